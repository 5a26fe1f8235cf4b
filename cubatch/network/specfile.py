"""Spec files and mappings: read, checked, and made into layers and networks."""

from __future__ import annotations

import functools
import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cubatch import files
from cubatch.errors import InvalidSpec, UnknownName
from cubatch.network.extents import printable
from cubatch.network.graph import Network, Spec, layer_of


def from_mapping(mapping: Mapping[str, Any], *, name: str | None = None) -> Spec:
    """
    Return the layer or network that a mapping in the form of a spec file describes.

    Args:
        mapping: A network with "layers", a single layer with "type".
        name: Default name of the network; None: "network".

    Raises:
        InvalidSpec: If a value is missing or invalid.
        UnknownName: If it has an unknown layer type, key or input.
    """
    if not isinstance(mapping, Mapping):
        raise InvalidSpec("spec", mapping, 'a mapping with "layers" and "input_shape", or with "type"')
    if "layers" not in mapping and "type" in mapping:
        return layer_of(mapping, "spec")
    for key in mapping:
        if key not in {"name", "input_shape", "layers"}:
            raise UnknownName("key in spec", key, ("name", "input_shape", "layers"))
    for key in ("input_shape", "layers"):
        if key not in mapping:
            raise InvalidSpec(key, None, "given")
    title = mapping.get("name")
    if not isinstance(title, str | None):
        raise InvalidSpec("name", title, "text")
    title = title or name or "network"
    return Network(input_shape=mapping["input_shape"], layers=mapping["layers"], name=title)


def load_spec(path: str | Path) -> Spec:
    r"""
    Return the layer or network that a .toml or .json file describes.

    Args:
        path: The file; docs/reference/files.md describes its form.

    Returns:
        Layer or Network: The default name of a network is that of the file.

    Raises:
        InvalidSpec: If the file is missing, is no TOML or JSON, or has an invalid value.
        UnknownName: If it has an unknown layer type, key or input.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     place = Path(folder) / "fc.toml"
        ...     _ = place.write_text('type = "linear"\nc = 1000\nk = 100\n')
        ...     load_spec(place).parameters
        100100
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidSpec("spec file", path, "a str or os.PathLike that names a .toml or .json file")
    path = Path(path)
    parsed_json = functools.partial(json.loads, object_pairs_hook=_distinct)
    readers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": parsed_json}
    if path.suffix.lower() not in readers:
        raise InvalidSpec("spec file", str(path), "a .toml or .json file")
    if files.is_special(path):  # a pipe would block
        raise InvalidSpec("spec file", str(path), "a text file that can be read (it is no regular file)")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        allowed = f"a text file that can be read ({files.reason(error)})"
        raise InvalidSpec("spec file", str(path), allowed) from None
    try:
        mapping = readers[path.suffix.lower()](text)
    except (ValueError, RecursionError) as error:  # both decoders raise children of ValueError
        allowed = f"valid {path.suffix[1:].upper()} ({error})"
        raise InvalidSpec("spec file", str(path), allowed) from None
    # Bytes of a file's name that are not UTF-8 become U+FFFD, since the name is printed and stored.
    return from_mapping(mapping, name=printable(os.fsencode(path.stem).decode(errors="replace")))


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return (key, value) pairs of a JSON object as a dict; raise ValueError for a duplicate key."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"an object has a key twice; its keys are {', '.join(key for key, _ in pairs)}")
    return values
