"""`cubatch tune package.module:name --library torch`: options of the command for `autotune_module`."""

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


def tune_function(
    model: str,
    input_shape: str | None,
    example_inputs: str | None,
    batches: str | None,
    *,
    dtype: str,
    others: Mapping[str, object | None],
) -> Callable[..., TuningResult]:
    """
    Return a function of the options that `autotune_module` shares with `autotune`, for a module and its inputs.

    Args:
        model: "package.module:name" of a function that builds a module; files in the current folder are found too.
        input_shape: "H,W,C" of one sample.
        example_inputs: "package.module:name" of a function that returns example inputs.
        batches: "package.module:name" of a function from a batch size to inputs, or of a data loader.
        dtype: Value of --dtype; 16 bits mean automatic mixed precision.
        others: Options that a PyTorch module does not take; None for an option that was not given.

    Raises:
        typer.BadParameter: If such an option is given, or not exactly one of the three kinds of inputs.
        CubatchError: If there is no such function, or it raises.
    """
    from cubatch.tuning.tune_module import autotune_module

    if model.lower().endswith(".onnx"):
        raise typer.BadParameter(
            f"--library torch takes package.module:name, and {model} is an ONNX file; use --library onnxruntime, or "
            "auto for cubatch's own engine"
        )
    if ":" not in model:
        raise typer.BadParameter(f"--library torch takes package.module:name of a function, got {model}")
    for option, value in others.items():
        if value is not None:
            raise typer.BadParameter(f"leave out {option}: --library torch runs the module as it is")
    if dtype not in _AUTOCAST:
        raise typer.BadParameter(f"--library torch does not take --dtype {dtype}; set it where the module is built")
    if sum(each is not None for each in (input_shape, example_inputs, batches)) != 1:
        raise typer.BadParameter(
            "--library torch needs exactly one of these options: --input-shape H,W,C (images), --batches or --loader "
            "(batches of any size), or --example-inputs (a function that returns one batch)"
        )
    here = user_code.current_folder()
    with user_code.beside(here):
        example = _example(input_shape, example_inputs) if batches is None else batches

    def tuned(**options: Any) -> TuningResult:
        with user_code.beside(here), _name_options(input_shape):
            return autotune_module(model, example, autocast=_AUTOCAST[dtype], **options)

    return tuned


def parse_inputs(text: str) -> list[str | int]:
    """
    Parse the value of --constant-inputs: names, and positions from 0.

    Example:
        >>> parse_inputs("mask,2")
        ['mask', 2]
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [int(name) if name.isdecimal() else name for name in names]


def _example(input_shape: str | None, example_inputs: str | None) -> Any:
    """Return the input shape, or the example inputs."""
    if example_inputs is not None:
        from cubatch.frameworks import module_worker

        return module_worker.example(example_inputs)
    from cubatch.network.graph import check_input_shape
    from cubatch.network.importers.factories import channels_first

    remedy = "; --example-inputs takes a function that returns inputs other than images"
    return channels_first(check_input_shape(whole_numbers("--input-shape", input_shape or "", 3, remedy)))


@contextlib.contextmanager
def _name_options(input_shape: str | None) -> Iterator[None]:
    """Replace the remedies of errors by remedies that name the options of this command."""
    from cubatch.tuning.subjects.bounded_subject import INPUTS, LOSS

    remedy = "--example-inputs takes a function that returns a batch of tensors, or a tuple or dict of tensors."
    if input_shape is not None:
        h, w, c = input_shape.split(",")
        remedy = (
            f"--input-shape {input_shape} means H,W,C: height {h}, width {w}, {c} channels (PyTorch puts them first); "
            "--example-inputs takes a function that returns inputs other than images."
        )
    try:
        yield
    except (InvalidArgument, NothingMeasured) as error:
        args = [arg.replace(INPUTS, remedy).replace(LOSS, "") if isinstance(arg, str) else arg for arg in error.args]
        raise type(error)(*args) from error  # the command has no option for a loss
