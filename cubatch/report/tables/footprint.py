"""Tables of `cubatch memory`: the memory plan, and the rules of thumb."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized

import attrs

from cubatch.frameworks.module_footprint import ModuleFootprint
from cubatch.memory.step_footprint import Footprint
from cubatch.memory.thumb_rules import Rule
from cubatch.report.grid import Grid
from cubatch.report.tables.common import shape, written
from cubatch.units import format_bytes, format_count, join_words

_PARTS = ("weights", "gradients", "optimizer", "activations", "activation_gradients", "workspace")


@attrs.frozen
class ModeMemory:
    """
    The memory of a step in one mode.

    Attributes:
        footprint: At the requested batch size.
        rules: Rules of thumb, compared with the plan.
        max_batch_size: The largest batch that fits; 0 if none does.
    """

    footprint: Footprint
    rules: Sequence[Rule]
    max_batch_size: int


def footprint(plan: Footprint, *, title: str) -> list[Grid]:
    """Return the tables of the memory of a step, by part and by layer."""
    return [_parts({"bytes": plan}, title), _by_layer(plan, "By layer")]


def of_module(taken: ModuleFootprint) -> Grid:
    """Return the table of the memory of a PyTorch module's step, by part."""
    sizes = {part: getattr(taken, part) for part in ("weights", "inputs", "gradients", "optimizer", "activations")}
    rows = [[part, format_bytes(size)] for part, size in sizes.items() if size]
    rows.append(["total", format_bytes(taken.total)])
    title = f"{taken.name}, {taken.mode}, batch {format_count(taken.batch_size)}: memory of a step at its peak"
    notes = ["Without workspaces inside operations, the rounding of the allocator, and the process itself."]
    return Grid(title=title, columns=["part", "bytes"], rows=rows, marked=[len(rows) - 1], notes=notes)


def modes(
    modes: Mapping[str, ModeMemory],
    *,
    title: str,
    limit: int,
    why: str = "",
    members: int = 1,
    target: int | None = None,
) -> list[Grid]:
    """
    Return the tables of the memory of a step: by part for each mode, by layer, and the rules of thumb.

    Args:
        modes: The memory of each mode.
        title: Title of the first table.
        limit: Bytes that the largest batch fits into.
        why: Source of the limit; empty if the user gave it.
        members: CPU threads with samples and gradients of their own, in the last mode.
        target: Samples per optimizer step, if gradients are accumulated.
    """
    by_mode = {mode: memory.footprint for mode, memory in modes.items()}
    last = list(by_mode)[-1]
    parts = _parts(by_mode, title)
    parts = attrs.evolve(parts, notes=[_fits(modes, limit, why, target), *parts.notes])
    if members > 1 and by_mode[last].gradients:
        parts = attrs.evolve(parts, notes=[*parts.notes, f"Each of {members} threads has its own gradients."])
    compared = [rules(memory.rules, mode=mode) for mode, memory in modes.items()]
    return [parts, _by_layer(by_mode[last], f"By layer, {last}"), *compared]


def _fits(modes: Mapping[str, ModeMemory], limit: int, why: str, target: int | None) -> str:
    """Return a sentence: the largest batch of each mode, and the modes in which the requested one does not fit."""
    requested = next(iter(modes.values())).footprint.batch_size
    largest = {mode: memory.max_batch_size for mode, memory in modes.items()}
    sizes = join_words([f"{format_count(n) if n else 'no batch'}{_in([mode], modes)}" for mode, n in largest.items()])
    beyond = [mode for mode, n in largest.items() if n < requested]
    does_not = f"; {format_count(requested)} does not fit{_in(beyond, modes)}" if beyond else ""
    where = f"{format_bytes(limit)}{f' ({why})' if why else ''}"
    batch = "batch" if target is None else f"batch that divides {format_count(target)}"
    return f"The largest {batch} whose step fits in {where}, by the plan: {sizes}{does_not}."


def _in(some: Sequence[str], modes: Sized) -> str:
    return f" in {join_words(some)}" if len(modes) > 1 else ""


def _parts(plans: Mapping[str, Footprint], title: str) -> Grid:
    """Return the table of the parts, with a column for each plan."""
    sizes = {part: [int(getattr(plan, part)) for plan in plans.values()] for part in _PARTS}
    rows: list[list[str | None]] = [
        [part.replace("_", " "), *(format_bytes(size) if size else None for size in taken)]
        for part, taken in sizes.items()
        if any(taken)
    ]
    rows.append(["peak", *(format_bytes(plan.total) for plan in plans.values())])
    peaks = [
        f"{format_bytes(plan.total)}, in {plan.peak_layer}{f' ({name})' if len(plans) > 1 else ''}"
        for name, plan in plans.items()
    ]
    counts = [plan.elements_per_sample for plan in plans.values()]
    size = next(iter(plans.values())).batch_size
    words = " forward, {} with gradients" if len(counts) > 1 else ""
    count = f"{format_count(counts[0])} elements per sample{words.format(format_count(counts[-1]))}"
    notes = [
        f"Peak {', '.join(peaks)}; parts are sums over all layers, which share memory, so that the peak is lower.",
        f"Textbook count: {count}; times {size} is {format_count(counts[-1] * size)} elements.",
    ]
    return Grid(title=title, columns=["part", *plans], rows=rows, marked=[len(rows) - 1], notes=notes)


def _by_layer(plan: Footprint, title: str) -> Grid:
    columns = ("parameters", "weights", "activations", "activation_gradients", "workspace")
    rows = [
        [
            layer["name"],
            layer["type"],
            shape(layer["output_shape"]),
            format_count(layer["parameters"]) if layer["parameters"] else None,
            *(format_bytes(layer[part]) if layer[part] else None for part in columns[1:]),
        ]
        for layer in plan.layers
    ]
    names = ["layer", "type", "output", *(column.replace("activation_", "") for column in columns)]
    return Grid(title=title, columns=names, rows=rows)


def rules(compared: Sequence[Rule], *, mode: str) -> Grid:
    """Return the table of the rules of thumb and the plan."""
    write: dict[str, Callable[[float], str]] = {"bytes": format_bytes}
    rows = [
        [
            rule.name,
            write.get(rule.unit, format_count)(rule.value),
            write.get(rule.unit, format_count)(rule.computed),
            written(lambda error: f"{100 * error:+.1f} %", rule.error if math.isfinite(rule.error) else None),
            rule.unit,
            rule.formula,
        ]
        for rule in compared
    ]
    return Grid(
        title=f"Rules of thumb and the plan, {mode}",
        columns=["rule", "gives", "plan", "off by", "unit", "formula"],
        rows=rows,
    )
