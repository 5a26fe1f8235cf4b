"""
Exit codes and messages of errors, with the names of options instead of arguments.

The exit code is 2 if the request is invalid, and 1 if it failed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from cubatch.errors import CubatchError, InvalidArgument, UnknownName

FAILED, MISUSED = 1, 2
# Messages of Pydantic, with which Typer parses values, and their plain wording.
_REWORDED = (
    (r"Value error, ", ""),
    (r"Input should be a valid integer, .*", "a whole number is needed"),
    (r"Input should be a valid number, .*", "a number is needed"),
    (r"Input should be greater than or equal to (\S+)", r"at least \1 is needed"),
    (r"Input should be ", "it should be "),
)
# Options with another name than the argument of the library.
_OPTIONS = {
    "threads_per_block": "--threads", "registers_per_thread": "--registers", "shared_bytes_per_block": "--shared",
    "num_blocks": "--blocks", "layer_spec": "MODEL", "network": "MODEL", "module": "MODEL", "learning_rate": "--lr",
    "client": "--scheduler", "extents": "--dim", "dims": "--dim", "price_per_hour": "--price",
}  # fmt: skip


def exit_code(error: CubatchError) -> int:
    """
    Return the exit code of a command that failed.

    Example:
        >>> exit_code(InvalidArgument("budget", -5, "positive")), exit_code(CubatchError("the disk is full"))
        (2, 1)
    """
    return MISUSED if isinstance(error, InvalidArgument) else FAILED


def message(error: CubatchError, command: Any, words: Sequence[str] = ()) -> str:
    """
    Return the message of an error, in which options of the command replace names of Python arguments.

    `command` None: there was none. `words` are those of the command line.
    """
    options = {param.name: param.opts[0] for param in getattr(command, "params", ()) if param.opts[0].startswith("-")}
    text = _as_options(str(error), options).replace(", or None", "").replace(" or None", "")
    text = text.replace("store=False", "--no-store") if "no_store" in options else text
    if not options or not isinstance(error, InvalidArgument) or isinstance(error, UnknownName):
        return text
    option = options.get(error.field) or _OPTIONS.get(error.field, "")
    defaults = {param.name: param.default for param in command.params}
    is_default = error.value is None or error.value == defaults.get(error.field)
    if option.startswith("--") and not is_default and not any(w.partition("=")[0] == option for w in words):
        return text  # the value is that of a key in a file
    return f"{option}{text.removeprefix(error.field)}" if option and text.startswith(error.field) else text


def _as_options(text: str, options: Mapping[str, str]) -> str:
    """
    Return a text in which options replace Python arguments, except in a call, which is to be copied as it is.

    Example:
        >>> _as_options('library="a" or "b", to f(library="c") without batch_size; Pass opaque=True',
        ...             {"library": "--library", "batch_size": "--batch-size", "opaque": "--opaque"})
        '--library a or b, to f(library="c") without --batch-size; Pass --opaque'
        >>> _as_options("Or pass mode='training'.", {"mode": "--mode"})
        'Or pass --mode training.'
    """

    def replaced(match: re.Match[str]) -> str:
        name, rest = match["set"] or match["flag"] or match["bare"], re.sub("[\"']", "", match["values"] or "")
        return f"{options[name]}{rest and f' {rest}'}" if name else match[0]

    names, bare = "|".join(options), "|".join(name for name in options if "_" in name) or "(?!)"
    quoted = r"""(?:"\w+"|'\w+')"""
    values = rf"{quoted}(?:(?:,| or|, or) {quoted})*"
    ways = (
        r"[\w.]+\([^()]*\)", rf"\b(?P<set>{names})=(?P<values>{values})", rf"\b(?P<flag>{names})=True\b",
        rf"(?<=\s)(?P<bare>{bare})\b(?![=(])",
    )  # fmt: skip
    return re.sub("|".join(ways), replaced, text) if options else text


def reword(error: typer.BadParameter) -> typer.BadParameter:
    """Return a BadParameter whose message replaces Pydantic's phrases by plain ones; `error` itself if it has none."""
    text = error.message
    for pattern, plain in _REWORDED:
        text = re.sub(pattern, plain, text)
    if text == error.message:  # keeps the subclasses of BadParameter
        return error
    return typer.BadParameter(text, ctx=error.ctx, param=error.param, param_hint=error.param_hint)
