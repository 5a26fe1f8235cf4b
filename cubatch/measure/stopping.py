"""
Intervals of medians and shifts, and a rule for when a median is known well enough.

All use order statistics, which assume no distribution of the noise.
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
MIN_ROUNDS = 5  # fewest timings whose range holds the median with CONFIDENCE: 1 - 2 / 2**5 = 94 %
MAX_ROUNDS = 30  # more rounds do not average out noise that 30 leave
MIN_ROUNDS_TO_DROP = 3
DROP_MARGIN = 0.05  # gap beyond the tolerance, because three timings are few
TO_SD = 1.4826  # median distance from the middle to the standard deviation, of normal noise
MEDIAN_SD = 1.2533  # how much less sure than a mean a median is, of normal noise


def median(values: Sequence[float]) -> float:
    """Return the median; of an even number, the mean of the middle two."""
    return statistics.median(values)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """
    Return an interval that contains the true median with at least this confidence, for any distribution.

    The interval [k-th smallest, k-th largest] misses it if fewer than k of n independent timings fall on one side.  The
    probability of that is 2 * P(Binomial(n, 1/2) < k).  No k has exactly this confidence, so the ends are interpolated
    between the two nearest (Hettmansperger and Sheather 1986, Statistics & Probability Letters 4).

    Returns:
        (low, high); None if even the whole range has less confidence: below 5 values for 90 %.

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
    Decide when the median cost of a candidate is known well enough.

    That is after at least MIN_ROUNDS timings, once the interval of the median is at most `target_width` of it, or after
    MAX_ROUNDS.  Throttled timings count only if there are twice MIN_ROUNDS of them and no others.

    Args:
        target_width: Width of the interval as a share of the median.

    Example:
        >>> rule = StopRule(target_width=0.01)
        >>> for seconds in (1.000, 1.001, 1.002, 1.003, 1.004):
        ...     rule.add(seconds)
        >>> rule.is_finished(), rule.reason
        (True, 'the median is known to 0.329 % after 5 timings, the target is 1 %')
    """

    target_width: float
    _clear: list[float] = field(factory=list, init=False)
    _throttled: list[float] = field(factory=list, init=False)
    _attempts: int = field(default=0, init=False)

    def add(self, cost: float | None, *, throttled: bool = False) -> None:
        """Add a timing; None is one without a value of the objective (energy)."""
        self._attempts += 1
        if cost is not None:
            (self._throttled if throttled else self._clear).append(cost)

    @property
    def costs(self) -> Sequence[float]:
        """The costs that count."""
        return self._clear or self._throttled

    @property
    def median(self) -> float | None:
        """The median cost; None without a cost that counts."""
        return median(self.costs) if self.costs else None

    @property
    def range(self) -> tuple[float, float]:
        """The interval of the median, or the whole range of few timings."""
        return median_interval(self.costs) or (min(self.costs), max(self.costs))

    @property
    def width(self) -> float | None:
        """Width of the interval as a share of the median; None if unknown."""
        interval = median_interval(self.costs)
        return (interval[1] - interval[0]) / median(self.costs) if interval else None

    def is_finished(self) -> bool:
        """Return whether the median is known well enough."""
        if self._attempts >= MAX_ROUNDS:
            return True
        if not self._clear:
            return len(self._throttled) >= 2 * MIN_ROUNDS
        return len(self._clear) >= MIN_ROUNDS and self.width is not None and self.width <= self.target_width

    @property
    def reason(self) -> str:
        """How well the median is known, as text."""
        target = f"the target is {100 * self.target_width:g} %"
        count = "1 timing" if len(self.costs) == 1 else f"{len(self.costs)} timings"
        known = f"the median is known to {format_percent(self.width)}" if self.width is not None else "no interval"
        text = f"{known} after {count}, {target}"
        if not self._clear and self._throttled:
            return f"{text}; all of them were throttled"
        if self._throttled:
            return f"{text}; {len(self._throttled)} more were throttled and do not count"
        return text


def is_clearly_worse(rule: StopRule, leader: StopRule, goal: Goal) -> bool:
    """
    Return whether a candidate is worse than the leader by more than the tolerance and DROP_MARGIN.

    The ranges of both are compared, each of at least MIN_ROUNDS_TO_DROP timings that count.
    """
    if min(len(rule.costs), len(leader.costs)) < MIN_ROUNDS_TO_DROP:
        return False
    return rule.range[0] > goal.allowed(leader.range[1]) * (1 + DROP_MARGIN)


def paired_interval(first: Mapping[int, float], second: Mapping[int, float]) -> tuple[float, float] | None:
    """
    Return an interval for log(first / second) from the rounds that both have.

    Differences within a round do not contain changes between rounds, such as a falling clock.  The interval is that of
    the median log ratio; with fewer than MIN_ROUNDS pairs it is their whole range.

    Args:
        first, second: Costs or seconds by round.

    Returns:
        (low, high); None without a common round.

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
    Return the shift between two independent samples of any distribution, with an interval.

    The estimate is the median of all differences (Hodges and Lehmann 1963, Annals of Mathematical Statistics 34).  The
    ends of the interval leave out as many differences as the rank test of Mann and Whitney allows.  It has at least
    this confidence if the distributions differ only by a shift.

    Returns:
        (estimate, low, high); None if even all differences have less confidence: below 3 values each for 90 %.

    Example:
        >>> shift_interval([11.0, 12.0, 13.0], [1.0, 2.0, 3.0])
        (10.0, 8.0, 12.0)
        >>> shift_interval([11.0, 12.0], [1.0, 2.0, 3.0]) is None
        True
    """
    n, m = len(first), len(second)
    differences = sorted(a - b for a in first for b in second)
    total, allowed = math.comb(n + m, n), (1 - confidence) / 2 * (1 + 1e-9)  # rounding of 1 - 0.9
    below, left_out = 0, 0  # orders with fewer pairs in favor of one side; number of differences left out
    for ways in _rank_orders(n, m):
        below += ways
        if below > allowed * total:
            break
        left_out += 1
    if left_out == 0:
        return None
    return median(differences), differences[left_out - 1], differences[-left_out]


def _rank_orders(n: int, m: int) -> list[int]:
    """Return the number of orders of n and m values in which 0, 1, ... n * m pairs favor the first."""
    # Partitions of u into at most n parts of at most m each: the coefficients of a Gaussian binomial, by its product.
    counts = [1] + [0] * (n * m)
    for part in range(1, n + 1):
        for u in range(n * m, m + part - 1, -1):
            counts[u] -= counts[u - m - part]
        for u in range(part, n * m + 1):
            counts[u] += counts[u - part]
    return counts
