"""Table of `cubatch models`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.report.grid import Grid
from cubatch.report.tables.common import shape
from cubatch.units import format_count, format_metric


def models(named: Sequence[Mapping[str, Any]]) -> Grid:
    """Return the table of the named networks, with the other forms of a command's MODEL beneath."""
    columns = {
        "MODEL": lambda m: m["name"],
        "input": lambda m: shape(m["input_shape"]),
        "output": lambda m: shape(m["output_shape"]) if m["output_shape"][:2] != [1, 1] else m["output_shape"][2],
        "parameters": lambda m: format_count(m["parameters"]),
        "per sample": lambda m: format_metric(m["flop_per_sample"], "FLOP"),
        "can be measured": lambda m: "yes" if m["runs"] else "predicted only",
    }
    notes = [
        "Case and hyphens of a name do not matter. FLOP are those of inference; a multiply-add counts as two.",
        "MODEL may also be an .onnx, .toml or .json file, or package.module:name of a function that builds a module.",
        "The layers of a spec: cubatch layers",
        "With another image size or number of classes: cubatch memory resnet50 --input-shape 160,160,3 --classes 10",
    ]
    return Grid.of(named, columns, title="Networks by name", notes=notes)
