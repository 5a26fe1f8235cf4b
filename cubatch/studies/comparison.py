"""Whether one batch size is as fast as another, by visits that sweeps spread evenly over a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from cubatch.measure import stopping
from cubatch.measure.records import PER_VISIT
from cubatch.tuning.results import Measurement

TOLERANCE = 0.01
WIDE = 0.02  # half an interval, of a verdict that is worth a warning


@attrs.frozen(kw_only=True)
class Comparison:
    """
    A size beside another.

    Attributes:
        batch_size, beside: The two sizes.
        ratio: Samples per second of the size over those of the other.
        interval: Where the ratio lies, with 90 % confidence.
        visits: To the size, and to the other.
        verdict: "same", "faster" or "slower".
    """

    batch_size: int
    beside: int
    ratio: float
    interval: tuple[float, float]
    visits: tuple[int, int]
    verdict: str


def compare(size: Measurement, other: Measurement, tolerance: float = TOLERANCE) -> Comparison | None:
    """
    Say whether a size is as fast as another.

    The medians of their visits, which sweeps spread evenly over the run, are two samples; the ratio and its 90 %
    interval are those of `stopping.shift_interval`, of logarithms.  The size is faster, or slower, where the interval
    does not hold 1 and the ratio is further from 1 than the tolerance; else they are the same.

    Returns:
        Comparison, or None where there were too few visits to tell: under 3 to each.
    """
    rates, reference = _log_rates(size), _log_rates(other)
    shift = stopping.shift_interval(rates, reference)
    if shift is None:
        return None
    ratio, low, high = (math.exp(value) for value in shift)
    verdict = "same"
    if low > 1 and ratio > 1 + tolerance:
        verdict = "faster"
    elif high < 1 and ratio < 1 - tolerance:
        verdict = "slower"
    return Comparison(
        batch_size=size.batch_size, beside=other.batch_size, ratio=ratio, interval=(low, high),
        visits=(len(rates), len(reference)), verdict=verdict,
    )  # fmt: skip


def is_wide(interval: Sequence[float]) -> bool:
    """Say whether an interval is so wide that "same" only means that no difference shows."""
    low, high = interval
    return high - low > 2 * WIDE


def _log_rates(measurement: Measurement) -> list[float]:
    """Give the logarithm of the samples per second of each visit."""
    found: dict[int, list[float]] = {}
    for number, seconds in zip(measurement.timings_rounds or (), measurement.timings_seconds, strict=True):
        found.setdefault(number // PER_VISIT, []).append(seconds)
    return [math.log(measurement.batch_size / stopping.median(those)) for those in found.values()]
