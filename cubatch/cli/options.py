"""
Options that several commands share, and the functions that parse their text.

Typer evaluates these annotations when the command line starts, so this module imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cubatch import files
from cubatch.choices import Dtype, Library, Mode, Objective, Optimizer, Planned, Tunable
from cubatch.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cubatch.network.graph import Spec


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name from `cubatch models`, a .toml, .json or .onnx file, or package.module:name of a function that "
        "builds a PyTorch module.",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="cpu, gpu, cuda:1, a GPU's name from `cubatch devices`, or a .toml file that describes a GPU. "
        "Default: the first GPU, else the CPU.",
    ),
]
PresentOption = Annotated[
    str | None,
    typer.Option(
        "--device", help="cpu, gpu, cuda:1, or a GPU's name; it must be here. Default: the first GPU, else the CPU."
    ),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="N|A,B,...",
        help="Train data parallel on N GPUs, or on these devices: cuda:0,cuda:1 or cpu,cpu.",
    ),
]
ModeOption = Annotated[
    Mode, typer.Option("--mode", help="inference: forward only; training: forward, backward and optimizer step.")
]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="Type of activations and weights. On a CPU cubatch runs float32 only.")
]
_LIBRARIES = (
    "cubatch: cubatch kernels, on a GPU only; im2col: matrix products of cuBLAS on a GPU, of NumPy on a CPU; "
    "auto: cubatch on a GPU, im2col on a CPU"
)
LibraryOption = Annotated[Library, typer.Option("--library", help=f"{_LIBRARIES}.")]
TunableOption = Annotated[
    Tunable,
    typer.Option(
        "--library",
        help=f"{_LIBRARIES}; onnxruntime: run an .onnx file in ONNX Runtime; torch: run the module of "
        "package.module:name in PyTorch, where a 16-bit --dtype means autocast.",
    ),
]
PlannedOption = Annotated[
    Planned,
    typer.Option(
        "--library",
        help=f"{_LIBRARIES}; torch: trace a step of the module of package.module:name, where a 16-bit --dtype means "
        "autocast.",
    ),
]
OptimizerOption = Annotated[
    Optimizer, typer.Option("--optimizer", help="Optimizer of a training step; its state takes memory.")
]
ModuleOptimizerOption = Annotated[
    str,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        help="sgd, momentum or adam; its state takes memory. A PyTorch module also takes adamw, or "
        "package.module:function from parameters to an optimizer.",
    ),
]
TargetOption = Annotated[
    int | None,
    typer.Option(
        "--target-batch-size",
        metavar="N",
        min=1,
        help="Samples per optimizer step: gradients of smaller batches are accumulated.",
    ),
]
ObjectiveOption = Annotated[
    Objective,
    typer.Option(
        "--objective",
        help="throughput: most samples per second; latency: shortest step; energy: most samples per joule.",
    ),
]
SizesOption = Annotated[
    str | None, typer.Option("--batch-sizes", metavar="N,N,...", help="Use exactly these batch sizes: 32,64.")
]
RecomputeOption = Annotated[
    bool, typer.Option("--recompute", help="Save memory: compute activations again in the backward pass.")
]
ToleranceOption = Annotated[
    float, typer.Option("--tolerance", help="Acceptable loss against the best batch size; 0.01 is 1 %.")
]
LatencyOption = Annotated[
    float | None, typer.Option("--latency-limit", metavar="SECONDS", help="Longest acceptable time of a step.")
]
MaxOption = Annotated[int | None, typer.Option("--max-batch-size", metavar="N", help="Largest batch size to consider.")]
CurrentOption = Annotated[
    int | None,
    typer.Option("--current", metavar="N", help="The batch size that you use now, to compare with."),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help='Bytes, "8GiB", or "80%" of free memory. Default: all of it, on a CPU 0.8 of it.',
    ),
]
ShapeOption = Annotated[
    str | None,
    typer.Option(
        "--input-shape",
        metavar="H,W,C",
        help="Shape of one sample, channels last, also for a PyTorch module. Default: the model's own, or 224,224,3.",
    ),
]
ClassesOption = Annotated[
    int | None, typer.Option("--classes", metavar="N", help="Number of outputs of a named model.")
]
BatchesOption = Annotated[
    str | None,
    typer.Option(
        "--batches",
        metavar="package.module:name",
        help="A function from a batch size to inputs of a PyTorch module, for --library torch.",
    ),
]
LoaderOption = Annotated[
    str | None,
    typer.Option(
        "--loader",
        metavar="package.module:name",
        help="A data loader, or a function that returns one: its samples make the batches. For `tune` its rate counts.",
    ),
]
ExampleOption = Annotated[
    str | None,
    typer.Option(
        "--example-inputs",
        metavar="package.module:name",
        help="A function that returns example inputs of the module, for --library torch.",
    ),
]
ConstantOption = Annotated[
    str | None,
    typer.Option(
        "--constant-inputs",
        metavar="NAME,...",
        help="Names or positions of inputs of a PyTorch module that are the same at every batch size.",
    ),
]
AccumulateOption = Annotated[
    int | None,
    typer.Option(
        "--accumulate", metavar="N", help="Batches between two optimizer steps of a PyTorch module. Default: 1."
    ),
]
ThreadsOption = Annotated[
    str | None,
    typer.Option(
        "--threads",
        metavar="N,N,...",
        help="On a CPU, for an .onnx file in ONNX Runtime or package.module:name in PyTorch: threads of an instance, "
        "from 1 to the number of CPUs. For each, as many instances as the CPUs allow run at the same time, bound to "
        "CPUs of their own.",
    ),
]
OpaqueOption = Annotated[
    bool, typer.Option("--opaque", help="Accept unknown operators, as layers of known bytes and FLOP.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of data, weights and the order of rounds.")]
StoreOption = Annotated[
    Path | None,
    typer.Option("--store", metavar="FILE", help="File with the cached timings. Default: in the user's cache folder."),
]
NoStoreOption = Annotated[bool, typer.Option("--no-store", help="Neither use nor cache timings.")]
FreshOption = Annotated[
    bool, typer.Option("--fresh", help="Discard cached timings, also those that chose kernels, and measure again.")
]
PlotOption = Annotated[
    str | None, typer.Option("--plot", metavar="FILE", help="Draw a figure into this .png, .svg or .pdf file.")
]
PricesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--prices",
        metavar="NAME=PRICE,...|FILE",
        help="Price of one hour of each device, to show costs; or a .toml file with lines NAME = PRICE.",
    ),
]
JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the result as JSON; - writes it to stdout, without the tables."),
]


def read_spec(model: str, input_shape: str | None, classes: int | None, *, opaque: bool = False) -> Spec:
    """
    Return the network or layer that the MODEL argument of a command means.

    The shape "H,W,C" and the number of classes are the model's own if None. BadParameter is raised for another form of
    shape, and for a spec file with either.
    """
    from cubatch.network import models

    shape = None if input_shape is None else whole_numbers("--input-shape", input_shape, count=3)
    if (shape or classes) and Path(model).suffix.lower() in {".toml", ".json"}:
        raise typer.BadParameter("--input-shape and --classes are for named models; edit the spec file instead")
    return models.resolve(
        model, input_shape=cast("Any", None if shape is None else tuple(shape)), classes=classes, opaque=opaque
    )


def whole_numbers(option: str, text: str, count: int | None = None, remedy: str = "") -> list[int]:
    """
    Return the numbers in the text of an option, such as "32,64".

    For other text, or if there are not `count` numbers (None: any count), BadParameter is raised; `remedy` ends it.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or (count is not None and len(numbers) != count):
        wanted = f"{count} whole numbers" if count else "whole numbers"
        raise typer.BadParameter(f"{option} takes {wanted} separated by commas, got {text!r}{remedy}")
    return numbers


