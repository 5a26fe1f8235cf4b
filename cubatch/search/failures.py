"""What a failure says of a size, and how a runner is made fit for the next one."""

from __future__ import annotations

import logging
import traceback
from typing import Any, Self

import attrs

from cubatch.errors import CubatchError, OutOfMemory, OverLimit, TimedOut, is_out_of_memory
from cubatch.measure.runner import HasWorker, Runner

_log = logging.getLogger(__name__)


@attrs.frozen
class Failure:
    """
    What a candidate raised, as it is kept.

    Attributes:
        status: Of a size that never ran: "out_of_memory", "over_limit", "timeout" or "error".
        reason: In words.
        facts: For programs.
    """

    status: str
    reason: str
    facts: dict[str, Any]

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Read an exception, by its type."""
        name = type(error).__name__
        text = str(error).encode(errors="backslashreplace").decode()  # so that a store can hold it
        facts: dict[str, Any] = {"type": name, "message": text}
        if isinstance(error, OutOfMemory):
            sizes = {"needed_bytes": error.needed_bytes, "available_bytes": error.available_bytes}
            facts |= {key: value for key, value in sizes.items() if isinstance(value, int)}
        reason = text if isinstance(error, CubatchError) else f"{name}: {text}"
        if isinstance(error, OverLimit):
            return cls("over_limit", reason, {"limit": "memory", **facts})
        if is_out_of_memory(error):
            return cls("out_of_memory", reason, facts)
        return cls("timeout" if isinstance(error, TimedOut) else "error", reason, facts)


def clear(runner: Runner, error: Exception, *, anew: bool) -> None:
    """
    Make a runner fit for what comes next: memory is given back, and a process that may be broken is ended.

    A fault on a GPU leaves a context that fails at everything after it; running out of memory does not.

    Args:
        runner: Which failed.
        error: What it raised.
        anew: Whether the same size is tried again, which is to have a new process.
    """
    raised: BaseException | None = error
    while raised is not None:
        traceback.clear_frames(raised.__traceback__)  # which hold what the step had made, on the device
        raised = raised.__cause__ or raised.__context__
    try:
        if isinstance(runner, HasWorker) and (anew or not is_out_of_memory(error)):
            runner.restart()
        else:
            runner.release()
    except Exception as second:  # noqa: BLE001 - the next prepare will tell whether the runner still works
        _log.warning("clearing up after %s failed: %s", error, second)
