"""`cubatch tune`: measure a network at the batch sizes that matter."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cubatch.cli import console, torch_module
from cubatch.cli.options import (
    ClassesOption,
    CurrentOption,
    DevicesOption,
    DtypeOption,
    JsonOption,
    LatencyOption,
    MaxOption,
    MemoryOption,
    Model,
    ModeOption,
    ObjectiveOption,
    OptimizerOption,
    PresentOption,
    RecomputeOption,
    SeedOption,
    ShapeOption,
    SizesOption,
    StoreOption,
    ToleranceOption,
    TunableOption,
    read_spec,
    several_devices,
    whole_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cubatch.tuning.results import TuningResult


QUICK_SECONDS = 10.0
USUAL_SECONDS = 60.0


def tune(
    model: Model,
    *,
    device: PresentOption = None,
    devices: DevicesOption = None,
    mode: ModeOption = "inference",
    dtype: DtypeOption = "float32",
    objective: ObjectiveOption = "throughput",
    tolerance: ToleranceOption = 0.01,
    batch_sizes: SizesOption = None,
    max_batch_size: MaxOption = None,
    current: CurrentOption = None,
    memory_limit: MemoryOption = None,
    latency_limit: LatencyOption = None,
    optimizer: OptimizerOption = "sgd",
    library: TunableOption = "auto",
    recompute: RecomputeOption = False,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="SECONDS", help=f"Measuring time, at most. Default: {USUAL_SECONDS:g}."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"A first answer: the same as --budget {QUICK_SECONDS:g}.")
    ] = False,
    isolate: Annotated[
        bool | None,
        typer.Option("--isolate/--no-isolate", help="Measure in a process that may die. Default: as needed."),
    ] = None,
    no_store: Annotated[bool, typer.Option("--no-store", help="Neither use nor keep results.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew, also which kernels win.")] = False,
    store: StoreOption = None,
    seed: SeedOption = 0,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw the curve: .png, .svg or .pdf.")
    ] = None,
    report: Annotated[str | None, typer.Option("--report", metavar="FILE", help="Write one HTML page.")] = None,
    input_shape: ShapeOption = None,
    example_inputs: Annotated[
        str | None,
        typer.Option(
            "--example-inputs",
            metavar="package.module:name",
            help="A function that gives what a PyTorch module is called with, for --library torch.",
        ),
    ] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(
            "--accumulate", metavar="N", help="Batches between two optimizer steps of a PyTorch module. Default: 1."
        ),
    ] = None,
    classes: ClassesOption = None,
    json: JsonOption = None,
) -> None:
    """
    Measure a network at the batch sizes that matter.

    Says which is best and why.

    Example: cubatch tune resnet18 --mode training --memory-limit 8GiB --plot curve.png
    """
    from cubatch.tuning import tune as tuner

    if no_store + fresh + (store is not None) > 1:
        raise typer.BadParameter("--no-store, --fresh and --store exclude each other")
    if quick and budget is not None:
        raise typer.BadParameter(f"--quick and --budget exclude each other: --quick is --budget {QUICK_SECONDS:g}")
    seconds = QUICK_SECONDS if quick else USUAL_SECONDS if budget is None else budget
    sizes = None if batch_sizes is None else whole_numbers("--batch-sizes", batch_sizes)
    console.check_writable(json=json, plot=plot, report=report)
    _check_pictures(plot, report)
    ask: Callable[..., TuningResult]
    if library == "torch":
        others = {
            "--classes": classes, "--devices": devices, "--recompute": recompute or None,
            "--isolate/--no-isolate": isolate,
        }  # fmt: skip
        ask = torch_module.asking(model, input_shape, example_inputs, dtype, others)
        ask = functools.partial(ask, accumulate=1 if accumulate is None else accumulate)
    else:
        _check_library(library, {"--example-inputs": example_inputs, "--accumulate": accumulate})
        ask = functools.partial(
            tuner.autotune, _spec(model, library, input_shape, classes), devices=several_devices(devices), dtype=dtype,
            library=library, recompute=recompute, isolate="auto" if isolate is None else isolate,
        )  # fmt: skip
    try:
        with console.watching(model) as watch:
            result = ask(
                device=device, mode=mode, objective=objective, tolerance=tolerance, batch_sizes=sizes,
                max_batch_size=max_batch_size, current=current, memory_limit=memory_limit,
                latency_limit=latency_limit, optimizer=optimizer, budget=seconds,
                store="refresh" if fresh else not no_store if store is None else store,
                seed=seed, progress=watch,
            )  # fmt: skip
    except KeyboardInterrupt as stop:
        partial = cast("TuningResult | None", getattr(stop, "partial", None))
        if partial is not None:
            _show(partial, json)
        is_kept = getattr(stop, "is_kept", not no_store)
        console.say(f"cubatch: interrupted; what was measured is {_kept(is_kept=is_kept, fresh=fresh)}")
        raise typer.Exit(console.INTERRUPTED) from stop
    _show(result, json)
    if plot is not None:
        result.plot(plot)
    if report is not None:
        with console.writing("--report", report) as path:
            result.report(path)
    for written in filter(None, (plot, report)):
        console.say(f"wrote {written}")


def _check_library(library: str, given: Mapping[str, object | None]) -> None:
    """Reject options of PyTorch modules for another library."""
    for option, value in given.items():
        if value is not None:
            raise typer.BadParameter(f"{option} is for --library torch, not {library}")


def _kept(*, is_kept: bool, fresh: bool) -> str:
    """Say what goes on with an interrupted run; with --fresh the same command would measure it anew."""
    if not is_kept:
        return "not kept"
    return f"kept; the same command{' without --fresh' if fresh else ''} goes on with it"


def _check_pictures(plot: str | None, report: str | None) -> None:
    """Refuse files of other kinds before anything is measured."""
    from cubatch.report.plots import style

    if report is not None and not report.lower().endswith((".html", ".htm")):
        raise typer.BadParameter(f"--report writes an .html file, got {report!r}")
    if plot is not None:
        style.check(plot)


def _spec(model: str, library: str, input_shape: str | None, classes: int | None) -> Any:
    """Read what stands for a network; ONNX Runtime reads its file itself."""
    from cubatch.network.graph import Network

    if library != "onnxruntime":
        spec = read_spec(model, input_shape, classes)
        if ":" in model and isinstance(spec, Network) and spec.name == model:  # which a PyTorch module alone is called
            console.say(f"cubatch: {model} is run by cubatch's own engine; --library torch times it in PyTorch")
        return spec
    if input_shape is not None or classes is not None:
        option = "--classes" if input_shape is None else "--input-shape"
        raise typer.BadParameter(f"{option} is not for --library onnxruntime, which runs a file as it is")
    return model


def _show(result: TuningResult, json_path: str | None) -> None:
    from cubatch.report.tables import result as result_table

    console.emit([result_table.fitted(result, width=console.line_width())], result.to_mapping(), json_path)
