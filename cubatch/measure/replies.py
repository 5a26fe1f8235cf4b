"""A process that another one controls and that may be killed: its set-up, its runner, its errors as JSON values."""

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
from cubatch.measure.runner import HoldsReference, KnowsFree, Reading, Runner
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


class RunnerServer:
    """Serves requests of another process for the runner of this one; each request is a method of this class."""

    _runner: Runner

    def prepare(self, batch_size: int) -> float | None:
        """Prepare a batch size; return the seconds of its first step, None if none has run yet."""
        return self._runner.prepare(batch_size)

    def hold_reference(self, repeats: int) -> bool:
        """Keep the prepared step for `repeats` reference steps around each timing; return whether that is possible."""
        return isinstance(self._runner, HoldsReference) and self._runner.hold_reference(repeats)

    def time(self, repeats: int) -> Reading:
        """Return the timing of `repeats` steps of the prepared batch size."""
        try:
            return self._runner.clock.time(self._runner.step, repeats)
        except Exception as error:
            if (launch := self._launch()) and launch["graph"]:
                error.add_note(f"It happened in a step's graph of {launch['launches']} launches.")
            raise

    def facts(self) -> dict[str, Any]:
        """Return `peak_bytes`, `peak_device_bytes` and, if known, `launch` of the runner, by these names."""
        memory = {"peak_bytes": self._runner.peak_bytes, "peak_device_bytes": self._runner.peak_device_bytes}
        return {**memory, "launch": self._launch()}

    def free_bytes(self) -> int | None:
        """Return the free bytes of the runner's device; None if unknown."""
        clock = self._runner.clock
        return clock.free_bytes() if isinstance(clock, KnowsFree) else None

    def release(self) -> None:
        """Release the memory of the last `prepare`."""
        self._runner.release()

    def _launch(self) -> dict[str, Any] | None:
        launch: dict[str, Any] | None = getattr(self._runner, "launch", None)
        return launch


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
