"""
The source of "package.module:build" and its dependencies, without running any of it.

Cached timings apply only while the source is the same. The source is the file with the function, the user's own files
that it imports, directly or not, and the versions of installed packages. Imports are read from the source: dynamic
imports and data files are not seen.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import attrs

from cubatch import user_code
from cubatch.errors import InvalidArgument

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_ALLOWED = "a torch.nn.Module, or the name of a function that makes one: 'package.module:build'"

_IMPORTED = (
    "in a module that can be imported",
    "Its folder must be on sys.path (PYTHONPATH); functions of a script must move to a file that can be imported.",
)


@attrs.frozen(kw_only=True)
class ModuleSource:
    """The name of a function, its source files, and the versions or digests by name of packages that these import."""

    name: str  # "package.module:build"
    files: tuple[Path, ...]  # its file, and the user's own files that are imported from there
    # installed packages that these import, each with its version, or the digest of its first file
    packages: dict[str, str]

    @classmethod
    def of(cls, name: str, field: str = "module") -> Self:
        """
        Return the source of a function by its name, without importing the function.

        `field` is the argument that errors name.

        Raises:
            InvalidArgument: If the name is not "package.module:function", or there is no such module.
        """
        name = dotted(name)
        if not _FORM.fullmatch(name):
            raise InvalidArgument(field, name, _ALLOWED)
        module = name.partition(":")[0]
        located = None if module == "__main__" else _located(module)
        if located is None:
            raise InvalidArgument(field, name, *_IMPORTED)
        files, installed = _followed(located)
        return cls(
            name=name, files=tuple(files), packages={name: state for name in installed if (state := _state(name))}
        )

    def conditions(self) -> dict[str, Any]:
        """
        Return the values by name that must be equal for cached timings to apply.

        These are the versions of the packages by name and of "torch", and a hash of the source files, "source_sha256".
        """
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return {**self.packages, "torch": _version("torch"), "source_sha256": digest.hexdigest()}


@attrs.frozen
class _Module:
    """A module or package, with its file (None for a namespace package) and the folders of its submodules."""

    name: str
    path: Path | None
    folders: tuple[Path, ...]

    @property
    def source(self) -> Path:
        """Path of its file; an empty path for a namespace package."""
        return self.path or Path()


def load(name: str, field: str = "module") -> Any:
    """Import and return the function "package.module:function"; `field` is the argument that errors name."""
    if not callable(made := load_any(name, field)):
        raise InvalidArgument(field, name, f"the name of a function; it is a {type(made).__name__}")
    return made


def make(name: str) -> Any:
    """Return the result of the function or class "package.module:name", or the module of that name itself."""
    made = load(name)
    return made if hasattr(made, "forward") and not isinstance(made, type) else made()


def load_any(name: str, field: str) -> Any:
    """Import and return the value "package.module:name", callable or not; errors as for `load`."""
    name = dotted(name)
    if not _FORM.fullmatch(name):
        raise InvalidArgument(field, name, "'package.module:function'")
    module, _, attribute = name.partition(":")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and imports what is not
        raise InvalidArgument(field, name, *_IMPORTED) from error
    return user_code.part_of(imported, attribute, field, "a function")


def dotted(name: str) -> str:
    """
    Return "path/file.py:name" as "path.file:name", where "path.file" is the module; other names unchanged.

    Example:
        >>> dotted("models/small.py:build"), dotted("models.small:build")
        ('models.small:build', 'models.small:build')
    """
    module, colon, attribute = name.partition(":")
    return f"{module[:-3].replace('/', '.').lstrip('.')}:{attribute}" if module.endswith(".py") and colon else name


def _followed(first: _Module) -> tuple[list[Path], list[str]]:
    """Return a module's file and the user's files that it imports, directly or not, and names of installed packages."""
    waiting, files, installed = [first], {first.source}, set()
    while waiting:
        module = waiting.pop()
        if user_code.is_installed(module.source):
            installed.add(module.name.partition(".")[0])
            continue
        for name in _imports(module):
            imported = _located(name)
            if imported is None or imported.source in files:
                continue
            if user_code.is_installed(imported.source):
                installed.add(name.partition(".")[0])
            else:
                files.add(imported.source)
                waiting.append(imported)
    return sorted(files), sorted(installed - set(sys.stdlib_module_names))


def _imports(module: _Module) -> Iterator[str]:
    """Yield the names that a module's source imports, parent packages included; some may be no modules."""
    parts = module.name.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts)))
    try:
        tree = ast.parse(module.source.read_bytes())
    except (SyntaxError, ValueError, OSError):  # importing it raises the same error
        return
    package = parts if module.folders else parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_packages(alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from _with_packages(base)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _with_packages(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _located(name: str) -> _Module | None:
    """Return a module's file and folders without importing its parent packages; None if there is no source file."""
    top, *below = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    path = Path(spec.origin).resolve() if spec.origin is not None and spec.origin.endswith(".py") else None
    located = _Module(top, path, tuple(Path(folder).resolve() for folder in spec.submodule_search_locations or ()))
    for part in below:
        places = [folder / part for folder in located.folders]
        package = next((place for place in places if (place / "__init__.py").is_file()), None)
        module = next(
            (place.with_name(f"{part}.py") for place in places if place.with_name(f"{part}.py").is_file()), None
        )
        folders = [package] if package is not None else [place for place in places if place.is_dir()]
        path = module if package is None else package / "__init__.py"
        located = _Module(f"{located.name}.{part}", path, tuple(folders) if path is None or package is not None else ())
    return located if located.path is not None else None


def _state(package: str) -> str | None:
    """
    Return the version of an installed package, or the SHA-256 of its first file if no distribution has it.

    It is None if there is neither.
    """
    located = None if (version := _version(package)) else _located(package)
    return version if located is None else hashlib.sha256(located.source.read_bytes()).hexdigest()


def _version(package: str) -> str | None:
    """
    Return the version of the distribution that has a package, as Pillow's for PIL; None if none has it.

    If several distributions share the package, their versions are joined by commas.
    """
    try:
        known = filter(None, _distributions().get(package, ()))  # one that is half removed has no name
        names = sorted(set(known)) or [package]
        return ", ".join(metadata.version(name) for name in names)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the names of the distributions of each importable package; the result is cached."""
    return metadata.packages_distributions()
