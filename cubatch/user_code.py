"""Functions of a user: which arguments they take, finding them by name, and attributing the errors that they raise."""

from __future__ import annotations

import contextlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from cubatch.errors import CubatchError, InvalidArgument, OutOfMemory, is_out_of_memory, near_names
from cubatch.units import shown

_PACKAGES = {"site-packages", "dist-packages"}  # folders, the latter Debian's


def part_of(module: ModuleType, path: str, field: str, what: str) -> Any:
    """
    Return an attribute of a module; raise InvalidArgument if it does not exist.

    Args:
        path: The name of the attribute, which may have dots.
        field: The argument in which the user named it.
        what: The kind of object that is required, for the error: "a function".
    """
    part: Any = module
    for name in path.split("."):
        if not hasattr(part, name):
            near = near_names(name, [other for other in dir(part) if not other.startswith("_")])
            remedy = f"Did you mean {' or '.join(map(shown, near))}?" if near else ""
            raise InvalidArgument(field, f"{module.__name__}:{path}", f"{what} of {file_of(module)}", remedy)
        part = getattr(part, name)
    return part


def current_folder() -> str | None:
    """Return the working directory; None if it was deleted."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def beside(folder: str | None) -> Iterator[None]:
    """Add a folder (None: none) to the end of `sys.path` in the block, so that it hides no installed module."""
    if folder is None or folder in sys.path or "" in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:  # the user's code may have added it too, or replaced the list
        if places := [place for place, entry in enumerate(sys.path) if entry == folder]:
            del sys.path[places[-1]]


@contextlib.contextmanager
def users(field: str, name: str, allowed: str) -> Iterator[None]:
    """
    Raise exceptions of user code in the block as InvalidArgument or OutOfMemory; errors of cubatch pass unchanged.

    `sys.exit` counts as an exception. In the block `sys.argv` has no arguments. A training script that parses its
    command line when it is imported then gets its defaults, not the arguments of this process.

    Args:
        field: The argument in which the user named the code.
        name: The code as the user named it: "package.module:name".
        allowed: The accepted code, as a phrase for the error: "a function".
    """
    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    except CubatchError:
        raise
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
        if is_out_of_memory(error):
            raise OutOfMemory(f"{name}: {text}") from error
        moves = " Move what a script runs under `if __name__ == '__main__':`." if isinstance(error, SystemExit) else ""
        raise InvalidArgument(field, name, allowed, f"It raised {text}{_place(error)}{moves}") from error
    finally:
        sys.argv = arguments


def _place(error: BaseException) -> str:
    """Return ", at FILE:LINE." of the innermost user code in the traceback; empty text without one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if (path := Path(frame.filename)).is_file() and not is_installed(path)]
    return f", at {own[-1].filename}:{own[-1].lineno}." if own else ""


def is_installed(path: Path) -> bool:
    """Return whether a file belongs to Python, an installed package or cubatch, not to the user."""
    places = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")]
    file = path.resolve()
    if not _PACKAGES.isdisjoint(file.parts):  # also of a user, of the system outside an environment, or on PYTHONPATH
        return True
    return any(file.is_relative_to(Path(place).resolve()) for place in (*places, str(Path(__file__).parent)))


def file_of(module: ModuleType) -> str:
    """Return the file of a module, or its name if it has none."""
    return getattr(module, "__file__", None) or module.__name__


def takes(function: Any, count: int, keywords: Iterable[Any] = (), *, follow_wrapped: bool = True) -> bool:
    """
    Return whether a function or module can be called with `count` positional arguments and `keywords`.

    It is True where that is unknown. `follow_wrapped` is whether a decorated function (`functools.wraps`) takes the
    arguments of the original.

    Example:
        >>> takes(lambda x, y=0: x, 2), takes(lambda x: x, 2)
        (True, False)
    """
    try:
        called = function.forward if is_torch_module(function) else function
        inspect.signature(called, follow_wrapped=follow_wrapped).bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError:
        return False
    except ValueError:  # a built-in function without a signature
        return True
    return True


def is_torch_module(value: object) -> bool:
    """Return whether a value is a PyTorch module; nothing is if PyTorch has not been imported."""
    nn = sys.modules.get("torch.nn")
    return nn is not None and isinstance(value, nn.Module)
