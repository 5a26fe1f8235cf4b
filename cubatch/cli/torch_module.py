"""`cubatch tune package.module:name --library torch`: what is asked of a PyTorch module, from the command's text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import typer

from cubatch import user_code
from cubatch.cli.options import whole_numbers
from cubatch.errors import InvalidArgument, NothingMeasured

if TYPE_CHECKING:
    from cubatch.tuning.results import TuningResult

_AUTOCAST = {"float32": None, "float16": "float16", "bfloat16": "bfloat16"}


def asking(
    model: str,
    input_shape: str | None,
    example_inputs: str | None,
    dtype: str,
    others: Mapping[str, object | None],
) -> Callable[..., TuningResult]:
    """
    Give `autotune_module`, which wants no more than what it shares with `autotune`.

    Args:
        model: "package.module:name" of what builds a module; the file may lie in this folder, as that of the inputs.
        input_shape: "H,W,C" of one sample.
        example_inputs: "package.module:name" of a function that gives what the module is called with.
        dtype: Of --dtype: 16 bits are automatic mixed precision.
        others: Options that are not for PyTorch's modules; None is one that was not given.

    Raises:
        typer.BadParameter: If an option is not for them, or not just one says what goes in.
        CubatchError: If there is no such function, or it raises.
    """
    from cubatch.tuning.tune_module import autotune_module

    if model.lower().endswith(".onnx"):
        raise typer.BadParameter(
            f"--library torch runs what package.module:name builds, and no ONNX file: {model} is run by --library "
            "onnxruntime, or in cubatch's own engine by auto, cubatch and im2col"
        )
    if ":" not in model:
        raise typer.BadParameter(f"--library torch runs what package.module:name builds, and {model} names no function")
    for option, value in others.items():
        if value is not None:
            raise typer.BadParameter(f"{option} is not for --library torch, which runs a module as it is: leave it out")
    if dtype not in _AUTOCAST:
        raise typer.BadParameter(f"--dtype {dtype} is not for --library torch: what builds the module may set it")
    if (input_shape is None) == (example_inputs is None):
        raise typer.BadParameter(
            "--library torch takes one of --input-shape H,W,C, of one image, and --example-inputs, a function "
            "that gives any other inputs"
        )
    here = user_code.current_folder()
    with user_code.beside(here):
        example = _example(input_shape, example_inputs)

    def tuned(**options: Any) -> TuningResult:
        with user_code.beside(here), _told_by_options(input_shape):
            return autotune_module(model, example, autocast=_AUTOCAST[dtype], **options)

    return tuned


def _example(input_shape: str | None, example_inputs: str | None) -> Any:
    """Read a shape, or call what gives the inputs."""
    if example_inputs is not None:
        from cubatch.frameworks import module_worker

        return module_worker.example(example_inputs)
    from cubatch.network.graph import check_input_shape
    from cubatch.network.importers.factories import channels_first

    remedy = "; --example-inputs names a function that gives inputs other than images"
    return channels_first(check_input_shape(whole_numbers("--input-shape", input_shape or "", 3, remedy)))


@contextlib.contextmanager
def _told_by_options(input_shape: str | None) -> Iterator[None]:
    """Have errors tell of inputs by the options that say what they are, not by the argument of the function."""
    from cubatch.tuning.subjects.bounded_subject import INPUTS, LOSS

    told = "--example-inputs names what gives a batch of tensors, those of several arguments in a tuple or a dict."
    if input_shape is not None:
        h, w, c = input_shape.split(",")
        told = (
            f"--input-shape {input_shape} is H,W,C: {h} high, {w} wide, {c} channels, which PyTorch has first; "
            "--example-inputs names a function that gives inputs other than images."
        )
    try:
        yield
    except (InvalidArgument, NothingMeasured) as error:
        words = [text.replace(INPUTS, told).replace(LOSS, "") if isinstance(text, str) else text for text in error.args]
        raise type(error)(*words) from error  # there is no option of a loss
