"""One look at what was read: the answer, what may run, and what a visit costs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cubatch.measure.goal import Goal
from tests.unit.search.searching import line
from tests.unit.situations import along, record, view


def probabilities(found) -> dict[int, float]:
    """How likely each size may be visited with success."""
    return dict(zip(found.sizes, found.feasibility.tolist(), strict=True))


def test_sizes_over_the_latency_limit_are_no_answer() -> None:
    """A median of 3 s is above 2.5 s; where all are, there is no answer and no field."""
    found = view({100: 2.0, 300: 3.0}, goal=Goal(latency_limit=2.5), ladder=[])
    assert (found.recommended, found.fastest) == (100, 100)
    nothing = view({300: 3.0}, goal=Goal(latency_limit=2.5), ladder=[])
    assert (nothing.recommended, nothing.fastest) == (None, None)
    with pytest.raises(ValueError, match="no size is recommended"):
        nothing.expected_loss  # noqa: B018


def test_a_size_that_was_read_and_then_ran_out_of_memory_is_no_answer() -> None:
    """An older run may have kept both; what it read still tells of the others."""
    found = view(along(line, 64, 512), ladder=[], failed=[512])
    assert (found.recommended, found.fastest) == (64, 64)
    assert 512 in found.sizes


def test_energy_has_an_answer_of_its_own_and_seconds_of_its_own() -> None:
    """Joules per sample decide; what a visit takes is still in seconds, as read."""
    goal = Goal(objective="energy")
    read = {8: record(8, 2.0, joules=8.0), 32: record(32, 4.0, joules=64.0)}
    read[64] = record(64, 5.0)
    found = view(read, goal=goal, ladder=[], extends=False)
    assert found.recommended == 8
    assert 64 not in found.measured
    assert np.exp(found.posterior.mean[found.place(32)]) == pytest.approx(64.0, rel=0.01)
    assert found.step_seconds[found.place(32)] == pytest.approx(4.0, rel=0.02)
    assert found.trial_seconds[found.place(8)] == pytest.approx(20.0, rel=0.02)


def test_sizes_are_those_of_the_ladder_and_openings_beside_them() -> None:
    """Closed ones are out unless they were read; between 8 and 16 open 10, 11 and 13, where any may be added."""
    read = along(line, 8, 16)
    assert view(read, ladder=[32], extends=False).sizes == [8, 16, 32]
    assert view(read, ladder=[32], closed=[16, 32], extends=False).sizes == [8, 16]
    assert view(read, ladder=[], closed=[11]).sizes == [8, 10, 13, 16]
    assert view(read, ladder=[], failed=[20]).sizes == [8, 10, 11, 13, 16, 17, 18, 19]
    assert view(along(line, 8, 64), ladder=[], multiple=8).sizes == [8, 16, 24, 40, 64]


def test_a_size_below_the_largest_that_ran_runs() -> None:
    """Memory rises with the size, so nothing is taken off and nothing added there, however near the failure is."""
    found = probabilities(view(along(line, 1, 512), failed=[520, 1024]))
    assert {n: p for n, p in found.items() if n <= 512} == dict.fromkeys([n for n in found if n <= 512], 1.0)


def test_between_what_ran_and_what_failed_it_is_a_matter_of_distance() -> None:
    """512 ran and 1024 did not: three quarters of the way there, one in four runs."""
    found = probabilities(view(along(line, 1, 512), ladder=[640, 768, 896], failed=[1024]))
    assert (found[640], found[768], found[896]) == pytest.approx((0.75, 0.5, 0.25))


def test_beyond_each_failure_a_size_runs_less_often() -> None:
    """
    After 512 ran and 800 failed, 1200 is too near to be tried, 1201 runs with a quarter; after 1300 failed too with
    a sixteenth beyond 1950, and between the two that failed none runs. What bisection tried says nothing new.
    """
    more: dict[str, Any] = {"ladder": [600, 900, 1000, 1200, 1201, 1950, 1951], "extends": False}
    found = probabilities(view(along(line, 1, 512), failed=[800], **more))
    assert (found[600], found[1200], found[1201]) == (pytest.approx(200 / 288), 0.0, 0.25)
    found = probabilities(view(along(line, 1, 512), failed=[800, 1300], **more))
    assert (found[900], found[1201], found[1950], found[1951]) == (0.0, 0.0, 0.0, 1 / 16)
    found = probabilities(view(along(line, 1, 512), failed=[700, 800], **more))
    assert found[1201] == 0.25
    found = probabilities(view(along(line, 1, 512), failed={800: "timeout"}, **more))
    assert found[1951] == 0.0


def test_a_size_runs_as_likely_as_it_keeps_the_latency_limit() -> None:
    """A step that is believed to take just the limit keeps it in half of the cases; what was read is known."""
    goal = Goal(latency_limit=line(256))
    found = view(along(line, 1, 8, 64, 512), goal=goal, ladder=[16, 250, 256, 320])
    allowed = probabilities(found)
    assert (allowed[1], allowed[64], allowed[512]) == (1.0, 1.0, 0.0)
    place = found.place(250)
    z = (math.log(line(256)) - found.posterior.mean[place]) / found.posterior.sd[place]
    assert allowed[250] == pytest.approx(0.5 * (1 + math.erf(z / math.sqrt(2))), rel=1e-6)
    assert allowed[16] > 0.999 > allowed[250] > allowed[256] > allowed[320]


def test_what_the_budget_does_not_hold_is_not_expected_unless_it_was_read() -> None:
    """A visit takes ten steps: with 1 s left, steps of 0.1 s and more are out of reach, except as an answer."""
    found = view(along(line, 1, 8, 64, 512), left=1.0)
    allowed = probabilities(found)
    assert allowed[512] == 1.0
    rows = zip(found.sizes, allowed.values(), found.step_seconds, strict=True)
    assert all((p == 0.0) == (10 * s > 1.0) for n, p, s in rows
               if n not in found.measured)  # fmt: skip
    assert found.affordable(1)
    assert not found.affordable(512)
    assert not found.affordable(1, 0.5)


@pytest.mark.parametrize(("tolerance", "expected"), [(0.05, -math.log(0.95)), (0.0, -math.log(0.995))])
def test_the_tolerance_is_a_logarithm_and_never_below_what_repeats(tolerance: float, expected: float) -> None:
    """5 % of the throughput, as a logarithm; zero counts as half a percent."""
    assert view({8: 1.0}, goal=Goal(tolerance=tolerance)).tolerance == pytest.approx(expected)


def test_the_field_is_worth_what_the_goal_says() -> None:
    """Samples per second rise with the size, by latency a step alone counts."""
    read = along(line, 1, 8, 64, 512)
    found = view(read)
    assert found.ahead(64, 512)[0] == pytest.approx(math.log(64 / line(64) * line(512) / 512), abs=0.01)
    assert found.ahead(512, found.fastest) == (0.0, pytest.approx(0.0, abs=1e-4))
    assert found.recommended == 512
    latency = view(read, goal=Goal(objective="latency"))
    assert latency.ahead(64, 1)[0] == pytest.approx(math.log(line(1) / line(64)), abs=0.01)
    assert found.expected_loss == view(read).expected_loss
