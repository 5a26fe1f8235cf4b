"""Tables of `cubatch layers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.report.grid import Grid


def layers(kinds: Sequence[Mapping[str, Any]]) -> Grid:
    """Return the table of the types of layers, with their keys and defaults."""
    rows = [
        [
            kind["type"],
            "yes" if kind["runs"] else "predicted only",
            ", ".join(key["name"] if key["default"] is None else f"{key['name']}={key['default']}"
                      for key in kind["keys"]) or None,
        ]
        for kind in kinds
    ]  # fmt: skip
    notes = [
        "A key without a default is required. Any layer may also have a name, and inputs: names of layers.",
        "h, w and c are inferred in a network, and required for a single layer.",
        "The meaning of each key, and an example: cubatch layers conv2d",
    ]
    return Grid(
        title="Types of layers in a spec file", columns=["type", "can be measured", "keys"], rows=rows, notes=notes
    )


def layer(kind: Mapping[str, Any]) -> list[Grid]:
    """Return the tables of one type: its keys, and an example."""
    rows = [[key["name"], "required" if key["default"] is None else key["default"], key["meaning"]]
            for key in kind["keys"]]  # fmt: skip
    keys = Grid(
        title=f"{kind['type']}: {kind['does']}",
        columns=["key", "default", "meaning"] if rows else [],
        rows=rows,
        notes=[] if rows else ["It has no keys of its own."],
    )
    return [keys, Grid(title="In a spec file:", beneath=kind["example"].split("\n"))]
