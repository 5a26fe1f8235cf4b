"""Intervals of medians and shifts."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cubatch.measure import stopping

COSTS = st.floats(min_value=1e-9, max_value=1e9)


def rank_interval(n: int, k: int) -> float:
    """How often the values of rank k and n + 1 - k hold the median: not fewer than k of n coins on either side."""
    return 1 - 2 * sum(math.comb(n, j) for j in range(k)) / 2**n


@pytest.mark.parametrize("n", range(5, 41))
def test_the_interval_lies_between_those_of_the_sign_test(n: int) -> None:
    """
    Its ends lie between the two pairs of ranks whose exact confidences hold 90 % between them, where Hettmansperger
    and Sheather put them: share = (n - k) I / (k + (n - 2 k) I), I the part of the confidence that may be given up.
    """
    wide = next(k for k in range(n) if rank_interval(n, k + 1) < 0.9)
    ranked = np.exp(np.random.default_rng(n).standard_normal(n)).cumsum()  # ascending, unevenly
    low, high = stopping.median_interval(np.random.default_rng(0).permutation(ranked).tolist()) or (0.0, 0.0)
    assert ranked[wide - 1] <= low <= ranked[wide]
    assert ranked[n - wide - 1] <= high <= ranked[n - wide]
    part = (rank_interval(n, wide) - 0.9) / (rank_interval(n, wide) - rank_interval(n, wide + 1))
    share = (n - wide) * part / (wide + (n - 2 * wide) * part)
    assert low == pytest.approx(ranked[wide - 1] + share * (ranked[wide] - ranked[wide - 1]))
    assert high == pytest.approx(ranked[n - wide] - share * (ranked[n - wide] - ranked[n - wide - 1]))


@pytest.mark.parametrize("draw", ["standard_normal", "standard_exponential"])
@pytest.mark.parametrize("n", [5, 6, 7, 8, 9, 10, 12, 15, 20, 25, 30])
def test_the_interval_holds_the_true_median_as_often_as_it_says(n: int, draw: str) -> None:
    """
    Of 4 000 draws from a symmetric and a skewed distribution, 88 to 92 % of the intervals hold the median.

    The standard error of that share is 0.5 %, four of which would be all of the 2 % on either side; the draws are
    the same each time.
    """
    draws = getattr(np.random.default_rng(n), draw)((4000, n))
    true = 0.0 if draw == "standard_normal" else math.log(2)
    held = [low <= true <= high for low, high in (stopping.median_interval(row.tolist()) or (9, 9) for row in draws)]
    assert 0.88 <= np.mean(held) <= 0.92


@given(st.lists(COSTS, min_size=5, max_size=40), st.floats(0.8, 0.93))
def test_the_interval_holds_the_median_and_grows_with_what_is_asked(values: list[float], confidence: float) -> None:
    """The sample's own median lies inside, all of it inside the range, and more confidence is a wider interval."""
    low, high = stopping.median_interval(values, confidence) or (0.0, 0.0)
    wider = stopping.median_interval(values, 0.9375) or (0.0, 0.0)  # 1 - 2 / 2**5: the range of five
    slack = 1e-9 * max(values)
    assert min(values) - slack <= wider[0] <= low + slack
    assert low - slack <= stopping.median(values) <= high + slack
    assert high - slack <= wider[1] <= max(values) + slack


def test_the_range_of_five_is_an_interval_of_its_own_confidence() -> None:
    """1 - 2 / 2**5 is met by the range exactly; beyond it there is no interval."""
    assert stopping.median_interval([1.0, 2.0, 3.0, 4.0, 5.0], 1 - 2 / 2**5) == (1.0, 5.0)
    assert stopping.median_interval([1.0, 2.0, 3.0, 4.0, 5.0], 0.94) is None


@pytest.mark.parametrize("n", [0, 1, 4])
def test_too_few_values_have_no_interval(n: int) -> None:
    """Under five values not even their range holds the median nine times in ten."""
    assert stopping.median_interval([1.0] * n) is None


# --- shift_interval ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(3, 3), (4, 3), (5, 5), (4, 6)])
def test_orders_are_those_that_one_finds_by_writing_all_down(n, m):
    """The counts of Mann and Whitney's U agree with an enumeration of every order of n and m values."""
    counts = [0] * (n * m + 1)
    for places in itertools.combinations(range(n + m), n):
        others = [place for place in range(n + m) if place not in places]
        counts[sum(a > b for a in places for b in others)] += 1
    assert stopping._rank_orders(n, m) == counts


@pytest.mark.parametrize(("n", "m"), [(3, 3), (5, 5), (5, 11), (11, 11)])
def test_the_interval_holds_the_shift_as_often_as_it_says(n, m):
    """
    Of 1000 pairs of samples of the heavy-tailed kind that timings are, at least 90 % less chance's four deviations.

    A binomial of 1000 draws of 0.9 deviates by 9.5, hence 862.
    """
    draws = random.Random(7)
    held = 0
    for _ in range(1000):
        first = [1.0 + draws.expovariate(1.0) for _ in range(n)]
        second = [draws.expovariate(1.0) for _ in range(m)]
        _, low, high = stopping.shift_interval(first, second)
        held += low <= 1.0 <= high
    assert held >= 862
