"""
Allow one measurement at a time in a process; detect measurements of other processes on the same device.

Threads of a process wait for each other. Processes do not, since the wait has no bound; both results have a note.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cubatch import sqlite_file
from cubatch.hardware import cpu_load
from cubatch.hardware.facts import Device
from cubatch.tuning.notes import interference, note, sentence

_LOCK = threading.RLock()  # a step may itself tune, in the same thread
_depth = 0

_OTHER_RUN = sentence(note("another_run"))
_TRIES, _TRY_SECONDS = 100, 0.01  # while another process tries for its exclusive lock


@contextlib.contextmanager
def exclusive(device: Device, worker_pid: int | None = None) -> Iterator[list[str]]:
    """
    Measure exclusively in this process while the block runs; other threads wait.

    The device is marked for other processes of this user, which do not wait. Earlier CPU time of the worker
    `worker_pid` does not count as interference; None: it is this process.

    Yields:
        list[str]: Messages about interference, complete at the end of the block: another cubatch process on the device
        at its start or end, and CPU time of other processes. Empty in a block within another of the same thread.

    Warns:
        UserWarning: If this thread must wait for another, or another process measures on the device.
    """
    global _depth  # noqa: PLW0603 - only the thread that holds the lock reads and writes it
    if not _LOCK.acquire(blocking=False):
        warnings.warn("another thread is measuring: this one waits until it is done", stacklevel=2)
        _LOCK.acquire()
    _depth += 1
    try:
        if _depth > 1:
            yield []
        else:
            before, messages = cpu_load.snapshot(worker_pid), list[str]()
            try:
                with _marked(device, messages):
                    if messages:
                        warnings.warn(_OTHER_RUN, stacklevel=3)
                    yield messages
            finally:
                taken = cpu_load.between(before, cpu_load.snapshot(worker_pid))
                busy = None if taken is None else interference(taken, device.threads or 1)
                messages.extend([] if busy is None else [sentence(busy)])
    finally:
        _depth -= 1
        _LOCK.release()


def folder() -> Path:
    """Return the folder of the lock files, in the user's cache directory."""
    return sqlite_file.default_path().with_name("measuring")


@contextlib.contextmanager
def _marked(device: Device, messages: list[str]) -> Iterator[None]:
    """
    Mark a device as being measured on while the block runs.

    A message is appended to `messages` if another process has marked the device at the start or end of the block.
    """
    with contextlib.ExitStack() as stack:
        mark: BinaryIO | None = None
        with contextlib.suppress(OSError, RuntimeError):  # no writable cache directory: measure without a mark
            place = folder().expanduser()
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            mark = stack.enter_context((place / re.sub(r"[^\w-]", "_", device.uuid or device.kind)).open("ab"))
        is_alone = mark is None or _is_only(mark)
        if not is_alone:
            messages.append(_OTHER_RUN)
        try:
            yield
        finally:
            if mark is not None and is_alone and not _is_only(mark):
                messages.append(_OTHER_RUN)


def _is_only(mark: BinaryIO) -> bool:
    """
    Mark the device, and return whether no other process has marked it.

    Measuring processes share a file lock, which the kernel drops at their end. This function tries for a moment to
    hold it exclusively.
    """
    for _ in range(_TRIES):
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(mark, fcntl.LOCK_SH)
        except BlockingIOError:
            with contextlib.suppress(BlockingIOError):  # another process tries for its exclusive lock
                fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        except OSError:  # a file system without locks
            return True
        else:
            return True
        time.sleep(_TRY_SECONDS)
    return False
