"""
A tuning result for a person: the table, the answer in two sentences, the HTML page.

It reads only the schema-1 JSON of a result, so a result from another machine or year prints alike.
`grid` and `rich_grid` are handed on for everything else that is a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cubatch.curve import (
    curve_of,
    format_objective,
    is_predicted,
    setting,
    share_of_best,
    subject,
    value_of,
)
from cubatch.grids import WIDTH, filled, grid, rich_grid
from cubatch.page import document, figures, legend_of
from cubatch.units import format_bytes, format_count, format_percent, format_seconds

__all__ = ["WIDTH", "answer", "fitted", "grid", "html", "rich_grid", "table", "tuning_grid"]

_MIN_REASONS = 16
_DISPENSABLE = ("roofline", "memory plan", "memory real", "±")  # on a narrow line, in this order
_WHY = {
    "peak": "larger batches are slower",
    "plateau": "larger batches gain no more than that",
    "memory": "no much larger batch fits in memory, though with more of it one might be better",
    "latency_limit": "larger batches take longer than the latency limit allows",
    "max_batch_size": "much larger batches were ruled out by max_batch_size",
    "batch_sizes": "only the sizes asked for were looked at",
    "budget": "the budget was spent before every size was measured, so a larger budget may find better",
}


def tuning_grid(result: Mapping[str, Any], *, reasons_width: int | None = None) -> dict[str, Any]:
    """
    Lay out a tuning result: one row per batch size, the answer marked, the answer in words beneath.

    Args:
        result: A tuning result in the JSON form of schema 1.
        reasons_width: Characters for the reasons of a size; None writes them all.

    Returns:
        A grid.
    """
    energy, shares = result.get("objective") == "energy", share_of_best(result)
    measurements = sorted(result.get("measurements") or (), key=lambda m: int(m["batch_size"]))
    rows = [
        [
            _mark(result, int(m["batch_size"])),
            str(m["batch_size"]),
            _or_none(format_seconds, _seconds(m, result)),
            _or_none(format_count, _rate(m, result)),
            _spread(m),
            _or_none(format_percent, shares.get(int(m["batch_size"]))),
            _or_none(format_count, v[0] if energy and (v := value_of(m, "energy")) else None),
            _or_none(format_bytes, m.get("predicted_peak_bytes")),
            _or_none(format_bytes, m.get("peak_bytes")),
            _or_none(format_percent, m.get("roofline_fraction")),
            _status(m, result, full=reasons_width is None),
            _shortened(m.get("reasons") or (), reasons_width),
        ]
        for m in measurements
    ]
    marked = [index for index, m in enumerate(measurements) if int(m["batch_size"]) == result.get("batch_size")]
    names = ["", "batch", "time", "samples/s", "±", "of best", "samples/J", "memory plan", "memory real", "roofline"]
    word = "Predicted: " if is_predicted(result) else ""
    return {
        "title": f"{word}{subject(result)}: {setting(result)}",
        "columns": [*names, "status", "reasons"],
        "rows": rows,
        "marked": marked,
        "notes": [answer(result), _points(result), *_legend(result)],
    }


def table(result: Mapping[str, Any], *, width: int = WIDTH) -> str:
    """
    Write a tuning result as plain text: the table, the answer and why, the ties.

    Args:
        result: A tuning result in the JSON form of schema 1.
        width: Characters per line.

    Returns:
        The lines, without a final newline.
    """
    return grid(fitted(result, width=width), width=width)


def fitted(result: Mapping[str, Any], *, width: int = WIDTH) -> dict[str, Any]:
    """
    Lay out a tuning result with one line per batch size, whatever the width.

    Where the line is too narrow, the columns that can be done without go first; the reasons get
    what is left, and say how many more there are.

    Args:
        result: A tuning result in the JSON form of schema 1.
        width: Characters per line.

    Returns:
        A grid.
    """
    content, room = tuning_grid(result, reasons_width=0), 0
    for name in ("", *_DISPENSABLE):
        kept = [index for index, column in enumerate(content["columns"]) if column != name or not name]
        content["columns"] = [content["columns"][index] for index in kept]
        content["rows"] = [[row[index] for index in kept] for row in content["rows"]]
        shape = filled(content)
        columns = list(zip(shape["columns"], *shape["rows"], strict=True))
        room = width - sum(max(len(cell) for cell in column) + 2 for column in columns if column[0] != "reasons")
        if room >= _MIN_REASONS:
            break
    whole = tuning_grid(result, reasons_width=max(room, _MIN_REASONS))["rows"]
    content["rows"] = [[*row[:-1], complete[-1]] for row, complete in zip(content["rows"], whole, strict=True)]
    return content


def answer(result: Mapping[str, Any]) -> str:
    """
    Say the answer, and why, in two sentences.

    Args:
        result: A tuning result in the JSON form of schema 1.

    Returns:
        The sentences; a prediction says that it is one; without an answer, one sentence saying so.
    """
    objective = result.get("objective") or "throughput"
    by_size = {int(m["batch_size"]): m for m in result.get("measurements") or ()}
    chosen = by_size.get(result.get("batch_size") or 0)
    if chosen is None:
        return "There is no answer yet: too little was measured."
    size, fastest = int(chosen["batch_size"]), result.get("fastest_batch_size")
    facts = [
        f"{format_count(rate)} samples/s" if (rate := _rate(chosen, result)) is not None else "",
        f"{format_seconds(seconds)} per batch" if (seconds := _seconds(chosen, result)) is not None else "",
        format_objective(v[0], objective) if objective == "energy" and (v := value_of(chosen, objective)) else "",
    ]
    lead = "Predicted, not measured: use" if is_predicted(result) else "Use"
    device = (result.get("device") or {}).get("name")
    first = f"{lead} batch size {size}{f' on {device}' if device else ''}: {', '.join(f for f in facts if f)}."
    within = f"within {100 * float(result.get('tolerance') or 0):g} % of"
    best = {"latency": "the lowest latency", "energy": "the best samples per joule"}.get(objective, "the fastest")
    extreme = "largest" if objective == "latency" else "smallest"
    decided_by = str(result.get("decided_by") or "")
    if len(by_size) == 1 and decided_by == "batch_sizes":
        return f"{first} No other size was asked for."
    if size == fastest:
        second = f"It is {best.replace('the fastest', 'the fastest size')}, no {extreme[:-3]}er size comes {within} it"
    else:
        second = f"It is the {extreme} size {within} {best}, which is that of batch {fastest}"
        second = second.replace("the fastest, which is that of batch", "the fastest, batch")
    rising = objective == "latency" and decided_by in ("peak", "plateau")
    why = "larger batches take longer" if rising else _WHY.get(decided_by)
    return f"{first} {second}{f', and {why}' if why else ''}."


def html(result: Mapping[str, Any]) -> str:
    """
    Write one self-contained HTML page: answer, reasons, curve, table, what it was measured with.

    Args:
        result: A tuning result in the JSON form of schema 1.

    Returns:
        The document: no script, no external resource, light and dark, every text escaped.
    """
    shown = curve_of(result)
    content = filled({**tuning_grid(result), "title": "Every batch size", "notes": _legend(result)})
    return document(
        title=shown.title,
        subtitle=shown.subtitle,
        predicted=shown.predicted,
        answer=answer(result),
        reasons=_points(result),
        figures=figures(shown, result.get("objective") or "throughput"),
        legend=legend_of(shown),
        table=content,
        facts=_facts(result),
    )


def _or_none(write: Callable[[float], str], value: float | None) -> str | None:
    return None if value is None else write(value)


def _seconds(measurement: Mapping[str, Any], result: Mapping[str, Any]) -> float | None:
    seconds = measurement.get("latency_seconds")
    return measurement.get("predicted_seconds") if seconds is None and is_predicted(result) else seconds


def _rate(measurement: Mapping[str, Any], result: Mapping[str, Any]) -> float | None:
    rate, seconds = measurement.get("samples_per_second"), _seconds(measurement, result)
    return measurement["batch_size"] / seconds if rate is None and seconds else rate


def _spread(measurement: Mapping[str, Any]) -> str | None:
    """Write half the width of the throughput's interval as a share of its median."""
    interval, rate = measurement.get("throughput_interval"), measurement.get("samples_per_second")
    return f"± {50 * (interval[1] - interval[0]) / rate:.1f} %" if interval and rate else None


