"""Checks of paths that a user gave, and the reasons why a file cannot be used."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def reason(error: Exception) -> str:
    """
    Return why an operation on a file failed, as text without the file's name.

    Example:
        >>> reason(FileNotFoundError(2, "No such file or directory", "x.toml")), reason(ValueError("it is empty"))
        ('No such file or directory', 'it is empty')
    """
    if isinstance(error, UnicodeDecodeError):
        return "it is no UTF-8"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def is_file(path: str | Path) -> bool:
    """Return whether a regular file exists at the path; False also for an invalid path, such as a very long one."""
    with contextlib.suppress(OSError, ValueError):
        return Path(path).is_file()
    return False


def is_special(path: str | Path) -> bool:
    """Return whether the path exists and is no regular file, but a folder or a device."""
    with contextlib.suppress(OSError, ValueError):
        return Path(path).exists() and not Path(path).is_file()
    return False


def is_folder(path: str | Path) -> bool:
    """Return whether a folder exists at the path; False also for an invalid path."""
    with contextlib.suppress(OSError, ValueError):
        return Path(path).is_dir()
    return False


def is_writable(path: str | Path) -> bool:
    """Return whether this process may overwrite the file, or create it in its folder if it does not exist."""
    if os.access(path, os.F_OK):
        return os.access(path, os.W_OK)
    return os.access(Path(path).parent, os.W_OK | os.X_OK)


def trouble(path: str | Path) -> str:
    """Return why a path cannot be used, such as its length; empty text if its file exists or could be created."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return reason(error)
    return ""
