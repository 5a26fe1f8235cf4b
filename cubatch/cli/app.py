"""
The command line: options in, one library call, a grid or JSON out.

Every command takes `--json FILE` (`-` is stdout) and exits with 0 when done, 1 on a CubatchError,
2 on wrong arguments, 130 when interrupted.  Everything heavy is imported inside the commands, so
that `cubatch --help` comes at once.
"""

from __future__ import annotations

import contextlib
import math
import signal
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from typer.core import TyperGroup

from cubatch import __version__
from cubatch.cli import bench, console, kernels, occupancy, predict
from cubatch.cli import store as cli_store
from cubatch.cli.options import (
    ClassesOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    LatencyOption,
    LibraryOption,
    MaxOption,
    MemoryOption,
    Model,
    ModeOption,
    OptimizerOption,
    RecomputeOption,
    SeedOption,
    ShapeOption,
    StoreOption,
    ToleranceOption,
    read_spec,
    whole_numbers,
)
from cubatch.errors import CubatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cubatch.search.walk import Event
    from cubatch.tuning.results import TuningResult


INTERRUPTED = 130
QUICK_SECONDS = 10.0
USUAL_SECONDS = 60.0


class _Group(TyperGroup):
    """Gives errors and interruptions the exit codes of the contract, the same for every command."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except CubatchError as error:
            console.say(f"cubatch: {error}")
            raise typer.Exit(1) from error
        except KeyboardInterrupt as stop:
            console.say("cubatch: interrupted")
            raise typer.Exit(INTERRUPTED) from stop


_HELP = "Find the batch size at which a neural network runs fastest, and what fits."
app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=f"{_HELP}\n\nExample: cubatch tune mnist-cnn --mode training",
)
app.add_typer(cli_store.app, name="store")
app.add_typer(bench.app, name="bench")
app.command()(kernels.kernels)
app.command()(occupancy.occupancy)
app.command()(predict.predict)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and end.")
    ] = False,
) -> None:
    """Hold what comes before the command."""


def main() -> None:
    """
    Run the command line; the entry point of `cubatch` and `python -m cubatch`.

    SIGTERM is treated as Ctrl-C, so that a batch system's end of time keeps what was measured.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    console.plain_warnings()
    app(prog_name="cubatch")


@app.command()
def tune(
    model: Model,
    *,
    device: DeviceOption = None,
    mode: ModeOption = "inference",
    dtype: DtypeOption = "float32",
    objective: Annotated[
        Literal["throughput", "latency", "energy"], typer.Option("--objective", help="energy: samples per joule.")
    ] = "throughput",
    tolerance: ToleranceOption = 0.01,
    batch_sizes: Annotated[
        str | None, typer.Option("--batch-sizes", metavar="N,N,...", help="Measure exactly these: 32,64.")
    ] = None,
    max_batch_size: MaxOption = None,
    memory_limit: MemoryOption = None,
    latency_limit: LatencyOption = None,
    optimizer: OptimizerOption = "sgd",
    library: LibraryOption = "auto",
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
    classes: ClassesOption = None,
    json: JsonOption = None,
) -> None:
    """
    Measure a network at the batch sizes that matter, and say which is best and why.

    Example: cubatch tune resnet18 --mode training --memory-limit 8GiB --plot curve.png
    """
    from cubatch.report import plot as plot_module
    from cubatch.tuning import tune as tuner

    if no_store + fresh + (store is not None) > 1:
        raise typer.BadParameter("--no-store, --fresh and --store exclude each other")
    if quick and budget is not None:
        raise typer.BadParameter(f"--quick and --budget exclude each other: --quick is --budget {QUICK_SECONDS:g}")
    seconds = QUICK_SECONDS if quick else USUAL_SECONDS if budget is None else budget
    sizes = None if batch_sizes is None else whole_numbers("--batch-sizes", batch_sizes)
    console.check_writable(json=json, plot=plot, report=report)
    if report is not None and not report.lower().endswith((".html", ".htm")):
        raise typer.BadParameter(f"--report writes an .html file, got {report!r}")
    if plot is not None:
        plot_module.check(plot)
    spec = read_spec(model, input_shape, classes)
    try:
        with _watching(model) as watch:
            result = tuner.autotune(
                spec, device=device, mode=mode, dtype=dtype, objective=objective, tolerance=tolerance,
                batch_sizes=sizes, max_batch_size=max_batch_size, memory_limit=memory_limit,
                latency_limit=latency_limit, optimizer=optimizer, library=library, recompute=recompute, budget=seconds,
                isolate="auto" if isolate is None else isolate,
                store="refresh" if fresh else str(store) if store is not None else not no_store,
                seed=seed, progress=watch,
            )  # fmt: skip
    except KeyboardInterrupt as stop:
        partial = cast("TuningResult | None", getattr(stop, "partial", None))
        if partial is not None:
            _show(partial, json)
        kept = "nothing is kept" if no_store else "what was measured is kept, the same command goes on with it"
        console.say(f"cubatch: interrupted; {kept}")
        raise typer.Exit(INTERRUPTED) from stop
    _show(result, json)
    if plot is not None:
        result.plot(plot)
    if report is not None:
        with console.writing("--report", report) as path:
            result.report(path)
    for written in filter(None, (plot, report)):
        console.say(f"wrote {written}")


