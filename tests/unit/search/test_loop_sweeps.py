"""Sizes that are compared, not searched: each is visited equally often, whatever its readings say."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from cubatch.errors import NothingMeasured
from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_TRIAL, Recorder, Timing
from cubatch.tuning import answer
from tests.fakes import FakeDevice, affine
from tests.unit.search.walking import given, go, statuses, stop_after

STEEP = FakeDevice(affine(0.02, 1e-6), noise=0.003, seed=1)  # batch 1 takes as long as 128, and is dropped by a search


def sweeps_of(timings: list[Timing]) -> dict[int, list[int]]:
    """Give the sizes of each sweep, in the order of their visits."""
    found: dict[int, list[int]] = defaultdict(list)
    for timing in timings:
        if timing.batch_size not in found[timing.round // PER_TRIAL]:
            found[timing.round // PER_TRIAL].append(timing.batch_size)
    return found


def test_every_size_has_a_visit_in_every_sweep() -> None:
    """Five visits to each, also to those far behind, one in each sweep, in orders that differ."""
    measured = go(STEEP, given(1, 8, 64, 128), rounds=5)
    found = sweeps_of([*measured.timings])
    assert [sorted(sizes) for sizes in found.values()] == 5 * [[1, 8, 64, 128]]
    assert len({tuple(sizes) for sizes in found.values()}) > 1
    assert statuses(measured) == dict.fromkeys((1, 8, 64, 128), "ok")


@pytest.mark.parametrize("count", [1, 7, 20, 40])
def test_a_cut_off_comparison_goes_on(count: int) -> None:
    """After a kill at any point each size has its five visits in the end, and no timing is taken twice."""
    book = Recorder()
    with pytest.raises(KeyboardInterrupt):
        go(STEEP, given(1, 8, 64), keeper=book, progress=stop_after(count), rounds=5)
    whole = go(STEEP, given(1, 8, 64), earlier=book.measured, rounds=5)
    visits = Counter((t.batch_size) for t in {(t.batch_size, t.round // PER_TRIAL): t for t in whole.timings}.values())
    assert visits == {1: 5, 8: 5, 64: 5}
    assert whole.timings[:count] == book.measured.timings
    assert len({(timing.batch_size, timing.round) for timing in whole.timings}) == len(whole.timings)


def test_a_size_that_fails_leaves_the_others_their_visits() -> None:
    """What runs out of memory is an outcome, tried once."""
    device = FakeDevice(affine(0.02, 1e-6), memory_bytes=100 * 1024)
    measured = go(device, given(1, 64, 128), rounds=5)
    assert statuses(measured)[128] == "out_of_memory"
    assert [sorted(sizes) for sizes in sweeps_of([*measured.timings]).values()] == 5 * [[1, 64]]


def test_the_budget_ends_it_evenly() -> None:
    """A budget for fewer sweeps takes from all sizes alike: their visits differ by one at most."""
    measured = go(STEEP, given(1, 8, 64, 128), rounds=1000, budget=10.0)
    visits = Counter(n for sizes in sweeps_of([*measured.timings]).values() for n in sizes)
    assert max(visits.values()) - min(visits.values()) <= 1
    assert min(visits.values()) > 1


def test_a_size_that_the_budget_did_not_hold_was_not_compared() -> None:
    """256 breaks the latency limit and 512 is never read: no answer, for the limit, and 512 waits for more budget."""
    goal = Goal(latency_limit=0.01)
    measured = go(STEEP, given(256, 512), rounds=3, goal=goal, budget=0.03, seed=1)
    assert {timing.batch_size for timing in measured.timings} == {256}
    assert statuses(measured) == {256: "over_limit", 512: "not_run"}
    with pytest.raises(NothingMeasured, match="Raise latency_limit"):
        answer.answer(given(256, 512), measured, goal=goal, setting={}, is_listed=True)
