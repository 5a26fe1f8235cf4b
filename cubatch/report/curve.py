"""
What the picture of a tuning result shows, before anything is drawn.

Points with intervals, the tolerance band, the sizes that gave no timing, the few reasons worth a label, and
where the axis is ticked: decided here, drawn in `plot`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from cubatch.report.settings import setting_of
from cubatch.tuning.explain import ran_out_of_memory
from cubatch.tuning.results import BatchSizeResult
from cubatch.units import OBJECTIVE_UNITS, format_bytes, format_objective

STATUS_WORDS = {
    "dropped": "dropped: not expected to be better",
    "out_of_memory": "out of memory",
    "over_limit": "over the limit",
    "not_run": "not run",
    "timeout": "timed out",
    "error": "error",
    "interrupted": "interrupted",
}
RULED_OUT = "ruled out by neighbors"  # dropped without a timing
_MAX_TICKS = 12
_MAX_LABELS = 4
_LABEL_REACH = 0.2  # how far the label of the recommended size stretches to either side, as a share of the axis
# Reasons that explain a step of the curve; "power of two" and "asked for" explain nothing.
_OF_PEAKS, _OF_FALLS = ("crest", "coulom", "tensor-core"), ("past crest", "coulom")


@attrs.frozen(kw_only=True)
class Point:
    """
    One measured batch size on the curve.

    Attributes:
        batch_size: Samples per step.
        value: What is drawn upwards, in the unit of `Curve.y_label`.
        low, high: Ends of its interval; equal to `value` where none is known.
        kept: Whether the size could be recommended (status ok).
        tied: Whether it is tied with the fastest.
        label: Batch size and value: "batch 64: 27 462 samples/s".
    """

    batch_size: int
    value: float
    low: float
    high: float
    kept: bool
    tied: bool
    label: str


@attrs.frozen(kw_only=True)
class Curve:
    """
    Everything a drawing of the result needs.

    Attributes:
        title, subtitle: What was tuned, and where, how, when.
        y_label: The quantity and its unit.
        log_y: Whether the y axis is logarithmic (latencies that span decades).
        points: Measured sizes, ascending.
        absent: (batch size, words) of the sizes that gave no timing, ascending.
        answer, fastest: Points of the recommended and the fastest size; None where there is none.
        band, band_label: The values within tolerance of the best, None where there is no best; and its words.
        limit: Largest batch that fits, when the picture reaches it; and its words.
        label_above: The value above which the label of `answer` touches nothing; None without one.
        labels: (point, reason) of the few steps that a reason explains.
        x_low, x_high: Ends of the axis of batch sizes.
        ticks: Batch sizes to write on that axis.
        predicted: Whether the values are a prediction and not a measurement.
    """

    title: str
    subtitle: str
    y_label: str
    log_y: bool
    points: tuple[Point, ...]
    absent: tuple[tuple[int, str], ...]
    answer: Point | None
    fastest: Point | None
    band: tuple[float, float] | None
    limit: tuple[int, str] | None
    band_label: str
    label_above: float | None
    labels: tuple[tuple[Point, str], ...]
    x_low: float
    x_high: float
    ticks: tuple[int, ...]
    predicted: bool


def curve_of(result: BatchSizeResult) -> Curve:
    """Decide what the picture of a result or a prediction shows."""
    objective, tied = result.objective, set(result.ties)
    points, absent = [], []
    for n, measurement in result.sizes.items():
        value = measurement.value(objective)
        if value is None:
            is_ruled_out = measurement.status == "dropped"
            absent.append((n, RULED_OUT if is_ruled_out else STATUS_WORDS.get(measurement.status, "not run")))
            continue
        points.append(
            Point(
                batch_size=n, value=value[0], low=value[1], high=value[2], kept=measurement.status == "ok",
                tied=n in tied, label=f"batch {n}: {format_objective(value[0], objective)}",
            )
        )  # fmt: skip
    by_size = {point.batch_size: point for point in points}
    answer, fastest = by_size.get(result.batch_size or 0), by_size.get(result.fastest_batch_size or 0)
    sizes = list(result.sizes)
    if not result.recommended:  # of one size nothing is the best
        answer = fastest = None
    limit = _limit(result, sizes)
    x_low, x_high = _x_range(sizes + ([limit[0]] if limit else []))
    values = [point.value for point in points if point.value > 0]
    word = "predicted" if result.predicted else "measured"
    return Curve(
        title=("Predicted: " if result.predicted else "") + f"{result.subject}, {_GOALS[objective]}",
        subtitle=setting_of(result),
        y_label=f"{OBJECTIVE_UNITS[objective]} ({word})",
        log_y=objective == "latency" and bool(values) and max(values) > 20 * min(values),
        points=tuple(points),
        absent=tuple(absent),
        answer=answer,
        fastest=fastest,
        band=_band(fastest, result),
        limit=limit,
        band_label=f"within {100 * (result.tolerance or 0):g} % of the best",
        label_above=_highest_near(answer, points, x_low, x_high),
        labels=_labels(result, points, [p.batch_size for p in (answer, fastest) if p]),
        x_low=x_low,
        x_high=x_high,
        ticks=ticks(sizes, x_low, x_high),
        predicted=result.predicted,
    )


def ticks(sizes: Sequence[int], x_low: float, x_high: float) -> tuple[int, ...]:
    """
    Choose the batch sizes written on a log2 axis: powers of two, or the sizes themselves where few powers fit.

    Example:
        >>> ticks([1, 64], 0.7, 90), ticks([96, 100, 104, 112], 90, 120)
        ((1, 2, 4, 8, 16, 32, 64), (96, 100, 104, 112))
    """
    powers = [2**k for k in range(max(0, math.ceil(math.log2(x_low))), math.floor(math.log2(x_high)) + 1)]
    if len(powers) >= 4:  # noqa: PLR2004 - fewer do not show that the axis is logarithmic
        step = math.ceil(len(powers) / _MAX_TICKS)
        return tuple(powers[::step])
    gap = math.log2(x_high / x_low) / _MAX_TICKS
    chosen: list[int] = []
    for size in sorted(set(sizes)):
        if not chosen or math.log2(size / chosen[-1]) >= gap:
            chosen.append(size)
    return tuple(chosen)


_GOALS = {"throughput": "samples per second by batch size", "latency": "time of one batch by batch size",
          "energy": "samples per joule by batch size"}  # fmt: skip


def _band(fastest: Point | None, result: BatchSizeResult) -> tuple[float, float] | None:
    if fastest is None:
        return None
    tolerance = result.tolerance or 0.0
    if result.objective == "latency":
        return fastest.value, fastest.value * (1 + tolerance)
    return fastest.value * (1 - tolerance), fastest.value


def _limit(result: BatchSizeResult, sizes: Sequence[int]) -> tuple[int, str] | None:
    """Return the largest batch that fits, unless it does not, or lies so far right that it would squeeze the curve."""
    largest = result.largest_batch_size
    if not largest or not sizes or largest > 4 * max(sizes) or ran_out_of_memory(result) is not None:
        return None
    memory = result.limits.get("memory_bytes")
    return largest, f"largest that fits{f' in {format_bytes(memory)}' if memory else ''}: {largest}"


def _x_range(sizes: Sequence[int]) -> tuple[float, float]:
    if not sizes:
        return 0.7, 1.5
    pad = 0.06 * math.log2(max(sizes) / min(sizes)) or 0.5
    return min(sizes) / 2**pad, max(sizes) * 2**pad


def _highest_near(answer: Point | None, points: Sequence[Point], x_low: float, x_high: float) -> float | None:
    if answer is None:
        return None
    reach = _LABEL_REACH * math.log(x_high / x_low)
    return max(point.high for point in points if abs(math.log(point.batch_size / answer.batch_size)) <= reach)


def _labels(result: BatchSizeResult, points: Sequence[Point], taken: Sequence[int]) -> tuple[tuple[Point, str], ...]:
    """Pick the steps that a reason explains: local peaks and falls beyond their intervals, largest first, apart."""
    steps = []
    for before, point, after in zip(points, points[1:], points[2:], strict=False):
        peak = point.low > before.high and point.low > after.high
        fall = point.high < before.low and point.high < after.low
        if not (peak or fall):
            continue
        prefixes = _OF_FALLS if fall else _OF_PEAKS
        telling = [r for prefix in prefixes for r in result.sizes[point.batch_size].reasons if r.startswith(prefix)]
        if telling:
            height = abs(point.value - (before.value + after.value) / 2) / point.value
            steps.append((height, point, telling[0]))
    gap = math.log2(points[-1].batch_size / points[0].batch_size) / 6 if points else 0.0
    placed = list(taken)
    chosen: list[tuple[Point, str]] = []
    for _, point, reason in sorted(steps, key=lambda step: -step[0]):
        if len(chosen) < _MAX_LABELS and all(abs(math.log2(point.batch_size / size)) >= gap for size in placed):
            placed.append(point.batch_size)
            chosen.append((point, reason))
    return tuple(sorted(chosen, key=lambda label: label[0].batch_size))
