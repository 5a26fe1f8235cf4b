"""`cubatch predict`: the table of `tune` for an absent GPU, or several GPUs side by side."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cubatch.checks import EXPERIMENTAL
from cubatch.choices import Mode
from cubatch.cli import console, options as opt, torch_module

if TYPE_CHECKING:
    from collections.abc import Callable


def predict(
    model: opt.Model,
    *,
    device: Annotated[
        str | None,
        typer.Option("--device", help="A GPU's name from `cubatch devices`, or a .toml file that describes one."),
    ] = None,
    devices: Annotated[
        str | None, typer.Option("--devices", metavar="A,B,...", help="Compare these GPUs instead: t4,v100-sxm2-16gb.")
    ] = None,
    prices: opt.PricesOption = None,
    mode: Annotated[
        Mode,
        typer.Option(
            "--mode",
            help="inference: forward only; training: forward and backward, of a module also loss and optimizer.",
        ),
    ] = "inference",
    dtype: opt.DtypeOption = "float32",
    objective: Annotated[
        Literal["throughput", "latency"],
        typer.Option("--objective", help="throughput: most samples per second; latency: shortest step."),
    ] = "throughput",
    tolerance: opt.ToleranceOption = 0.03,
    batch_sizes: opt.SizesOption = None,
    max_batch_size: opt.MaxOption = None,
    memory_limit: opt.MemoryOption = None,
    latency_limit: opt.LatencyOption = None,
    optimizer: opt.ModuleOptimizerOption = "sgd",
    library: Annotated[
        Literal["vendor", "cubatch", "torch"],
        typer.Option(
            "--library",
            help="Predict for cuDNN and cuBLAS (vendor), for PyTorch (torch), or for cubatch kernels. With torch, "
            "package.module:name is a module, for which a 16-bit --dtype means autocast.",
        ),
    ] = "vendor",
    recompute: opt.RecomputeOption = False,
    experimental: Annotated[
        str | None,
        typer.Option(
            "--experimental",
            metavar="NAME,...",
            help="With --library cubatch: predict for kernels that no GPU has run yet, one or several of "
            f"{', '.join(EXPERIMENTAL)}.",
        ),
    ] = None,
    anchors: Annotated[
        list[str] | None,
        typer.Option(
            "--anchors",
            metavar="FILE",
            help="JSON of a `tune` on this or another GPU, to correct the prediction; repeat for more.",
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the time of each layer at the recommended batch size.")
    ] = False,
    plot: opt.PlotOption = None,
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
    Predict times and the best batch size on an absent GPU.

    Nothing is measured; every time has a 90 % interval.

    Example: cubatch predict vgg16 --device titan-x-pascal --plot curve.png

    Example: cubatch predict my_models:build --library torch --input-shape 32,32,3 --device t4 --mode training

    Example: cubatch predict vit-base --device h200-sxm --mode training --dtype float16 --batch-sizes 128 --library
    cubatch --experimental flash_attention
    """
    from cubatch.report.plots import forecast_curves, style
    from cubatch.report.tables import forecast as forecast_table

    if (device is None) == (devices is None):
        raise typer.BadParameter("give either --device NAME or --devices NAME,NAME,...")
    if explain and devices is not None:
        raise typer.BadParameter("--explain needs --device: it is about one GPU")
    if prices is not None and devices is None:
        raise typer.BadParameter("--prices needs --devices")
    hourly, sizes = opt.parse_prices(prices), opt.optional_sizes(batch_sizes)
    console.check_writable(json=json, plot=plot)
    if plot is not None:
        style.check(plot)
    inputs = torch_module.InputOptions(
        input_shape, batches=batches, loader=loader, example_inputs=example_inputs, constant_inputs=constant_inputs,
        accumulate=accumulate,
    )  # fmt: skip
    ask: Callable[..., Any]
    if library == "torch" and ":" in model:
        others = {
            "--anchors": anchors, "--recompute": recompute or None, "--classes": classes, "--opaque": opaque or None,
            "--experimental": experimental,
        }  # fmt: skip
        ask = torch_module.bind(_predicted, model, inputs, dtype=dtype, others=others)
    else:
        inputs.check_absent(library if library != "torch" else "a network")
        spec = opt.read_spec(model, input_shape, classes, opaque=opaque)
        ask = functools.partial(
            _predicted, spec, dtype=dtype, library=library, anchors=anchors, recompute=recompute,
            experimental=[name.strip() for name in experimental.split(",")] if experimental is not None else (),
        )  # fmt: skip
    options: dict[str, Any] = {
        "mode": mode, "batch_sizes": sizes, "objective": objective, "tolerance": tolerance, "optimizer": optimizer,
        "max_batch_size": max_batch_size, "memory_limit": memory_limit, "latency_limit": latency_limit,
    }  # fmt: skip
    if devices is None:
        predicted = ask(device=device, **options)
        forecasts, payload = [predicted], predicted.to_mapping()
        tables = [forecast_table.prediction(predicted), *([forecast_table.layers(predicted)] if explain else [])]
    else:
        compared = ask(devices=devices.split(","), prices=hourly, **options)
        forecasts, payload = list(compared.forecasts.values()), compared.to_mapping()
        costs = compared.cost_per_million_samples
        tables = [forecast_table.compared(forecasts, compared.failed, costs=costs)]
    console.emit(tables, payload, json)
    if plot is not None:
        forecast_curves.curves(forecasts, plot)
        console.say(f"wrote {plot}")


def _predicted(spec: Any, *batches: Any, devices: list[str] | None = None, **options: Any) -> Any:
    """
    Return the prediction of a network, or of a module with batches, for one device or several.

    For several `devices` a comparison is returned; None: for the `device` among the options.
    """
    from cubatch.tuning import comparison, prediction

    if devices is None:
        return prediction.predict(spec, *batches, **options)
    named = {"batches": batches[0]} if batches else {}
    return comparison.compare(spec, devices, **named, **options)
