"""The noise model: spreads of a run, and what timings beside a reference step say about a size."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest

from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_TRIAL, Timing
from cubatch.search import noise as noise_model
from cubatch.search.curve_posterior import SizeEstimate
from cubatch.search.noise import Noise, has_cost, usable
from tests.unit.situations import record


def estimate(timings: list[Timing], noise: Noise, goal: Goal | None = None) -> SizeEstimate:
    """The estimate of a size by its seconds, unless a goal says otherwise."""
    return noise_model.estimate(timings, noise, goal or Goal())


def estimate_noise(sizes: list[list[Timing]]) -> Noise:
    """The noise model of sizes that are compared by their seconds."""
    return noise_model.estimate_noise(sizes, Goal())


REFERENCE = 0.004  # seconds of the reference step on the undisturbed host
SLOWER = 1.4  # times, in the slow state of the host


def timing(
    n: int, trial: int, number: int, seconds: float, blocks: tuple[float, float] | None, size: int = 8
) -> Timing:
    """A timing beside two blocks of a reference step of batch size `size`; None: beside no reference."""
    before, after = blocks or (None, None)
    return Timing(
        batch_size=n, round=PER_TRIAL * trial + number, seconds=seconds,
        reference_batch_size=size if blocks else None, reference_before_seconds=before, reference_after_seconds=after,
    )  # fmt: skip


def paired(n: int, *trials: tuple[float, float], timings: int = 5, size: int = 8) -> list[Timing]:
    """Timings without noise: of each trial the seconds of a step and of the reference step."""
    return [
        timing(n, trial, number, seconds, (block, block), size)
        for trial, (seconds, block) in enumerate(trials)
        for number in range(timings)
    ]


def drawn(
    within: float, between: float, *, slopes: dict[int, float], trials: int, timings: int, slow: float = 1.0
) -> list[list[Timing]]:
    """Sizes of 10 ms a sample; every other trial meets the slow host, of which a size takes part by its slope."""
    random, found = np.random.default_rng(0), []
    for n, slope in slopes.items():
        one: list[Timing] = []
        for trial in range(trials):
            host = slow if trial % 2 else 1.0
            level = 0.01 * n * host**slope * math.exp(between * random.standard_normal())
            for number in range(timings):
                seconds = level * math.exp(within * random.standard_normal())
                blocks = REFERENCE * host * np.exp(within * random.standard_normal(2))
                one.append(timing(n, trial, number, seconds, (blocks[0], blocks[1])))
        found.append(one)
    return found


# --- a record ------------------------------------------------------------------------------------------------


def test_throttled_timings_are_used_only_where_there_are_no_others() -> None:
    """Of two timings at full clock and three throttled ones the two count; three that are all throttled count."""
    slow = [Timing(batch_size=8, round=number, seconds=3.0, throttled=True) for number in range(3)]
    clear = [Timing(batch_size=8, round=number, seconds=2.0) for number in (3, 4)]
    assert (usable([*slow, *clear]), usable(slow)) == (clear, slow)
    for one, seconds in (([*slow, *clear], 2.0), (slow, 3.0)):
        assert estimate(one, Noise(0.01, 0.01)).log_cost == pytest.approx(math.log(seconds))


def test_energy_is_compared_by_joules_and_timed_in_seconds() -> None:
    """Timings without joules do not count by energy, and a size without any has no cost; its seconds are known."""
    goal, noise = Goal(objective="energy"), Noise(0.01, 0.01)
    one = [Timing(batch_size=8, round=number * PER_TRIAL, seconds=2.0) for number in range(2)]
    assert not has_cost(one, goal)
    assert noise_model.estimate(one, noise, goal) is None
    one.append(Timing(batch_size=8, round=2 * PER_TRIAL, seconds=2.0, joules=16.0))
    assert has_cost(one, goal)
    assert estimate(one, noise, goal).log_cost == pytest.approx(math.log(16.0))
    assert estimate(one, noise).log_cost == pytest.approx(math.log(2.0))


# --- spreads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("within", "between"), [(0.02, 0.0), (0.003, 0.03), (0.02, 0.02), (0.0, 0.01)])
def test_planted_spreads_are_estimated(within: float, between: float) -> None:
    """
    Of 40 sizes, 6 trials of 7 timings, both spreads are found within 30 %, or half a percent.

    The median of m distances has a relative error of 1.17 / sqrt(m): 240 trials give 8 %.  Distances of six or seven
    values from their own median, corrected as they are, leave them 13 % too low, by drawing.
    """
    records = drawn(within, between, slopes=dict.fromkeys(range(1, 41), 1.0), trials=6, timings=7)
    for one in records:
        one[:] = [attrs.evolve(t, reference_before_seconds=None) for t in one]
    found = estimate_noise(records)
    assert not found.is_paired
    assert found.timing == pytest.approx(max(within, 0.001), rel=0.25)
    assert found.trial == pytest.approx(max(between, 0.001), rel=0.3, abs=0.005 if within > between else 1e-9)


def test_before_much_is_measured_spreads_are_those_assumed() -> None:
    """Half a percent for both, and 2 % between trials on a host; one pair 10 % apart does not move four assumed."""
    assert estimate_noise([]) == Noise(0.005, 0.005)
    assert estimate_noise([record(8, [[1.0, 1.1]])]).timing == pytest.approx(0.005)
    found = estimate_noise([paired(8, (1.0, REFERENCE))])
    assert (found.trial, found.slope, found.is_paired) == (pytest.approx(0.02), 1.0, True)
    assert found.reference == {"batch_size": 8, "seconds": pytest.approx(REFERENCE)}


def test_on_a_cpu_trials_differ_more_with_and_without_a_reference() -> None:
    """Before much is measured 2 % between trials, and 3 % of outliers, where a GPU has 0.5 % and 0.2 %."""
    alone = [paired(8, (1.0, REFERENCE)), record(8, [[1.0, 1.0, 1.0]])]
    found = [noise_model.estimate_noise([one], Goal(), on_host=True) for one in alone]
    assert [noise.trial for noise in found] == pytest.approx([0.02, 0.02])
    assert [noise.outliers for noise in found] == [0.03, 0.03]
    assert [noise.is_paired for noise in found] == [True, False]
    elsewhere = estimate_noise(alone[1:])
    assert (elsewhere.trial, elsewhere.outliers) == (pytest.approx(0.005), 0.002)


def test_a_few_outliers_do_not_set_the_spread() -> None:
    """One timing in seven twice as long leaves the spread of the others within a half."""
    calm = drawn(0.004, 0.004, slopes=dict.fromkeys(range(1, 21), 1.0), trials=2, timings=7)
    before = estimate_noise(calm).timing
    for one in calm:
        one[3] = attrs.evolve(one[3], seconds=2 * one[3].seconds)
    assert before <= estimate_noise(calm).timing <= 1.5 * before


def test_the_variance_of_a_median_is_that_of_many_draws() -> None:
    """Nine timings in two trials: variances add, each as drawn, within 5 %, which is five standard errors."""
    random = np.random.default_rng(3)
    medians = np.median(0.02 * random.standard_normal((20_000, 45)), axis=1)
    assert Noise(0.02, 0.0, outliers=0.0).variance(45) == pytest.approx(medians.var(), rel=0.05)
    means = 0.01 * random.standard_normal((20_000, 5)).mean(axis=1)
    assert Noise(0.0, 0.01, outliers=0.0).variance(45, 5) == pytest.approx(means.var(), rel=0.05)
    both = Noise(0.02, 0.01, outliers=0.0).variance(9, 2)
    assert both == pytest.approx(math.pi / 2 * 0.02**2 / 9 + 0.01**2 / 2, rel=1e-4)


# --- the host ------------------------------------------------------------------------------------------------


def test_a_slow_host_is_canceled_by_the_reference() -> None:
    """
    The host is 1.4 times slower in every other trial and so is the reference: sizes are as at the usual speed.

    A trial of 3 timings errs by 1 % / sqrt(3) times 1.25 for a median and 0.7 for the blocks, 0.9 %, and 1 % of its
    own; 7 trials by 0.5 %, of which four are allowed.  Without the reference the error is 14 %, and 34 % at a size that
    met the slow host alone.
    """
    records = drawn(0.01, 0.01, slopes=dict.fromkeys((1, 2, 4, 8, 16), 1.0), trials=7, timings=3, slow=SLOWER)
    once = paired(32, (0.32 * SLOWER, REFERENCE * SLOWER))
    noise = estimate_noise([*records, once])
    usual = np.median([t.reference_seconds for one in records for t in one]) / REFERENCE
    assert 0.98 < usual < 1.02  # four of seven trials meet the fast host
    for one in records:
        expected = math.log(0.01 * one[0].batch_size * usual)
        plain = np.log([t.seconds for t in one]).mean()
        assert estimate(one, noise).log_cost == pytest.approx(expected, abs=0.02)
        assert abs(plain - expected) > 0.1
    assert estimate(once, noise).log_cost == pytest.approx(math.log(0.32 * usual), abs=0.04)


def test_a_size_met_in_both_states_has_its_own_slope() -> None:
    """
    Size 16 takes 1.4**1.6 times as long on the slow host, where the others take 1.4 times.

    At the usual speed it is found within 2 %; the common slope would leave half of 0.6 * log(1.4), which is 10 %.
    Size 24 was met on the slow host alone, where it takes 1.4**1.2 times as long: its standard deviation covers that.
    """
    slopes = dict.fromkeys((1, 2, 3, 4, 6, 8, 12), 1.0) | {16: 1.6}
    records = drawn(0.003, 0.003, slopes=slopes, trials=7, timings=5, slow=SLOWER)
    once = paired(24, (0.24 * SLOWER**1.2, REFERENCE * SLOWER))
    noise = estimate_noise([*records, once])
    found = estimate(records[-1], noise)
    assert found.log_cost == pytest.approx(math.log(0.16), abs=0.02)
    assert noise.slope == pytest.approx(1.0, abs=0.1)
    alone = estimate(once, noise)
    assert abs(alone.log_cost - math.log(0.24)) < 2.5 * math.sqrt(alone.variance)
    assert alone.variance > 10 * found.variance
    assert alone.host == pytest.approx(math.log(SLOWER), abs=0.01)


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_trials_on_a_host_of_two_speeds_keep_their_spread(spread: float) -> None:
    """
    Half of the trials of eight sizes meet the slow host, of which each size takes part by its own slope.

    Trials at one speed err by 2 %. The median of 48 such pairs is off by less than a third of that.
    """
    slopes = {n: 1 + spread * (-1) ** place for place, n in enumerate((1, 2, 3, 4, 6, 8, 12, 16))}
    noise = estimate_noise(drawn(0.003, 0.02, slopes=slopes, trials=6, timings=5, slow=SLOWER))
    assert noise.trial == pytest.approx(0.02, rel=1 / 3)


def test_sizes_are_compared_as_on_a_fast_host() -> None:
    """
    Two of three trials meet the slow host, on which size 16 takes 1.4**1.6 times as long and the others 1.4 times.

    Of the 20 % that size 16 is slower there, the fast trial leaves (0.02 / 0.17)**2, 1.4 %, where a trial errs by 2 %
    and a size's slope by 0.5 * log(1.4): 0.3 %.
    """
    slow = REFERENCE * SLOWER
    trials = {n: paired(n, (0.01 * n, REFERENCE), *[(0.01 * n * SLOWER, slow)] * 2) for n in (1, 2, 4, 8, 32)}
    odd = paired(16, (0.16, REFERENCE), *[(0.16 * SLOWER**1.6, slow)] * 2)
    noise = estimate_noise([*trials.values(), odd])
    ahead = estimate(odd, noise).log_cost - estimate(trials[8], noise).log_cost
    assert ahead == pytest.approx(math.log(2), abs=0.003)


def test_timings_of_a_trial_on_a_fast_host_outweigh_those_on_a_slow_one() -> None:
    """Of one trial three timings in five met a slow host, of which the step took 1.6 times its part: two decide."""
    blocks = [REFERENCE] * 2 + [REFERENCE * SLOWER] * 3
    mixed = [timing(16, 0, k, 0.16 * (b / REFERENCE) ** 1.6, (b, b)) for k, b in enumerate(blocks)]
    run = [paired(n, (0.01 * n, REFERENCE)) for n in (1, 2, 4, 8)]
    noise = estimate_noise([*run, mixed])
    assert estimate(mixed, noise).log_cost == pytest.approx(math.log(0.16), abs=0.01)


@pytest.mark.parametrize("size", [None, 4], ids=["no reference", "another reference"])
def test_a_timing_without_this_reference_has_the_variance_of_the_drift(size: int | None) -> None:
    """Its host speed is unknown: the variance is larger by that of the drift, 1.4826 times the median distance."""
    shifts = np.array([-0.2, -0.1, 0.0, 0.1, 0.2])
    run = [paired(n, (0.1, REFERENCE * math.exp(shift))) for n, shift in zip((9, 10, 11, 12, 13), shifts, strict=True)]
    odd = [timing(2, 0, k, 0.1, size and (0.001, 0.001), size or 8) for k in range(4)]
    noise = estimate_noise([odd, *run])
    drift = 1.4826 * np.median(np.abs(shifts))
    more = estimate(odd, noise).variance - estimate(run[2], noise).variance
    assert more == pytest.approx(drift**2, rel=0.05)  # and what outliers among four timings add
    assert estimate(odd, noise).log_cost == pytest.approx(math.log(0.1))
    assert estimate(odd, noise).host == 0.0


# --- one size ------------------------------------------------------------------------------------------------


def test_one_outlier_in_five_timings_moves_the_estimate_by_less_than_the_noise() -> None:
    """A timing of half and one of ten times the others: the median moves by less than 1 % of noise."""
    calm = [1.0, 1.004, 0.996, 1.008, 0.992]
    noise = Noise(0.01, 0.01)
    before = estimate(record(8, [calm]), noise).log_cost
    for outlier in (0.5, 10.0):
        moved = estimate(record(8, [[*calm[:4], outlier]]), noise).log_cost
        assert abs(moved - before) < 0.01


def test_a_trial_that_disagrees_with_four_hardly_counts() -> None:
    """One trial of five took 1.5 times as long: the estimate moves by less than 2 %, where the mean moves by 8 %."""
    found = estimate(record(8, [[1.0] * 3] * 4 + [[1.5] * 3]), Noise(0.005, 0.01))
    assert 0 <= found.log_cost < 0.02


def test_trials_that_disagree_widen_the_variance() -> None:
    """
    Two trials 10 % apart where 0.2 % are expected: the standard error of their mean is half of the distance.

    Two trials that agree have the variance of the noise alone.
    """
    noise = Noise(0.002, 0.002, outliers=0.0)
    apart = estimate(record(8, [[1.0] * 5, [1.1] * 5]), noise)
    assert math.sqrt(apart.variance) == pytest.approx(math.log(1.1) / 2, rel=0.1)
    assert apart.log_cost == pytest.approx(math.log(1.1) / 2)
    assert estimate(record(8, [[1.0] * 5] * 2), noise).variance == pytest.approx(noise.variance(10, 2))


def test_a_trial_whose_timings_scatter_counts_less_than_a_calm_one() -> None:
    """Medians of 1.0 and 1.04 s: timings 10 % apart make the second count for less than a third."""
    calm, wild = [1.0, 1.001, 0.999, 1.002, 0.998], [1.04 * factor for factor in (1.0, 1.1, 0.9, 1.12, 0.88)]
    found = estimate(record(8, [calm, wild]), Noise(0.002, 0.01))
    assert 0 < found.log_cost < math.log(1.04) / 3


def test_a_reference_that_grows_with_the_candidate_is_no_reference():
    """Steps that share the user's state are slower with larger candidates: dividing by them would hide the cost."""

    def paired(reference):
        timings = {
            n: [
                Timing(batch_size=n, round=number, seconds=0.001 * n, reference_batch_size=8,
                       reference_before_seconds=reference(n), reference_after_seconds=reference(n))
                for number in range(5)
            ]
            for n in (8, 32, 128)
        }  # fmt: skip
        return list(timings.values())

    assert not estimate_noise(paired(lambda n: 0.001 * n)).is_paired
    assert estimate_noise(paired(lambda n: 0.008 * (1.0 + 0.6 * (n == 128)))).is_paired  # the host became slower
