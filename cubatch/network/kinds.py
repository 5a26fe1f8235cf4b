"""The kinds of layers as a spec file writes them: their keys, what these are without a word, and an example."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import attrs

from cubatch.errors import UnknownName
from cubatch.network.layer import Layer
from cubatch.network.layers import LAYERS

# What every kind has, is inferred in a network, and so is in no example.
_COMMON = ("name", "inputs", "h", "w", "c")
_INFERRED = {"add": {"count"}, "concat": {"channels"}, "opaque": {"others"}}
_SAMPLES: dict[str, int] = {"k": 64, "r": 3, "s": 3, "heads": 4, "end": 32}


@attrs.frozen
class Key:
    """
    One key of a kind of layer.

    Attributes:
        name: As a spec file has it.
        default: What it is where it is left out, as a spec file would write it; None where it must be given.
        meaning: One line.
    """

    name: str
    default: str | None
    meaning: str


@attrs.frozen
class Kind:
    """
    A kind of layer.

    Attributes:
        type: Its name in a spec file.
        does: One line.
        keys: Its own, those that must be given first; not those that every layer has.
        example: A layer of it as a spec file has it, with the keys that must be given.
    """

    type: str
    does: str
    keys: tuple[Key, ...]
    example: str


def kinds() -> tuple[Kind, ...]:
    """
    List the kinds of layers.

    Example:
        >>> [kind.type for kind in kinds()][:2]
        ['conv2d', 'linear']
    """
    return tuple(kind(name) for name in LAYERS)


def kind(name: str) -> Kind:
    """
    Describe one kind of layer.

    Raises:
        UnknownName: If there is none of that name.

    Example:
        >>> print(kind("linear").example)
        [[layers]]
        type = "linear"
        k = 64
    """
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
    """Read the "Attributes:" of a docstring; "r, s: Height and width" speaks of both."""
    found: dict[str, str] = {}
    for line in text.partition("Attributes:\n")[2].splitlines():
        names, _, meaning = line.partition(": ")
        if not re.fullmatch(r"    [a-z_, ]+", names):
            break
        found |= dict.fromkeys(names.strip().split(", "), meaning)
    return found


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
