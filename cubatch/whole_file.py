"""Atomic writing of files: to a partial file in the same folder, which is then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """
    Yield an empty file to write to, and rename it to `path` when its content is complete and on the disk.

    A killed process or a power cut leaves the earlier file or the new one. A killed process also leaves its partial
    file, NAME.*.partial, which the next writer of the same file removes. Several processes may write the same file. Its
    folder must exist.
    """
    _remove_abandoned(path)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    with partial.open("xb") as file:
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield partial
            os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise


def _remove_abandoned(path: Path) -> None:
    """Remove partial files that no process has locked: their writers were killed."""
    for partial in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 16}.partial"):
        with contextlib.suppress(OSError), partial.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if partial.stat().st_size:  # an empty one may be about to be locked
                partial.unlink()


def write(path: Path, content: bytes) -> None:
    """Write a file atomically; see `replacing`."""
    with replacing(path) as partial:
        partial.write_bytes(content)
