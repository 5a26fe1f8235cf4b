"""
A tuning result for a person: the table, the answer in two sentences, the HTML page.

It reads only the schema-1 JSON of a result, so a result from another machine or year prints alike.
`grid` and `rich_grid` are handed on for everything else that is a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cubatch.report.curve import (
    curve_of,
    is_only_noise,
    is_predicted,
    is_recommended,
    setting,
    share_of_best,
    subject,
    value_of,
)
from cubatch.report.grid import WIDTH, filled, grid, rich_grid
from cubatch.report.html import document, figures, legend_of
from cubatch.report.tables.sentences import MAX_LISTED, TIMED, answer, half_width, rate_of, seconds_of
from cubatch.units import format_bytes, format_count, format_percent, format_seconds

__all__ = ["WIDTH", "answer", "fitted", "grid", "html", "rich_grid", "table", "tuning_grid"]

_MIN_REASONS, _PAGE_REASONS = 16, 80
_NOISE = "~"
_DISPENSABLE = ("roofline", "memory plan", "memory real", "±")  # on a narrow line, in this order
_MANY = 3  # sizes not tried, above which they share a line
_ENDS = {"out_of_memory": "ran out of memory", "error": "failed", "timeout": "did not come back"}


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
    measurements, beneath = _folded(sorted(result.get("measurements") or (), key=lambda m: int(m["batch_size"])))
    rows = [
        [
            _mark(m, result, shares),
            str(m["batch_size"]),
            _or_none(format_seconds, seconds_of(m, result)),
            _or_none(format_count, rate_of(m, result)),
            _spread(m),
            _or_none(format_percent, shares.get(int(m["batch_size"]))),
            _or_none(format_count, v[0] if energy and (v := value_of(m, "energy")) else None),
            _or_none(format_bytes, m.get("predicted_peak_bytes")),
            _or_none(format_bytes, m.get("peak_bytes")),
            _or_none(format_percent, m.get("roofline_fraction")),
            _status(m, result),
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
        "beneath": beneath,
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


def html(result: Mapping[str, Any]) -> str:
    """
    Write one self-contained HTML page: answer, reasons, curve, table, what it was measured with.

    Args:
        result: A tuning result in the JSON form of schema 1.

    Returns:
        The document: no script, no external resource, light and dark, every text escaped.
    """
    shown = curve_of(result)
    notes = [*([_explained(result)] if _explained(result) else []), *_legend(result)]
    content = filled({**tuning_grid(result, reasons_width=_PAGE_REASONS), "title": "Every batch size", "notes": notes})
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


def _spread(measurement: Mapping[str, Any]) -> str | None:
    """Write half the width of the throughput's interval as a share of its median."""
    share = half_width(measurement)
    return None if share is None else f"± {100 * share:.1f} %"


def _mark(measurement: Mapping[str, Any], result: Mapping[str, Any], shares: Mapping[int, float]) -> str:
    size = int(measurement["batch_size"])
    if size == result.get("batch_size"):
        return "→"
    if size == result.get("fastest_batch_size"):
        return "▲"
    if size not in (result.get("tied_with") or ()):
        return ""
    is_noise = is_only_noise(shares.get(size), measurement.get("throughput_interval")) and not is_predicted(result)
    return _NOISE if is_noise else "≈"


def _status(measurement: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Write a status that is not plain ok, in a word or three."""
    status = str(measurement.get("status") or "ok")
    if status == "ok":
        return "predicted" if is_predicted(result) else ""
    if status == "over_limit":
        return "over memory" if measurement.get("latency_seconds") is None else "over latency"
    return status.replace("_", " ")


def _folded(measurements: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Part the sizes that get a row from those that share a line beneath the table, and write those lines."""
    ruled_out = [m for m in measurements if m.get("status") == "dropped" and m.get("latency_seconds") is None]
    untried = [m for m in measurements if m.get("status") == "not_run"]
    untried = untried if len(untried) > _MANY else []
    unreached = [m for m in measurements if m.get("status") == "interrupted" and m.get("latency_seconds") is None]
    gone = {int(m["batch_size"]) for m in (*ruled_out, *untried, *unreached)}
    lines, ruled_out, beyond = [], *_parted(ruled_out, measurements)
    for end, those in beyond:
        how = _ENDS.get(str(end.get("status")), "failed")
        lines.append(f"{_num_sizes(those)} not tried: {_listed(those)}, above {end['batch_size']}, which {how}.")
    if ruled_out:
        whose = "its neighbours' readings" if len(ruled_out) == 1 else "their neighbours' readings"
        lines.append(f"{_num_sizes(ruled_out)} cannot be the answer: {_listed(ruled_out)}, by {whose}.")
    if untried:
        lines.append(f"{_num_sizes(untried)} not tried, for lack of time: {_listed(untried)}.")
    if unreached:
        lines.append(f"{_num_sizes(unreached)} not reached before the interruption: {_listed(unreached)}.")
    return [m for m in measurements if int(m["batch_size"]) not in gone], lines


def _parted(
    ruled_out: Sequence[Mapping[str, Any]], measurements: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]]:
    """Part what readings ruled out from what lies above a size that failed, above all that ran, with that size."""
    top = max((int(m["batch_size"]) for m in measurements if m.get("latency_seconds") is not None), default=0)
    ends = [m for m in measurements if m.get("status") in _ENDS and int(m["batch_size"]) > top]
    if not ends:
        return list(ruled_out), []
    end = min(ends, key=lambda m: int(m["batch_size"]))
    above = [m for m in ruled_out if int(m["batch_size"]) > int(end["batch_size"])]
    return [m for m in ruled_out if m not in above], [(end, above)] if above else []


def _num_sizes(measurements: Sequence[Mapping[str, Any]]) -> str:
    return "1 size" if len(measurements) == 1 else f"{len(measurements)} sizes"


def _listed(measurements: Sequence[Mapping[str, Any]]) -> str:
    sizes = [str(m["batch_size"]) for m in measurements]
    rest = len(sizes) - MAX_LISTED
    return ", ".join(sizes) if rest <= 1 else f"{', '.join(sizes[:MAX_LISTED])} and {rest} more"


def _explained(result: Mapping[str, Any]) -> list[str]:
    """Say why sizes that have a row gave no answer, those of one reason together; `dropped` says it all."""
    rows, _ = _folded(sorted(result.get("measurements") or (), key=lambda m: int(m["batch_size"])))
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for m in rows:
        if m.get("status") not in (*TIMED, "predicted", None) and m.get("stop_reason"):
            alike.setdefault((_status(m, result), str(m["stop_reason"])), []).append(m)
    lines = [f"{_listed(those)}: {status}: {why}" for (status, why), those in alike.items()]
    rest = len(lines) - MAX_LISTED
    return lines if rest <= 1 else [*lines[:MAX_LISTED], f"{rest} more reasons are in the JSON."]


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
    size, fastest, shares = result.get("batch_size"), result.get("fastest_batch_size"), share_of_best(result)
    if not size:
        return []
    marks = {_mark(m, result, shares) for m in result.get("measurements") or ()}
    words = {
        "→": "answer" if is_recommended(result) else "the only size measured",
        "▲": "fastest",
        "≈": "tied with the fastest",
        _NOISE: "too noisy to tell",
    }
    shown = [f"{mark} {word}" for mark, word in words.items() if mark in marks or (mark == "▲" and fastest != size)]
    return [f"{', '.join(shown)}."]


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
