"""Files that are written whole or not at all: next to their place first, then renamed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """
    Yield a path to write to, and rename the file to `path` when it is complete and on the disk.

    A killed process leaves the file as it was, and next to it its own that ends in ".partial".  Several processes
    may write the same file.

    Args:
        path: The file, in an existing folder.

    Raises:
        OSError: If the file cannot be renamed; an error of the block leaves the file as it was too.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = Path(folder.name, "answer.txt")
        >>> with replacing(path) as partial:
        ...     written = partial.write_text("32")
        >>> path.read_text(), [file.name for file in path.parent.iterdir()]
        ('32', ['answer.txt'])
        >>> folder.cleanup()
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write(path: Path, content: bytes) -> None:
    """
    Write a file whole or not at all; see `replacing`.

    Raises:
        OSError: If it cannot be written.
    """
    with replacing(path) as partial:
        partial.write_bytes(content)
