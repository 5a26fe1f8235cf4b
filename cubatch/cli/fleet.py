"""`cubatch fleet`: tune on every distinct device of a Dask cluster."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cubatch.cli import console, options as opt
from cubatch.errors import InvalidArgument, NothingMeasured

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Tune on a Dask cluster.\n\nExample: cubatch fleet tune resnet18 --scheduler tcp://10.0.0.1:8786",
)


@app.callback()
def _group() -> None:
    """Make `tune` a command of a group; Typer would drop the word of a single command."""


@app.command("tune")
def tune(
    model: opt.Model,
    *,
    scheduler: Annotated[
        str, typer.Option("--scheduler", metavar="ADDRESS", help="Address of the scheduler: tcp://10.0.0.1:8786.")
    ],
    mode: opt.ModeOption = "inference",
    dtype: opt.DtypeOption = "float32",
    objective: opt.ObjectiveOption = "throughput",
    tolerance: opt.ToleranceOption = 0.01,
    batch_sizes: opt.SizesOption = None,
    max_batch_size: opt.MaxOption = None,
    memory_limit: opt.MemoryOption = None,
    latency_limit: opt.LatencyOption = None,
    optimizer: opt.OptimizerOption = "sgd",
    recompute: opt.RecomputeOption = False,
    budget: Annotated[
        float, typer.Option("--budget", metavar="SECONDS", help="Measuring time of each distinct device, at most.")
    ] = 60.0,
    predict: Annotated[
        str | None,
        typer.Option("--predict-missing", metavar="A,B,...", help="Also predict these GPUs, which the cluster lacks."),
    ] = None,
    prices: opt.PricesOption = None,
    share: Annotated[
        int | None,
        typer.Option("--share", metavar="N", min=1, help="Divide a batch of N among all workers by their rates."),
    ] = None,
    no_store: opt.NoStoreOption = False,
    fresh: opt.FreshOption = False,
    store: opt.StoreOption = None,
    seed: opt.SeedOption = 0,
    input_shape: opt.ShapeOption = None,
    classes: opt.ClassesOption = None,
    json: opt.JsonOption = None,
) -> None:
    """
    Tune a network once on each distinct device of a Dask cluster.

    Example: cubatch fleet tune resnet18 --scheduler tcp://10.0.0.1:8786 --mode training
    """
    from cubatch.fleet.tune_fleet import autotune_fleet
    from cubatch.report.tables import fleet as fleet_table

    chosen_store = opt.choose_store(store, no_store=no_store, fresh=fresh)
    console.check_writable(json=json)
    spec = opt.read_spec(model, input_shape, classes)
    lines = console.progress_lines()
    options: dict[str, Any] = {
        "mode": mode, "dtype": dtype, "objective": objective, "tolerance": tolerance, "max_batch_size": max_batch_size,
        "memory_limit": memory_limit, "latency_limit": latency_limit, "optimizer": optimizer, "recompute": recompute,
        "budget": budget, "seed": seed,
    }  # fmt: skip
    rejected: InvalidArgument | None = None
    try:
        result = autotune_fleet(
            spec, scheduler, **options,
            batch_sizes=opt.optional_sizes(batch_sizes),
            predict=[] if predict is None else [name.strip() for name in predict.split(",")],
            prices=opt.parse_prices(prices),
            store=chosen_store,
            progress=lambda name, sentence: lines(f"{name}: {sentence}"),
        )  # fmt: skip
    except InvalidArgument as error:
        if not hasattr(error, "partial"):
            raise
        result, rejected = error.partial, error
    payload = result.to_mapping()
    tables = [fleet_table.compared(result)]
    if share is not None:
        try:
            payload["shares"] = result.shares(share)
            tables.append(fleet_table.shared(payload["shares"]))
        except InvalidArgument as error:
            rejected = rejected or InvalidArgument("share", share, error.allowed, error.remedy)
    console.emit(tables, payload, json)  # before any error: the measurements took long
    if all(device.result is None for device in result.devices):  # predictions alone are no success
        raise NothingMeasured("every device failed", "The result has the reasons.")
    if rejected is not None:
        raise rejected