def optional_sizes(text: str | None) -> list[int] | None:
    """Return the batch sizes in a value of --batch-sizes, such as "32,64"; None for None."""
    return None if text is None else whole_numbers("--batch-sizes", text)


def several_devices(text: str | None) -> int | list[str] | None:
    """Return the value of --devices: an int for "4", a list of names for "cuda:0,cuda:1", None for None."""
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    return [name.strip() for name in text.split(",")]


def parse_prices(texts: Sequence[str] | None) -> dict[str, float] | None:
    """Return prices per hour by device name from texts such as "t4=0.35,a40=0.79" or "prices.toml"; None for None."""
    if texts is None:
        return None
    prices: dict[str, float] = {}
    for text in texts:
        prices |= _read_prices(text) if text.lower().endswith(".toml") else _prices_in(text)
    return prices


def _prices_in(text: str) -> dict[str, float]:
    try:
        return {name.strip(): float(price) for name, _, price in (part.rpartition("=") for part in text.split(","))}
    except ValueError:
        raise typer.BadParameter(f"--prices takes NAME=PRICE separated by commas, got {text!r}") from None


def _read_prices(path: str) -> dict[str, float]:
    import tomllib

    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument("--prices", path, f"a TOML file that can be read ({files.reason(error)})") from None


def choose_store(store: Path | None, *, no_store: bool, fresh: bool) -> Path | str | bool:
    """
    Return the `store` argument of `autotune`: the path, "refresh" for --fresh, False for --no-store, else True.

    `store` is the path of --store; None: not given. BadParameter is raised if two of the options are given.
    """
    if no_store + fresh + (store is not None) > 1:
        raise typer.BadParameter("--no-store, --fresh and --store exclude each other")
    return "refresh" if fresh else not no_store if store is None else store
