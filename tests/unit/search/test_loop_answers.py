"""What the walk answers on fake devices: dear steps, slow starts, sizes that are added, and budgets."""

from __future__ import annotations

import pytest

from cubatch.measure.goal import Goal
from cubatch.measure.records import Recorder
from cubatch.tuning import ladder
from cubatch.tuning.request import Request
from tests.fakes import FakeDevice, affine
from tests.unit.search.walking import (
    SIZES,
    Sessions,
    SlowFirst,
    given,
    go,
    outcome_of,
    seek,
    share_of_best,
    statuses,
)


@pytest.mark.parametrize(("overhead", "work", "loss"), [(0.3, 0.02, 0.05), (0.1, 0.05, 0.03), (0.02, 0.01, 0.03)])
def test_long_steps_get_an_answer_near_the_best(overhead: float, work: float, loss: float) -> None:
    """60 s hold few steps of up to 26 s: they go where the answer may lie."""
    device = FakeDevice(affine(overhead, work), noise=0.002)
    measured, result = seek(device, 512)
    assert share_of_best(device, result, 512) >= 1 - loss
    assert measured.seconds_spent < 60 + device.curve(512)


def test_one_slow_timing_at_the_start_costs_no_size() -> None:
    """0.7 s for six calls where 24 ms are right: within 25 s all is looked at, and the answer is right."""
    device = FakeDevice(affine(0.02, 0.004), behaviours=(SlowFirst(),))
    measured, result = seek(device, 64, budget=25.0)
    assert len(ladder.plain(Request(max_batch_size=64))) == 12
    assert "not_run" not in statuses(measured).values()
    assert share_of_best(device, result, 64) >= 0.99
    assert result.decided_by != "budget"


def test_one_slow_timing_does_not_break_a_latency_limit_for_good() -> None:
    """The first reading takes 0.7 s where 0.2 s are allowed: before it is believed the size is visited again."""
    device = FakeDevice(affine(0.02, 0.004), behaviours=(SlowFirst(3),))
    _, result = seek(device, 64, budget=25.0, goal=Goal(latency_limit=0.2))
    assert result.batch_size <= 45  # of 0.2 s
    assert device.throughput(result.batch_size) >= 0.985 * device.throughput(45)


def test_added_sizes_are_told_to_the_keeper_and_are_multiples() -> None:
    """Each size that the search adds to the ladder is kept once, is a multiple of 8, and says between which it lies."""
    device = FakeDevice(affine(0.5, 1e-5), memory_bytes=1024 * 400)
    book = Recorder()
    measured, _ = seek(device, given(8, 64, 128, 256, 512), keeper=book, multiple=8)
    sizes = [candidate.batch_size for candidate in measured.added]
    assert sizes
    assert len(sizes) == len(set(sizes))
    assert all(n % 8 == 0 for n in sizes)
    assert not set(sizes) & {8, 64, 128, 256, 512}
    assert book.measured.added == measured.added
    assert set(sizes) <= set(statuses(measured))
    assert all(text.startswith("between ") for candidate in measured.added for text in candidate.reasons)


@pytest.mark.parametrize("budget", [0.001, 0.5, 2.0, 10.0, 100.0])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_budget_holds_but_for_the_last_step(budget: float, noise: float) -> None:
    """Whatever the budget, the run exceeds it by less than one preparation and two steps of what was underway."""
    device = FakeDevice(affine(1e-2, 1e-3), noise=noise, seed=3)
    measured = go(device, given(*SIZES, 256, 512, 1024), budget=budget)
    last = measured.timings[-1].batch_size
    assert measured.seconds_spent <= budget + device.prepare_seconds + 2 * 1.5 * device.curve(last)
    assert set(statuses(measured)) == {*SIZES, 256, 512, 1024}


def test_a_size_that_would_not_fit_the_budget_is_not_run_and_says_the_numbers() -> None:
    """A step of 12.8 s does not fit 6 s: it is never prepared, and says what it would take and could gain."""
    sessions = Sessions(FakeDevice(affine(1.0, 0.1), noise=0.001))
    measured, result = seek(sessions, given(1, 8, 128), budget=6.0)
    outcome = outcome_of(measured, 128)
    assert (outcome.status, outcome.facts["limit"]) == ("not_run", "budget")
    assert "of the budget are left" in outcome.stop_reason
    assert outcome.facts["could_gain"] > 0.5
    assert 128 not in sessions.opened[0].prepared
    assert result.decided_by == "budget"
