"""The devices of the search benchmark are what their classes say, and what is called the best is the best."""

from __future__ import annotations

import math

import pytest

from benchmarks.search.cases import Case
from benchmarks.search.fake_devices import KINDS, make, numbers

TURNS = 3


def of_kind(kind: str, turns: int = TURNS) -> list[Case]:
    """Make the first devices of one class."""
    return [make(0, number) for number in numbers(turns, [kind])]


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_is_the_best_of_all_integers(kind: str) -> None:
    """No size that fits and keeps the limit costs less, and none on the other side of the knee is within 1 %."""
    for case in of_kind(kind):
        limit = case.goal.latency_limit or math.inf
        seconds = {n: case.device.curve(n) for n in range(1, case.task.max_batch_size + 1) if case.device.fits(n)}
        by_latency = case.goal.objective == "latency"
        costs = {n: s if by_latency else s / n for n, s in seconds.items() if s <= limit}
        assert costs[case.best_batch_size] == case.best_cost == min(costs.values())
        bound = case.best_cost * 1.01 if by_latency else case.best_cost / 0.99
        good = [n for n, cost in costs.items() if cost <= bound]
        assert case.knee == (max(good) if by_latency else min(good))
        assert case.largest == max(costs)
        assert case.regret(case.best_batch_size) == case.regret(case.knee) == 0.0


def test_regret_is_the_share_that_is_lost_beyond_the_tolerance() -> None:
    """A size at x of the best throughput loses 1 - x / 0.99, one within the tolerance nothing, no answer all of it."""
    (case,) = of_kind("plateau", turns=1)
    share = case.best_cost / case.cost(1)
    assert case.regret(1) == pytest.approx(1.0 - share / 0.99)
    assert case.regret(1, tolerance=0.0) == pytest.approx(1.0 - share)
    assert case.regret(None) == case.regret(10**6) == 1.0
