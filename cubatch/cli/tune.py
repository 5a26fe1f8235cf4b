"""`cubatch tune`: measure a network, and recommend a batch size."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cubatch.cli import console, options as opt, torch_module

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cubatch.tuning.extents_result import ExtentsResult
    from cubatch.tuning.results import TuningResult
    from cubatch.tuning.threads_result import ThreadsResult

    _Result = TuningResult | ThreadsResult | ExtentsResult

QUICK_SECONDS = 10.0
USUAL_SECONDS = 60.0


def tune(
    model: opt.Model,
    *,
    device: opt.PresentOption = None,
    devices: opt.DevicesOption = None,
    mode: opt.ModeOption = "inference",
    dtype: opt.DtypeOption = "float32",
    objective: opt.ObjectiveOption = "throughput",
    tolerance: opt.ToleranceOption = 0.01,
    batch_sizes: opt.SizesOption = None,
    max_batch_size: opt.MaxOption = None,
    current: opt.CurrentOption = None,
    multiple_of: Annotated[
        int, typer.Option("--multiple-of", metavar="N", help="Propose only multiples of this batch size.")
    ] = 1,
    divides: Annotated[
        int | None, typer.Option("--divides", metavar="N", help="Propose only batch sizes that divide this number.")
    ] = None,
    memory_limit: opt.MemoryOption = None,
    latency_limit: opt.LatencyOption = None,
    optimizer: opt.ModuleOptimizerOption = "sgd",
    library: opt.TunableOption = "auto",
    recompute: opt.RecomputeOption = False,
    dim: Annotated[
        list[str] | None,
        typer.Option(
            "--dim",
            metavar="NAME=N,...",
            help="Extent of an open axis of an ONNX file but the batch, or value of an integer input; repeatable. "
            "One axis may have several extents, such as sequence=128,512: each is tuned.",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="SECONDS",
            help=f"Measuring time, at most; start-up and compiling come on top. Default: {USUAL_SECONDS:g}.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"Measure for a first impression: --budget {QUICK_SECONDS:g}.")
    ] = False,
    isolate: Annotated[
        bool | None,
        typer.Option(
            "--isolate/--no-isolate",
            help="Measure in a worker process. Default: on a GPU, and where memory may run out.",
        ),
    ] = None,
    no_store: opt.NoStoreOption = False,
    fresh: opt.FreshOption = False,
    store: opt.StoreOption = None,
    seed: opt.SeedOption = 0,
    plot: opt.PlotOption = None,
    report: Annotated[
        str | None, typer.Option("--report", metavar="FILE", help="Write the result as an .html page.")
    ] = None,
    input_shape: opt.ShapeOption = None,
    batches: opt.BatchesOption = None,
    loader: opt.LoaderOption = None,
    example_inputs: opt.ExampleOption = None,
    constant_inputs: opt.ConstantOption = None,
    accumulate: opt.AccumulateOption = None,
    threads: opt.ThreadsOption = None,
    classes: opt.ClassesOption = None,
    json: opt.JsonOption = None,
) -> None:
    """
    Measure a network, and recommend a batch size.

    Timings are cached, so that an interrupted or repeated command continues from them.

    With --threads, the result is the best combination of threads, instances and batch size of a CPU. With several
    extents in --dim, it has a batch size for each.

    Example: cubatch tune resnet18 --mode training --memory-limit 8GiB --plot curve.png
    """
    from cubatch.tuning import tune as tuner
    from cubatch.tuning.results import TuningResult

    chosen_store = opt.choose_store(store, no_store=no_store, fresh=fresh)
    if quick and budget is not None:
        raise typer.BadParameter(f"--quick and --budget exclude each other: --quick means --budget {QUICK_SECONDS:g}")
    seconds = QUICK_SECONDS if quick else USUAL_SECONDS if budget is None else budget
    sizes = opt.optional_sizes(batch_sizes)
    console.check_writable(json=json, plot=plot, report=report)
    _check_endings(plot, report)
    tune_one: functools.partial[TuningResult]
    inputs = torch_module.InputOptions(
        input_shape, batches=batches, loader=loader, example_inputs=example_inputs, constant_inputs=constant_inputs,
        accumulate=accumulate,
    )  # fmt: skip
    dims = _dims(dim or [])
    extents = {name: numbers for name, numbers in dims.items() if len(numbers) > 1}
    if (threads is not None or extents) and library == "auto":  # cubatch's engine has neither
        library = "onnxruntime" if model.lower().endswith(".onnx") else "torch" if ":" in model else library
    if library == "torch":
        from cubatch.tuning import tune_module

        others = {
            "--classes": classes, "--devices": devices, "--recompute": recompute or None,
            "--isolate/--no-isolate": isolate, "--dim": dim,
        }  # fmt: skip
        bound = torch_module.bind(tune_module.autotune_module, model, inputs, dtype=dtype, others=others)
        tune_one = functools.partial(bound, loader=loader)
    else:
        inputs.check_absent(library)
        tune_one = functools.partial(
            tuner.autotune, _spec(model, library, input_shape, classes), devices=opt.several_devices(devices),
            dtype=dtype, library=library, recompute=recompute, isolate="auto" if isolate is None else isolate,
            dims={name: numbers[0] for name, numbers in dims.items()} or None,
        )  # fmt: skip
    ask: Callable[..., _Result] = tune_one
    if extents and library == "onnxruntime":
        if threads is not None or report is not None:
            raise typer.BadParameter("leave out --threads and --report where --dim has several extents")
        ask = _over_extents(tune_one, model, extents)
    elif threads is not None:
        if plot is not None or report is not None:
            raise typer.BadParameter("leave out --plot and --report where --threads compares several results")
        from cubatch.tuning import tune_each

        device = "cpu" if device is None else device
        ask = functools.partial(tune_each.over_threads, tune_one, opt.whole_numbers("--threads", threads))
    try:
        with console.watching(model) as watch:
            result = ask(
                device=device, mode=mode, objective=objective, tolerance=tolerance, batch_sizes=sizes,
                max_batch_size=max_batch_size, current=current, multiple_of=multiple_of, divides=divides,
                memory_limit=memory_limit, latency_limit=latency_limit, optimizer=optimizer, budget=seconds,
                store=chosen_store,
                seed=seed, progress=watch,
            )  # fmt: skip
    except KeyboardInterrupt as stop:
        partial: _Result | None = getattr(stop, "partial", None)
        if partial is not None:
            _show(partial, json)
        is_timed = not isinstance(partial, TuningResult) or partial.largest_measured is not None
        resume = f"cached; repeat the command{' without --fresh' if fresh else ''} to continue"
        ending = resume if getattr(stop, "is_kept", not no_store) else "not cached"
        timings = (
            f"; {'any' if partial is None else 'the'} timings are {ending}" if is_timed else " before the first timing"
        )
        console.say(f"cubatch: interrupted{timings}")
        raise typer.Exit(console.INTERRUPTED) from stop
    _show(result, json)
    _write(result, plot, report)


def _over_extents(
    tune_one: functools.partial[TuningResult], model: str, extents: Mapping[str, list[int]]
) -> Callable[..., ExtentsResult]:
    """Return the function that tunes a file at each of several extents of an axis, with the arguments of `tune_one`."""
    from cubatch.tuning import tune_each

    if len(extents) > 1:
        raise typer.BadParameter(f"only one --dim may have several extents, not {' and '.join(sorted(extents))}")
    dims = {name: extent for name, extent in tune_one.keywords["dims"].items() if name not in extents}
    return functools.partial(tune_each.autotune_extents, model, extents, **{**tune_one.keywords, "dims": dims})


def _dims(texts: list[str]) -> dict[str, list[int]]:
    """Return extents by name from texts such as "sequence=128" or "sequence=128,512"."""
    dims = dict[str, list[int]]()
    for text in texts:
        name, _, extents = text.rpartition("=")
        if not name or not all(each.isdecimal() for each in extents.split(",")):
            raise typer.BadParameter(f"--dim takes NAME=N or NAME=N,N,..., such as sequence=128; got {text!r}")
        dims.setdefault(name, []).extend(opt.whole_numbers("--dim", extents))
    return dims


def _check_endings(plot: str | None, report: str | None) -> None:
    from cubatch.report.plots import style

    if report is not None and not report.lower().endswith((".html", ".htm")):
        raise typer.BadParameter(f"--report writes an .html file, got {report!r}")
    if plot is not None:
        style.check(plot)


def _spec(model: str, library: str, input_shape: str | None, classes: int | None) -> Any:
    """Return the network that `model` means; for ONNX Runtime, `model` itself. Options that are not given are None."""
    from cubatch.network.graph import Network

    if library != "onnxruntime":
        spec = opt.read_spec(model, input_shape, classes)
        if ":" in model and isinstance(spec, Network) and spec.name == model:  # only imported modules have such a name
            console.say(f"cubatch: {model} runs in cubatch's own engine; --library torch runs it in PyTorch")
        return spec
    if input_shape is not None or classes is not None:
        option = "--classes" if input_shape is None else "--input-shape"
        raise typer.BadParameter(f"leave out {option}: --library onnxruntime runs the file as it is")
    return model


def _write(result: Any, plot: str | None, report: str | None) -> None:
    if plot is not None:
        result.plot(plot)
    if report is not None:
        with console.writing("--report", report) as path:
            result.report(path)
    for written in filter(None, (plot, report)):
        console.say(f"wrote {written}")


def _show(result: _Result, json_path: str | None) -> None:
    from cubatch.report import views

    console.emit(views.grids(result), result.to_mapping(), json_path)
