"""What the measuring process answers, one JSON line at a time, read as if anything could stand there."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Mapping
from typing import Any

from cubatch import errors
from cubatch.errors import CubatchError, OutOfMemory, WorkerFailed, is_out_of_memory
from cubatch.units import message_of, visible

_FACTS = {"type": str, "text": str, "traceback": str, "out_of_memory": bool, "args": list | None}


def parsed(line: bytes) -> dict[str, Any]:
    """
    Read an answer: {"ok": what was asked for}, or {"error": facts} as `rebuilt` takes them.

    Raises:
        ValueError: If it is neither.
    """
    try:
        reply = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(reply, dict) or not reply.keys() & {"ok", "error"}:
        raise ValueError("neither an answer nor an error")
    facts = reply.get("error", {})
    if "error" in reply and not (
        isinstance(facts, dict) and all(name in facts and isinstance(facts[name], of) for name, of in _FACTS.items())
    ):
        raise ValueError("an error without its facts")
    return reply


def described(error: Exception) -> dict[str, Any]:
    """Turn an error into what JSON can hold; `args` only for those of ours that can be made again from it."""
    args = None
    if isinstance(error, CubatchError) and getattr(errors, type(error).__name__, None) is type(error):
        with contextlib.suppress(TypeError):
            args = json.loads(json.dumps(error.args))
    return {
        "type": type(error).__name__,
        "args": args,
        "text": " ".join([message_of(error), *getattr(error, "__notes__", ())]),
        "out_of_memory": is_out_of_memory(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def rebuilt(facts: Mapping[str, Any], doing: str, remedy: str) -> CubatchError:
    """Make the worker's error again: one of ours as itself, a foreign one as what it means here, with a remedy."""
    error = _own(facts["type"], facts["args"])
    if error is None and facts["out_of_memory"]:
        error = OutOfMemory(f"{doing}: {facts['type']}: {facts['text']}")
    elif error is None:
        error = WorkerFailed(f"{doing} raised {facts['type']}: {facts['text']}", remedy)
    error.add_note(f"In the measuring process:\n{visible(facts['traceback'])}")
    return error


def _own(name: str, args: list[Any] | None) -> CubatchError | None:
    """Make an error of ours from its name and arguments; None where they make none."""
    kind = getattr(errors, name, None)
    if args is None or not (isinstance(kind, type) and issubclass(kind, CubatchError)):
        return None
    try:
        error = kind(*args)
        str(error)  # which reads its arguments
    except Exception:  # noqa: BLE001 - arguments that no such error has
        return None
    return error
