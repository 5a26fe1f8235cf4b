"""`cubatch memory`: the memory plan of a step, and the largest batch that fits."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cubatch.choices import Mode
from cubatch.cli import console
from cubatch.cli import options as opt


def memory(
    model: opt.Model,
    *,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", help="Samples per step.")] = 1,
    target_batch_size: opt.TargetOption = None,
    device: opt.DeviceOption = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="Find the largest batch that fits into this: 12GiB.")
    ] = None,
    mode: Annotated[Mode | None, typer.Option("--mode", help="Default: both, side by side.")] = None,
    dtype: opt.DtypeOption = "float32",
    optimizer: opt.OptimizerOption = "sgd",
    library: opt.LibraryOption = "auto",
    recompute: opt.RecomputeOption = False,
    input_shape: opt.ShapeOption = None,
    classes: opt.ClassesOption = None,
    opaque: opt.OpaqueOption = False,
    json: opt.JsonOption = None,
) -> None:
    """
    Show the memory of a step, and the largest batch that fits.

    Nothing is run: the numbers come from the memory plan, by part and by layer. With --target-batch-size it also
    shows the largest batch of training that leaves memory for the accumulated gradients.

    Example: cubatch memory mlp --batch-size 256 --memory 12GiB
    """
    from cubatch.errors import DoesNotFit
    from cubatch.hardware import memory_limit as hardware_memory
    from cubatch.hardware import probe
    from cubatch.memory import fit
    from cubatch.memory import step_footprint as planner
    from cubatch.memory import thumb_rules as memory_rules
    from cubatch.memory.plan import plan
    from cubatch.report.tables import common, footprint
    from cubatch.workload import Workload

    console.check_writable(json=json)
    spec = opt.read_spec(model, input_shape, classes, opaque=opaque)
    options: dict[str, Any] = {
        "dtype": dtype, "optimizer": optimizer, "recompute": recompute, "device": device, "library": library,
    }  # fmt: skip
    target = probe.resolve(device, live=False)
    if memory is not None:
        limit, why = fit.limit_bytes(memory, target), ""
    else:
        there = hardware_memory.memory_limit(target)
        limit, why = there.bytes, there.note
    chosen_modes: tuple[Mode, ...] = ("inference", "training") if mode is None else (mode,)
    if target_batch_size is not None:
        chosen_modes, options["target_batch_size"] = (mode or "training",), target_batch_size
    largest = {}
    for each in chosen_modes:
        try:
            largest[each] = fit.max_batch_size(spec, limit, mode=each, **options)
        except DoesNotFit:
            if mode is not None or each == "inference":  # which takes less: training does not fit either
                raise
            largest[each] = 0
    modes: dict[str, footprint.ModeMemory] = {}
    for each in chosen_modes:
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
    trained = f", optimizer {optimizer}" if "training" in chosen_modes else ""
    title = f"{model} on {target}, {dtype}, batch {batch_size}{of_target}{trained}: memory of a step"
    payload = {"schema": 2, "modes": listed, "memory": limit}
    options.pop("target_batch_size", None)
    members = plan(Workload.of(spec, mode=chosen_modes[-1], **options), batch_size).members
    grids = footprint.modes(
        modes, title=title, limit=limit, why=why, members=members, target=target_batch_size
    )  # fmt: skip
    console.emit(grids, payload, json)
