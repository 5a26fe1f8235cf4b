"""
When enough has been measured: the rules, apart from the measuring.

They see numbers and give verdicts with their reasons, so that a test can put any history before
them.  All of them rest on order statistics and assume nothing of how the noise is distributed.
Costs are those of `goal.Goal`: less is better.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import attrs
from attrs import field

from cubatch.measure.goal import Goal
from cubatch.units import format_percent

CONFIDENCE = 0.9
MIN_ROUNDS = 5  # the fewest timings whose range holds the median with CONFIDENCE: 1 - 2 / 2**5 = 94 %
MAX_ROUNDS = 30  # noise that 30 rounds do not average away will not be by 60
MIN_ROUNDS_TO_DROP = 3
DROP_MARGIN = 0.05  # three timings say little: the gap must be far beyond what the tolerance gives away
TO_SD = 1.4826  # median distance from the middle to the standard deviation, of normal noise
MEDIAN_SD = 1.2533  # how much less sure than a mean a median is, of normal noise


def median(values: Sequence[float]) -> float:
    """Return the median; of an even number, the mean of the middle two."""
    return statistics.median(values)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """
    Return an interval that contains the true median with at least this confidence, for any distribution.

    The interval [k-th smallest, k-th largest] fails to hold it only if fewer than k of n independent timings
    fall on one side of it, which has the probability 2 * P(Binomial(n, 1/2) < k).  No k meets the confidence
    exactly, so between the two nearest to it the ends are interpolated (Hettmansperger and Sheather 1986, Statistics
    & Probability Letters 4), which holds what it says within a percent for all but freakish noise.

    Returns:
        (low, high), or None where even the whole range is not that sure: under 5 values for 90 %.

    Example:
        >>> low, high = median_interval([3.0, 1.0, 2.0, 5.0, 4.0])
        >>> round(low, 2), round(high, 2)
        (1.35, 4.65)
        >>> median_interval([1.0, 2.0, 3.0, 4.0]) is None
        True
    """
    n = len(values)
    sure, k = 1.0, 0
    while True:
        less_sure = sure - 2 * math.comb(n, k) / 2**n  # of the interval between the values of rank k + 1
        if less_sure < confidence:
            break
        sure, k = less_sure, k + 1
    if k == 0:
        return None
    ranked = sorted(values)
    part = (sure - confidence) / (sure - less_sure)
    share = (n - k) * part / (k + (n - 2 * k) * part)
    low = ranked[k - 1] + share * (ranked[k] - ranked[k - 1])  # of equal values it is they, to the bit
    high = ranked[n - k] - share * (ranked[n - k] - ranked[n - k - 1])
    return low, high


@attrs.define
class StopRule:
    """
    Decides when the median cost of one candidate is known well enough.

    Finished when the interval of the median is at most `target_width` of it, after MIN_ROUNDS
    timings at least; or after MAX_ROUNDS, throttled ones included.  Throttled timings do not count,
    unless twice MIN_ROUNDS of them came and no other: then they are all there is.

    Args:
        target_width: Width of the interval as a share of the median.

    Example:
        >>> rule = StopRule(target_width=0.01)
        >>> for seconds in (1.000, 1.001, 1.002, 1.003, 1.004):
        ...     rule.add(seconds)
        >>> rule.is_finished(), rule.reason
        (True, 'the median is known to 0.329 % after 5 timings, 1 % was asked')
    """

    target_width: float
    _clear: list[float] = field(factory=list, init=False)
    _throttled: list[float] = field(factory=list, init=False)
    _attempts: int = field(default=0, init=False)

    def add(self, cost: float | None, *, throttled: bool = False) -> None:
        """Take in a timing; None is one without a reading of the objective (energy)."""
        self._attempts += 1
        if cost is not None:
            (self._throttled if throttled else self._clear).append(cost)

    @property
    def costs(self) -> Sequence[float]:
        """The costs that count."""
        return self._clear or self._throttled

    @property
    def median(self) -> float | None:
        """The median cost, None before the first that counts."""
        return median(self.costs) if self.costs else None

    @property
    def range(self) -> tuple[float, float]:
        """Where the median lies: its interval, or with few timings all that was seen."""
        return median_interval(self.costs) or (min(self.costs), max(self.costs))

    @property
    def width(self) -> float | None:
        """Width of the median's interval as a share of the median; None where it is not known yet."""
        interval = median_interval(self.costs)
        return (interval[1] - interval[0]) / median(self.costs) if interval else None

    def is_finished(self) -> bool:
        """Return whether nothing more is gained by measuring."""
        if self._attempts >= MAX_ROUNDS:
            return True
        if not self._clear:
            return len(self._throttled) >= 2 * MIN_ROUNDS
        return len(self._clear) >= MIN_ROUNDS and self.width is not None and self.width <= self.target_width

    @property
    def reason(self) -> str:
        """Say in words how well the median is known, and from what."""
        asked = f"{100 * self.target_width:g} % was asked"
        count = "1 timing" if len(self.costs) == 1 else f"{len(self.costs)} timings"
        known = f"the median is known to {format_percent(self.width)}" if self.width is not None else "no interval"
        text = f"{known} after {count}, {asked}"
        if not self._clear and self._throttled:
            return f"{text}; all of them were throttled and count for want of others"
        if self._throttled:
            return f"{text}; {len(self._throttled)} more were throttled and do not count"
        return text


