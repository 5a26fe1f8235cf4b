"""
The content of the figure of a tuning result: points, intervals, tolerance band, labels and ticks.

`plot` draws it.
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
_LABEL_REACH = 0.2  # half the width of the label of the recommended size, as a share of the axis
# Beginnings of the reasons that explain a step of the curve.
_OF_PEAKS, _OF_FALLS = ("crest", "coulom", "tensor-core"), ("past crest", "coulom")


@attrs.frozen(kw_only=True)
class Point:
    """
    A measured or predicted batch size on the curve.

    Attributes:
        batch_size: Samples per step.
        value: The value in the unit of `Curve.y_label`.
        low, high: Ends of its interval; equal to `value` if unknown.
        is_ok: Whether its status is "ok", so that it can be recommended.
        tied: Whether it is tied with the fastest.
        label: Batch size and value: "batch 64: 27 462 samples/s".
    """

    batch_size: int
    value: float
    low: float
    high: float
    is_ok: bool
    tied: bool
    label: str


@attrs.frozen(kw_only=True)
class Curve:
    """
    The content of the figure of a result.

    Attributes:
        title, subtitle: Title and subtitle.
        y_label: Quantity and unit.
        log_y: Whether the y axis is logarithmic.
        points: Sizes with a value, ascending.
        absent: (batch size, reason) of the sizes without a timing, ascending.
        answer, fastest: Points of the recommended and the fastest size; None if there is none.
        band, band_label: Values within the tolerance of the best, None if there is no best; and the legend.
        limit: The largest batch that fits, if the axis reaches it, and its legend.
        label_above: The value above which the label of `answer` overlaps nothing; None without `answer`.
        labels: (point, reason) of the steps of the curve that a reason explains.
        x_low, x_high: Ends of the axis of batch sizes.
        ticks: Batch sizes at the ticks.
        predicted: Whether the values are predictions.
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
    """Return the content of the figure of a tuning result or prediction."""
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
                batch_size=n, value=value[0], low=value[1], high=value[2], is_ok=measurement.status == "ok",
                tied=n in tied, label=f"batch {n}: {format_objective(value[0], objective)}",
            )
        )  # fmt: skip
    by_size = {point.batch_size: point for point in points}
    answer, fastest = by_size.get(result.batch_size or 0), by_size.get(result.fastest_batch_size or 0)
    sizes = list(result.sizes)
    if not result.recommended:
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
    Return the batch sizes at the ticks of a log2 axis: powers of two, or the sizes themselves on a short axis.

    Example:
        >>> ticks([1, 64], 0.7, 90), ticks([96, 100, 104, 112], 90, 120)
        ((1, 2, 4, 8, 16, 32, 64), (96, 100, 104, 112))
    """
    powers = [2**k for k in range(max(0, math.ceil(math.log2(x_low))), math.floor(math.log2(x_high)) + 1)]
    if len(powers) >= 4:  # noqa: PLR2004 - fewer ticks do not show a logarithmic axis
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
    """Return the largest batch that fits, unless it ran out of memory or is far to the right of the curve."""
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
    """Return the largest steps of the curve that a reason explains, with a minimum distance."""
    steps = []
    for before, point, after in zip(points, points[1:], points[2:], strict=False):
        peak = point.low > before.high and point.low > after.high
        fall = point.high < before.low and point.high < after.low
        if not (peak or fall):
            continue
        prefixes = _OF_FALLS if fall else _OF_PEAKS
        explaining = [r for prefix in prefixes for r in result.sizes[point.batch_size].reasons if r.startswith(prefix)]
        if explaining:
            height = abs(point.value - (before.value + after.value) / 2) / point.value
            steps.append((height, point, explaining[0]))
    gap = math.log2(points[-1].batch_size / points[0].batch_size) / 6 if points else 0.0
    placed = list(taken)
    chosen: list[tuple[Point, str]] = []
    for _, point, reason in sorted(steps, key=lambda step: -step[0]):
        if len(chosen) < _MAX_LABELS and all(abs(math.log2(point.batch_size / size)) >= gap for size in placed):
            placed.append(point.batch_size)
            chosen.append((point, reason))
    return tuple(sorted(chosen, key=lambda label: label[0].batch_size))
