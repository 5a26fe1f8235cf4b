"""`cubatch memory`: the memory of a step, and the largest batch that fits."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cubatch.choices import Mode
from cubatch.cli import console, options as opt, refusals, torch_module

if TYPE_CHECKING:
    from collections.abc import Callable


def memory(
    model: opt.Model,
    *,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", help="Samples per step.")] = 1,
    target_batch_size: opt.TargetOption = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="A,B,...",
            help="cpu, gpu, cuda:1, a GPU's name from `cubatch devices`, or a .toml file that describes a GPU; several "
            "are compared. Default: the first GPU, else the CPU.",
        ),
    ] = None,
    prices: opt.PricesOption = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            "--memory",
            "--limit",
            metavar="SIZE",
            help="Memory that a step may take: 12GiB. Default: all that is free on the device, on a CPU 0.8 of it.",
        ),
    ] = None,
    mode: Annotated[Mode | None, typer.Option("--mode", help="Default: both, side by side.")] = None,
    dtype: opt.DtypeOption = "float32",
    optimizer: opt.ModuleOptimizerOption = "sgd",
    library: opt.PlannedOption = "auto",
    recompute: opt.RecomputeOption = False,
    input_shape: opt.ShapeOption = None,
    batches: opt.BatchesOption = None,
    loader: opt.LoaderOption = None,
    example_inputs: opt.ExampleOption = None,
    constant_inputs: opt.ConstantOption = None,
    accumulate: opt.AccumulateOption = None,
    classes: opt.ClassesOption = None,
    opaque: opt.OpaqueOption = False,
    json: opt.JsonOption = None,
) -> None:
    """
    Show the memory of a step, and the largest batch that fits.

    Nothing is run: a network has a memory plan, by part and by layer. A step of a PyTorch module (--library torch) is
    traced on tensors without data. With --target-batch-size the command also shows the largest batch of training that
    leaves memory for the accumulated gradients.

    The exit code is 1 if the batch does not fit on a device. Without --mode that is decided in inference, which takes
    less.

    Example: cubatch memory resnet50 --batch-size 256 --mode training --device t4,l4 --prices t4=0.35,l4=0.71

    Example: cubatch memory my_models:build --library torch --input-shape 32,32,3 --batch-size 64 --limit 8GiB
    """
    from cubatch.report.tables import footprint
    from cubatch.tuning import device_memory

    console.check_writable(json=json)
    modes: tuple[Mode, ...] = ("inference", "training") if mode is None else (mode,)
    if target_batch_size is not None:
        modes = (mode or "training",)
    inputs = torch_module.InputOptions(
        input_shape, batches=batches, loader=loader, example_inputs=example_inputs, constant_inputs=constant_inputs,
        accumulate=accumulate,
    )  # fmt: skip
    ask: Callable[..., list[device_memory.DeviceMemory]]
    if library == "torch":
        others = {
            "--target-batch-size": target_batch_size, "--recompute": recompute or None, "--classes": classes,
            "--opaque": opaque or None,
        }  # fmt: skip
        ask = torch_module.bind(device_memory.memory_on, model, inputs, dtype=dtype, others=others)
    else:
        inputs.check_absent(library)
        spec = opt.read_spec(model, input_shape, classes, opaque=opaque)
        ask = functools.partial(
            device_memory.memory_on, spec, dtype=dtype, library=library, recompute=recompute,
            target_batch_size=target_batch_size,
        )  # fmt: skip
    with console.progress(f"memory of {model}") as show:
        rows = ask(
            devices=[None] if device is None else device.split(","), modes=modes, batch_size=batch_size,
            memory_limit=memory_limit, prices=opt.parse_prices(prices), optimizer=optimizer, progress=show,
        )  # fmt: skip
    of_target = "" if target_batch_size in {None, batch_size} else f" of {target_batch_size}"
    trained = f", optimizer {optimizer}" if "training" in modes else ""
    settings = f"{dtype}, batch {batch_size}{of_target}{trained}: memory of a step"
    payload: dict[str, Any] = {"schema": 2}
    if len(rows) > 1:
        payload["devices"] = [row.to_mapping() for row in rows]
        grids = [footprint.by_device(rows, title=f"{model}, {settings}")]
    else:
        (row,) = rows
        payload |= row.to_mapping()
        title = f"{model} on {row.device}, {settings}"
        grids = footprint.modes(row.modes, title=title, limit=row.limit, why=row.why, target=target_batch_size)
    console.emit(grids, payload, json)
    if beyond := [str(row.device) for row in rows if not row.fits]:
        console.say(f"cubatch: batch {batch_size} does not fit on {', '.join(beyond)}")
        raise typer.Exit(refusals.FAILED)
