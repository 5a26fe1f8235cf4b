"""`cubatch predict`: the table of `tune` for a GPU that is not here, or several GPUs side by side."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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
    OpaqueOption,
    OptimizerOption,
    RecomputeOption,
    ShapeOption,
    ToleranceOption,
    priced,
    read_spec,
    whole_numbers,
)


def predict(
    model: Model,
    *,
    device: Annotated[
        str | None, typer.Option("--device", help="A GPU's name, any of `cubatch devices`, or a .toml file of one.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option("--devices", metavar="A,B,...", help="Compare these GPUs instead: t4,v100-sxm2-16gb.")
    ] = None,
    prices: Annotated[
        list[str] | None,
        typer.Option("--prices", metavar="NAME=PRICE,...", help="An hour of each of --devices, for what samples cost."),
    ] = None,
    mode: ModeOption = "inference",
    dtype: DtypeOption = "float32",
    objective: Annotated[
        Literal["throughput", "latency"], typer.Option("--objective", help="What is to be as good as possible.")
    ] = "throughput",
    tolerance: ToleranceOption = 0.01,
    batch_sizes: Annotated[
        str | None, typer.Option("--batch-sizes", metavar="N,N,...", help="Predict exactly these: 32,64.")
    ] = None,
    max_batch_size: MaxOption = None,
    memory_limit: MemoryOption = None,
    latency_limit: LatencyOption = None,
    optimizer: OptimizerOption = "sgd",
    library: Annotated[
        Literal["vendor", "cubatch"], typer.Option("--library", help="vendor: cuDNN and cuBLAS; cubatch: our kernels.")
    ] = "vendor",
    recompute: RecomputeOption = False,
    anchors: Annotated[
        list[str] | None,
        typer.Option("--anchors", metavar="FILE", help="JSON of a `tune` on that or another GPU; again for more."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Where the time of the answer goes: passes, what runs, blocks, fill.")
    ] = False,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw the curves: .png, .svg or .pdf.")
    ] = None,
    input_shape: ShapeOption = None,
    classes: ClassesOption = None,
    opaque: OpaqueOption = False,
    json: JsonOption = None,
) -> None:
    """
    Predict times and the best batch size on an absent GPU.

    With intervals; nothing is measured.

    Example: cubatch predict vgg16 --device titan-x-pascal --plot curve.png
    """
    from cubatch.report.plots import forecast, style
    from cubatch.report.tables import forecast as forecast_table
    from cubatch.tuning import comparison
    from cubatch.tuning import prediction as tuning_forecast

    if (device is None) == (devices is None):
        raise typer.BadParameter("give either --device NAME or --devices NAME,NAME,...")
    if explain and devices is not None:
        raise typer.BadParameter("--explain is about one GPU: give it with --device")
    if prices is not None and devices is None:
        raise typer.BadParameter("--prices are of the GPUs of --devices")
    paid = None if prices is None else priced(prices)
    sizes = None if batch_sizes is None else whole_numbers("--batch-sizes", batch_sizes)
    console.check_writable(json=json, plot=plot)
    if plot is not None:
        style.check(plot)
    spec = read_spec(model, input_shape, classes, opaque=opaque)
    options: dict[str, Any] = {
        "mode": mode, "dtype": dtype, "batch_sizes": sizes, "library": library, "anchors": anchors,
        "objective": objective, "tolerance": tolerance, "max_batch_size": max_batch_size,
        "memory_limit": memory_limit, "latency_limit": latency_limit, "optimizer": optimizer, "recompute": recompute,
    }  # fmt: skip
    width = console.line_width()
    if devices is None:
        predicted = tuning_forecast.predict(spec, device=device, **options)
        found, payload = [predicted], predicted.to_mapping()
        tables = [forecast_table.fitted(predicted, width=width)]
        tables += [forecast_table.layers(predicted, width=width)] if explain else []
    else:
        compared = comparison.compare(spec, devices.split(","), prices=paid, **options)
        found, payload = list(compared.forecasts.values()), compared.to_mapping()
        costs = compared.cost_per_million_samples
        tables = [forecast_table.compared(found, compared.failed, width=width, costs=costs)]
    console.emit(tables, payload, json)
    if plot is not None:
        forecast.curves(found, plot)
        console.say(f"wrote {plot}")
