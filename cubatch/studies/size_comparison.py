"""Comparison of two batch sizes whose trials are spread evenly over a run, and the sentences about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

from cubatch.measure import stopping
from cubatch.measure.records import PER_TRIAL
from cubatch.report.tables.study import signed
from cubatch.studies.study_request import TOO_FEW_TRIALS
from cubatch.tuning.results import Measurement
from cubatch.units import format_percent, join_words

TOLERANCE = 0.01
WIDE = 0.02
"""Half the width of an interval from which on two sizes are not called equally fast."""


@attrs.frozen(kw_only=True)
class SizeComparison:
    """
    The throughput of a batch size relative to that of a reference size.

    Attributes:
        batch_size, reference: The two sizes.
        ratio: Samples per second of the size over those of the reference.
        interval: The 90 % confidence interval of the ratio.
        trials: Number of trials of the size and of the reference.
        verdict: "same", "faster", "slower", or "unclear": no difference is certain, and the interval is wide.
        rule: Why these two sizes are compared; empty for a study with one rule only.
    """

    batch_size: int
    reference: int
    ratio: float
    interval: tuple[float, float]
    trials: tuple[int, int]
    verdict: str
    rule: str = ""

    def to_mapping(self) -> dict[str, Any]:
        """Return the attributes by name as a dict that JSON can hold."""
        return attrs.asdict(self) | {"interval": list(self.interval), "trials": list(self.trials)}


def compare(
    size: Measurement, other: Measurement, tolerance: float = TOLERANCE, *, rule: str = ""
) -> SizeComparison | None:
    """
    Return samples/s of a batch size over those of the size `other`; `rule` is the reason for the comparison.

    The medians of their trials are two samples; the ratio and its 90 % interval are those of
    `stopping.shift_interval`, of logarithms.  The size is faster, or slower, if the interval does not contain 1 and
    the ratio differs from 1 by more than the tolerance.

    Returns:
        SizeComparison, or None if one of the two has fewer than 3 trials.
    """
    rates, reference_rates = _log_rates(size), _log_rates(other)
    shift = stopping.shift_interval(rates, reference_rates)
    if shift is None:
        return None
    ratio, low, high = (math.exp(value) for value in shift)
    if low > 1 and ratio > 1 + tolerance:
        verdict = "faster"
    elif high < 1 and ratio < 1 - tolerance:
        verdict = "slower"
    else:
        verdict = "same" if high - low <= 2 * WIDE else "unclear"
    return SizeComparison(
        batch_size=size.batch_size,
        reference=other.batch_size,
        ratio=ratio,
        interval=(low, high),
        trials=(len(rates), len(reference_rates)),
        verdict=verdict,
        rule=rule,
    )


def _log_rates(measurement: Measurement) -> list[float]:
    trials: dict[int, list[float]] = {}
    for number, seconds in zip(measurement.timings_rounds or (), measurement.timings_seconds, strict=True):
        trials.setdefault(number // PER_TRIAL, []).append(seconds)
    return [math.log(measurement.batch_size / stopping.median(seconds)) for seconds in trials.values()]


def list_verdicts(comparisons: Sequence[SizeComparison]) -> str:
    """
    Return the comparisons as text, grouped by verdict.

    Example:
        >>> one = SizeComparison(batch_size=9, reference=8, ratio=0.95, interval=(0.94, 0.96), trials=(7, 7),
        ...                      verdict="slower")
        >>> list_verdicts([attrs.evolve(one, batch_size=7, verdict="same"), one])
        'equally fast: 7 vs 8; slower: 9 vs 8 (−5.0 %)'
    """  # noqa: RUF002 - a minus sign
    parts = []
    for verdict, label in (
        ("same", "equally fast"),
        ("faster", "faster"),
        ("slower", "slower"),
        ("unclear", "unclear"),
    ):
        named = [
            f"{c.batch_size} vs {c.reference}"
            + (f" ({signed(c.ratio - 1)})" if verdict in {"faster", "slower"} else "")
            for c in comparisons
            if c.verdict == verdict
        ]
        if named:
            parts.append(f"{label}: {join_words(named)}")
    return "; ".join(parts)


def answer_slower(comparisons: Sequence[SizeComparison]) -> str:
    """Return a sentence on whether the sizes are slower than their references: yes, no, unclear, or it depends."""
    verdicts = {c.verdict for c in comparisons}
    if not verdicts:
        return TOO_FEW_TRIALS
    if verdicts == {"slower"}:
        word = "Yes"
    elif verdicts <= {"same", "faster"}:
        word = "No"
    else:
        word = "It depends"
    listed = list_verdicts(comparisons)
    return f"{listed.capitalize() if verdicts == {'unclear'} else f'{word}; {listed}'}."


def doubts(comparisons: Sequence[SizeComparison], missing: Sequence[tuple[int, int]]) -> list[str]:
    """Return sentences on comparisons with a wide interval, and on `missing` (size, reference) with too few trials."""
    lines = []
    if any(c.verdict == "unclear" for c in comparisons):
        lines.append(
            f"Unclear means: the interval of the ratio is wider than ± {format_percent(WIDE)} and no difference is "
            "certain. An idle machine narrows it."
        )
    if missing:
        pairs = join_words([f"{size} vs {reference}" for size, reference in missing])
        lines.append(f"Not compared: {pairs}; the budget allowed too few trials.")
    return lines