def _mark(result: Mapping[str, Any], size: int) -> str:
    if size == result.get("batch_size"):
        return "→"
    if size == result.get("fastest_batch_size"):
        return "▲"
    return "≈" if size in (result.get("tied_with") or ()) else ""


def _status(measurement: Mapping[str, Any], result: Mapping[str, Any], *, full: bool) -> str:
    """Write a status that is not plain ok; in full, with why (dropped says it all)."""
    status = str(measurement.get("status") or "ok").replace("_", " ")
    if status == "ok":
        return "predicted" if is_predicted(result) else ""
    why = measurement.get("stop_reason")
    return f"{status}: {why}" if full and why and status != "dropped" else status


def _shortened(reasons: Sequence[str], width: int | None) -> str | None:
    """Join the reasons; where they do not fit, as many as do and how many more there are."""
    if not reasons:
        return None
    text = ", ".join(reasons)
    if width is None or len(text) <= width:
        return text
    for count in range(len(reasons) - 1, 0, -1):
        text = f"{', '.join(reasons[:count])} +{len(reasons) - count}"
        if len(text) <= width:
            return text
    more = f" +{len(reasons) - 1}" if len(reasons) > 1 else ""
    return f"{reasons[0][: width - len(more) - 1]}…{more}"


def _points(result: Mapping[str, Any]) -> list[str]:
    """Gather what stands beneath the answer: the reasons of the result, and how far memory would reach."""
    points = [str(reason) for reason in result.get("reasons") or ()]
    if (largest := result.get("largest_batch_size")) is not None:
        measured = None if is_predicted(result) else result.get("largest_measured")
        ran = f"; the largest that ran is {measured}" if measured else ""
        points.append(f"The largest batch size that fits, by the plan, is {largest}{ran}.")
    return points


