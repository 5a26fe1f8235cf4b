"""Where memory, the latency limit and failures end the sizes: found on fake devices, and named in the result."""

from __future__ import annotations

import pytest

from cubatch.measure.goal import Goal
from cubatch.report.tables import result as result_table
from cubatch.search import rules
from tests.fakes import Fails, FakeDevice, affine
from tests.unit.search.test_walk import near, seek, statuses
from tests.unit.situations import along, view


def line(n: int) -> float:
    """A step of 64 ms and 1 ms a sample."""
    return 0.064 + 0.001 * n


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
    named = f"the largest that ran is {result.largest_measured}; {failed} runs out of memory"
    assert any(named in reason for reason in result.reasons)


def test_a_flat_curve_is_not_searched_for_the_end_of_memory() -> None:
    """From 64 to 512 nothing is gained, so that it does not matter whether 600 fits."""
    read = along(lambda n: 0.001 * n, 64, 256, 512)
    assert rules.memory(view(read, failed=[1024])) == []


def test_a_dear_latency_limit_is_met_while_budget_is_left() -> None:
    """Steps of a second are a tenth of what is left: 35 samples take just the second that is allowed."""
    device = FakeDevice(affine(0.3, 0.02), prepare_seconds=1e-4)
    _, result = seek(device, 512, budget=20.0, goal=Goal(latency_limit=1.0 + 1e-9))
    assert (result.batch_size, result.decided_by) == (35, "latency_limit")
    assert any("36 already takes 1.02 s" in reason for reason in result.reasons)


@pytest.mark.parametrize("first", [20, 64, 100])
def test_sizes_that_fail_narrow_the_range_as_memory_does(first: int) -> None:
    """From one size on a step raises: the end is found, few sizes fail on the way, and the result names both."""
    error = ValueError("no such shape")
    device = FakeDevice(affine(0.002, 1e-4), behaviours=(Fails(range(first, 600), error=error),), prepare_seconds=1e-4)
    measured, result = seek(device, 512, budget=20.0)
    failed = [n for n, status in statuses(measured).items() if status == "error"]
    assert near(result.largest_measured, min(failed))
    assert len(failed) <= 8
    assert result.decided_by is None
    named = f"the largest that ran is {result.largest_measured}; {min(failed)} fails (ValueError: no such shape)"
    assert any(named in reason for reason in result.reasons)
    assert not any("plateau" in reason for reason in result.reasons)


def test_one_size_that_fails_does_not_end_the_sizes() -> None:
    """64 fails and nothing else does: the largest is the answer."""
    device = FakeDevice(affine(0.02, 1e-4), behaviours=(Fails({64}),))
    _, result = seek(device, 512)
    assert result.largest_measured == 512


def test_one_error_halves_the_chance_of_what_lies_above_and_two_end_it() -> None:
    """An error may be of that size alone; of two sizes it is not, and what lies between two that failed fails too."""
    read = along(line, 1, 8, 32)
    alone = view(read, failed=[64], broken={64: "error"})
    assert alone.allowed[alone.place(128)] == pytest.approx(0.5)
    assert alone.walls == set()
    both = view(read, failed=[64, 256], broken={64: "error", 256: "error"})
    assert both.walls == {64, 256}
    assert both.allowed[both.place(128)] == 0


def test_what_lies_above_a_failure_is_not_said_to_be_ruled_out_by_readings() -> None:
    """The line beneath the table names the size that failed."""
    device = FakeDevice(affine(0.002, 1e-4), behaviours=(Fails(range(64, 600)),), prepare_seconds=1e-4)
    _, result = seek(device, 512, budget=20.0)
    beneath = result_table.tuning_grid(result.to_mapping()).beneath
    above = [text for text in beneath if "above 64, which failed" in text]
    assert len(above) == 1
    assert "128" in above[0]
    assert not any("128" in text for text in beneath if "readings" in text)
