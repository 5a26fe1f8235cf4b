"""What `cubatch models` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.report.grid import Grid
from cubatch.report.tables.common import shape
from cubatch.units import format_count, format_metric


def models(found: Sequence[Mapping[str, Any]]) -> Grid:
    """Lay out the named networks, and what else a MODEL may be."""
    rows = [
        [
            model["name"],
            shape(model["input_shape"]),
            shape(model["output_shape"]) if model["output_shape"][:2] != [1, 1] else model["output_shape"][2],
            format_count(model["parameters"]),
            format_metric(model["flop_per_sample"], "FLOP"),
            "yes" if model["runs"] else "predicted only",
        ]
        for model in found
    ]
    notes = [
        "A name is found in any case, with or without hyphens. FLOP are of inference; a multiply-add is two.",
        "MODEL is also a .onnx file, package.module:name of what builds a PyTorch module, or a .toml or .json spec.",
        "What a spec may hold: cubatch layers",
        "Another image or number of classes: cubatch memory resnet50 --input-shape 160,160,3 --classes 10",
    ]
    columns = ["MODEL", "input", "output", "parameters", "per sample", "can be measured"]
    return Grid(title="Networks by name", columns=columns, rows=rows, notes=notes)
