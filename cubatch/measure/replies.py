"""Set up a worker process, which may be killed at any time; convert its errors to JSON values and back."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cubatch import errors
from cubatch.errors import CubatchError, OutOfMemory, WorkerFailed, is_out_of_memory
from cubatch.units import message_of, visible

_PR_SET_PDEATHSIG = 1  # prctl(2)


def set_up_worker() -> None:
    """
    Set up this process as a worker.

    Output of libraries goes to standard error, and a crash prints its stack.  The process ends after its parent, also
    while it is suspended.  The kernel kills it first if memory runs out.
    """
    os.dup2(2, 1)
    faulthandler.enable()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def describe_error(error: BaseException) -> dict[str, Any]:
    """
    Return an error as JSON values, from which `rebuild_error` makes it again.

    The keys are "type" (the class), "args" (None unless it is a CubatchError), "text" (the message), "out_of_memory"
    (whether memory ran out) and "traceback".
    """
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


def rebuild_error(facts: Mapping[str, Any], doing: str, remedy: str) -> CubatchError:
    """
    Return the error that a worker reported: a CubatchError as itself, another one as OutOfMemory or WorkerFailed.

    `facts` are from `describe_error`, `doing` names the request, such as "batch size 8", and `remedy` ends a
    WorkerFailed.
    """
    error = _make_error(facts["type"], facts["args"])
    if error is None and facts["out_of_memory"]:
        error = OutOfMemory(f"{doing}: {facts['type']}: {facts['text']}")
    elif error is None:
        error = WorkerFailed(f"{doing} raised {facts['type']}: {facts['text']}", remedy)
    error.add_note(f"In the measuring process:\n{visible(facts['traceback'])}")
    return error


def _make_error(name: str, args: list[Any] | None) -> CubatchError | None:
    """Return a CubatchError of a class name and arguments; None if there is no such class or it does not take them."""
    kind = getattr(errors, name, None)
    if args is None or not (isinstance(kind, type) and issubclass(kind, CubatchError)):
        return None
    try:
        error = kind(*args)
        str(error)  # reads its arguments
    except Exception:  # noqa: BLE001 - not the arguments of such an error
        return None
    return error
