"""What became of every size at the end: each status, and its reason."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from cubatch.measure.goal import Goal
from cubatch.measure.records import STATUSES, Outcome
from cubatch.search.state import SearchState
from cubatch.search.verdicts import judge_sizes
from tests.unit.search.searching import LATENCY, falling, line, rising
from tests.unit.situations import POWERS, along, record, view


def outcomes(state: SearchState) -> dict[int, Outcome]:
    """The outcomes of all open sizes."""
    return {outcome.batch_size: outcome for outcome in judge_sizes(state)}


def judge(read: dict[int, Any], **more: Any) -> dict[int, Outcome]:
    """The outcomes of a situation."""
    return outcomes(view(read, **more))


def test_every_open_size_has_a_verdict_and_no_closed_one() -> None:
    """All of the ladder and all that was read, beside it too; what is closed has its outcome already."""
    found = judge(along(line, 1, 8, 50, 512), closed=[2], failed=[1024])
    assert found.keys() == {*POWERS, 50} - {2}
    assert {verdict.status for verdict in found.values()} <= set(STATUSES)
    assert all(verdict.stop_reason for verdict in found.values())


# --- sizes that were read ------------------------------------------------------------------------------------


def test_what_was_read_is_ok_or_clearly_behind() -> None:
    """64 has half of what there is and 512 most: 64 lies 43.8 % behind; who is within the tolerance is ok."""
    found = judge(along(line, 64, 512, 516), ladder=[])
    behind = 1 - (64 / line(64)) / (516 / line(516))
    text = f"{100 * behind:.1f} % behind batch size 516 after 10 timings in 2 trials"
    assert found[64] == Outcome(64, "dropped", text)
    assert found[512] == Outcome(512, "ok", "10 timings in 2 trials")
    assert found[516].status == "ok"


def test_one_is_one() -> None:
    """A single timing in a single trial is said as such."""
    read = {64: record(64, [[line(64)]]), 512: record(512, [[line(512)]])}
    found = judge(read, ladder=[])
    assert found[512].stop_reason == "1 timing in 1 trial"
    assert found[64].stop_reason.endswith("after 1 timing in 1 trial")


@pytest.mark.parametrize(("behind", "expected"), [(0.0099, "ok"), (0.0115, "ok"), (0.021, "dropped")])
def test_who_is_behind_by_less_than_the_readings_tell_is_ok(behind: float, expected: str) -> None:
    """
    A tolerance of 1 %, and two visits each: their difference is known to 1.645 standard deviations of the noise that
    is assumed of few readings, 0.5 % a visit and as much a reading, or of what was read.
    """
    read = {100: 1.0, 200: 2.0 * (1 - behind)}
    found = view(read, ladder=[])
    sd = math.sqrt(2 * found.fitted.noise.variance(10, 2))
    assert expected == ("dropped" if -math.log(1 - behind) - 1.645 * sd > -math.log(0.99) else "ok")
    assert outcomes(found)[100].status == expected


def test_the_answer_is_ok_whatever_the_noise() -> None:
    """The smallest within the tolerance is the answer: never dropped for being behind the fastest."""
    found = judge({100: 1.0, 200: 1.985}, ladder=[], goal=Goal(tolerance=0.01))
    assert (found[100].status, found[200].status) == ("ok", "ok")


def test_over_the_latency_limit_is_said_with_both_numbers() -> None:
    """Whether or not there is an answer."""
    expected = Outcome(8, "over_limit", "its time of 900 ms is above the latency limit of 500 ms", {"limit": "latency"})
    read = {8: record(8, [[0.9] * 3]), 1: record(1, [[0.1] * 3])}
    assert judge(read, ladder=[], goal=Goal(latency_limit=0.5))[8] == expected
    assert judge({8: read[8]}, ladder=[], goal=Goal(latency_limit=0.5)) == {8: expected}


# --- sizes that were not -------------------------------------------------------------------------------------


def test_without_an_answer_what_lies_above_a_broken_limit_is_dropped() -> None:
    """8 breaks the limit, so that 16 does; of 4 nothing is known but that the budget is spent."""
    found = judge({8: record(8, [[0.9] * 3])}, ladder=[4, 8, 16], goal=Goal(latency_limit=0.5))
    assert found[16] == Outcome(16, "dropped", "batch size 8, which is smaller, breaks the latency limit")
    assert found[4] == Outcome(
        4, "not_run", "the budget of 60.0 s left no time for a trial of this size", {"limit": "budget"}
    )
    assert {verdict.status for verdict in judge({}).values()} == {"not_run"}


def test_a_size_asked_for_that_the_budget_did_not_hold_is_not_run() -> None:
    """Nobody drops by a guess what was asked for by name."""
    found = judge({1: line(1)}, ladder=[1, 512], extends=False, left=0.1)
    assert found[512] == Outcome(
        512, "not_run", "the budget of 60.0 s left no time for a trial of this size", {"limit": "budget"}
    )


def test_by_latency_what_is_larger_than_a_slower_one_is_dropped() -> None:
    """8 takes longer than 1 by more than the tolerance, 4 does not: 16 is dropped for 8, and 2 for its neighbors."""
    found = judge({1: 0.1, 4: 0.104, 8: 0.2, 32: 0.3}, goal=LATENCY)
    assert found[16] == Outcome(16, "dropped", "batch size 8, which is smaller, already takes longer")
    assert "smaller, already" not in found[2].stop_reason


def test_above_what_ran_out_of_memory_is_dropped() -> None:
    """The smallest failure above the largest that ran is named; one below what ran is none."""
    found = judge(along(falling, 1, 8, 64), failed=[32, 100, 300])
    assert found[512] == Outcome(512, "dropped", "batch size 100, which is smaller, does not fit")
    assert "memory" not in judge(along(falling, 1, 8, 64), failed=[32])[512].stop_reason


def test_above_the_latency_limit_by_the_curve_is_dropped() -> None:
    """512 would take 0.576 s on the line through the others; 128 keeps the limit."""
    found = judge(along(line, 1, 8, 64, 256), goal=Goal(latency_limit=0.4))
    reason = re.fullmatch(r"it would take about (\d+) ms, above the latency limit of 400 ms", found[512].stop_reason)
    assert found[512].status == "dropped"
    assert reason
    assert int(reason[1]) == pytest.approx(576, rel=0.02)
    assert "would take" not in found[128].stop_reason


def test_beyond_a_fall_over_two_octaves_nothing_is_expected() -> None:
    """8 is the answer, and up to 32, four times that, was looked; up to 31 is not far enough to rule out 93."""
    far, near = (judge({4: 0.05, 8: 0.06, last: 1.0}, ladder=[93], left=5.0)[93] for last in (32, 31))
    assert far == Outcome(93, "dropped", "from batch size 8 to 32 nothing is gained, so nothing is expected beyond")
    assert (near.status, near.facts["limit"]) == ("not_run", "budget")


def test_far_beyond_a_plateau_nothing_is_ruled_out() -> None:
    """From 8 to 32 throughput stays, and 512 is more than three times 32: it was not looked at, 96 need not be."""
    found = judge(along(lambda n: n / 1000, 4, 8, 16, 32), ladder=[96, 512], goal=Goal(tolerance=0.1), left=0.0)
    assert found[512] == Outcome(
        512,
        "dropped",
        "from batch size 4 to 32 nothing is gained, and sizes far beyond were not measured",
        {"looked_at": False},
    )
    assert found[96].stop_reason == "from batch size 4 to 32 nothing is gained, so nothing is expected beyond"


def test_what_could_be_better_and_is_not_affordable_is_not_run() -> None:
    """The reason says what a visit takes and what is left, the facts by how much the size may be better."""
    found = view(rising(), ladder=[1024], left=2.0)
    verdict = outcomes(found)[1024]
    need = 10 * float(found.step_seconds[found.place(1024)])
    assert verdict.status == "not_run"
    assert verdict.stop_reason == f"a trial would take about {need:.1f} s, 2.00 s of the budget are left"
    # By the belief itself: the difference of two normal numbers, at 1.645 of its deviations.
    random = np.random.default_rng(0)
    costs = random.multivariate_normal(
        found.posterior.mean, found.posterior.covariance + 1e-12 * np.eye(len(found.sizes)), 100_000
    )
    place, answer = found.place(1024), found.place(512)
    ahead = costs[:, answer] - costs[:, place] + math.log(2)
    assert verdict.facts["limit"] == "budget"
    assert math.log1p(float(str(verdict.facts["could_gain"]))) == pytest.approx(np.quantile(ahead, 0.95), abs=0.003)


def test_what_was_affordable_and_left_is_dropped_with_what_it_may_be() -> None:
    """The search ended for its patience or for the worth of a visit: nothing is said of the budget."""
    found = judge(rising(), ladder=[1024], left=60.0)[1024]
    assert found.status == "dropped"
    assert re.fullmatch(
        r"by the timings of its neighbors it is at most [\d.]+ % better than batch size 512", found.stop_reason
    )


def test_by_latency_what_is_not_affordable_is_not_run() -> None:
    """The largest size that is as low may be any."""
    found = judge({1: 0.1, 8: 0.1}, ladder=[16], goal=LATENCY, left=0.5)
    assert (found[16].status, found[16].facts["limit"]) == ("not_run", "budget")


def words(found: Iterable[Outcome]) -> str:
    """All reasons."""
    return "\n".join(verdict.stop_reason for verdict in found)


def test_what_the_neighbors_rule_out_is_dropped_with_by_how_much() -> None:
    """On a line well read to 512, size 2 is surely slower and 1024 at most some percent better."""
    found = judge(along(line, 1, 4, 64, 256, 512, 516), ladder=[2, 520], goal=Goal(tolerance=0.1))
    assert found[2] == Outcome(2, "dropped", "by the timings of its neighbors it is slower than batch size 512")
    said = re.fullmatch(
        r"by the timings of its neighbors it is at most ([\d.]+) % better than batch size 512", found[520].stop_reason
    )
    assert said
    assert 0 < float(said[1]) < 5
    assert found[520].status == "dropped"
    assert "nothing is expected" not in words(found.values())
