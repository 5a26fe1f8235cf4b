"""One measurement at a time in a process: threads that measure together would measure each other."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

_TURN = threading.RLock()  # the same thread may tune within what it tunes


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """
    Hold this process's turn to measure while the block runs, after waiting for threads that measure already.

    Warns:
        UserWarning: If it has to wait.

    Example:
        >>> with alone(), alone():
        ...     "measured"
        'measured'
    """
    if not _TURN.acquire(blocking=False):
        warnings.warn("another thread is measuring: this one waits until it is done", stacklevel=2)
        _TURN.acquire()
    try:
        yield
    finally:
        _TURN.release()
