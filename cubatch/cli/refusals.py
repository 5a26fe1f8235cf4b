"""
How a command says no: by which exit code, and in the words of its own options.

The rule of the codes: 2 where what was asked makes no sense, whoever noticed, 1 where it does and could not be done.
"""

from __future__ import annotations

import re
from typing import Any

import typer

from cubatch.errors import CubatchError, InvalidArgument, UnknownName

FAILED, MISUSED = 1, 2
# What the command line's library says of a value, in the words of the library that it reads values with.
_FOREIGN = (
    (r"Value error, ", ""),
    (r"Input should be a valid integer, .*", "a whole number is needed"),
    (r"Input should be a valid number, .*", "a number is needed"),
    (r"Input should be greater than or equal to (\S+)", r"at least \1 is needed"),
    (r"Input should be ", "it should be "),
)
# Options that are called otherwise than the argument that they are.
_OPTIONS = {
    "threads_per_block": "--threads", "registers_per_thread": "--registers", "shared_bytes_per_block": "--shared",
    "num_blocks": "--blocks", "layer_spec": "MODEL", "network": "MODEL", "module": "MODEL", "learning_rate": "--lr",
    "client": "--scheduler",
}  # fmt: skip


def exit_code(error: CubatchError) -> int:
    """
    Say which code a command ends with.

    Example:
        >>> exit_code(InvalidArgument("budget", -5, "positive")), exit_code(CubatchError("the disk is full"))
        (2, 1)
    """
    return MISUSED if isinstance(error, InvalidArgument) else FAILED


def sentence(error: CubatchError, command: Any) -> str:
    """
    Write an error for a person at a terminal, who knows options and not the names of arguments.

    Args:
        error: What the library raised.
        command: The command that was given, with its `params`; None where there is none.
    """
    text = str(error)
    if not isinstance(error, InvalidArgument) or isinstance(error, UnknownName):
        return text
    options = {param.name: param.opts[0] for param in getattr(command, "params", ()) if param.opts[0].startswith("-")}
    option = options.get(error.field) or (_OPTIONS.get(error.field) if options else None)
    return f"{option}{text.removeprefix(error.field)}" if option and text.startswith(error.field) else text


def reworded(error: typer.BadParameter) -> typer.BadParameter:
    """Take the words of a library that the user never heard of out of a message."""
    text = error.message
    for foreign, ours in _FOREIGN:
        text = re.sub(foreign, ours, text)
    if text == error.message:  # which also leaves errors of a more special kind as they are
        return error
    return typer.BadParameter(text, ctx=error.ctx, param=error.param, param_hint=error.param_hint)
