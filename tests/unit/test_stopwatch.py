"""One visit to one size: what is discarded, what is begun at all, and when the clocks count as warm."""

from __future__ import annotations

import pytest

from cubatch.budget import Budget, OutOfBudget
from cubatch.stopwatch import MAX_WARM_SECONDS, WARM_SECONDS, Stopwatch
from tests.fakes import ColdStart, Curve, FakeDevice, FakeRunner, affine


def open_stopwatch(device: FakeDevice, seconds: float = 60.0) -> tuple[FakeRunner, Stopwatch]:
    """Open a session with a budget."""
    runner, budget = device(), Budget(seconds)
    budget.start(runner.clock.now)
    return runner, Stopwatch(runner, budget, span_seconds=0.01)


def visit(stopwatch: Stopwatch, batch_size: int = 8, step_seconds: float | None = None) -> float:
    """Take one timing."""
    return stopwatch.time(batch_size, round_number=0, step_seconds=step_seconds, likely=None).seconds


def test_a_step_that_the_budget_does_not_hold_is_not_begun() -> None:
    """Four steps of 0.6 s come first; of 2.7 s less than one step is left, and the timing is not taken."""
    runner, stopwatch = open_stopwatch(FakeDevice(affine(0.6, 0.0)), 2.7)
    with pytest.raises(OutOfBudget):
        visit(stopwatch)
    assert runner.steps == 4


def test_nothing_is_prepared_when_the_budget_is_spent() -> None:
    """Preparing takes time too."""
    runner, stopwatch = open_stopwatch(FakeDevice(affine(0.6, 0.0)), 0.0)
    with pytest.raises(OutOfBudget):
        visit(stopwatch)
    assert runner.prepared == []


def test_steady_clocks_are_warm_after_the_minimum() -> None:
    """A device that never changes is not kept working for longer than WARM_SECONDS and a reading."""
    runner, stopwatch = open_stopwatch(FakeDevice(affine(0.02, 0.0), prepare_seconds=0.0))
    visit(stopwatch)
    assert runner.clock.now() == pytest.approx(WARM_SECONDS + 3 * 0.02, abs=0.021)


@pytest.mark.parametrize("curve", [affine(0.002, 0.0), affine(0.02, 0.0), affine(0.3, 0.0)])
def test_rising_clocks_are_waited_for(curve: Curve) -> None:
    """A clock that takes 2 s of work to rise by 28 % (triton#2306) leaves the first timing within 5 %."""
    device = FakeDevice(curve, behaviours=(ColdStart(slower=0.28, seconds=2.0, first_step=1.0),))
    runner, stopwatch = open_stopwatch(device)
    assert visit(stopwatch) == pytest.approx(curve(8), rel=0.05)
    assert runner.clock.now() < MAX_WARM_SECONDS + 2.0


def test_clocks_are_warmed_once() -> None:
    """A second size runs its discarded steps and its timing, nothing more."""
    runner, stopwatch = open_stopwatch(FakeDevice(affine(0.02, 0.0)))
    visit(stopwatch, 8)
    steps = runner.steps
    visit(stopwatch, 16)
    assert runner.steps == steps + 3


def test_after_a_failure_a_size_is_prepared_and_warmed_again() -> None:
    """What runs next may be another process."""
    runner, stopwatch = open_stopwatch(FakeDevice(affine(0.02, 0.0)))
    visit(stopwatch)
    assert stopwatch.has_visited(8)
    stopwatch.forget()
    assert not stopwatch.has_visited(8)
    steps = runner.steps
    visit(stopwatch, step_seconds=0.02)
    assert (runner.prepared, runner.steps) == ([8, 8], steps + 3)
