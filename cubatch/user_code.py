"""What a user names, "package.module:name": where it lies, what it is, and whose fault it is when it raises."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from cubatch.errors import CubatchError, InvalidArgument, near_names
from cubatch.units import shown


def part_of(module: ModuleType, path: str, field: str, what: str) -> Any:
    """
    Give what a module has by a name, which may have dots.

    Args:
        module: It.
        path: The name.
        field: Where the user has named it.
        what: What it must be: "a function".

    Raises:
        InvalidArgument: If there is no such name; it says which are near.
    """
    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            near = near_names(name, [other for other in dir(found) if not other.startswith("_")])
            remedy = f"Did you mean {' or '.join(map(shown, near))}?" if near else ""
            raise InvalidArgument(field, f"{module.__name__}:{path}", f"{what} of {file_of(module)}", remedy)
        found = getattr(found, name)
    return found


def current_folder() -> str | None:
    """Give the folder that this process is in; None if it is gone."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def beside(folder: str | None) -> Iterator[None]:
    """Have imports look in a folder too, in the last place: a file there hides nothing that is installed."""
    if folder is None or folder in sys.path or "" in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:  # the user's code may have put it there as well, or made the whole path anew
        if places := [place for place, found in enumerate(sys.path) if found == folder]:
            del sys.path[places[-1]]


@contextlib.contextmanager
def users(field: str, name: str, allowed: str) -> Iterator[None]:
    """
    Say of what the user's code raises by which field it was named; errors of ours say it themselves.

    Raises:
        InvalidArgument: With the class and the text of what was raised.
    """
    try:
        yield
    except CubatchError:
        raise
    except Exception as error:
        raise InvalidArgument(field, name, allowed, f"{type(error).__name__}: {error}") from error


def file_of(module: ModuleType) -> str:
    """Give the file that a module is in; the name of one that has none."""
    return getattr(module, "__file__", None) or module.__name__