def _legend(result: Mapping[str, Any]) -> list[str]:
    """Say what the marks in the first column mean; nothing where there are none."""
    size, fastest = result.get("batch_size"), result.get("fastest_batch_size")
    if not size:
        return []
    tied = set(result.get("tied_with") or ()) - {size, fastest}
    return [f"→ answer{', ▲ fastest' if fastest != size else ''}{', ≈ tied with the fastest' if tied else ''}."]


def _facts(result: Mapping[str, Any]) -> dict[str, dict[str, object]]:
    """Gather the titled two-column tables of the page; what is unknown is left out."""
    limits, device = result.get("limits") or {}, dict(result.get("device") or {})
    for key, name in (("memory_bytes", "memory"), ("free_bytes", "free_memory")):
        device[name] = _or_none(format_bytes, device.pop(key, None))
    if (capability := device.get("compute_capability")) is not None:
        device["compute_capability"] = ".".join(str(part) for part in capability)
    settings = {
        **{key: result.get(key) for key in ("mode", "dtype", "objective", "tolerance", "optimizer", "library")},
        "input_shape": " x ".join(str(extent) for extent in result.get("input_shape") or ()) or None,
        "recompute": result.get("recompute"),
        "max_batch_size": limits.get("max_batch_size"),
        "memory_limit": _or_none(format_bytes, limits.get("memory_bytes")),
        "latency_limit": _or_none(format_seconds, limits.get("latency_seconds")),
        "budget": _or_none(format_seconds, result.get("budget_seconds")),
        "spent": _or_none(format_seconds, result.get("seconds_spent")),
        "seed": result.get("seed"),
        "L2 cache": result.get("l2"),
        "decided_by": result.get("decided_by"),
        "created": result.get("created"),
    }
    tables = {"Device": device, "Settings": settings, "Environment": dict(result.get("environment") or {})}
    return {
        name: {key.replace("_", " "): value for key, value in facts.items() if value not in (None, "")}
        for name, facts in tables.items()
    }
