"""Intervals and ties hold what visits differ by, of which readings of one visit say nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubatch.measure import stopping
from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_VISIT, Candidate, Measured, Outcome, Timing
from cubatch.tuning import answer as answers
from cubatch.tuning import intervals
from cubatch.tuning.results import TuningResult

RUNS, READINGS = 150, 5
VISIT_SD, READING_SD = 0.02, 0.003


def run(seed: int, rates: dict[int, float], visits: int) -> TuningResult:
    """Choose among sizes of these true samples per second, whose visits scatter far more than their readings."""
    random, timings = np.random.default_rng(seed), []
    for n, rate in rates.items():
        for visit in range(visits):
            shift = VISIT_SD * random.standard_normal()
            for number in range(READINGS):
                seconds = n / rate * math.exp(shift + READING_SD * random.standard_normal())
                timings.append(Timing(batch_size=n, round=PER_VISIT * visit + number, seconds=seconds))
    measured = Measured(timings=tuple(timings), outcomes=tuple(Outcome(n, "ok") for n in rates))
    return answers.answer([Candidate(n) for n in rates], measured, goal=Goal(), setting={})


@pytest.mark.parametrize("visits", [2, 3, 4])
def test_an_interval_holds_the_truth_where_visits_differ_more_than_their_readings(visits: int) -> None:
    """
    Nine of ten hold what is true of a size, by the numbers that were drawn.

    Of 900 independent ones 86 % or more do with a probability above 0.999; readings alone would say half to two thirds.
    """
    rates = {2**power: 1000.0 for power in range(6)}
    held = []
    for seed in range(RUNS):
        for m in run(seed, rates, visits).measurements:
            low, high = m.latency_interval or (math.nan, math.nan)
            held.append(low <= m.batch_size / 1000.0 <= high)
    assert 0.86 <= np.mean(held) <= 0.97


def test_what_one_size_does_at_times_is_no_scatter_of_the_others() -> None:
    """Visits to 32 took 10 and 20 ms, those to five others agree: all but 32 are known, and none is tied with it."""
    timings = [
        Timing(batch_size=n, round=PER_VISIT * visit + number, seconds=seconds, reference_seconds=5e-6)
        for n in (1, 2, 4, 8, 16, 32)
        for visit, seconds in enumerate((0.01, 0.02) if n == 32 else (0.002 * n, 0.00201 * n))
        for number in range(READINGS)
    ]
    measured = Measured(timings=tuple(timings), outcomes=tuple(Outcome(2**power, "ok") for power in range(6)))
    result = answers.answer([Candidate(2**power) for power in range(6)], measured, goal=Goal(), setting={})
    spans = {m.batch_size: (m.latency_interval[1] - m.latency_interval[0]) / m.latency_seconds
             for m in result.measurements if m.latency_interval and m.latency_seconds}  # fmt: skip
    assert max(span for n, span in spans.items() if n != 32) < 0.03 < spans[32]
    assert not any("spread widely" in reason for reason in result.reasons if result.fastest_batch_size != 32)


def test_throttled_visits_tell_where_there_are_no_others() -> None:
    """A GPU at its power limit: its visits scatter as those of any, and the interval is as wide."""
    spans = []
    for throttled in (False, True):
        timings = [
            Timing(batch_size=8, round=PER_VISIT * visit + number, seconds=1 + 0.05 * visit, throttled=throttled)
            for visit in range(2)
            for number in range(READINGS)
        ]
        measured = Measured(timings=tuple(timings), outcomes=(Outcome(8, "ok"),))
        (m,) = answers.answer([Candidate(8)], measured, goal=Goal(), setting={}).measurements
        spans.append(m.latency_interval)
    assert spans[0] == spans[1]


def test_a_size_visited_twice_alone_leaves_open_what_student_says() -> None:
    """Visits 2 % apart have a standard deviation of 1.41 % of one degree of freedom, whose t of 90 % is 6.314."""
    assert intervals.visit_sd([[[1.0], [1.02]]]) * 1.6449 == pytest.approx(
        6.314 * math.log(1.02) / math.sqrt(2), rel=1e-3
    )


@given(value=st.floats(1e-9, 1e6), count=st.integers(5, 12))
def test_an_interval_holds_its_median(value: float, count: int) -> None:
    """Readings that are all equal are their median and both ends, to the bit where visits do not scatter."""
    assert intervals.of_median([value] * count, 2, 0.0) == (value, value)


def test_equal_sizes_are_tied_however_their_visits_came_out() -> None:
    """Two sizes of one rate are tied in nine of ten runs; one that is a fifth slower is in none."""
    found = [run(seed, {8: 1000.0, 16: 1000.0, 32: 800.0}, 2) for seed in range(RUNS)]
    assert np.mean([set(result.tied_with) & {8, 16} != set() for result in found]) >= 0.86
    assert not any(32 in result.tied_with for result in found)


def test_what_sweeps_share_is_no_difference_within_one() -> None:
    """A clock that sinks by half between five sweeps hides no constant 3 %, however far visits scatter by it."""
    clock = {PER_VISIT * sweep + number: 1 + 0.1 * sweep for sweep in range(5) for number in range(3)}
    slower = {number: 1.03 * seconds for number, seconds in clock.items()}
    interval = intervals.of_ratio(slower, clock, scatter=0.2)
    assert interval is not None
    assert interval == pytest.approx((math.log(1.03), math.log(1.03)))


def test_few_sweeps_leave_open_what_visits_differ_by() -> None:
    """Of two sweeps whose readings agree, two differences of two visits each: 1.645 * 0.02 * sqrt(2 / 2)."""
    first = {PER_VISIT * sweep + number: 1.0 for sweep in range(2) for number in range(3)}
    assert intervals.of_ratio(first, first, scatter=0.02) == pytest.approx((-0.0329, 0.0329), abs=1e-4)
    assert intervals.of_ratio(first, {PER_VISIT * 7: 1.0}, scatter=0.02) is None


def test_visits_that_agree_leave_the_interval_of_the_readings() -> None:
    """Without scatter between visits it is that of the order statistics."""
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert intervals.of_median(values, 1, 0.0) == pytest.approx(stopping.median_interval(values))
    assert intervals.of_median(values[:4], 1, 0.0) is None
    assert intervals.of_few(values[:4], 1, 0.0) == pytest.approx((1.0, 8.0))


def test_scatter_is_what_visits_were_drawn_with() -> None:
    """Of 200 sizes visited twice: within 15 %, three relative errors of 1 / sqrt(400); of none but readings, little."""
    random = np.random.default_rng(5)
    for visit_sd, reading_sd, most_off in ((0.02, 0.003, 0.003), (0.0, 0.01, 0.0025)):
        shifts = visit_sd * random.standard_normal((200, 2, 1))
        drawn = np.exp(shifts + reading_sd * random.standard_normal((200, 2, 7)))
        assert intervals.visit_sd(drawn.tolist()) == pytest.approx(visit_sd, abs=most_off)
