"""The layer types of spec files: their keys with defaults and meanings, and an example of each."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import attrs

from cubatch.errors import UnknownName
from cubatch.network.layer import Layer
from cubatch.network.layers import LAYERS

# Fields of every layer, and fields that a network infers: neither is described here.
_COMMON = ("name", "inputs", "h", "w", "c")
_INFERRED = {"add": {"count"}, "concat": {"channels"}, "opaque": {"others"}}
_SAMPLES: dict[str, int] = {"k": 64, "r": 3, "s": 3, "heads": 4, "end": 32}


@attrs.frozen
class Key:
    """A key of a layer type in a spec file: its name, default and meaning."""

    name: str  # name in a spec file
    default: str | None  # default as a spec file writes it; None for a required key
    meaning: str  # description in one line


@attrs.frozen
class Kind:
    """The name, purpose, keys and an example of a layer type, as needed to write it in a spec file."""

    type: str  # name in a spec file
    does: str  # description in one line
    keys: tuple[Key, ...]  # keys that not every layer has, the required ones first
    example: str  # a layer in a spec file, with the required keys


def kinds() -> tuple[Kind, ...]:
    """
    Return the description of every layer type.

    Example:
        >>> [kind.type for kind in kinds()][:2]
        ['conv2d', 'linear']
    """
    return tuple(kind(name) for name in LAYERS)


def kind(name: str) -> Kind:
    """Return the description of a layer type; raise UnknownName if there is none of that name."""
    if name not in LAYERS:
        raise UnknownName("layer type", name, LAYERS)
    record = LAYERS[name]
    text = inspect.getdoc(record) or ""  # none under python -OO
    meanings = _meanings(text)
    keys = [
        Key(
            field.name,
            None if field.default is attrs.NOTHING else _default(record, field.name),
            meanings.get(field.name, ""),
        )
        for field in attrs.fields(record)
        if field.name not in {*_COMMON, *_INFERRED.get(name, ())}
    ]
    keys.sort(key=lambda key: key.default is not None)
    lines = ["[[layers]]", f'type = "{name}"']
    lines += [f"{key.name} = {_SAMPLES[key.name]}" for key in keys if key.default is None]
    if record.arity[0] > 1:
        lines.append('inputs = ["layer1", "layer2"]')
    return Kind(name, text.partition("\n")[0], tuple(keys), "\n".join(lines))


def _meanings(text: str) -> dict[str, str]:
    """Return the text of each field in a docstring's "Attributes:"; "r, s: Height and width" describes two."""
    meanings: dict[str, str] = {}
    for line in text.partition("Attributes:\n")[2].splitlines():
        names, _, meaning = line.partition(": ")
        if not re.fullmatch(r"    [a-z_, ]+", names):
            break
        meanings |= dict.fromkeys(names.strip().split(", "), meaning)
    return meanings


def _default(record: type[Layer], key: str) -> str:
    field = attrs.fields_dict(record)[key]
    if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
        return "the window"
    value: Any = field.default
    if value is None:
        return "the input's"
    if isinstance(value, tuple):
        value = value[0] if len(set(value)) == 1 else list(value)
    return json.dumps(value)
