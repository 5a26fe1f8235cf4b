"""What `cubatch memory` prints: the footprint, and the rules of thumb."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cubatch.units import format_bytes, format_count

if TYPE_CHECKING:
    pass
from cubatch.report.tables.common import Grid, written


def footprint(plan: Mapping[str, Any], *, title: str, forward_elements: int) -> list[Grid]:
    """Lay out the memory of a step by part and by layer; the textbook's count of elements beneath the parts."""
    parts = ("weights", "gradients", "optimizer", "activations", "activation_gradients", "workspace")
    rows = [[part.replace("_", " "), format_bytes(plan[part])] for part in parts if plan[part]]
    each, size = plan["elements_per_sample"], plan["batch_size"]
    backward = "" if each == forward_elements else f", {format_count(each)} with gradients"
    peak = format_bytes(plan["total"])
    count = f"{format_count(forward_elements)} elements per sample forward{backward}"
    notes = [
        f"Peak {peak}, in {plan['peak_layer']}; parts are sums over all layers, of which many share memory in turn.",
        f"Textbook count: {count}; times {size} is {format_count(each * size)} elements.",
    ]
    total = [["peak", peak]]
    columns = ("parameters", "weights", "activations", "activation_gradients", "workspace")
    by_layer = [
        [
            layer["name"],
            layer["type"],
            " x ".join(str(extent) for extent in layer["output_shape"]),
            format_count(layer["parameters"]) if layer["parameters"] else None,
            *(format_bytes(layer[part]) if layer[part] else None for part in columns[1:]),
        ]
        for layer in plan["layers"]
    ]
    names = ["layer", "type", "output", *(column.replace("activation_", "") for column in columns)]
    return [
        {"title": title, "columns": ["part", "bytes"], "rows": rows + total, "marked": [len(rows)], "notes": notes},
        {"title": "By layer", "columns": names, "rows": by_layer},
    ]


def rules(found: Sequence[Mapping[str, Any]], *, largest: int, limit: int | str) -> Grid:
    """Lay out the rules of thumb beside the plan, and the largest batch beneath."""
    write: dict[str, Callable[[float], str]] = {"bytes": format_bytes}
    rows = [
        [
            rule["name"],
            write.get(rule["unit"], format_count)(rule["value"]),
            write.get(rule["unit"], format_count)(rule["computed"]),
            written(lambda error: f"{100 * error:+.1f} %", rule["error"]),
            rule["unit"],
            rule["formula"],
        ]
        for rule in found
    ]
    size = format_bytes(limit) if isinstance(limit, int) else limit
    return {
        "title": "Rules of thumb beside the plan",
        "columns": ["rule", "says", "plan", "off by", "unit", "formula"],
        "rows": rows,
        "notes": [f"Largest batch size whose step fits in {size}, by the plan: {largest}."],
    }
