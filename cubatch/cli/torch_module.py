"""`cubatch tune package.module:name --library torch`: what is asked of a PyTorch module, from the command's text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from cubatch import user_code
from cubatch.cli.options import whole_numbers

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
        with user_code.beside(here):
            return autotune_module(model, example, autocast=_AUTOCAST[dtype], **options)

    return tuned


def _example(input_shape: str | None, example_inputs: str | None) -> Any:
    """Read a shape, or call what gives the inputs."""
    if example_inputs is not None:
        from cubatch.frameworks import module_worker

        return module_worker.example(example_inputs)
    from cubatch.network.graph import check_input_shape
    from cubatch.network.importers.factories import channels_first

    return channels_first(check_input_shape(whole_numbers("--input-shape", input_shape or "", count=3)))