def is_clearly_worse(rule: StopRule, leader: StopRule, goal: Goal) -> bool:
    """
    Return whether a candidate can no longer be the answer: all of its range is worse than the tolerance allows.

    Both need MIN_ROUNDS_TO_DROP timings that count, and the gap between the ranges must exceed what
    the tolerance gives away by DROP_MARGIN.
    """
    if min(len(rule.costs), len(leader.costs)) < MIN_ROUNDS_TO_DROP:
        return False
    return rule.range[0] > goal.allowed(leader.range[1]) * (1 + DROP_MARGIN)


def paired_interval(first: Mapping[int, float], second: Mapping[int, float]) -> tuple[float, float] | None:
    """
    Return an interval for log(first / second) from the rounds that both have.

    Differences within a round are free of what changes from round to round, such as a sinking clock.
    It is the interval of the median of the log ratios; under MIN_ROUNDS pairs their whole range.

    Args:
        first: Costs or seconds by round.
        second: The same of what it is compared with.

    Returns:
        (low, high), or None without a common round.

    Example:
        >>> paired_interval({0: 1.0, 1: 2.0}, {0: 1.0, 1: 1.0, 2: 5.0})
        (0.0, 0.6931471805599453)
    """
    ratios = [math.log(first[number] / second[number]) for number in sorted(first.keys() & second.keys())]
    if not ratios:
        return None
    return median_interval(ratios) or (min(ratios), max(ratios))


def shift_interval(
    first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float, float] | None:
    """
    Return by how much values lie above others, and an interval for it, of independent samples of any distribution.

    The estimate of Hodges and Lehmann (1963, Annals of Mathematical Statistics 34): the median of all differences.
    The interval leaves as many differences out at either end as the rank test of Mann and Whitney allows, so that it
    holds the shift with at least this confidence where both distributions differ by a shift only.

    Returns:
        (estimate, low, high), or None where even all differences are not that sure: under 3 values each for 90 %.

    Example:
        >>> shift_interval([11.0, 12.0, 13.0], [1.0, 2.0, 3.0])
        (10.0, 8.0, 12.0)
        >>> shift_interval([11.0, 12.0], [1.0, 2.0, 3.0]) is None
        True
    """
    n, m = len(first), len(second)
    differences = sorted(a - b for a in first for b in second)
    total, allowed = math.comb(n + m, n), (1 - confidence) / 2 * (1 + 1e-9)  # rounding of 1 - 0.9
    below, left_out = 0, 0  # orders of the values with fewer pairs in favour of one side; differences left out
    for ways in _rank_orders(n, m):
        below += ways
        if below > allowed * total:
            break
        left_out += 1
    if left_out == 0:
        return None
    return median(differences), differences[left_out - 1], differences[-left_out]


def _rank_orders(n: int, m: int) -> list[int]:
    """Count the orders of n and m values in which 0, 1, ... n * m pairs favour the first: Mann and Whitney's U."""
    # Partitions of u into at most n parts of at most m each: the coefficients of a Gaussian binomial, by its product.
    counts = [1] + [0] * (n * m)
    for part in range(1, n + 1):
        for u in range(n * m, m + part - 1, -1):
            counts[u] -= counts[u - m - part]
        for u in range(part, n * m + 1):
            counts[u] += counts[u - part]
    return counts
