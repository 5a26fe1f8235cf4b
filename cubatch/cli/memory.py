"""`cubatch memory`: what a step takes in memory, and the largest batch that fits."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cubatch.cli import console
from cubatch.cli.options import (
    ClassesOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    LibraryOption,
    Model,
    ModeOption,
    OpaqueOption,
    OptimizerOption,
    RecomputeOption,
    ShapeOption,
    read_spec,
)


def memory(
    model: Model,
    *,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", help="Samples per step.")] = 1,
    device: DeviceOption = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="Find the largest batch in this much: 12GiB.")
    ] = None,
    mode: ModeOption = "training",
    dtype: DtypeOption = "float32",
    optimizer: OptimizerOption = "sgd",
    library: LibraryOption = "auto",
    recompute: RecomputeOption = False,
    input_shape: ShapeOption = None,
    classes: ClassesOption = None,
    opaque: OpaqueOption = False,
    json: JsonOption = None,
) -> None:
    """
    Say what a step takes in memory, by part and by layer, and the largest batch that fits.

    Example: cubatch memory mlp --batch-size 256 --memory 12GiB
    """
    from cubatch.hardware import probe, room
    from cubatch.memory import fit
    from cubatch.memory import parts as planner
    from cubatch.memory import rules as memory_rules
    from cubatch.report.tables import common, footprint

    console.check_writable(json=json)
    spec = read_spec(model, input_shape, classes, opaque=opaque)
    options: dict[str, Any] = {
        "mode": mode, "dtype": dtype, "optimizer": optimizer, "recompute": recompute, "device": device,
        "library": library,
    }  # fmt: skip
    plan = planner.footprint(spec, batch_size=batch_size, **options)
    forward = planner.footprint(spec, batch_size=batch_size, **{**options, "mode": "inference"})
    found = probe.resolve(device, live=False)
    limit = fit.limit_bytes(memory, found) if memory else room.memory_limit(found).bytes
    rules = memory_rules.rules_of_thumb(spec, batch_size=batch_size, memory=limit, **options)
    largest = fit.max_batch_size(spec, limit, **options)
    facts, listed = plan.to_mapping(), [common.plain(rule.to_mapping()) for rule in rules]
    payload = {"schema": 1, "footprint": facts, "rules_of_thumb": listed, "max_batch_size": largest, "memory": limit}
    title = f"{model}, {mode}, {dtype}, batch {batch_size}: memory of a step"
    grids = footprint.footprint(facts, title=title, forward_elements=forward.elements_per_sample)
    console.emit([*grids, footprint.rules(listed, largest=largest, limit=limit)], payload, json)
