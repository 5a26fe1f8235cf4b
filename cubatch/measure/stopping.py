"""Confidence intervals of medians and shifts by order statistics, which assume no distribution of the noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.9
MIN_ROUNDS = 5  # fewest timings whose range holds the median with CONFIDENCE: 1 - 2 / 2**5 = 94 %
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


def shift_interval(
    first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float, float] | None:
    """
    Return the shift of `first` against `second`, two independent samples of any distribution, with an interval.

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
    """Return for u = 0 to n * m the number of orders of n and m values with u pairs whose first value is larger."""
    # Partitions of u into at most n parts of at most m each: the coefficients of a Gaussian binomial, by its product.
    counts = [1] + [0] * (n * m)
    for part in range(1, n + 1):
        for u in range(n * m, m + part - 1, -1):
            counts[u] -= counts[u - m - part]
        for u in range(part, n * m + 1):
            counts[u] += counts[u - part]
    return counts
