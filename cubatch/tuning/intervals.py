"""
Where a median lies, and the ratio of two: what readings leave open, and what visits do.

The readings of one visit share its place in memory and the state of the machine at that time: however many there are,
together they tell no more than that visit can.  How far visits scatter is taken from all sizes that were visited again;
what that leaves open after so many visits is added to the interval of the readings, as variances are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from cubatch.measure import stopping
from cubatch.measure.records import PER_VISIT

Interval = tuple[float, float]

_Z = statistics.NormalDist().inv_cdf((1 + stopping.CONFIDENCE) / 2)
_FEW_DEGREES = {1: 6.314 / _Z, 2: 2.920 / _Z}  # of Student's t, which the expansion falls short of there
_FAR, _LEAST_SD = 3.0, 0.001


def visit_sd(sizes: Iterable[Sequence[Sequence[float]]]) -> float:
    """
    Say how far what visits tell scatters, as a share, so that 1.645 times that holds nine of ten.

    It is the pooled standard deviation of the logarithms of visits' medians from those of their sizes, less what
    readings explain of it; and more by as much as a quantile of Student's t is above one of the normal distribution,
    where few visits tell (expansion 26.7.5 of Abramowitz and Stegun, Handbook of Mathematical Functions).  What is
    farther off than three times what is usual counts as if it were that far: what one size does at times, or a cold
    process in the first visit, is no scatter of the others.

    Args:
        sizes: Of each size the readings of its visits.

    Returns:
        float: 0 where no size was visited twice: nothing tells then.

    Example:
        >>> visit_sd([[[1.0, 1.0], [1.0, 1.0]], [[2.0]]])
        0.0
        >>> round(visit_sd([[[1.0], [1.02]]] * 100), 3)
        0.014
    """
    degrees, own, between, shares = 0, list[float](), list[float](), list[float]()
    for visits in sizes:
        logs = [[math.log(value) for value in visit] for visit in visits]
        own += [distance for visit in logs for distance in _distances(visit)]
        between += _distances([stopping.median(visit) for visit in logs])
        degrees += max(0, len(logs) - 1)
        if len(logs) > 1:
            shares += [(stopping.MEDIAN_SD**2 if len(visit) > 2 else 1.0) / len(visit) for visit in logs]  # noqa: PLR2004
    if not degrees:
        return 0.0
    explained = _variance(own) * statistics.fmean(shares) if own else 0.0
    variance = _variance(between)
    student = 1 + (_Z**2 + 1) / (4 * degrees) + (5 * _Z**4 + 16 * _Z**2 + 3) / (96 * degrees**2)
    return _FEW_DEGREES.get(degrees, student) * math.sqrt(max(variance - explained, 0.0))


def _distances(values: Sequence[float]) -> list[float]:
    """Give how far values lie from their mean, made up for its having been drawn to them; nothing of a single one."""
    if len(values) < 2:  # noqa: PLR2004
        return []
    mean, share = statistics.fmean(values), math.sqrt(len(values) / (len(values) - 1))
    return [abs(value - mean) * share for value in values]


def _variance(distances: Sequence[float]) -> float:
    farthest = _FAR * max(stopping.TO_SD * stopping.median(distances), _LEAST_SD)
    return statistics.fmean(min(distance, farthest) ** 2 for distance in distances)


def of_median(
    values: Sequence[float], visits: int, scatter: float, confidence: float = stopping.CONFIDENCE
) -> Interval | None:
    """
    Give an interval for the median of readings above 0.

    Args:
        values: The readings, of all visits.
        visits: How many visits they are of.
        scatter: How far visits scatter, as `visit_sd` gives it.
        confidence: Of the interval.

    Returns:
        (low, high), or None where there are too few readings: under 5 for 90 %.

    Example:
        >>> low, high = of_median([1.0] * 5, visits=4, scatter=0.02)
        >>> round(math.log(high), 4) == round(-math.log(low), 4) == round(1.645 * 0.02 / 2, 4)
        True
    """
    interval = stopping.median_interval(values, confidence)
    return _widened(values, interval, scatter / math.sqrt(visits)) if interval else None


def of_few(values: Sequence[float], visits: int, scatter: float) -> Interval:
    """Give the same, or of readings that are too few all that was seen and what visits leave open."""
    interval = stopping.median_interval(values) or (min(values), max(values))
    return _widened(values, interval, scatter / math.sqrt(visits))


def of_ratio(first: Mapping[int, float], second: Mapping[int, float], scatter: float) -> Interval | None:
    """
    Give an interval for log(first / second) from the rounds that both have.

    What a sweep changes for all, such as a sinking clock, is no difference within it: where both were visited in five
    sweeps or more, it is the interval of the median of their differences, however visits scatter.

    Args:
        first: Costs or seconds by round.
        second: The same of what it is compared with.
        scatter: As of `of_median`.

    Returns:
        (low, high), or None without a common round.
    """
    interval = stopping.paired_interval(first, second)
    if interval is None:
        return None
    sweeps: dict[int, list[float]] = {}
    for number in sorted(first.keys() & second.keys()):
        sweeps.setdefault(number // PER_VISIT, []).append(math.log(first[number] / second[number]))
    of_sweeps = stopping.median_interval([stopping.median(ratios) for ratios in sweeps.values()])
    if of_sweeps is not None:
        return of_sweeps
    middle = stopping.median([ratio for ratios in sweeps.values() for ratio in ratios])
    return _around(middle, interval, scatter * math.sqrt(2 / len(sweeps)))


def _widened(values: Sequence[float], interval: Interval, sd: float) -> Interval:
    if not sd:
        return interval
    low, high = (math.log(end) for end in interval)
    low, high = _around(math.log(stopping.median(values)), (low, high), sd)
    return math.exp(low), math.exp(high)


def _around(middle: float, interval: Interval, sd: float) -> Interval:
    """Add what scatters around the middle with this standard deviation."""
    return middle - math.hypot(middle - interval[0], _Z * sd), middle + math.hypot(interval[1] - middle, _Z * sd)
