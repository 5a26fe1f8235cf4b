"""
"package.module:build": where its source is, and what it depends on, found out without running any of it.

A kept result is only as good as what it was measured with is the same.  That is the file with the function, and
whatever files of the user's own it imports, directly or through each other; what is installed counts by its version.
Imports are read off the source: those that are made by name while it runs, and data files, are not seen.
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
    "Its folder must be on sys.path (PYTHONPATH); a script's own functions must be in a file of theirs.",
)


@attrs.frozen(kw_only=True)
class ModuleSource:
    """
    A function by name, and what it depends on.

    Attributes:
        name: "package.module:build".
        files: The file that it is in, and the user's own files that are imported from there.
        packages: Installed packages that are imported from there, with their versions, or what their first file holds.
    """

    name: str
    files: tuple[Path, ...]
    packages: dict[str, str]

    @classmethod
    def of(cls, name: str, field: str = "module") -> Self:
        """
        Find it.

        Raises:
            InvalidArgument: If it is no such name, or there is no such module.
        """
        if not _FORM.fullmatch(name):
            raise InvalidArgument(field, name, _ALLOWED)
        module = name.partition(":")[0]
        found = None if module == "__main__" else _located(module)
        if found is None:
            raise InvalidArgument(field, name, *_IMPORTED)
        files, installed = _followed(found)
        return cls(
            name=name, files=tuple(files), packages={name: state for name in installed if (state := _state(name))}
        )

    def conditions(self) -> dict[str, Any]:
        """Say what must be the same for what was measured with it to apply."""
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return {**self.packages, "torch": _version("torch"), "source_sha256": digest.hexdigest()}


@attrs.frozen
class _Module:
    """A module or package: its file, None of a package without one, and the folders that a package's parts are in."""

    name: str
    path: Path | None
    folders: tuple[Path, ...]

    @property
    def source(self) -> Path:
        """Its file, where it is known to have one."""
        return self.path or Path()


def load(name: str, field: str = "module") -> Any:
    """
    Import what "package.module:function" names.

    Raises:
        InvalidArgument: Naming the field, if there is no such module, or it has no such function; it says which
            names are near.
    """
    if not _FORM.fullmatch(name):
        raise InvalidArgument(field, name, "'package.module:function'")
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and imports what is not
        raise InvalidArgument(field, name, *_IMPORTED) from error
    if not callable(made := user_code.part_of(found, attribute, field, "a function")):
        raise InvalidArgument(field, name, f"a function of {user_code.file_of(found)}")
    return made


def _followed(first: _Module) -> tuple[list[Path], list[str]]:
    """Follow imports from a module: the user's own files, and the names of installed packages."""
    waiting, files, installed = [first], {first.source}, set()
    while waiting:
        module = waiting.pop()
        if user_code.is_installed(module.source):
            installed.add(module.name.partition(".")[0])
            continue
        for name in _imports(module):
            found = _located(name)
            if found is None or found.source in files:
                continue
            if user_code.is_installed(found.source):
                installed.add(name.partition(".")[0])
            else:
                files.add(found.source)
                waiting.append(found)
    return sorted(files), sorted(installed - set(sys.stdlib_module_names))


def _imports(module: _Module) -> Iterator[str]:
    """Name all that a source imports, its own packages included; a name taken from a module may be one too."""
    parts = module.name.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts)))
    try:
        tree = ast.parse(module.source.read_bytes())
    except (SyntaxError, ValueError, OSError):  # whoever imports it will say so
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
    """Find a module whose source is there, without importing the packages that it is in."""
    top, *below = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    path = Path(spec.origin).resolve() if spec.origin is not None and spec.origin.endswith(".py") else None
    found = _Module(top, path, tuple(Path(folder).resolve() for folder in spec.submodule_search_locations or ()))
    for part in below:
        places = [folder / part for folder in found.folders]
        package = next((place for place in places if (place / "__init__.py").is_file()), None)
        module = next(
            (place.with_name(f"{part}.py") for place in places if place.with_name(f"{part}.py").is_file()), None
        )
        folders = [package] if package is not None else [place for place in places if place.is_dir()]
        path = module if package is None else package / "__init__.py"
        found = _Module(f"{found.name}.{part}", path, tuple(folders) if path is None or package is not None else ())
    return found if found.path is not None else None


def _state(package: str) -> str | None:
    """Give an installed package's version, or the digest of its first file where no distribution has it."""
    found = None if (version := _version(package)) else _located(package)
    return version if found is None else hashlib.sha256(found.source.read_bytes()).hexdigest()


def _version(package: str) -> str | None:
    """Give the version of the distribution that a package is imported from: PIL is Pillow's."""
    try:
        known = filter(None, _distributions().get(package, ()))  # one that is half removed has no name
        names = sorted(set(known)) or [package]
        return ", ".join(metadata.version(name) for name in names)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Name the distributions of each package that can be imported; read once, as a process imports one version."""
    return metadata.packages_distributions()
