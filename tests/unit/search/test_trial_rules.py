"""The rules of what is visited next, with situations put before them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cubatch.measure.goal import Goal
from cubatch.measure.records import Timing
from cubatch.search import trial_rules
from cubatch.search.state import is_closed
from tests.fakes import Fails, FakeDevice, affine
from tests.unit.search.searching import LATENCY, falling, go, line
from tests.unit.situations import POWERS, along, record, view

# --- the first size ------------------------------------------------------------------------------------------


def test_the_first_visit_goes_to_the_smallest_size_that_is_open() -> None:
    """Nothing is known, so that the cheapest step is the first; what failed is passed over."""
    assert trial_rules.next_trials(view({})) == [1]
    assert trial_rules.next_trials(view({}, failed=[1, 2])) == [4]
    assert trial_rules.next_trials(view({}, closed=POWERS)) == []


@pytest.mark.parametrize(("work", "expected"), [(0.299, 1), (0.301, 128)])
def test_a_dear_first_step_goes_where_the_model_expects_the_answer(work: float, expected: int) -> None:
    """Ten steps of 0.3 s are 5 % of 60 s: a visit that takes more goes where a sample is said to be cheapest."""
    model = {n: work * max(1.0, n / 64) * (0.9 if n == 128 else 1.0) for n in POWERS}
    assert trial_rules.next_trials(view({}, model=model)) == [expected]


def test_a_dear_first_visit_keeps_the_latency_limit_and_fits_what_is_left() -> None:
    """Samples get cheaper to the end, but ten steps of 512 are not left, and a limit allows less still."""
    model = {n: 1.0 + n / 100 for n in POWERS}
    assert trial_rules.next_trials(view({}, model=model)) == [256]  # 35.6 s, where 512 would take 61.2 s
    assert trial_rules.next_trials(view({}, model=model, goal=Goal(latency_limit=2.0))) == [64]
    assert trial_rules.next_trials(view({}, model=model, goal=Goal(latency_limit=0.5))) == [1]


def test_by_latency_or_by_a_list_the_first_is_the_smallest_however_dear() -> None:
    """The smallest step is what the lowest latency is expected of; sizes asked for by name all have their turn."""
    model = {n: 1.0 + n / 100 for n in POWERS}
    assert trial_rules.next_trials(view({}, model=model, goal=LATENCY)) == [1]
    assert trial_rules.next_trials(view({}, model=model, extends=False)) == [1]
    assert trial_rules.next_trials(view({}, model=dict.fromkeys((2, 4), 9.0), ladder=[2, 4])) == [2]


def test_below_a_size_that_was_timed_and_then_failed_the_smallest_is_tried() -> None:
    """An earlier run may have kept both; no time is a limit here."""
    assert trial_rules.next_trials(view({8: 0.1}, failed=[8])) == [1]
    assert trial_rules.next_trials(view({8: 0.1}, ladder=[], failed=[8])) == []


def test_below_a_dear_size_that_breaks_the_limit_there_is_an_answer() -> None:
    """The model says 16 keeps the limit of 10 s, which it breaks: the smaller sizes are looked at."""
    assert trial_rules.next_trials(view({16: 11.0}, goal=Goal(latency_limit=10.0), left=200.0)) == [1]
    assert trial_rules.next_trials(view({16: 11.0}, goal=Goal(latency_limit=10.0), closed=[1, 2], left=200.0)) == [4]
    assert trial_rules.next_trials(view({16: 11.0}, goal=Goal(latency_limit=10.0), left=5.0)) == []
    assert trial_rules.next_trials(view({1: 11.0}, goal=Goal(latency_limit=10.0), left=200.0)) == []
    truth = affine(9.5, 0.1)
    runner, found = go(
        FakeDevice(truth), model=lambda n: 0.9 * truth(n), goal=Goal(latency_limit=10.0), budget=100.0
    )  # fmt: skip
    assert runner.prepared[:2] == [16, 1]  # 16 is said to take 9.99 s and takes 11.1 s
    assert "ok" in {outcome.status for outcome in found.outcomes}


# --- limits --------------------------------------------------------------------------------------------------


def close_in(read: dict[int, float], curve: Callable[[int], float], **more: Any) -> list[int]:
    """Measure what `bisect` returns, by a curve, until it returns nothing; return its sizes in order."""
    read, order = dict(read), list[int]()
    for _ in range(30):
        found = trial_rules.bisect(view(read, **more))
        if not found:
            break
        order += found
        read[found[0]] = curve(found[0])
    return order


def test_a_requested_size_is_tried_although_others_with_its_divisors_failed() -> None:
    """The user's size, 768, was too expensive at first; then 6 failed. No candidate is larger."""
    found = view(along(line, 1, 2, 4, 8), ladder=[768], failed={6: "error"}, requested=[768])
    assert trial_rules.try_requested(found) == [768]


