"""
The options that commands share, declared once, and how their text is read.

Typer evaluates these annotations when the command line starts, so they import nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cubatch.choices import Dtype, Library, Mode, Objective, Optimizer, Tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cubatch.network.graph import Spec


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A model's name, a .toml, .json or .onnx file, or package.module:name of what builds it."
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="cpu, gpu, cuda:1, a name of `cubatch devices`, a GPU's .toml file. Default: first GPU, else CPU.",
    ),
]
PresentOption = Annotated[
    str | None,
    typer.Option("--device", help="cpu, gpu, cuda:1, or the name of a GPU that is here. Default: first GPU, else CPU."),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices", metavar="N|A,B,...", help="Share each training step: how many, or which: cuda:0,cuda:1; cpu,cpu."
    ),
]
ModeOption = Annotated[Mode, typer.Option("--mode", help="Training is forward, backward and optimiser step.")]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="Of activations and weights; our engine takes float32 on a CPU.")
]
LibraryOption = Annotated[
    Library, typer.Option("--library", help="cubatch: our kernels, GPU only; im2col: the GEMM of cuBLAS or NumPy.")
]
TunableOption = Annotated[
    Tunable,
    typer.Option(
        "--library",
        help="cubatch: our kernels, GPU only; im2col: the GEMM of cuBLAS or NumPy; onnxruntime: of an .onnx file; "
        "torch: of package.module:name, as PyTorch runs it, where --dtype is that of autocast.",
    ),
]
OptimizerOption = Annotated[Optimizer, typer.Option("--optimizer", help="For memory, and the training step.")]
TargetOption = Annotated[
    int | None,
    typer.Option(
        "--target-batch-size", metavar="N", min=1, help="Of an optimiser's step: gradients of batches are added up."
    ),
]
ObjectiveOption = Annotated[Objective, typer.Option("--objective", help="energy: samples per joule.")]
SizesOption = Annotated[
    str | None, typer.Option("--batch-sizes", metavar="N,N,...", help="Measure exactly these: 32,64.")
]
RecomputeOption = Annotated[bool, typer.Option("--recompute", help="Forget activations, compute them again backward.")]
ToleranceOption = Annotated[float, typer.Option("--tolerance", help="How far from the best is as good; 0.01 is 1 %.")]
LatencyOption = Annotated[
    float | None, typer.Option("--latency-limit", metavar="SECONDS", help="Longest step that is acceptable.")
]
MaxOption = Annotated[int | None, typer.Option("--max-batch-size", metavar="N", help="Look no further than this.")]
CurrentOption = Annotated[
    int | None,
    typer.Option("--current", metavar="N", help="The batch size that you use now, to compare with."),
]
MemoryOption = Annotated[
    str | None, typer.Option("--memory-limit", metavar="SIZE", help='Bytes, "8GiB", or "80%" of free memory.')
]
ShapeOption = Annotated[
    str | None,
    typer.Option(
        "--input-shape",
        metavar="H,W,C",
        help="Input of one sample, channels last, of a PyTorch module too; default: the model's own, or 224,224,3.",
    ),
]
ClassesOption = Annotated[int | None, typer.Option("--classes", metavar="N", help="Outputs of a named model.")]
OpaqueOption = Annotated[
    bool, typer.Option("--opaque", help="Keep operators that have no layer, by their bytes and FLOP.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of data, weights and the order of rounds.")]
StoreOption = Annotated[
    Path | None, typer.Option("--store", metavar="FILE", help="Where results are kept. Default: the user's cache.")
]
JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write JSON; - is stdout, then nothing else is there.")
]


def read_spec(model: str, input_shape: str | None, classes: int | None, *, opaque: bool = False) -> Spec:
    """
    Read what stands for a network, as `models.resolve` does.

    Args:
        model: The argument of the command.
        input_shape: "H,W,C".
        classes: Outputs of a named model.
        opaque: Keep operators that have no layer.

    Raises:
        typer.BadParameter: If the shape is not three numbers, or is given beside a spec file.
        CubatchError: If there is no such model or the file is no spec.
    """
    from cubatch.network import models

    shape = None if input_shape is None else whole_numbers("--input-shape", input_shape, count=3)
    if (shape or classes) and Path(model).suffix.lower() in {".toml", ".json"}:
        raise typer.BadParameter("--input-shape and --classes are for named models; a spec file says its own")
    return models.resolve(
        model, input_shape=cast("Any", None if shape is None else tuple(shape)), classes=classes, opaque=opaque
    )


def whole_numbers(option: str, text: str, count: int | None = None, remedy: str = "") -> list[int]:
    """Read "32,64"; what else is wrong with the numbers is for the library to say."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or (count is not None and len(numbers) != count):
        wanted = f"{count} whole numbers" if count else "whole numbers"
        raise typer.BadParameter(f"{option} takes {wanted} with commas between, got {text!r}{remedy}")
    return numbers


def several_devices(text: str | None) -> int | list[str] | None:
    """Read "4" or "cuda:0,cuda:1"; which devices there are is for the library to say."""
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    return [name.strip() for name in text.split(",")]


def priced(texts: Sequence[str]) -> dict[str, float]:
    """Read "t4=0.35,a40=0.79", once or several times; what else is wrong with a price is for the library to say."""
    text = ",".join(texts)
    try:
        return {name.strip(): float(price) for name, _, price in (part.rpartition("=") for part in text.split(","))}
    except ValueError:
        raise typer.BadParameter(f"--prices takes NAME=PRICE with commas between, got {text!r}") from None
