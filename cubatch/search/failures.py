"""Record why a batch size failed, and release the runner for the next one."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from cubatch.errors import CubatchError, OutOfMemory, OverLimit, TimedOut, is_out_of_memory
from cubatch.measure.records import Outcome
from cubatch.measure.runner import HasWorker, Runner

_log = logging.getLogger(__name__)


def describe_failure(n: int, error: Exception) -> Outcome:
    """Return the outcome of a size that raised: "out_of_memory", "over_limit", "timeout" or "error", with a reason."""
    name = type(error).__name__
    text = str(error).encode(errors="backslashreplace").decode()  # SQLite rejects lone surrogates
    facts: dict[str, Any] = {"type": name, "message": text}
    if isinstance(error, OutOfMemory):
        sizes = {"needed_bytes": error.needed_bytes, "available_bytes": error.available_bytes}
        facts |= {key: value for key, value in sizes.items() if isinstance(value, int)}
    reason = text if isinstance(error, CubatchError) else f"{name}: {text}"
    if isinstance(error, OverLimit):
        return Outcome(n, "over_limit", reason, {"limit": "memory", **facts})
    if is_out_of_memory(error):
        return Outcome(n, "out_of_memory", reason, facts)
    return Outcome(n, "timeout" if isinstance(error, TimedOut) else "error", reason, facts)


def release_runner(runner: Runner, error: Exception, *, restart: bool) -> None:
    """
    Free the memory of a failed runner, and restart a worker process that may be broken.

    After a fault on a GPU every later call in its context fails; running out of memory leaves the context usable.

    Args:
        runner: The runner that failed.
        error: The exception that it raised.
        restart: Whether the same size is tried again, in a new process.
    """
    raised: BaseException | None = error
    while raised is not None:
        traceback.clear_frames(raised.__traceback__)  # they hold device arrays of the step
        raised = raised.__cause__ or raised.__context__
    try:
        if isinstance(runner, HasWorker) and (restart or not is_out_of_memory(error)):
            runner.restart()
        else:
            runner.release()
    except Exception as second:  # noqa: BLE001 - the next prepare shows whether the runner still works
        _log.warning("clearing up after %s failed: %s", error, second)
