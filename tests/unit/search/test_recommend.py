"""The recommendation: from a posterior, among sizes that may be recommended on equal terms and others."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Timing
from cubatch.search.curve_posterior import CurvePosterior
from cubatch.search.noise import Noise
from cubatch.search.posterior import Posterior, Recommendation, is_favored, is_round

LATENCY = Goal(objective="latency", tolerance=0.05)


def posterior(rates: dict[int, float], sd: float = 1e-6) -> CurvePosterior:
    """Return a posterior of these samples per second, each with an independent error."""
    sizes = np.array(sorted(rates))
    mean = np.array([math.log(n / rates[n]) for n in sizes])
    return CurvePosterior(sizes, mean, sd**2 * np.eye(len(sizes)))


def recommend(
    curve: CurvePosterior, feasible: list[int], goal: Goal, favored: set[int] | None = None
) -> Recommendation:
    """Return the recommendation from a posterior of the cost."""
    return Posterior(goal, Noise(0.01, 0.01), curve, curve).recommend(feasible, favored)


# --- which sizes ---------------------------------------------------------------------------------------------


def test_round_sizes_are_powers_of_two_and_one_and_a_half_times_one() -> None:
    """By listing them: 1, 2, 4, ... and 3, 6, 12, ... up to 4096."""
    expected = {2**k for k in range(13)} | {3 * 2**k for k in range(11)}
    assert {n for n in range(1, 4097) if is_round(n)} == expected


@pytest.mark.parametrize(
    ("size", "reasons", "expected"),
    [
        (96, (), True), (97, (), False), (97, ("between 64 and 128",), False), (97, ("crest of conv1",), True),
        (97, ("past crest of conv1",), True), (97, ("coulom n=3",), True), (97, ("asked for",), True),
        (100, ("largest that fits", "tensor-core multiple"), True),
    ],
)  # fmt: skip
def test_hardware_reasons_make_a_size_favored(size: int, reasons: tuple[str, ...], expected: bool) -> None:
    """A size that is not round is favored where a model of the hardware or the user proposed it."""
    assert is_favored(Candidate(size, reasons=reasons)) == expected


# --- the smallest within the tolerance -----------------------------------------------------------------------


def test_the_smallest_size_within_the_tolerance_of_the_best_is_recommended() -> None:
    """Rates of 98.9, 99.1, 100 and 90: within 1 % the second is the smallest."""
    rates = {8: 98.9, 16: 99.1, 32: 100.0, 64: 90.0}
    found = recommend(posterior(rates), list(rates), Goal(tolerance=0.01))
    assert (found.batch_size, found.fastest) == (16, 32)
    assert recommend(posterior(rates), [32, 64], Goal(tolerance=0.01)).batch_size == 32
    assert recommend(posterior(rates), list(rates), Goal(tolerance=0.0)).batch_size == 32


def test_by_latency_the_largest_size_within_the_tolerance_is_recommended() -> None:
    """Steps of 100, 102, 104.9 and 105.1 ms: 5 % above the lowest allow the third, though it is not round."""
    steps = {1: 0.1, 4: 0.102, 7: 0.1049, 16: 0.1051}
    found = recommend(posterior({n: n / s for n, s in steps.items()}), list(steps), LATENCY, favored={1, 4, 16})
    assert (found.batch_size, found.fastest) == (7, 1)


def test_of_equally_fast_sizes_the_smallest_is_the_fastest() -> None:
    """Equal means leave the smaller size."""
    found = recommend(posterior({8: 100.0, 16: 100.0}), [16, 8], Goal(tolerance=0.0))
    assert (found.batch_size, found.fastest) == (8, 8)


def test_ties_are_the_sizes_whose_difference_may_be_zero() -> None:
    """
    Errors of 1 % each differ by 1.41 %, so that 1.645 of that is 2.3 %: 2.2 % behind is a tie, 2.5 % is not.

    Errors that two sizes share do not count.
    """
    rates = {8: 100 * math.exp(-0.025), 16: 100 * math.exp(-0.022), 32: 100.0}
    assert recommend(posterior(rates, 0.01), list(rates), Goal()).equal == (16,)
    alone = posterior(rates, 0.01)
    shared = CurvePosterior(alone.sizes, alone.mean, alone.covariance + 0.1**2)
    assert recommend(shared, list(rates), Goal()).equal == (16,)


# --- sizes that are not favored ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lead", "sd", "expected"),
    [(0.05, 0.001, 40), (0.05, 0.03, 32), (0.011, 0.0001, 40), (0.009, 0.0001, 32)],
    ids=["clear peak", "peak within the noise", "just above the tolerance", "just below the tolerance"],
)
def test_a_size_that_is_not_favored_must_beat_both_neighbors_clearly(lead: float, sd: float, expected: int) -> None:
    """The lead less 1.2816 times sqrt(2) of the error must exceed the tolerance: 5 % with errors of 3 % does not."""
    belief = posterior({32: 100.0, 40: 100.0 / (1 - lead), 48: 100.0}, sd)
    clear = -math.log(1 - lead) - 1.2816 * math.sqrt(2) * sd > -math.log(0.99)
    assert clear == (expected == 40)
    assert recommend(belief, [32, 40, 48], Goal(tolerance=0.01), favored={32, 48}).batch_size == expected
    assert recommend(belief, [32, 40, 48], Goal(tolerance=0.001), favored={32, 40, 48}).batch_size == 40


def test_beating_one_neighbor_does_not_do() -> None:
    """40 is 10 % ahead of 32 and 0.05 % ahead of 48: 48 is recommended; of 32 alone 40 is a neighbor, and wins."""
    belief = posterior({32: 90.0, 40: 100.0, 48: 99.95}, 1e-5)
    assert recommend(belief, [32, 40, 48], Goal(tolerance=0.001), favored={32, 48}).batch_size == 48
    assert recommend(belief, [32, 40], Goal(tolerance=0.001), favored={32, 48}).batch_size == 40


def test_where_no_favored_size_may_be_the_answer_all_others_may() -> None:
    """32 and 48 broke a limit: the best of the rest is recommended."""
    belief = posterior({32: 100.0, 40: 90.0, 41: 80.0, 48: 100.0})
    assert recommend(belief, [40, 41], Goal(), favored={32, 48}).batch_size == 40


# --- from timings --------------------------------------------------------------------------------------------


def timed(rates: dict[int, float], trials: int, spread: float) -> Posterior:
    """Return the posterior of timings beside a reference: five in each trial, and trials that scatter."""
    random = np.random.default_rng(5)
    timings: dict[int, list[Timing]] = {n: [] for n in rates}
    for trial in range(trials):
        for n, rate in rates.items():
            factor = math.exp(spread * random.standard_normal())
            timings[n] += [
                Timing(
                    batch_size=n, round=16 * trial + number, seconds=n / rate * factor * (1 + 0.001 * (number - 2)),
                    reference_batch_size=8, reference_before_seconds=0.01, reference_after_seconds=0.01,
                )
                for number in range(5)
            ]  # fmt: skip
    return Posterior.of(timings, Goal(tolerance=0.01))


PLATEAU = {16: 94.0, 24: 97.0, 32: 100.0, 48: 100.0, 64: 100.0, 96: 100.0}


@pytest.mark.parametrize(
    ("peak", "trials", "spread", "reasons", "wins"),
    [
        (130.0, 6, 0.003, (), True),
        (101.5, 2, 0.01, (), False),
        (130.0, 6, 0.003, ("crest of conv1",), True),
        (104.0, 6, 0.003, ("crest of conv1",), True),
    ],
    ids=["clear peak", "peak within the noise", "clear crest", "small crest"],
)
def test_a_planted_peak_between_round_sizes(
    peak: float, trials: int, spread: float, reasons: tuple[str, ...], *, wins: bool
) -> None:
    """A peak at 40 of 30 % in six trials is recommended, one of 1.5 % in two trials that scatter by 1 % is not."""
    found = timed({**PLATEAU, 40: peak}, trials, spread)
    favored = set(PLATEAU) | ({40} if is_favored(Candidate(40, reasons=reasons)) else set())
    assert (found.recommend(sorted({*PLATEAU, 40}), favored).batch_size == 40) == wins


def test_intervals_hold_the_estimate_and_ratios_are_of_a_sample() -> None:
    """Twice the rate is a ratio of a half; the interval of a cost is that of a step over its samples."""
    found = timed({8: 50.0, 16: 100.0}, 4, 0.002)
    low, high = found.ratio_interval(16, 8)
    assert low < math.log(0.5) < high
    seconds, interval = found.seconds_of(16, [])
    assert interval[0] < seconds < interval[1]
    assert found.cost_interval(16) == pytest.approx(tuple(value / 16 for value in interval))
    assert (found.seconds_of(32, []), found.cost_interval(32), found.joules_of(16, [])) == ((None, None), None, None)
    assert found.noise.reference == {"batch_size": 8, "seconds": pytest.approx(0.01)}
    with pytest.raises(ValueError, match="32 and 8 were not both measured"):
        found.ratio_interval(32, 8)