@app.command()
def candidates(
    model: Model,
    *,
    device: DeviceOption = None,
    mode: ModeOption = "inference",
    dtype: DtypeOption = "float32",
    optimizer: OptimizerOption = "sgd",
    library: LibraryOption = "auto",
    max_batch_size: MaxOption = None,
    memory_limit: MemoryOption = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Per layer: blocks, busiest SM, fill, channels that miss a Tensor Core.")
    ] = False,
    input_shape: ShapeOption = None,
    classes: ClassesOption = None,
    json: JsonOption = None,
) -> None:
    """
    List the batch sizes worth measuring and why; the device need not be here.

    Example: cubatch candidates resnet18 --device v100-sxm2-16gb --dtype float16 --explain
    """
    from cubatch.hardware import probe
    from cubatch.report.tables import candidates as candidates_table
    from cubatch.report.tables import common
    from cubatch.tuning import explain as explaining
    from cubatch.tuning import ladder

    console.check_writable(json=json)
    spec = read_spec(model, input_shape, classes)
    gpu = probe.resolve(device, live=False)
    if gpu.kind == "cuda" and gpu.num_sms is None:
        console.say(f"how many SMs {gpu} has is not known, so no candidate comes from Coulom's rule or a crest")
    options: dict[str, Any] = {
        "device": gpu, "mode": mode, "dtype": dtype, "optimizer": optimizer, "library": library,
        "max_batch_size": max_batch_size, "memory_limit": memory_limit,
    }  # fmt: skip
    found = ladder.candidates(spec, **options)
    rows = explaining.explain(spec, **options) if explain else None
    grids = [candidates_table.candidates(found, title=f"{model}, {mode}, {dtype}: batch sizes worth measuring")]
    grids += [] if rows is None else [candidates_table.explained(rows)]
    listed = [common.plain(candidate) for candidate in found]
    console.emit(grids, {"schema": 1, "candidates": listed, "explain": rows}, json)


@app.command()
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
    spec = read_spec(model, input_shape, classes)
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


@app.command()
def devices(*, json: JsonOption = None) -> None:
    """
    List the devices in this machine and the GPUs of the catalogue.

    Example: cubatch devices --json devices.json
    """
    from cubatch.hardware import catalogue, probe
    from cubatch.report.tables import devices as devices_table

    console.check_writable(json=json)
    here, known = probe.devices(), catalogue.all_devices()
    grids = [
        devices_table.devices(here, title="In this machine"),
        devices_table.devices(known, title="In the catalogue"),
    ]
    payload = {"schema": 1, "devices": [d.to_mapping() for d in here], "catalogue": [d.to_mapping() for d in known]}
    console.emit(grids, payload, json)


