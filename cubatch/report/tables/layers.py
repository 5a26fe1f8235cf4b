"""What `cubatch layers` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.report.grid import Grid


def layers(found: Sequence[Mapping[str, Any]]) -> Grid:
    """Lay out the kinds of layers with their keys and what these are by default."""
    rows = [
        [
            kind["type"],
            "yes" if kind["runs"] else "predicted only",
            ", ".join(key["name"] if key["default"] is None else f"{key['name']}={key['default']}"
                      for key in kind["keys"]) or None,
        ]
        for kind in found
    ]  # fmt: skip
    notes = [
        "A key without a default must be given. Each layer may also have a name, and inputs: names of what it reads.",
        "h, w and c are inferred in a network and given for a single layer.",
        "What a key means, with an example: cubatch layers conv2d",
    ]
    return Grid(
        title="Types of layers in a spec file", columns=["type", "can be measured", "keys"], rows=rows, notes=notes
    )


def layer(kind: Mapping[str, Any]) -> list[Grid]:
    """Lay out the keys of one kind, and an example."""
    rows = [[key["name"], "must be given" if key["default"] is None else key["default"], key["meaning"]]
            for key in kind["keys"]]  # fmt: skip
    keys = Grid(
        title=f"{kind['type']}: {kind['does']}",
        columns=["key", "default", "meaning"] if rows else [],
        rows=rows,
        notes=[] if rows else ["It has no keys of its own."],
    )
    return [keys, Grid(title="In a spec file:", beneath=kind["example"].split("\n"))]
