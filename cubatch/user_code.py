"""What a user names, "package.module:name": where it lies, what it is, and whose fault it is when it raises."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from cubatch.errors import CubatchError, InvalidArgument, OutOfMemory, is_out_of_memory, near_names
from cubatch.units import shown

_PACKAGES = {"site-packages", "dist-packages"}  # folders, the latter Debian's


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
        InvalidArgument: With the class and the text of what was raised, and where.
        OutOfMemory: If it is a want of memory, which is no fault of the code's.
    """
    try:
        yield
    except CubatchError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if is_out_of_memory(error):
            raise OutOfMemory(f"{name}: {text}") from error
        raise InvalidArgument(field, name, allowed, f"It raised {text}{_place(error)}") from error


def _place(error: Exception) -> str:
    """Name the innermost line of the user's own code; nothing where none was reached, as without its module."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if (path := Path(frame.filename)).is_file() and not is_installed(path)]
    return f", at {own[-1].filename}:{own[-1].lineno}." if own else ""


def is_installed(path: Path) -> bool:
    """Say whether a file is Python's, of an installed package or of this one, and so not the user's own."""
    places = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")]
    found = path.resolve()
    if not _PACKAGES.isdisjoint(found.parts):  # also a user's, the system's beside an environment, or on PYTHONPATH
        return True
    return any(found.is_relative_to(Path(place).resolve()) for place in (*places, str(Path(__file__).parent)))


def file_of(module: ModuleType) -> str:
    """Give the file that a module is in; the name of one that has none."""
    return getattr(module, "__file__", None) or module.__name__