@app.command()
def train(
    model: Model,
    *,
    data: Annotated[str, typer.Option("--data", metavar="DIR", help="Folder with MNIST's files, plain or gzip.")],
    download: Annotated[bool, typer.Option("--download", help="First fetch what of MNIST is not there.")] = False,
    batch_size: Annotated[
        str, typer.Option("--batch-size", metavar="N|auto", help="auto: tune first, train with the answer.")
    ] = "auto",
    epochs: Annotated[int, typer.Option("--epochs", help="Passes over the training set.")] = 5,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate at the start; it falls to 0 along a cosine.")] = 0.05,
    optimizer: OptimizerOption = "momentum",
    device: DeviceOption = None,
    dtype: DtypeOption = "float32",
    recompute: RecomputeOption = False,
    seed: SeedOption = 0,
    input_shape: ShapeOption = None,
    classes: ClassesOption = None,
    json: JsonOption = None,
) -> None:
    """
    Train a network on MNIST, or data in its format, and test it after each epoch.

    Example: cubatch train mnist-cnn --data mnist --download --batch-size 64
    """
    from cubatch.engine import data as files
    from cubatch.engine import train as engine
    from cubatch.hardware import arithmetic, probe
    from cubatch.measure import kernel_choice
    from cubatch.network.graph import as_network
    from cubatch.report.tables import common, training
    from cubatch.tuning import tune as tuner

    if batch_size != "auto" and not batch_size.isdecimal():
        raise typer.BadParameter(f"--batch-size takes a whole number or auto, got {batch_size!r}")
    size = 0 if batch_size == "auto" else int(batch_size)
    console.check_writable(json=json)
    network = as_network(read_spec(model, input_shape, classes))
    found = probe.resolve(device)
    arithmetic.check_dtype(found, dtype)
    if download:
        files.download_mnist(data)
    shared: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "recompute": recompute, "seed": seed}
    if batch_size == "auto":
        training_set, _ = files.load_mnist(data)
        engine.check(network, training_set, epochs=epochs, learning_rate=lr)  # before a minute is spent
        console.say("tuning the batch size first, for up to a minute; --batch-size N does without")
        options: dict[str, Any] = {"mode": "training", "max_batch_size": len(training_set), **shared}
        with _watching(model) as watch:
            size = tuner.autotune(network, device=found, progress=watch, **options).batch_size or 1
        console.say(f"training with batch size {size}, the answer for training {model} with {optimizer}")
    title = f"{model}, {dtype}, batch {size}, {optimizer}, learning rate {lr:g}, on {found}"
    done: list[engine.Epoch] = []
    try:
        with console.progress_bar(f"training {model}") as show:

            def tell(epoch: engine.Epoch) -> None:
                done.append(epoch)
                if show is not None:
                    show(epoch.number, epochs, f"loss {epoch.loss:.4f}")

            trained = engine.train(
                network,
                data=data,
                batch_size=size,
                device=found,
                epochs=epochs,
                learning_rate=lr,
                context=kernel_choice.usual_context(found, dtype),
                progress=tell,
                **shared,
            )
    except KeyboardInterrupt:
        if done:
            partial = [common.plain(epoch) for epoch in done]
            console.emit([training.epochs(partial, title=title)], {"schema": 1, "epochs": partial}, json)
        raise
    facts = common.plain(trained)
    grid = training.epochs(facts["epochs"], title=title, diverged=trained.diverged)
    console.emit([grid], {"schema": 1, **facts}, json)


@contextlib.contextmanager
def _watching(model: str) -> Iterator[Callable[[Event], None]]:
    """Let tuning's events move a bar on a terminal, and elsewhere write a line now and then."""
    with console.progress_bar(f"tuning {model}") as bar:
        line = console.progress_lines()

        def show(event: Event) -> None:
            if bar is not None:
                bar(event.done, event.total, _so_far(event))
            elif event.kind != "end":  # the answer comes next
                line(_so_far(event))

        yield show


def _so_far(event: Event) -> str:
    """Say the best size so far and what may still be gained; before there is one, what happened."""
    from cubatch.units import format_count, format_whole_percent

    if event.best_batch_size is None:
        return event.message
    rate = "" if event.best_rate is None else f" ({format_count(event.best_rate)} samples/s)"
    gain = ""
    if event.could_gain is not None and math.isfinite(event.could_gain):
        gain = f", at most {format_whole_percent(event.could_gain, at_most=True)} more to gain"
    return f"{event.best_batch_size} best so far{rate}{gain}"


def _show(result: TuningResult, json_path: str | None) -> None:
    from cubatch.report.tables import result as result_table

    mapping = result.to_mapping()
    console.emit([result_table.fitted(mapping, width=console.line_width())], mapping, json_path)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
