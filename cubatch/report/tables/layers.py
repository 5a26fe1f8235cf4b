"""Tables of `cubatch layers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.report.grid import Grid


def layers(kinds: Sequence[Mapping[str, Any]]) -> Grid:
    """Return the table of layer types, their keys and defaults, from the "layers" of `cubatch layers --json`."""
    columns = {
        "type": lambda kind: kind["type"],
        "can be measured": lambda kind: "yes" if kind["runs"] else "predicted only",
        "keys": lambda kind: ", ".join(
            key["name"] if key["default"] is None else f"{key['name']}={key['default']}" for key in kind["keys"]
        ) or None,
    }  # fmt: skip
    notes = [
        "A key without a default is required. Any layer may also have a name, and inputs: names of layers.",
        "h, w and c are inferred in a network, and required for a single layer.",
        "The meaning of each key, and an example: cubatch layers conv2d",
    ]
    return Grid.of(kinds, columns, title="Types of layers in a spec file", notes=notes)


def layer(kind: Mapping[str, Any]) -> list[Grid]:
    """Return the tables of one entry of these "layers": the keys of the type of layer, and an example."""
    columns = {
        "key": lambda key: key["name"],
        "default": lambda key: "required" if key["default"] is None else key["default"],
        "meaning": lambda key: key["meaning"],
    }
    title, keys = f"{kind['type']}: {kind['does']}", kind["keys"]
    described = Grid.of(keys, columns, title=title) if keys else Grid(title=title, notes=["It has no keys of its own."])
    return [described, Grid(title="In a spec file:", beneath=kind["example"].split("\n"))]
