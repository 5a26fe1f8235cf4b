"""`cubatch memory`: what a step takes in memory, and the largest batch that fits."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cubatch.choices import Mode
from cubatch.cli import console
from cubatch.cli.options import (
    ClassesOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    LibraryOption,
    Model,
    OpaqueOption,
    OptimizerOption,
    RecomputeOption,
    ShapeOption,
    TargetOption,
    read_spec,
)


def memory(
    model: Model,
    *,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", help="Samples that go through together.")] = 1,
    target_batch_size: TargetOption = None,
    device: DeviceOption = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="Find the largest batch in this much: 12GiB.")
    ] = None,
    mode: Annotated[Mode | None, typer.Option("--mode", help="One of them; default: both, side by side.")] = None,
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
    Say what a step takes in memory, and what fits.

    By part and by layer, and the largest batch; with --target-batch-size that of training, beside the sum of gradients.

    Example: cubatch memory mlp --batch-size 256 --memory 12GiB
    """
    from cubatch.errors import DoesNotFit
    from cubatch.hardware import probe, room
    from cubatch.memory import fit
    from cubatch.memory import step_footprint as planner
    from cubatch.memory import thumb_rules as memory_rules
    from cubatch.memory.plan import plan
    from cubatch.report.tables import common, footprint
    from cubatch.workload import Workload

    console.check_writable(json=json)
    spec = read_spec(model, input_shape, classes, opaque=opaque)
    options: dict[str, Any] = {
        "dtype": dtype, "optimizer": optimizer, "recompute": recompute, "device": device, "library": library,
    }  # fmt: skip
    found = probe.resolve(device, live=False)
    if memory is not None:
        limit, why = fit.limit_bytes(memory, found), ""
    else:
        there = room.memory_limit(found)
        limit, why = there.bytes, there.note
    asked: tuple[Mode, ...] = ("inference", "training") if mode is None else (mode,)
    if target_batch_size is not None:
        asked, options["target_batch_size"] = (mode or "training",), target_batch_size
    largest = {}
    for each in asked:
        try:
            largest[each] = fit.max_batch_size(spec, limit, mode=each, **options)
        except DoesNotFit:
            if mode is not None or each == "inference":  # which takes less: training does not fit either
                raise
            largest[each] = 0
    modes: dict[str, footprint.ModeMemory] = {}
    for each in asked:
        rules = memory_rules.rules_of_thumb(
            spec, batch_size=batch_size, memory=limit if largest[each] else None, mode=each, **options
        )
        planned = planner.footprint(spec, batch_size=batch_size, mode=each, **options)
        modes[each] = footprint.ModeMemory(planned, rules, largest[each])
    listed = {
        each: {
            "footprint": taken.footprint.to_mapping(),
            "rules_of_thumb": [common.plain(rule.to_mapping()) for rule in taken.rules],
            "max_batch_size": taken.max_batch_size,
        }
        for each, taken in modes.items()
    }
    of_target = "" if target_batch_size in {None, batch_size} else f" of {target_batch_size}"
    trained = f", training by {optimizer}" if "training" in asked else ""
    title = f"{model} on {found}, {dtype}, batch {batch_size}{of_target}{trained}: memory of a step"
    payload = {"schema": 2, "modes": listed, "memory": limit}
    options.pop("target_batch_size", None)
    members = plan(Workload.of(spec, mode=asked[-1], **options), batch_size).members
    grids = footprint.modes(
        modes, title=title, limit=limit, why=why, members=members, target=target_batch_size
    )  # fmt: skip
    console.emit(grids, payload, json)
