"""The arithmetic of the budget: what a visit takes, and what is left."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, strategies as st

from cubatch.measure.budget import (
    MAX_REPEATS,
    Budget,
    OutOfBudget,
    guess_prepare,
    repeats_for,
    timings_for,
    trial_seconds,
)

SECONDS = st.floats(1e-6, 1e4)


def test_a_budget_counts_from_its_start_and_on_top_of_earlier_runs() -> None:
    """Of 60 s, with 20 s spent before and 15 s since the start at clock 100, 25 s are left."""
    now = [100.0]
    budget = Budget(60.0, 20.0)
    assert budget.spent() == 20.0
    budget.start(lambda: now[0])
    now[0] = 115.0
    assert (budget.spent(), budget.left()) == (35.0, 25.0)
    budget.check(25.0)
    with pytest.raises(OutOfBudget):
        budget.check(25.1)
    now[0] = 200.0
    assert budget.left() == 0.0
    with pytest.raises(OutOfBudget):
        budget.check()


def test_what_is_forgiven_does_not_count() -> None:
    """Of 5 s, 3 forgiven, 2 are spent."""
    now = [100.0]
    budget = Budget(60.0)
    budget.start(lambda: now[0])
    now[0] = 105.0
    budget.forgive(3.0)
    assert budget.spent() == 2.0


def test_a_timing_spans_its_minimum_with_whole_steps() -> None:
    """Four 3 ms steps span 10 ms; a step longer than the span is taken once; a broken clock ends somewhere."""
    assert [repeats_for(step, 0.01) for step in (0.003, 0.01, 7.0, 1e-12)] == [4, 1, 1, MAX_REPEATS]


@given(step=st.floats(1e-3, 1e3), overhead=SECONDS, left=SECONDS)
def test_a_visit_takes_three_to_nine_readings_or_two_expensive_ones(step: float, overhead: float, left: float) -> None:
    """Twice if it takes over 0.7 % of what is left or 0.2 s; else to fill the overhead."""
    reading = step * next(n for n in range(1, 100) if n * step >= 0.01)
    assume(abs(overhead / reading - round(overhead / reading)) > 1e-9)  # a whole number of them, but for rounding
    expensive = min(0.007 * left, 0.2)
    expected = 2 if reading > expensive else max(3, min(9, overhead // reading))
    assert timings_for(step, 0.01, overhead_seconds=overhead, left=left) == expected


@pytest.mark.parametrize(
    ("overhead", "left", "expected"),
    [(0.059, 60.0, 5), (0.0, 60.0, 3), (1.0, 60.0, 9), (1.0, 1.3, 2)],
    ids=["as long as it took to get there", "at least three", "at most nine", "0.77 % of what is left"],
)
def test_readings_of_ten_milliseconds(overhead: float, left: float, expected: int) -> None:
    """Two steps of 5 ms are one reading, whatever the overhead is."""
    assert timings_for(0.005, 0.01, overhead_seconds=overhead, left=left) == expected


def test_a_visit_is_preparing_two_steps_and_the_readings() -> None:
    """
    1 s to prepare and steps of 0.1 s: nine readings, the first being one of the two steps before.

    Steps of 4 ms: three to a reading, nine readings besides the two steps.
    """
    long = trial_seconds(0.1, 0.01, prepare_seconds=1.0, left=1000.0)
    assert long == pytest.approx(1.0 + 2 * 0.1 + 8 * 0.1)
    short = trial_seconds(0.004, 0.01, prepare_seconds=1.0, left=1000.0)
    assert short == pytest.approx(1.0 + 2 * 0.004 + 9 * 3 * 0.004)
    assert trial_seconds(5.0, 0.01, prepare_seconds=1.0, left=60.0) == pytest.approx(1.0 + 3 * 5.0)


@given(size=st.integers(1, 4096), known=st.dictionaries(st.integers(1, 4096), st.floats(0, 100), max_size=6))
def test_preparing_is_the_cheapest_that_others_say(size: int, known: dict[int, float]) -> None:
    """Every size says its own seconds, in proportion where it is smaller; whoever was disturbed says too much."""
    said = [seconds if n >= size else seconds * size / n for n, seconds in known.items()]
    assert guess_prepare(size, known) == pytest.approx(min(said) if said else 0.0)