def test_a_latency_limit_is_closed_in_upon_in_a_few_trials() -> None:
    """Steps lie on a line through 512 and 1024, so that 0.8 s are taken at 736 exactly."""
    read, goal = along(line, 1, 8, 64, 512, 1024), Goal(latency_limit=0.8)
    cheap: dict[str, Any] = {"goal": goal, "seconds_of_trial": lambda n, step: step}
    order = close_in(read, line, **cheap)
    assert len(order) <= 4
    low, high = max(n for n in order if n <= 736), min(n for n in order if n > 736)
    assert is_closed(low, high)
    assert all(n % 32 == 0 for n in close_in(read, line, **cheap, multiple=32))
    assert trial_rules.bisect(view(read, ladder=[600, 700, 900], goal=goal, extends=False)) == [700]


def test_a_size_beyond_the_latency_limit_shows_where_it_lies() -> None:
    """The limit is expected at 780: the nearest candidate is tried."""
    read = along(line, 1, 8, 64, 512)
    found = view(read, ladder=[640, 768, 1024], goal=Goal(latency_limit=line(780)))
    assert trial_rules.bisect(found) == [768]


def test_a_latency_limit_is_nothing_without_one_or_without_a_size_above_it() -> None:
    """No limit, none above it, none within it, or a gap of 2 %: nothing to narrow."""
    read = along(line, 1, 8, 64, 512, 1024)
    assert trial_rules.bisect(view(read, left=1e4)) == []
    assert trial_rules.bisect(view(along(falling, 1, 8, 64), goal=Goal(latency_limit=0.2))) == []
    assert trial_rules.bisect(view(read, goal=Goal(latency_limit=2.0))) == []
    assert trial_rules.bisect(view({1: 9.0}, goal=Goal(latency_limit=0.8))) == []
    close = along(line, 1, 8, 64, 512, 522)
    assert trial_rules.bisect(view(close, goal=Goal(latency_limit=line(515)))) == []


def test_memory_is_bisected_where_the_curve_rises_only() -> None:
    """Between 512, which ran, and 1024, which did not, lies 724 midway; not where it falls, nor without the budget."""
    sizes = (1, 8, 64, 256, 512)
    assert trial_rules.bisect(view(along(line, *sizes), failed=[1024])) == [724]
    assert trial_rules.bisect(view(along(line, *sizes), failed=[1024, 4096])) == [724]
    assert trial_rules.bisect(view(along(line, *sizes), failed=[300])) == []
    cheap: dict[str, Any] = {"seconds_of_trial": lambda n, step: 0.01 * step}
    assert trial_rules.bisect(view(along(line, *sizes), ladder=[514], failed=[518], **cheap)) == [514]
    assert trial_rules.bisect(view(along(line, *sizes), ladder=[514], failed=[517], **cheap)) == []  # within 1 %
    assert trial_rules.bisect(view(along(falling, *sizes), failed=[1024], left=1e4)) == []
    assert trial_rules.bisect(view({64: 9.0}, failed=[128], goal=Goal(latency_limit=1.0))) == []
    assert trial_rules.bisect(view(along(line, *sizes), failed=[1024], left=1.0)) == []


