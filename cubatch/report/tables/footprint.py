"""What `cubatch memory` prints: the footprint, and the rules of thumb."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import attrs

from cubatch.report.grid import Grid
from cubatch.report.tables.common import joined, shape, written
from cubatch.units import format_bytes, format_count

_PARTS = ("weights", "gradients", "optimizer", "activations", "activation_gradients", "workspace")


def footprint(plan: Mapping[str, Any], *, title: str) -> list[Grid]:
    """
    Lay out the memory of a step by part and by layer; the textbook's count of elements beneath the parts.

    Args:
        plan: A footprint as JSON.
        title: Above the parts.
    """
    return [_parts({"bytes": plan}, title), _by_layer(plan, "By layer")]


def modes(
    found: Mapping[str, Mapping[str, Any]], *, title: str, limit: int, why: str = "", members: int = 1,
    target: int | None = None,
) -> list[Grid]:  # fmt: skip
    """
    Lay out the memory of a step in one mode, or in both side by side; then its layers and the rules of thumb.

    Args:
        found: Of each mode the footprint, the rules of thumb and the largest batch, as JSON.
        title: Above the parts.
        limit: Bytes that the largest batch fits into.
        why: How they came about; empty where they were asked for.
        members: Threads of a CPU that each walk through samples of their own, by the plan of the last mode.
        target: Samples of a step of the optimiser, where the largest batch is one of those that it can be cut into.
    """
    by_mode = {mode: facts["footprint"] for mode, facts in found.items()}
    last = list(by_mode)[-1]
    beside = [rules(facts["rules_of_thumb"], mode=mode) for mode, facts in found.items()]
    parts = _parts(by_mode, title)
    parts = attrs.evolve(parts, notes=[_fits(found, limit, why, target), *parts.notes])
    if members > 1 and by_mode[last]["gradients"]:
        parts = attrs.evolve(parts, notes=[*parts.notes, f"Each of {members} threads has gradients of its own."])
    return [parts, _by_layer(by_mode[last], f"By layer, {last}"), *beside]


def _fits(found: Mapping[str, Mapping[str, Any]], limit: int, why: str, target: int | None) -> str:
    """Say which is the largest batch that fits in each mode, and where the one that was asked for does not."""
    asked = next(iter(found.values()))["footprint"]["batch_size"]
    largest = {mode: int(facts["max_batch_size"]) for mode, facts in found.items()}
    sizes = joined([f"{format_count(n) if n else 'no batch'}{_in([mode], found)}" for mode, n in largest.items()])
    beyond = [mode for mode, n in largest.items() if n < asked]
    does_not = f"; {format_count(asked)} does not fit{_in(beyond, found)}" if beyond else ""
    where = f"{format_bytes(limit)}{f' ({why})' if why else ''}"
    batch = "batch" if target is None else f"of the sizes that {format_count(target)} can be cut into"
    return f"The largest {batch} whose step fits in {where}, by the plan: {sizes}{does_not}."


def _in(modes: Sequence[str], found: Sized) -> str:
    """Name the modes, where there are several."""
    return f" in {joined(modes)}" if len(found) > 1 else ""


def _parts(plans: Mapping[str, Mapping[str, Any]], title: str) -> Grid:
    """Lay out the parts, a column a plan."""
    rows: list[list[str | None]] = [
        [part.replace("_", " "), *(format_bytes(plan[part]) if plan[part] else None for plan in plans.values())]
        for part in _PARTS
        if any(plan[part] for plan in plans.values())
    ]
    rows.append(["peak", *(format_bytes(plan["total"]) for plan in plans.values())])
    peaks = [
        f"{format_bytes(plan['total'])}, in {plan['peak_layer']}{f' ({name})' if len(plans) > 1 else ''}"
        for name, plan in plans.items()
    ]
    counts = [plan["elements_per_sample"] for plan in plans.values()]
    size = next(iter(plans.values()))["batch_size"]
    words = " forward, {} with gradients" if len(counts) > 1 else ""
    count = f"{format_count(counts[0])} elements per sample{words.format(format_count(counts[-1]))}"
    notes = [
        f"Peak {', '.join(peaks)}; parts are sums over all layers, of which many share memory in turn.",
        f"Textbook count: {count}; times {size} is {format_count(counts[-1] * size)} elements.",
    ]
    return Grid(title=title, columns=["part", *plans], rows=rows, marked=[len(rows) - 1], notes=notes)


def _by_layer(plan: Mapping[str, Any], title: str) -> Grid:
    columns = ("parameters", "weights", "activations", "activation_gradients", "workspace")
    rows = [
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
    return Grid(title=title, columns=names, rows=rows)


def rules(found: Sequence[Mapping[str, Any]], *, mode: str) -> Grid:
    """Lay out the rules of thumb beside the plan."""
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
    return Grid(
        title=f"Rules of thumb beside the plan, {mode}",
        columns=["rule", "says", "plan", "off by", "unit", "formula"],
        rows=rows,
    )
