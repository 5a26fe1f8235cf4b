"""Verdicts on timings whose truth is known, and the sizes that the sweeps choose."""

from __future__ import annotations

import random

import attrs
import pytest
from hypothesis import given, strategies as st

from cubatch.errors import InvalidArgument, NothingMeasured
from cubatch.measure.records import PER_TRIAL
from cubatch.studies import sweep
from cubatch.studies.size_comparison import answer_slower, compare
from cubatch.tuning.results import Measurement


def measured(size, seconds_per_sample, *, noise=0.0, rounds=11, drift=0.0):
    """Three timings in each round, that grow by a share from round to round."""
    draws = random.Random(f"{size}, 0")
    numbers = [number * PER_TRIAL + k for number in range(rounds) for k in range(3)]
    factors = [(1 + drift * (r // PER_TRIAL)) * (1 + noise * draws.uniform(-1, 1)) for r in numbers]
    return Measurement(
        batch_size=size,
        status="ok",
        timings_rounds=numbers,
        timings_seconds=[size * seconds_per_sample * factor for factor in factors],
    )


@pytest.mark.case("power-of-two")
@pytest.mark.case("mobilenet-v100")
@pytest.mark.parametrize(
    ("true_ratio", "verdict"), [(1.0, "same"), (1.004, "same"), (1.05, "faster"), (0.95, "slower"), (0.996, "same")]
)
def test_the_verdict_is_the_truth_beyond_the_tolerance(true_ratio, verdict):
    """Timings scatter by half a percent around a known ratio."""
    comparison = compare(measured(127, 1 / true_ratio, noise=0.005), measured(128, 1.0, noise=0.005))
    assert comparison.verdict == verdict
    assert comparison.interval[0] < true_ratio < comparison.interval[1]
    assert comparison.trials == (11, 11)


def test_noise_beyond_the_difference_is_unclear():
    """Two percent apart with timings that scatter by fifty."""
    comparison = compare(measured(127, 1.02, noise=0.5), measured(128, 1.0, noise=0.5))
    assert comparison.verdict == "unclear"
    assert comparison.interval[1] - comparison.interval[0] > 0.04


def test_drift_that_affects_both_sizes_makes_no_difference():
    """A device that slows down by 0.2 % per round slows both sizes."""
    comparison = compare(measured(127, 1.0, drift=0.002), measured(128, 1.0, drift=0.002))
    assert comparison.verdict == "same"
    assert comparison.ratio == pytest.approx(1.0)


def test_two_trials_are_too_few():
    """The extreme ones of six orders of two and two values occur too often by chance."""
    assert compare(measured(127, 9.0, rounds=2), measured(128, 1.0, rounds=2)) is None


@pytest.mark.parametrize(
    ("ratios", "word"),
    [((1.0, 1.0), "No"), ((0.9, 0.8), "Yes"), ((0.9, 1.0), "It depends"), ((1.1, 1.0), "No"), ((), "Unknown")],
)
def test_the_answer_follows_from_the_verdicts(ratios, word):
    """Sizes are slower than their references, or not, or some are."""
    comparisons = [compare(measured(9 + k, 1 / ratio), measured(8, 1.0)) for k, ratio in enumerate(ratios)]
    assert answer_slower(comparisons).startswith(word)
    unclear = [attrs.evolve(each, verdict="unclear") for each in comparisons[:1]]
    assert answer_slower(unclear) == ("Unclear: 9 vs 8." if unclear else answer_slower([]))


@given(st.integers(5, 5000))
def test_every_power_has_both_neighbors_within_the_limit(limit):
    """The largest power of two that has both is among them."""
    groups = sweep.powers_and_neighbors(limit)
    assert max(groups) == max(2**k for k in range(2, 14) if 2**k + 1 <= limit)
    for power, others in groups.items():
        assert {power - 1, power + 1} <= set(others)
        assert max(others) <= limit


def test_a_limit_without_powers_of_two_is_rejected():
    """Up to 4 there is none with both neighbors."""
    with pytest.raises(InvalidArgument) as caught:
        sweep.powers_and_neighbors(4)
    assert (caught.value.field, caught.value.value) == ("max_batch_size", 4)


def test_the_published_sizes_are_measured():
    """All sizes of the published comparison, if they fit."""
    assert set(sweep.PUBLISHED) == {n for others in sweep.powers_and_neighbors(513).values() for n in others}


@pytest.mark.case("small-batch-floor")
@given(st.floats(1e-5, 1.0), st.floats(1e-9, 1e-2))
def test_the_floor_of_a_line_is_where_a_tenth_is_added(fixed, each):
    """Steps of a + b n seconds: up to the floor none exceeds 1.1 of a single one, the next does; half is n1/2."""
    seconds = {2**k: fixed + each * 2**k for k in range(14)}
    sizes = sweep.floor_of(seconds)
    assert seconds[sizes["floor"]] <= 1.1 * seconds[1]
    assert sizes["floor"] == 2**13 or seconds[2 * sizes["floor"]] > 1.1 * seconds[1]
    best = max(n / step for n, step in seconds.items())
    assert sizes["half"] / seconds[sizes["half"]] >= best / 2
    assert sizes["half"] == 1 or (sizes["half"] / 2) / seconds[sizes["half"] / 2] < best / 2


@pytest.mark.parametrize(
    ("seconds", "floor", "answer"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.3, 8: 1.0}, 2, "Below batch 2"),  # what lies beyond a slow size does not count
        ({1: 1.0, 2: 2.0}, 1, "There is no such batch"),
        ({1: 1.0}, 1, "Unknown"),
        ({1: 1.0, 8: 2.0}, 1, "Unknown"),
        ({1: 1.2, 2: 1.2, 4: 1.0}, None, "Unknown: a step of 1 took"),  # the single sample was disturbed
        # a busy host: no claim rests on a step that takes longer than one of sixteen times its size
        ({1: 1e-4, 2: 2e-4, 16: 0.17, 256: 4e-3}, None, "Unknown: a step of 16 took 170 ms, longer than a step of 256"),
    ],
)
def test_the_floor_of_some_step_times(seconds, floor, answer):
    """A size is named only if the step times show it."""
    assert sweep.floor_of(seconds)["floor"] == floor
    assert sweep.answer_floor(floor, seconds).startswith(answer)


def test_no_single_sample_is_no_floor():
    """There is nothing to compare with."""
    with pytest.raises(NothingMeasured):
        sweep.floor_of({2: 1.0})