def test_one_error_ends_nothing_and_two_narrow_the_range() -> None:
    """An error may concern one size alone; above 512, two errors count as memory does."""
    read = along(line, 1, 8, 64, 256, 512)
    assert trial_rules.bisect(view(read, failed={1024: "error"})) == []
    assert trial_rules.bisect(view(read, failed={1024: "error", 2048: "error"})) == [724]


def test_a_size_in_a_gap_that_ended_in_an_error_is_not_named_again() -> None:
    """Another that is open is, and with it the search ends: no size is prepared twice for nothing."""
    read = along(line, 1, 8, 64, 256, 512)
    found = trial_rules.bisect(view(read, failed=[1024], closed=[724]))
    assert found
    assert found != [724]
    assert 512 < found[0] < 1024
    sizes = (*POWERS, 1024)
    device = FakeDevice(line, memory_bytes=1024 * 900, behaviours=(Fails({724, 768}),))
    runner, measured = go(device, sizes)
    (failed,) = [o.batch_size for o in measured.outcomes if o.status == "error"]
    assert runner.prepared.count(failed) == 1
    assert max(runner.ran) > failed


# --- the lowest latency --------------------------------------------------------------------------------------


def test_the_lowest_latency_of_a_long_ladder_is_found_in_a_few_visits() -> None:
    """Of a hundred sizes, flat to 70, a fifth of them is visited at most to know that 70 is the largest as low."""

    def curve(n: int) -> float:
        return 0.1 if n <= 70 else 0.1 + 0.002 * (n - 60)

    read: dict[int, float] = along(curve, 1, 8, 100)
    for _ in range(20):
        found = trial_rules.bisect(view(read, ladder=range(1, 101), goal=LATENCY, left=600.0))
        if not found or found[0] in read:
            break
        read[found[0]] = curve(found[0])
    assert {70, 71} <= read.keys()


def test_the_lowest_latency_goes_on_as_long_as_it_is_as_low() -> None:
    """With nothing above known, a larger size is named that is believed to be as fast; and none without the budget."""
    read = {1: 0.1, 8: 0.1}
    assert trial_rules.bisect(view(read, goal=LATENCY))[0] > 8
    assert trial_rules.bisect(view(read, goal=LATENCY, left=0.5)) == []
    assert trial_rules.bisect(view(read)) == []


# --- all of them ---------------------------------------------------------------------------------------------


def test_nothing_is_named_where_the_answer_is_known() -> None:
    """A steep fall after 1, all visited twice: at most two sizes between are left to rule out a jump, else none."""
    read = dict(along(falling, *POWERS))
    assert trial_rules.next_trials(view(read, extends=False)) == []
    for _ in range(2):
        read |= {n: falling(n) for n in trial_rules.next_trials(view(read))}
    assert trial_rules.next_trials(view(read)) == []


@pytest.mark.parametrize("goal", [Goal(), LATENCY, Goal(latency_limit=0.3)])
@pytest.mark.parametrize("left", [0.05, 60.0])
@pytest.mark.parametrize("extends", [True, False])
def test_whatever_is_named_is_open_and_affordable(goal: Goal, left: float, extends: bool) -> None:
    """Sizes that are closed are never named first, nor what the budget does not hold, nor one beside a list."""
    random = np.random.default_rng(0)
    for _ in range(20):
        sizes = random.choice(POWERS, 4, replace=False).tolist()
        closed = random.choice([n for n in POWERS if n not in sizes], 2, replace=False).tolist()
        read: dict[int, float | list[Timing]] = {
            n: record(n, line(n) * math.exp(0.05 * random.standard_normal()), visits=int(random.integers(1, 3)))
            for n in sizes
        }
        found = view(read, goal=goal, left=left, extends=extends, closed=closed)
        named = trial_rules.next_trials(found)
        assert len(set(named)) == len(named)
        assert not set(named) & set(closed)
        if not extends:
            assert set(named) <= set(POWERS)
        assert all(10 * found.step_seconds[found.place(n)] <= left for n in named if n in found.sizes)
