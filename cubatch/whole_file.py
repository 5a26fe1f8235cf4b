"""Files that are there whole or not at all: written beside their place, then put into it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, *, is_shared: bool = False) -> Iterator[Path]:
    """
    Let a file be written beside its place, and put it there once it lies on the disk as a whole.

    A process that is killed leaves the file as it was, and beside it at most one that ends in ".partial", which the
    next writing overwrites.

    Args:
        path: The file, in a folder that is there.
        is_shared: Of a cache: other processes may write the same file meanwhile, and whoever reads it notices damage.
            Then each writes beside it under a name of its own, which a kill leaves, and the disk is not waited for.

    Yields:
        The path to write to.

    Raises:
        OSError: If the file cannot be put in its place; whatever the block raises is raised on, and leaves the file as
            it was.

    Example:
        >>> import tempfile
        >>> place = tempfile.TemporaryDirectory()
        >>> path = Path(place.name, "answer.txt")
        >>> with replacing(path) as partial:
        ...     written = partial.write_text("32")
        >>> path.read_text(), [one.name for one in path.parent.iterdir()]
        ('32', ['answer.txt'])
        >>> place.cleanup()
    """
    own = f".{os.getpid()}-{threading.get_ident()}" if is_shared else ""
    partial = path.with_name(f"{path.name}{own}.partial")
    try:
        yield partial
        if not is_shared:
            _keep(partial)
        partial.replace(path)
        if not is_shared:
            _keep(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write(path: Path, content: bytes, *, is_shared: bool = False) -> None:
    """
    Write a file whole or not at all; see `replacing`.

    Raises:
        OSError: If it cannot be written.
    """
    with replacing(path, is_shared=is_shared) as partial:
        partial.write_bytes(content)


def _keep(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk and not only in the system's memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
