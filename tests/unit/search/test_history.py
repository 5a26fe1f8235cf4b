"""What was read, how far it may be trusted, and what was read at a bad time."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_VISIT, Timing
from cubatch.search.history import Noise, Record, noise_of, seen_of, suspect
from tests.unit.situations import record, records


def drawn(within: float, between: float, *, sizes: int, visits: int, readings: int, seed: int = 0) -> list[Record]:
    """Sizes of unlike costs, whose visits and readings scatter normally by these shares."""
    random = np.random.default_rng(seed)
    found = []
    for place in range(sizes):
        base = 0.01 * 1.5**place
        shift = np.exp(between * random.standard_normal(visits))
        errors = np.exp(within * random.standard_normal((visits, readings)))
        found.append(record(place + 1, (base * shift[:, None] * errors).tolist()))
    return found


# --- a record ------------------------------------------------------------------------------------------------


def test_a_record_is_its_counting_readings_by_visit() -> None:
    """A visit 10 % above the other does not count in any number, though it was a visit."""
    one = record(8, [[2.0, 2.2, 1.9], [9.0, 9.0], [2.1]])
    assert one.visits == 3
    assert [timing.seconds for timing in one.counting] == [2.0, 2.2, 1.9, 2.1]
    assert (one.seconds, one.least_seconds) == (2.05, 1.9)
    assert one.step_costs() == {0: [2.0, 2.2, 1.9], 2: [2.1]}


def test_costs_are_those_of_the_goal() -> None:
    """2 s and 12 J for eight samples: a quarter of a second, two seconds, 1.5 J."""
    costs = {
        name: record(8, 2.0, goal=Goal(objective=name), joules=12.0).cost
        for name in ("throughput", "latency", "energy")
    }
    assert costs == pytest.approx({"throughput": 0.25, "latency": 2.0, "energy": 1.5})


def test_energy_that_was_not_read_is_no_cost() -> None:
    """Of two readings one without joules, the other is the cost; of none there is none, though it has seconds."""
    one = Record(8, Goal(objective="energy"))
    one.add(Timing(batch_size=8, round=0, seconds=2.0))
    assert one.cost is None
    assert (one.step_costs(), one.seconds) == ({}, 2.0)
    one.add(Timing(batch_size=8, round=1, seconds=2.0, joules=16.0))
    assert (one.cost, one.step_costs()) == (2.0, {0: [16.0]})


# --- noise ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("within", "between"), [(0.02, 0.0), (0.003, 0.03), (0.02, 0.02), (0.0, 0.01)])
def test_noise_is_found_again(within: float, between: float) -> None:
    """
    Of 40 sizes, 6 visits of 7 readings, both spreads are found within a quarter, or a thousandth and half a percent.

    The median of m distances has a relative error of 1.17 / sqrt(m): 240 visits give 8 %, of which three are allowed.
    What readings explain of the visits is taken off, which leaves 0.5 % of 2 % at most.
    """
    found = noise_of(drawn(within, between, sizes=40, visits=6, readings=7))
    assert found.reading == pytest.approx(max(within, 0.001), rel=0.15)
    assert found.visit == pytest.approx(max(between, 0.001), rel=0.25, abs=0.005 if within > between else 1e-9)


def test_two_visits_tell_of_visits() -> None:
    """Of 60 sizes visited twice the spread of 3 % is found within a third: four relative errors of 1 / sqrt(120)."""
    found = noise_of(drawn(0.001, 0.03, sizes=60, visits=2, readings=3))
    assert found.visit == pytest.approx(0.03, rel=0.36)


def test_before_much_was_read_noise_is_what_hardware_shows() -> None:
    """Half a percent of both; two readings that lie 10 % apart do not move three that were assumed."""
    assert noise_of([]) == noise_of([record(8, [[1.0]])]) == Noise(0.005, 0.005)
    assert noise_of([record(8, [[1.0, 1.1]])]).reading == pytest.approx(0.005)
    assert noise_of([record(8, [[1.0, 1.1], [1.02, 1.12]])]).reading > 0.01


def test_visits_of_a_host_are_thought_to_differ_by_more_until_they_tell() -> None:
    """With a reference 2 % before there are two visits to a size; then what they tell, as without one."""
    assert noise_of([record(8, [[1.0, 1.0]], reference_seconds=5e-6)]) == Noise(0.005, 0.02)
    told = [noise_of([record(n, [[1.0] * 5] * 3, reference_seconds=met) for n in range(1, 9)]) for met in (None, 5e-6)]
    assert told == [Noise(0.001, 0.001)] * 2


def test_a_few_disturbed_readings_do_not_count() -> None:
    """One reading in seven twice as long leaves the spread of the others within a half; readings agree to 0.1 %."""
    calm = drawn(0.004, 0.004, sizes=20, visits=2, readings=7)
    before = noise_of(calm).reading
    for one in calm:
        spike = one.timings[3]
        one.timings[3] = Timing(batch_size=spike.batch_size, round=spike.round, seconds=2 * spike.seconds)
    assert before <= noise_of(calm).reading <= 1.5 * before
    still = noise_of([record(n, [[1.0] * 5] * 3) for n in range(1, 9)])
    assert still == Noise(0.001, 0.001)


def test_the_variance_of_a_median_is_that_of_many_draws() -> None:
    """Five visits of nine readings: the median of all readings varies as said, within 5 %, five standard errors."""
    random = np.random.default_rng(3)
    draws = 0.02 * random.standard_normal((20_000, 1, 45))
    assert Noise(0.02, 0.0).variance(45) == pytest.approx(np.median(draws, axis=2).var(), rel=0.05)
    means = 0.01 * random.standard_normal((20_000, 5)).mean(axis=1)
    assert Noise(0.0, 0.01).variance(45, 5) == pytest.approx(means.var(), rel=0.05)
    both = Noise(0.02, 0.01).variance(9, 2)
    assert both == pytest.approx(Noise(0.02, 0.0).variance(9) + Noise(0.0, 0.01).variance(9, 2))


# --- what was seen -------------------------------------------------------------------------------------------


def test_what_was_seen_is_the_median_of_a_step_and_its_variance() -> None:
    """By throughput too it is a step's cost; more readings and visits make it surer, by the noise's own rule."""
    noise = Noise(0.01, 0.02)
    (one, other) = seen_of({32: record(32, [[4.0]]), 8: record(8, [[2.0, 2.1, 2.05], [2.06, 2.04]])}, noise)
    assert (one.batch_size, other.batch_size) == (8, 32)
    assert one.log_cost == pytest.approx(math.log(statistics.median([2.0, 2.1, 2.05, 2.06, 2.04])))
    assert one.variance == pytest.approx(noise.variance(5, 2))
    assert other.variance == pytest.approx(noise.variance(1, 1))


def test_what_was_read_at_a_bad_time_is_not_seen_until_it_is_visited_again() -> None:
    """Size 1 took clearly longer than size 8 did: not seen after its first visit, seen after a second."""
    read = records({8: 0.06, 64: 0.3})
    noise = Noise(0.01, 0.01)
    assert [s.batch_size for s in seen_of({1: record(1, 0.7, visits=1), **read}, noise)] == [8, 64]
    assert [s.batch_size for s in seen_of({1: record(1, 0.7, visits=2), **read}, noise)] == [1, 8, 64]


@pytest.mark.parametrize(("seconds", "expected"), [(1.09, set()), (1.12, {4})])
def test_a_bad_time_is_a_tenth_longer_than_the_shortest_of_any_larger_size(seconds: float, expected: set[int]) -> None:
    """The next larger size took long itself; the one after read 1.0 s once: a median of more than 1.1 s is suspect."""
    found = suspect(
        {
            4: record(4, [[seconds] * 3]),
            8: record(8, [[3.0] * 5] * 2),
            16: record(16, [[1.0, 1.04, 1.05]]),
            32: Record(32, Goal()),
        }
    )
    assert found == expected


def test_where_all_were_read_at_a_bad_time_that_is_what_is_known() -> None:
    """One reading of 0.5 ms among 30 ms makes suspects of both sizes; steps are then not guessed out of nothing."""
    read = {32: record(32, [[0.03, 0.03, 0.0005]]), 33: record(33, 0.021, visits=1)}
    assert suspect(read) == {32, 33}
    assert [s.batch_size for s in seen_of(read, Noise(0.1, 0.1))] == [32, 33]
    assert [s.batch_size for s in seen_of({**read, 34: Record(34, Goal())}, Noise(0.1, 0.1))] == [32, 33]


def test_what_takes_many_times_as_long_a_sample_was_held_up_for_three_visits() -> None:
    """2 takes 0.2 ms and 3 takes 11.5: another process, not the size, however many steps; at last it is believed."""
    read = {2: record(2, [[0.2e-3] * 9])}
    held = [[11.5e-3] * 9]
    for visits, found in ((1, {3}), (3, {3}), (4, set())):
        assert suspect({**read, 3: record(3, held * visits)}) == found
    assert suspect({**read, 3: record(3, [[7.9 * 0.3e-3] * 9])}) == set()
    assert suspect({**read, 3: record(3, [[8.1 * 0.3e-3] * 9])}) == {3}


def test_the_largest_size_and_those_without_a_reading_are_never_suspect() -> None:
    """There is nothing larger to compare with."""
    assert suspect({1: Record(1, Goal()), 8: record(8, 9.0, visits=1), 64: Record(64, Goal())}) == set()
    assert PER_VISIT > 9  # the most readings of a visit have rounds of their own
