"""`cubatch fleet`: tune on every kind of device of a Dask cluster."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cubatch.cli import console
from cubatch.cli.options import (
    ClassesOption,
    DtypeOption,
    JsonOption,
    LatencyOption,
    MaxOption,
    MemoryOption,
    Model,
    ModeOption,
    ObjectiveOption,
    OptimizerOption,
    RecomputeOption,
    SeedOption,
    ShapeOption,
    SizesOption,
    StoreOption,
    ToleranceOption,
    priced,
    read_spec,
    whole_numbers,
)
from cubatch.errors import InvalidArgument, NothingMeasured

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Tuning on a Dask cluster.\n\nExample: cubatch fleet tune resnet18 --scheduler tcp://10.0.0.1:8786",
)


@app.callback()
def _group() -> None:
    """Keep `tune` a word of its own while it is the only one."""


@app.command("tune")
def tune(
    model: Model,
    *,
    scheduler: Annotated[
        str, typer.Option("--scheduler", metavar="ADDRESS", help="Of the cluster: tcp://10.0.0.1:8786.")
    ],
    mode: ModeOption = "inference",
    dtype: DtypeOption = "float32",
    objective: ObjectiveOption = "throughput",
    tolerance: ToleranceOption = 0.01,
    batch_sizes: SizesOption = None,
    max_batch_size: MaxOption = None,
    memory_limit: MemoryOption = None,
    latency_limit: LatencyOption = None,
    optimizer: OptimizerOption = "sgd",
    recompute: RecomputeOption = False,
    budget: Annotated[
        float, typer.Option("--budget", metavar="SECONDS", help="Measuring time of each kind of device, at most.")
    ] = 60.0,
    predict: Annotated[
        str | None, typer.Option("--predict-missing", metavar="A,B,...", help="GPUs that are not there: predict them.")
    ] = None,
    prices: Annotated[
        list[str] | None,
        typer.Option("--prices", metavar="NAME=PRICE,...", help="An hour of a device, for what samples cost."),
    ] = None,
    share: Annotated[
        int | None,
        typer.Option("--share", metavar="N", min=1, help="Share a batch of N out to all workers, by their rates."),
    ] = None,
    no_store: Annotated[bool, typer.Option("--no-store", help="Neither use nor keep results.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew.")] = False,
    store: StoreOption = None,
    seed: SeedOption = 0,
    input_shape: ShapeOption = None,
    classes: ClassesOption = None,
    json: JsonOption = None,
) -> None:
    """
    Measure a network once on each kind of device that a Dask cluster has.

    Example: cubatch fleet tune resnet18 --scheduler tcp://10.0.0.1:8786 --mode training
    """
    from cubatch.fleet.tune_fleet import autotune_fleet
    from cubatch.report.tables import fleet as fleet_table

    if no_store + fresh + (store is not None) > 1:
        raise typer.BadParameter("--no-store, --fresh and --store exclude each other")
    console.check_writable(json=json)
    spec = read_spec(model, input_shape, classes)
    lines = console.progress_lines()
    options: dict[str, Any] = {
        "mode": mode, "dtype": dtype, "objective": objective, "tolerance": tolerance, "max_batch_size": max_batch_size,
        "memory_limit": memory_limit, "latency_limit": latency_limit, "optimizer": optimizer, "recompute": recompute,
        "budget": budget, "seed": seed,
    }  # fmt: skip
    refusal: InvalidArgument | None = None
    try:
        result = autotune_fleet(
            spec, scheduler, **options,
            batch_sizes=None if batch_sizes is None else whole_numbers("--batch-sizes", batch_sizes),
            predict=[] if predict is None else [name.strip() for name in predict.split(",")],
            prices=None if prices is None else priced(prices),
            store="refresh" if fresh else not no_store if store is None else store,
            progress=lambda name, sentence: lines(f"{name}: {sentence}"),
        )  # fmt: skip
    except InvalidArgument as error:
        if not hasattr(error, "partial"):
            raise
        result, refusal = error.partial, error
    payload = result.to_mapping()
    tables = [fleet_table.compared(result, width=console.line_width())]
    if share is not None:
        try:
            payload["shares"] = result.shares(share)
            tables.append(fleet_table.shared(payload["shares"]))
        except InvalidArgument as error:
            refusal = refusal or InvalidArgument("share", share, error.allowed)
    console.emit(tables, payload, json)  # first: it took the whole fleet's time
    if all(device.result is None for device in result.devices):  # what is predicted is no answer of the fleet
        raise NothingMeasured("each kind of device failed", "The result says why.")
    if refusal is not None:
        raise refusal
