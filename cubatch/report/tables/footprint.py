"""What `cubatch memory` prints: the footprint, and the rules of thumb."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cubatch.report.grid import Grid
from cubatch.report.tables.common import shape, written
from cubatch.units import format_bytes, format_count


def footprint(plan: Mapping[str, Any], *, title: str, forward_elements: int | None = None) -> list[Grid]:
    """
    Lay out the memory of a step by part and by layer; the textbook's count of elements beneath the parts.

    Args:
        plan: A footprint as JSON.
        title: Above the parts.
        forward_elements: Elements per sample of the forward pass, where they are known beside those of the step.
    """
    parts = ("weights", "gradients", "optimizer", "activations", "activation_gradients", "workspace")
    rows = [[part.replace("_", " "), format_bytes(plan[part])] for part in parts if plan[part]]
    each, size = plan["elements_per_sample"], plan["batch_size"]
    peak = format_bytes(plan["total"])
    count = f"{format_count(each)} elements per sample"
    if forward_elements is not None:
        backward = "" if each == forward_elements else f", {format_count(each)} with gradients"
        count = f"{format_count(forward_elements)} elements per sample forward{backward}"
    notes = [
        f"Peak {peak}, in {plan['peak_layer']}; parts are sums over all layers, of which many share memory in turn.",
        f"Textbook count: {count}; times {size} is {format_count(each * size)} elements.",
    ]
    columns = ("parameters", "weights", "activations", "activation_gradients", "workspace")
    by_layer = [
        [
            layer["name"],
            layer["type"],
            shape(layer["output_shape"]),
            format_count(layer["parameters"]) if layer["parameters"] else None,
            *(format_bytes(layer[part]) if layer[part] else None for part in columns[1:]),
        ]
        for layer in plan["layers"]
    ]
    names = ["layer", "type", "output", *(column.replace("activation_", "") for column in columns)]
    return [
        Grid(title=title, columns=["part", "bytes"], rows=[*rows, ["peak", peak]], marked=[len(rows)], notes=notes),
        Grid(title="By layer", columns=names, rows=by_layer),
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
    return Grid(
        title="Rules of thumb beside the plan",
        columns=["rule", "says", "plan", "off by", "unit", "formula"],
        rows=rows,
        notes=[f"Largest batch size whose step fits in {size}, by the plan: {largest}."],
    )
