"""Files that others wrote, opened and read within bounds: no pipe that never ends, nothing larger than it can be."""

from __future__ import annotations

import contextlib
import os
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

from cubatch.units import format_bytes

MOST_TEXT_BYTES = 16 * 2**20
MOST_UNPACKED_BYTES = 4 * 2**30
"""Of what a packed file holds."""
MOST_KEY_PARTS = 32
"""Of a dotted key in TOML: what it takes to read one grows with their square."""


def open_regular(path: str | Path) -> BinaryIO:
    """
    Open a file for reading bytes, and refuse what is no regular file: a pipe or a device may have no end.

    Raises:
        OSError: If it cannot be opened.
        ValueError: If it is no regular file, or the path holds a zero byte.
    """
    # Without O_NONBLOCK a pipe that nobody writes to would be waited for.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("it is no regular file")
    return file


def read_text(path: str | Path, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """
    Read a text file in UTF-8.

    Args:
        path: Where.
        most_bytes: A larger one is refused, unread.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no regular file, larger, or no UTF-8.
    """
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it is larger than {format_bytes(most_bytes)}")
    return content.decode()


def parsed_toml(text: str) -> dict[str, Any]:
    r"""
    Parse TOML.

    Raises:
        ValueError: If it is none, or a key has very many parts, which would take minutes and gigabytes.
        RecursionError: If it is nested very deeply.

    Example:
        >>> parsed_toml("[a.b]\nc = 1")
        {'a': {'b': {'c': 1}}}
    """
    headers = (line.lstrip(" \t[").partition("]")[0] for line in text.splitlines() if line.lstrip()[:1] == "[")
    keys = (piece[max(piece.rfind(mark) for mark in "\n{,") + 1 :] for piece in text.split("=")[:-1])
    for parts in (headers, keys):
        if any(part.count(".") >= MOST_KEY_PARTS and "," not in part for part in parts):
            raise ValueError(f"a key has more than {MOST_KEY_PARTS} parts")
    return tomllib.loads(text)


def reason(error: Exception) -> str:
    """
    Say in words why a file cannot be read, without its name, which stands beside it.

    Example:
        >>> reason(FileNotFoundError(2, "No such file or directory", "x.toml")), reason(ValueError("it is a pipe"))
        ('No such file or directory', 'it is a pipe')
    """
    if isinstance(error, UnicodeDecodeError):
        return "it is no UTF-8"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def is_file(path: str | Path) -> bool:
    """Whether a file is there; a path that no file can have, such as a very long one, leads to none."""
    with contextlib.suppress(OSError, ValueError):
        return Path(path).is_file()
    return False


def is_special(path: str | Path) -> bool:
    """Whether something is there that is no regular file, such as a pipe or a device, as `is_file`."""
    with contextlib.suppress(OSError, ValueError):
        return Path(path).exists() and not Path(path).is_file()
    return False


def is_folder(path: str | Path) -> bool:
    """Whether a folder is there, as `is_file`."""
    with contextlib.suppress(OSError, ValueError):
        return Path(path).is_dir()
    return False


def is_writable(path: str | Path) -> bool:
    """Whether this process may write a file: over what is there, or a new one into its folder."""
    if os.access(path, os.F_OK):
        return os.access(path, os.W_OK)
    return os.access(Path(path).parent, os.W_OK | os.X_OK)


def trouble(path: str | Path) -> str:
    """Say why no file can have that path, such as a very long one; nothing where one is or could be."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return reason(error)
    return ""
