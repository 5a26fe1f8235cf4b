"""`--library torch`: the options of commands for a PyTorch module, package.module:name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import attrs
import typer

from cubatch import user_code
from cubatch.cli.options import whole_numbers
from cubatch.errors import InvalidArgument, NothingMeasured

_Result = TypeVar("_Result")
_AUTOCAST = {"float32": None, "float16": "float16", "bfloat16": "bfloat16"}


@attrs.frozen
class InputOptions:
    """Options of a command that determine the inputs of a PyTorch module; None for an option that was not given."""

    input_shape: str | None
    batches: str | None = attrs.field(kw_only=True)
    loader: str | None = attrs.field(kw_only=True)
    example_inputs: str | None = attrs.field(kw_only=True)
    constant_inputs: str | None = attrs.field(kw_only=True)
    accumulate: int | None = attrs.field(kw_only=True)

    def check_absent(self, library: str) -> None:
        """
        Raise an error if options of PyTorch modules were given for another library.

        Raises:
            typer.BadParameter: If such an option was given.
        """
        for name, value in attrs.asdict(self).items():
            if value is not None and name != "input_shape":
                raise typer.BadParameter(f"--{name.replace('_', '-')} is for --library torch, not {library}")

    def check(self) -> None:
        """
        Check that exactly one option determines the batches.

        Raises:
            typer.BadParameter: If none or several of --input-shape, --example-inputs, --batches, --loader were given.
        """
        if self.batches is not None and self.loader is not None:
            raise typer.BadParameter(
                "--batches and --loader exclude each other: pass --loader alone, it also makes the batches"
            )
        makers = (self.input_shape, self.example_inputs, self.batches or self.loader)
        if sum(each is not None for each in makers) != 1:
            raise typer.BadParameter(
                "--library torch needs exactly one of these options: --input-shape H,W,C (images), --batches or "
                "--loader (batches of any size), or --example-inputs (a function that returns one batch)"
            )


def bind(
    # public function for modules, with the arguments `autocast`, `constant_inputs` and `accumulate`
    function: Callable[..., _Result],
    model: str,  # "package.module:name" of a function that builds a module; files in the current folder are found too
    inputs: InputOptions,  # options for the inputs of the module
    *,
    dtype: str,  # value of --dtype; 16 bits mean automatic mixed precision
    # options that a PyTorch module does not take; None for an option that was not given
    others: Mapping[str, object | None],
) -> Callable[..., _Result]:
    """
    Return `function` with its module, inputs and precision filled in; the result takes its other arguments.

    Raises:
        typer.BadParameter: If `model` is no "package.module:name", an option of `others` is given, or autocast does not
            support `dtype`. Also if `inputs.check` fails.
        CubatchError: If an extent is below 1, or the function of --example-inputs does not exist or raises an error.
    """
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
        raise typer.BadParameter(
            f"--library torch takes --dtype {', '.join(_AUTOCAST)}, not {dtype}; set it where the module is built"
        )
    inputs.check()
    here = user_code.current_folder()
    with user_code.beside(here):
        batches = inputs.batches or inputs.loader or _example(inputs.input_shape, inputs.example_inputs)

    def bound(**options: Any) -> _Result:
        with user_code.beside(here), _name_options(inputs.input_shape):
            return function(
                model,
                batches,
                autocast=_AUTOCAST[dtype],
                constant_inputs=parse_inputs(inputs.constant_inputs or ""),
                accumulate=1 if inputs.accumulate is None else inputs.accumulate,
                **options,
            )

    return bound


def parse_inputs(text: str) -> list[str | int]:
    """
    Parse the value of --constant-inputs into names and positions, which count from 0.

    Example:
        >>> parse_inputs("mask,2")
        ['mask', 2]
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [int(name) if name.isdecimal() else name for name in names]


def _example(input_shape: str | None, example_inputs: str | None) -> Any:
    if example_inputs is not None:
        from cubatch.frameworks import module_worker

        return module_worker.example(example_inputs)
    from cubatch.network.graph import check_input_shape
    from cubatch.network.importers.factories import channels_first

    remedy = "; --example-inputs takes a function that returns inputs other than images"
    return channels_first(check_input_shape(whole_numbers("--input-shape", input_shape or "", 3, remedy)))


@contextlib.contextmanager
def _name_options(input_shape: str | None) -> Iterator[None]:
    """Raise errors of the block again with remedies that name options; `input_shape` is None if it was not given."""
    from cubatch.frameworks.batch_sources import INPUTS
    from cubatch.tuning.subjects.bounded_subject import LOSS

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
