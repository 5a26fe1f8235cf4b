"""Where memory, the latency limit and failures end the sizes: found on fake devices, and named in the result."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cubatch.errors import NothingMeasured, OverLimit
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Timing
from cubatch.tuning import answer
from cubatch.tuning.store import Run
from tests.fakes import Fails, FakeDevice, affine
from tests.unit.search.searching import line
from tests.unit.search.walking import (
    FLAT,
    RISES,
    SIZES,
    Sessions,
    given,
    go,
    near,
    outcome_of,
    seek,
    share_of_best,
    statuses,
)
from tests.unit.situations import along, view


def test_a_size_planned_over_the_limit_is_never_tried() -> None:
    """It is over_limit without being prepared, and if nothing else is left no runner is made."""
    sessions = Sessions(FakeDevice(FLAT))
    measured = go(sessions, given(8, 16, over=[16]))
    assert (statuses(measured)[16], outcome_of(measured, 16).facts) == ("over_limit", {"limit": "memory"})
    assert 16 not in sessions.opened[0].prepared
    assert statuses(go(lambda: pytest.fail("a runner was made"), given(16, over=[16]))) == {16: "over_limit"}


@pytest.mark.parametrize("most", [9, 100, 777, 1025, 3000])
def test_where_memory_ends_is_found_to_2_percent_or_1(most: int) -> None:
    """A step has a large fixed cost, so the largest batch is the best: it is found though no plan knows it."""
    device = FakeDevice(affine(0.5, 1e-5), noise=0.001, memory_bytes=1024 * most)
    measured, result = seek(device, 4096)
    failed = min(n for n, status in statuses(measured).items() if status == "out_of_memory")
    assert result.largest_measured <= most < failed
    assert near(result.largest_measured, failed)
    assert share_of_best(device, result, 4096) >= 0.97
    assert result.decided_by == "memory"


@pytest.mark.parametrize("bad", [627, 730, 756, 769, 782])
def test_a_size_that_fails_where_memory_is_sought_does_not_stall_the_search(bad: int) -> None:
    """The bisection would try just that size again and again; it ends, near the limit, long before the budget."""
    device = FakeDevice(affine(0.05, 1e-4), memory_bytes=1024 * 777, behaviours=(Fails({bad}),))
    measured, result = seek(device, 4096)
    assert measured.seconds_spent < 20
    assert share_of_best(device, result, 4096) >= 0.98


@pytest.mark.parametrize(
    ("overhead", "top"),
    [(0.3, 100), (0.3, 2633), (0.1, 1312), (0.05, 978)],  # the last: hardly a rise is left
)
def test_where_the_latency_limit_lies_is_found_to_2_percent_or_1(overhead: float, top: int) -> None:
    """The largest size that keeps it is the best: it is found, and the next larger one that was read breaks it."""
    device = FakeDevice(affine(overhead, 1e-4))
    goal = Goal(latency_limit=overhead + 1e-4 * (top + 0.5))
    measured, result = seek(device, 4096, goal=goal)
    over = min(n for n, status in statuses(measured).items() if status == "over_limit")
    assert result.largest_measured >= over > top
    kept = max(n for n, status in statuses(measured).items() if status == "ok")
    assert kept <= top + max(1, 0.005 * top)  # no better than a single timing is trusted before any was taken
    assert near(kept, over)
    assert result.decided_by == "latency_limit"
    assert "is above the latency limit of " in outcome_of(measured, over).stop_reason
    assert measured.of(over)
    larger = [outcome for outcome in measured.outcomes if outcome.batch_size >= over]
    assert {outcome.facts["limit"] for outcome in larger} == {"latency"}
    assert {outcome.status for outcome in larger} <= {"over_limit", "dropped"}


def test_a_gap_above_the_latency_limit_is_not_searched_for_the_end_of_memory() -> None:
    """What lies between the limit and what ran out of memory cannot be the answer."""
    device = FakeDevice(affine(0.05, 1e-5), memory_bytes=700 * 1024)
    goal = Goal(latency_limit=0.056)
    measured, result = seek(device, 8192, goal=goal)
    assert measured.seconds_spent < 20
    assert result.batch_size == pytest.approx(600, rel=0.03)


def test_a_latency_limit_that_the_first_size_breaks_ends_at_once() -> None:
    """A limit of 1 us with steps of 20 ms: one size is read, nobody else is prepared, and each says why."""
    sessions = Sessions(FakeDevice(RISES))
    goal = Goal(latency_limit=1e-6)
    with pytest.raises(NothingMeasured, match="Raise latency_limit"):
        seek(sessions, 4096, goal=goal)
    assert set(sessions.opened[0].prepared) == {1}
    assert sessions.opened[0].clock.now() < 1.5
    measured = go(sessions, given(), goal=goal, extend=Candidate)
    assert outcome_of(measured, 8).stop_reason == "batch size 1, which is smaller, breaks the latency limit"
    assert statuses(measured) == {1: "over_limit"} | dict.fromkeys(SIZES[1:], "dropped")


def test_no_size_is_dropped_for_a_faster_one_above_the_latency_limit() -> None:
    """128 has four times the throughput of 4 and may not be the answer, so 4 must stay."""
    measured = go(FakeDevice(affine(9e-3, 1e-4)), given(1, 2, 4, 128), goal=Goal(latency_limit=0.01))
    assert statuses(measured) == {1: "dropped", 2: "dropped", 4: "ok", 128: "over_limit"}


@pytest.mark.parametrize("budget", [60.0, 0.08])
def test_a_latency_limit_is_held_against_the_timings_that_count(budget: float) -> None:
    """
    Most timings were throttled and took 12 ms: those that count took 9 of the 10 ms allowed.

    The unknown scale has a variance of 100, so that a log cost of -4.7 with a variance below 1e-4 is pulled by 5e-6.
    """
    goal = Goal(latency_limit=0.01)
    kept = Measured(
        timings=tuple(
            Timing(batch_size=8, round=n, seconds=0.012 if n % 3 else 0.009, throttled=n % 3 > 0) for n in range(11)
        )
    )
    measured = go(FakeDevice(lambda _: 0.009), given(8), goal=goal, earlier=kept, budget=budget)
    result = answer.answer(given(8), measured, goal=goal, setting={})
    assert result.measurements[0].latency_seconds == pytest.approx(0.009, rel=1e-5)
    assert (statuses(measured), result.batch_size) == ({8: "ok"}, 8)


def test_a_larger_budget_reconsiders_what_one_slow_timing_put_above_the_latency_limit(tmp_path: Path) -> None:
    """A first timing of 12 ms was all that the budget held; the size takes 9 of the 10 ms allowed."""
    goal = Goal(latency_limit=0.01)
    asked: dict[str, Any] = {"path": tmp_path / "store.sqlite3", "identity": {}, "conditions": {}}
    slow = Timing(batch_size=8, round=0, seconds=0.012)
    for budget, status in ((1e-3, "over_limit"), (60.0, "ok")):
        with Run(**asked, budget=budget) as run:
            kept = run.earlier if run.earlier.timings else Measured(timings=(slow,), seconds_spent=1e-3)
            run.timing(slow)
            measured = go(FakeDevice(lambda _: 0.009), given(8), goal=goal, earlier=kept, keeper=run, budget=budget)
            run.finish()
        assert statuses(measured) == {8: status}


def names(reason: str, *sizes: int | None) -> bool:
    """Return whether a reason has all these sizes as words of their own."""
    return {str(size) for size in sizes} <= set(re.findall(r"\d+", reason))


@pytest.mark.parametrize("where", ["prepare", "step"])
@pytest.mark.parametrize("most", [280, 300])
def test_memory_is_met_where_the_curve_rises_by_less_than_the_tolerance(most: int, where: str) -> None:
    """From 283 to 300 a sample gets 0.4 % cheaper: that is no plateau, and where memory ends is named."""
    device = FakeDevice(affine(0.002, 1e-4), memory_bytes=1024 * most, memory_fails_at=where, prepare_seconds=1e-4)
    measured, result = seek(device, 4096, budget=20.0)
    failed = min(n for n, status in statuses(measured).items() if status == "out_of_memory")
    assert result.largest_measured <= most < failed
    assert near(result.largest_measured, failed)
    assert result.decided_by == "memory"
    assert any(names(reason, result.largest_measured, failed) for reason in result.reasons)


def test_a_dear_latency_limit_is_met_while_budget_is_left() -> None:
    """Steps of a second are a tenth of what is left: 35 samples take just the second that is allowed."""
    device = FakeDevice(affine(0.3, 0.02), prepare_seconds=1e-4)
    _, result = seek(device, 512, budget=20.0, goal=Goal(latency_limit=1.0 + 1e-9))
    assert (result.batch_size, result.decided_by) == (35, "latency_limit")
    assert any(names(reason, 35, 36) and "1.02 s" in reason for reason in result.reasons)


def test_a_size_that_the_runner_refuses_ends_memory() -> None:
    """Above 300 it predicts too much, from smaller sizes: the end is found, and memory decides."""
    refuses = Fails(range(301, 1025), error=OverLimit("a step", 4096, 1024), when="prepare")
    measured, result = seek(FakeDevice(RISES, behaviours=(refuses,)), 1024)
    refused = [n for n, status in statuses(measured).items() if status == "over_limit"]
    assert near(result.largest_measured, min(refused))
    assert result.decided_by == "memory"


@pytest.mark.parametrize("first", [20, 64, 100])
def test_sizes_that_fail_narrow_the_range_as_memory_does(first: int) -> None:
    """From one size on a step raises: the end is found, few sizes fail on the way, and the result names both."""
    error = ValueError("no such shape")
    device = FakeDevice(affine(0.002, 1e-4), behaviours=(Fails(range(first, 600), error=error),), prepare_seconds=1e-4)
    measured, result = seek(device, 512, budget=20.0)
    failed = [n for n, status in statuses(measured).items() if status == "error"]
    assert near(result.largest_measured, min(failed))
    assert len(failed) <= 10
    assert result.decided_by is None
    assert any(names(reason, result.largest_measured, min(failed)) for reason in result.reasons)
    assert any("no such shape" in reason and names(reason, min(failed)) for reason in result.reasons)


def test_each_error_halves_the_chance_of_what_lies_above_and_ends_nothing() -> None:
    """An error may be of that size alone; between two sizes that raised one no other is made up."""
    read = along(line, 1, 8, 32)
    alone = view(read, failed={64: "error"})
    assert alone.feasibility[alone.place(128)] == pytest.approx(0.5)
    both = view(read, failed={64: "error", 256: "error"})
    assert both.feasibility[both.place(128)] == pytest.approx(0.5)
    assert both.feasibility[both.place(512)] == pytest.approx(0.25)
    assert [n for n in both.sizes if 64 < n < 256] == [128]


def test_what_lies_above_a_failure_is_not_said_to_be_ruled_out_by_readings() -> None:
    """The line beneath the table names the size that failed."""
    device = FakeDevice(affine(0.002, 1e-4), behaviours=(Fails(range(64, 600)),), prepare_seconds=1e-4)
    _, result = seek(device, 512, budget=20.0)
    (above,) = (reason for reason in result.reasons if names(reason, 192))
    assert names(above, 64, 192)
    assert "timings" not in above
