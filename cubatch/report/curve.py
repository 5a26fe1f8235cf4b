"""
The content of the figure of a tuning result: points, intervals, tolerance band and labels.

`plot` draws it.
"""

from __future__ import annotations

import math

from cubatch.report.plots.lines import Dot
from cubatch.tuning.explain import ran_out_of_memory
from cubatch.tuning.results import BatchSizeResult
from cubatch.units import OBJECTIVE_UNITS, format_bytes

RULED_OUT = "ruled out by neighbors"  # dropped without a timing
_STATUS_WORDS = {
    "dropped": RULED_OUT,
    "out_of_memory": "out of memory",
    "over_limit": "over the limit",
    "not_run": "not run",
    "timeout": "timed out",
    "error": "error",
    "interrupted": "interrupted",
}
_MAX_LABELS = 4
_LABEL_REACH = 0.2  # half the width of the label of the recommended size, as a share of the axis
# Beginnings of the reasons that explain a step of the curve.
_OF_PEAKS, _OF_FALLS = ("crest", "coulom", "tensor-core"), ("past crest", "coulom")
_GOALS = {"throughput": "samples per second by batch size", "latency": "time of one batch by batch size",
          "energy": "samples per joule by batch size"}  # fmt: skip


class Curve:
    """
    The values, labels and axes of the figure of a tuning result or prediction.

    Attributes:
        result: The tuning result or prediction.
        points: Points of the batch sizes with a value of the objective, ascending.
        absent: (batch size, reason) of the batch sizes without a timing, ascending.
        answer, fastest: Points of the recommended and the fastest size; None if there is none.
    """

    def __init__(self, result: BatchSizeResult) -> None:
        self.result = result
        self.points: list[Dot] = []
        self.absent: list[tuple[int, str]] = []
        for n, m in result.sizes.items():
            if (value := m.value(result.objective)) is not None:
                self.points.append(
                    Dot(batch_size=n, value=value[0], low=value[1], high=value[2], is_ok=m.status == "ok")
                )
            else:
                self.absent.append((n, _STATUS_WORDS.get(m.status, "not run")))
        shown = {point.batch_size: point for point in self.points if result.recommended}
        self.answer = shown.get(result.batch_size or 0)
        self.fastest = shown.get(result.fastest_batch_size or 0)

    @property
    def title(self) -> str:
        """Title of the figure: the network, the quantity, and whether it is predicted."""
        return (
            "Predicted: " if self.result.predicted else ""
        ) + f"{self.result.subject}, {_GOALS[self.result.objective]}"

    @property
    def y_label(self) -> str:
        """Label of the y axis: the unit, and whether the values are measured or predicted."""
        word = "predicted" if self.result.predicted else "measured"
        return f"{OBJECTIVE_UNITS[self.result.objective]} ({word})"

    @property
    def log_y(self) -> bool:
        """Whether the y axis is logarithmic: for latencies of which the longest is over 20 times the shortest."""
        values = [point.value for point in self.points if point.value > 0]
        return self.result.objective == "latency" and bool(values) and max(values) > 20 * min(values)

    @property
    def tied(self) -> list[Dot]:
        """Points of batch sizes whose difference from the fastest may be noise, without the fastest."""
        return [p for p in self.points if p.batch_size in self.result.ties and p is not self.fastest]

    @property
    def band(self) -> tuple[float, float] | None:
        """Lowest and highest value of the objective within the tolerance of the fastest size; None if there is none."""
        if self.fastest is None:
            return None
        value, tolerance = self.fastest.value, self.result.tolerance or 0.0
        return (
            (value, value * (1 + tolerance)) if self.result.objective == "latency" else (value * (1 - tolerance), value)
        )

    @property
    def limit(self) -> tuple[int, str] | None:
        """
        The largest batch size that fits, and its text in the legend.

        None if it is unknown, larger than four times the largest candidate, or if a size up to it ran out of memory.
        """
        largest, sizes = self.result.largest_batch_size, self.result.sizes
        if not largest or not sizes or largest > 4 * max(sizes) or ran_out_of_memory(self.result) is not None:
            return None
        memory = self.result.limits.get("memory_bytes")
        return largest, f"largest that fits{f' in {format_bytes(memory)}' if memory else ''}: {largest}"

    @property
    def x_range(self) -> tuple[float, float]:
        """Batch sizes, not rounded to whole samples, at the left and at the right end of the axis."""
        sizes = [*self.result.sizes, *(self.limit or ())[:1]]
        if not sizes:
            return 0.7, 1.5
        pad = 0.06 * math.log2(max(sizes) / min(sizes)) or 0.5
        return min(sizes) / 2**pad, max(sizes) * 2**pad

    @property
    def label_above(self) -> float | None:
        """Upper end of the intervals near `answer`, above which its label overlaps none; None without `answer`."""
        if self.answer is None:
            return None
        (low, high), n = self.x_range, self.answer.batch_size
        reach = _LABEL_REACH * math.log(high / low)
        return max(point.high for point in self.points if abs(math.log(point.batch_size / n)) <= reach)

    @property
    def labels(self) -> list[tuple[Dot, str]]:
        """
        The largest peaks and drops of the curve whose cause is known, each with the cause as text.

        There are at most four, ascending. A point is left out if it is near the recommended or fastest size, or near a
        larger peak or drop.
        """
        steps = []
        for before, point, after in zip(self.points, self.points[1:], self.points[2:], strict=False):
            peak = point.low > before.high and point.low > after.high
            fall = point.high < before.low and point.high < after.low
            if not (peak or fall):
                continue
            reasons = self.result.sizes[point.batch_size].reasons
            explaining = [r for prefix in (_OF_FALLS if fall else _OF_PEAKS) for r in reasons if r.startswith(prefix)]
            if explaining:
                height = abs(point.value - (before.value + after.value) / 2) / point.value
                steps.append((height, point, explaining[0]))
        gap = math.log2(self.points[-1].batch_size / self.points[0].batch_size) / 6 if self.points else 0.0
        placed = [point.batch_size for point in (self.answer, self.fastest) if point]
        chosen: list[tuple[Dot, str]] = []
        for _, point, reason in sorted(steps, key=lambda step: -step[0]):
            if len(chosen) < _MAX_LABELS and all(abs(math.log2(point.batch_size / size)) >= gap for size in placed):
                placed.append(point.batch_size)
                chosen.append((point, reason))
        return sorted(chosen, key=lambda label: label[0].batch_size)
