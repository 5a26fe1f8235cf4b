"""
The table of a tuning result: a line a batch size, the answer marked, and beneath it what the answer is and why.

It reads only the schema-1 JSON of a result, so a result from another machine or year prints alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.report.answer import answer, points
from cubatch.report.facts import (
    half_width,
    is_above,
    is_only_noise,
    is_predicted,
    is_recommended,
    measurements_of,
    rate_of,
    seconds_of,
    setting,
    share_of_best,
    subject,
    value_of,
)
from cubatch.report.grid import WIDTH, Grid, Listed
from cubatch.report.tables.common import written
from cubatch.units import format_bytes, format_count, format_percent, format_seconds

DISPENSABLE = ("roofline", "memory plan", "memory real", "±")  # on a narrow line, in this order
_NOISE = "~"
_MAX_LISTED = 12  # batch sizes in a line
_MANY = 3  # sizes not tried, above which they share a line
_ENDS = {"out_of_memory": "ran out of memory", "error": "failed", "timeout": "did not come back"}


def tuning_grid(result: Mapping[str, Any]) -> Grid:
    """
    Lay out a tuning result: one row per batch size, the answer marked, the answer in words beneath.

    Args:
        result: A tuning result in the JSON form of schema 1.
    """
    energy, shares = result.get("objective") == "energy", share_of_best(result)
    measurements, beneath = parted(result)
    rows = [
        [
            _mark(m, result, shares),
            str(m["batch_size"]),
            written(format_seconds, seconds_of(m, result)),
            written(format_count, rate_of(m, result)),
            _spread(m),
            written(format_percent, shares.get(int(m["batch_size"]))),
            written(format_count, v[0] if energy and (v := value_of(m, "energy")) else None),
            written(format_bytes, m.get("predicted_peak_bytes")),
            written(format_bytes, m.get("peak_bytes")),
            written(format_percent, m.get("roofline_fraction")),
            status(m, result),
            Listed(m.get("reasons") or ()),
        ]
        for m in measurements
    ]
    names = ["", "batch", "time", "samples/s", "±", "of best", "samples/J", "memory plan", "memory real", "roofline"]
    word = "Predicted: " if is_predicted(result) else ""
    return Grid(
        title=f"{word}{subject(result)}: {setting(result)}",
        columns=[*names, "status", "reasons"],
        rows=rows,
        marked=[index for index, m in enumerate(measurements) if int(m["batch_size"]) == result.get("batch_size")],
        beneath=beneath,
        notes=[answer(result), points(result), *legend(result)],
    )


def table(result: Mapping[str, Any], *, width: int = WIDTH) -> str:
    """
    Write a tuning result as plain text: the table, the answer and why, the ties.

    Args:
        result: A tuning result in the JSON form of schema 1.
        width: Characters per line.

    Returns:
        The lines, without a final newline.
    """
    return fitted(result, width=width).text(width)


def fitted(result: Mapping[str, Any], *, width: int = WIDTH) -> Grid:
    """
    Lay out a tuning result with one line per batch size, whatever the width.

    Where the line is too narrow, the columns that can be done without go first; the reasons get
    what is left, and say how many more there are.

    Args:
        result: A tuning result in the JSON form of schema 1.
        width: Characters per line.
    """
    return tuning_grid(result).fit(width, DISPENSABLE)


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


def status(measurement: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Write a status that is not plain ok, in a word or three."""
    word = str(measurement.get("status") or "ok")
    if word == "ok":
        return "predicted" if is_predicted(result) else ""
    if word == "over_limit":
        limit = (result.get("limits") or {}).get("latency_seconds")
        return "over latency" if is_above(measurement.get("latency_seconds"), limit) else "over memory"
    return word.replace("_", " ")


def parted(result: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Part the sizes that get a row from those that share a line beneath the table, and write those lines."""
    measurements = sorted(measurements_of(result), key=lambda m: int(m["batch_size"]))
    ruled_out = [m for m in measurements if m.get("status") == "dropped" and m.get("latency_seconds") is None]
    untried = [m for m in measurements if m.get("status") == "not_run"]
    untried = untried if len(untried) > _MANY else []
    unreached = [m for m in measurements if m.get("status") == "interrupted" and m.get("latency_seconds") is None]
    gone = {int(m["batch_size"]) for m in (*ruled_out, *untried, *unreached)}
    lines, ruled_out, beyond = [], *_above_failed(ruled_out, measurements)
    for end, those in beyond:
        how = _ENDS.get(str(end.get("status")), "failed")
        lines.append(f"{_num_sizes(those)} not tried: {listed(those)}, above {end['batch_size']}, which {how}.")
    if ruled_out:
        are, their = ("is", "its") if len(ruled_out) == 1 else ("are", "their")
        told = f"{_num_sizes(ruled_out)} {are} not expected to be better"
        lines.append(f"{told}: {listed(ruled_out)}, by {their} neighbours' readings.")
    if untried:
        lines.append(f"{_num_sizes(untried)} not tried, for lack of time: {listed(untried)}.")
    if unreached:
        lines.append(f"{_num_sizes(unreached)} not reached before the interruption: {listed(unreached)}.")
    return [m for m in measurements if int(m["batch_size"]) not in gone], lines


def _above_failed(
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


def listed(measurements: Sequence[Mapping[str, Any]]) -> str:
    """Name sizes in a line, of many as many as can be read."""
    sizes = [str(m["batch_size"]) for m in measurements]
    rest = len(sizes) - _MAX_LISTED
    return ", ".join(sizes) if rest <= 1 else f"{', '.join(sizes[:_MAX_LISTED])} and {rest} more"


def legend(result: Mapping[str, Any]) -> list[str]:
    """Say what the marks in the first column mean; nothing where there are none."""
    size, fastest, shares = result.get("batch_size"), result.get("fastest_batch_size"), share_of_best(result)
    if not size:
        return []
    marks = {_mark(m, result, shares) for m in measurements_of(result)}
    words = {
        "→": "answer" if is_recommended(result) else "compared with none",
        "▲": "fastest",
        "≈": "tied with the fastest",
        _NOISE: "too noisy to tell",
    }
    shown = [f"{mark} {word}" for mark, word in words.items() if mark in marks or (mark == "▲" and fastest != size)]
    return [f"{', '.join(shown)}."]
