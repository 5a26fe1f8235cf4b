"""One measurement at a time: threads of a process take turns, processes on one device are at least seen."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import warnings
from collections.abc import Callable, Iterator

_TURN = threading.RLock()  # the same thread may tune within what it tunes
_PLACES = 16
_seen: set[str] = set()  # devices that this process is seen on


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


@contextlib.contextmanager
def seen_on(device: str) -> Iterator[Callable[[], bool]]:
    """
    Be seen to measure on a device while the block runs, and see the other processes of this machine that do.

    Each takes a place among abstract sockets: names without files, which the kernel gives back with the process.
    Where there are none, nobody is seen.

    Args:
        device: Its UUID, or "cpu".

    Yields:
        A function that says whether another process was there when the block began, or is there now.

    Example:
        >>> with seen_on("a device of the example's") as others:
        ...     others()
        False
    """
    if device in _seen:  # a run within a run
        yield lambda: False
        return
    with contextlib.ExitStack() as place:
        own = next((n for n in range(_PLACES) if _is_free(device, n, place)), _PLACES)
        _seen.add(device)
        place.callback(_seen.discard, device)
        met = any(_is_taken(device, n) for n in range(_PLACES) if n != own)
        yield lambda: met or any(_is_taken(device, n) for n in range(_PLACES) if n != own)


def _is_free(device: str, number: int, place: contextlib.ExitStack) -> bool:
    """Take a place, if nobody has it."""
    try:
        mine = place.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        mine.bind(f"\0cubatch/{device}/{number}")
    except OSError:
        return False
    return True


def _is_taken(device: str, number: int) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.bind(f"\0cubatch/{device}/{number}")
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
