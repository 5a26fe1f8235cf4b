"""Table of `cubatch models`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.report.grid import Grid
from cubatch.report.tables.common import shape
from cubatch.units import format_count, format_metric


def models(named: Sequence[Mapping[str, Any]]) -> Grid:
    """Return the table of the named networks, with the other forms of a MODEL beneath."""
    rows = [
        [
            model["name"],
            shape(model["input_shape"]),
            shape(model["output_shape"]) if model["output_shape"][:2] != [1, 1] else model["output_shape"][2],
            format_count(model["parameters"]),
            format_metric(model["flop_per_sample"], "FLOP"),
            "yes" if model["runs"] else "predicted only",
        ]
        for model in named
    ]
    notes = [
        "Case and hyphens of a name do not matter. FLOP are those of inference; a multiply-add counts as two.",
        "MODEL may also be an .onnx, .toml or .json file, or package.module:name of a function that builds a module.",
        "The layers of a spec: cubatch layers",
        "With another image size or number of classes: cubatch memory resnet50 --input-shape 160,160,3 --classes 10",
    ]
    columns = ["MODEL", "input", "output", "parameters", "per sample", "can be measured"]
    return Grid(title="Networks by name", columns=columns, rows=rows, notes=notes)
