"""Verdicts of `powers-of-two` on timings whose truth is known, and which sizes it looks at."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubatch.errors import InvalidArgument
from cubatch.measure import stopping
from cubatch.measure.records import PER_VISIT
from cubatch.studies import powers_of_two
from cubatch.tuning.results import Measurement


def measured(size, seconds_per_sample, *, noise=0.0, sweeps=11, seed=0, drift=0.0):
    """Three timings in each sweep, that grow by a share from sweep to sweep."""
    draws = random.Random(f"{size}, {seed}")
    rounds = [sweep * PER_VISIT + k for sweep in range(sweeps) for k in range(3)]
    factors = [(1 + drift * (r // PER_VISIT)) * (1 + noise * draws.uniform(-1, 1)) for r in rounds]
    return Measurement(
        batch_size=size, status="ok", timings_rounds=rounds,
        timings_seconds=[size * seconds_per_sample * factor for factor in factors],
    )  # fmt: skip


@pytest.mark.case("power-of-two")
@pytest.mark.case("mobilenet-v100")
@pytest.mark.parametrize(
    ("true_ratio", "verdict"), [(1.0, "same"), (1.004, "same"), (1.05, "faster"), (0.95, "slower"), (0.996, "same")]
)
def test_the_verdict_is_the_truth_beyond_the_tolerance(true_ratio, verdict):
    """A size that takes so much less a sample, by readings that scatter by half a percent, is called what it is."""
    found = powers_of_two.compare(measured(127, 1 / true_ratio, noise=0.005), measured(128, 1.0, noise=0.005))
    assert found.verdict == verdict
    assert found.interval[0] < true_ratio < found.interval[1]
    assert found.visits == (11, 11)


def test_noise_beyond_a_difference_hides_it():
    """Two percent apart with readings that scatter by fifty: nothing is made of it."""
    found = powers_of_two.compare(measured(127, 1.02, noise=0.5), measured(128, 1.0, noise=0.5))
    assert found.verdict == "same"
    assert found.interval[1] - found.interval[0] > 0.04


def test_drift_that_meets_both_alike_makes_no_difference():
    """A device that slows down by two percent a sweep slows both."""
    found = powers_of_two.compare(measured(127, 1.0, drift=0.02), measured(128, 1.0, drift=0.02))
    assert found.verdict == "same"
    assert found.ratio == pytest.approx(1.0)


def test_two_visits_tell_nothing():
    """Of six orders of two and two values the extreme ones come up by chance too often."""
    assert powers_of_two.compare(measured(127, 9.0, sweeps=2), measured(128, 1.0, sweeps=2)) is None


@given(st.integers(5, 5000))
def test_every_size_is_within_the_limit_and_beside_its_power(limit):
    """Both neighbours of each power of two are there, the largest power that has both among them."""
    groups = powers_of_two.sizes_of(limit)
    largest = max(2**k for k in range(2, 14) if 2**k + 1 <= limit)
    assert max(groups) == largest
    for power, others in groups.items():
        assert {power - 1, power + 1} <= set(others)
        assert max(others) <= limit


def test_no_power_of_two_is_refused_by_name():
    """Up to 4 there is none with both neighbours."""
    with pytest.raises(InvalidArgument) as caught:
        powers_of_two.sizes_of(4)
    assert (caught.value.field, caught.value.value) == ("max_batch_size", 4)


def test_the_published_sizes_are_looked_at():
    """All of the published case, where they fit."""
    groups = powers_of_two.sizes_of(513)
    assert set(powers_of_two.PUBLISHED) == {n for others in groups.values() for n in others}


# --- stopping.shift_interval ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(3, 3), (4, 3), (5, 5), (4, 6)])
def test_orders_are_those_that_one_finds_by_writing_all_down(n, m):
    """The counts of Mann and Whitney's U against every order of n and m values."""
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
