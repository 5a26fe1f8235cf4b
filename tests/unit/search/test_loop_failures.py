"""Sizes that run out of memory, raise, die or hang in the walk: what becomes of them and of the others."""

from __future__ import annotations

import weakref

import attrs
import pytest

from cubatch.errors import WorkerDied, WorkerFailed
from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_TRIAL, Candidate, Measured, Outcome, Recorder, Timing
from cubatch.measure.stopwatch import HANG_SECONDS
from cubatch.tuning import answer
from tests.fakes import Fails, FakeDevice, FakeOutOfMemoryError, FakeRunner, Hangs, affine
from tests.unit.search.walking import (
    FLAT,
    RISES,
    FailsLater,
    Sessions,
    given,
    go,
    outcome_of,
    seek,
    statuses,
    stop_after,
)


@pytest.mark.parametrize("where", ["prepare", "step"])
def test_out_of_memory_is_an_outcome_and_tuning_goes_on(where: str) -> None:
    """A MemoryError of no class of ours ends one size; the smaller ones are measured and the runner lives on."""
    sessions = Sessions(FakeDevice(affine(1e-3, 1e-4), memory_bytes=64 * 1024, memory_fails_at=where))
    measured = go(sessions, given())
    assert statuses(measured)[128] == "out_of_memory"
    assert statuses(measured)[64] == "ok"
    assert measured.outcomes[-1].facts["type"] == FakeOutOfMemoryError.__name__
    assert sessions.opened[0].prepared.count(128) == 1
    assert len(sessions.opened) == 1


def test_memory_need_not_be_monotone() -> None:
    """Batch 16 runs out of memory, batch 32 runs (deeplearning4j#5461): the larger size is still tried."""
    device = FakeDevice(affine(1e-3, 1e-4), memory_bytes=100, bytes_needed=lambda n: 1000 if n == 16 else 1)
    measured = go(device, given())
    assert [n for n, status in statuses(measured).items() if status == "out_of_memory"] == [16]
    assert statuses(measured)[128] == "ok"


def test_what_ran_out_of_memory_is_released_before_the_next_size() -> None:
    """Pools are emptied after every failure."""
    released: list[int] = []

    class Releases(FakeRunner):
        def release(self) -> None:
            released.append(self.prepared[-1])
            super().release()

    go(lambda: Releases(FakeDevice(FLAT, memory_bytes=1024 * 2)), given(1, 2, 4, 8))
    assert released[:2] == [4, 8]


@pytest.mark.parametrize("when", ["prepare", "step"])
def test_an_error_of_a_candidate_that_never_ran_is_its_outcome(when: str) -> None:
    """Type and message are kept, it is not tried again, and the other sizes are measured."""
    error = ZeroDivisionError("by nought")
    sessions = Sessions(FakeDevice(affine(1e-3, 1e-4), behaviours=(Fails({64}, error=error, when=when),)))
    measured = go(sessions, given())
    assert statuses(measured)[64] == "error"
    assert outcome_of(measured, 64).stop_reason == "ZeroDivisionError: by nought"
    assert outcome_of(measured, 64).facts["type"] == "ZeroDivisionError"
    assert sessions.opened[0].prepared.count(64) == 1
    assert statuses(measured)[128] == "ok"


@pytest.mark.parametrize("error", [ValueError, MemoryError, WorkerDied])
@pytest.mark.parametrize("after", [3, 5, 8], ids=["in its first visit", "before its second", "in its second"])
def test_the_leader_keeps_the_answer_where_it_fails_once(error: type[Exception], after: int) -> None:
    """A size that fails once after it has run is tried once more, and nothing is said of it in its outcome."""
    sessions = Sessions(FakeDevice(RISES, noise=0.005, behaviours=(FailsLater(128, after=after, error=error),)))
    measured = go(sessions, given())
    result = answer.answer(given(), measured, goal=Goal(), setting={})
    assert sessions.opened[0].behaviours[0]._raised == 1  # type: ignore[attr-defined]
    assert (statuses(measured)[128], result.batch_size) == ("ok", 128)
    assert "cut_short" not in outcome_of(measured, 128).facts
    keys = [(timing.batch_size, timing.round) for timing in measured.timings]
    assert len(keys) == len(set(keys)), "the second try must not take rounds that are taken"


def test_a_leader_that_fails_twice_is_judged_by_its_timings() -> None:
    """From its fifth step on it never comes back: it is ok with what was read, says why, and stays the answer."""
    measured = go(FakeDevice(RISES, noise=0.005, behaviours=(FailsLater(128, after=4, times=99),)), given())
    outcome = outcome_of(measured, 128)
    count = len(measured.of(128))
    assert (outcome.status, outcome.facts["cut_short"], outcome.facts["type"]) == ("ok", True, "ValueError")
    assert outcome.stop_reason.startswith(f"judged by its {count} timings, since it failed twice: ValueError: somebody")
    assert answer.answer(given(), measured, goal=Goal(), setting={}).batch_size == 128


@pytest.mark.parametrize(("times", "status"), [(1, "ok"), (2, "error")])
def test_a_worker_that_dies_before_a_size_has_run_is_started_once_more(times: int, status: str) -> None:
    """Who killed it may have been another; a second death is the size's own doing, and an error."""
    device = FakeDevice(RISES, behaviours=(FailsLater(128, times=times, error=WorkerDied),))
    measured = go(device, given())
    assert statuses(measured)[128] == status
    if status == "error":
        assert outcome_of(measured, 128).facts["type"] == "WorkerDied"
        assert statuses(measured)[64] == "ok"


def test_what_was_behind_a_fallen_leader_gets_its_chance() -> None:
    """Batch 128 turns out to break the latency limit after its first visit: 64, far behind it, is the answer."""

    first = [Timing(batch_size=128, round=number, seconds=0.0201) for number in range(3)]
    later = [Timing(batch_size=128, round=PER_TRIAL + number, seconds=0.0205) for number in range(9)]
    slow = Measured(timings=(*first, *later))
    goal = Goal(latency_limit=0.0203)
    measured = go(FakeDevice(RISES), given(), earlier=slow, goal=goal)
    assert statuses(measured)[128] == "over_limit"
    assert answer.answer(given(), measured, goal=goal, setting={}).batch_size == 64


def test_what_was_dropped_against_a_leader_that_fell_is_open_again() -> None:
    """An earlier run dropped 64; with more readings 128 breaks the latency limit, and 64 is the answer after all."""
    first = [Timing(batch_size=64, round=number, seconds=0.0201) for number in range(3)]
    later = [Timing(batch_size=128, round=number, seconds=0.0205) for number in range(9)]
    kept = Measured(
        timings=(*first, *later), outcomes=(Outcome(32, "dropped", "behind 128"), Outcome(64, "dropped", "behind 128"))
    )
    goal = Goal(latency_limit=0.0203)
    measured = go(FakeDevice(affine(0.0195, 8e-6)), given(32, 64, 128), earlier=kept, goal=goal)
    assert statuses(measured) == {32: "dropped", 64: "ok", 128: "over_limit"}
    assert measured.of(32), "it was never read, and is looked at now"
    assert answer.answer(given(32, 64, 128), measured, goal=goal, setting={}).batch_size == 64


def test_what_a_failed_step_had_made_is_gone_when_memory_is_released() -> None:
    """A traceback holds the frames of the step, and they hold its arrays: the next size would have less room."""
    alive: list[object] = []

    class Holds(FakeRunner):
        def step(self) -> None:
            made = {"activations"}
            alive.append(weakref.ref(made))
            super().step()

        def release(self) -> None:
            if alive:
                alive.append(alive[-1]())
            super().release()

    measured = go(lambda: Holds(FakeDevice(FLAT, behaviours=(Fails({2}),))), given(1, 2))
    assert statuses(measured)[2] == "error"
    assert [each for each in alive if not isinstance(each, weakref.ref)]
    assert not any(isinstance(each, set) for each in alive)


def test_a_failed_release_does_not_end_the_run() -> None:
    """A worker that died cannot release; the next size starts another."""

    class Dead(FakeRunner):
        def release(self) -> None:
            raise WorkerFailed("it has ended")

    measured = go(lambda: Dead(FakeDevice(FLAT, behaviours=(Fails({2}),))), given(1, 2, 4))
    assert statuses(measured)[2] == "error"
    assert statuses(measured)[4] == "ok"


def test_a_failed_close_does_not_lose_the_answer() -> None:
    """Everything measured is kept already."""

    class Dead(FakeRunner):
        def close(self) -> None:
            raise WorkerFailed("it has ended")

    assert statuses(go(lambda: Dead(FakeDevice(FLAT)), given(1))) == {1: "ok"}


def test_a_hang_is_a_timeout_and_leaves_budget_for_the_others() -> None:
    """A runner that gives up costs a hang's limit, and the larger sizes are measured."""
    device = FakeDevice(affine(1e-3, 1e-4), behaviours=(Hangs({16}),), gives_up=True)
    measured = go(device, given())
    assert statuses(measured)[16] == "timeout"
    assert statuses(measured)[128] == "ok"
    assert measured.seconds_spent < HANG_SECONDS + 25


@pytest.mark.parametrize("first", [3, 64, 400])
def test_a_hang_closes_the_larger_sizes_of_a_search(first: int) -> None:
    """All sizes from some size on hang: above the largest that ran, no size that is larger than a hang is tried."""
    sessions = Sessions(FakeDevice(RISES, behaviours=(Hangs(set(range(first, 513))),), gives_up=True))
    _, result = seek(sessions, 512, budget=300.0)
    hung = [n for session in sessions.opened for n in session.prepared if n >= first]
    assert hung
    assert hung == sorted(set(hung), reverse=True)  # each later trial is of a smaller size
    assert result.batch_size is not None
    assert result.batch_size < first


def test_a_worker_that_dies_closes_the_larger_sizes_of_a_search() -> None:
    """Each death takes two starts of a process, so that sizes above one that ended it twice are not tried."""
    dies = Fails(set(range(5, 513)), error=WorkerDied("signal 11 ended it"))
    sessions = Sessions(FakeDevice(RISES, behaviours=(dies,)))
    _, result = seek(sessions, 512, budget=300.0)
    died = [n for session in sessions.opened for n in session.prepared if n > 4]
    assert died
    assert died == sorted(died, reverse=True)
    assert result.batch_size == 4


@attrs.define
class HangsLater(Hangs):
    """Hangs from the second step of a session on."""

    _steps: int = 0

    def step(self, batch_size: int) -> None:
        """Let the first step through."""
        self._steps += 1
        if self._steps > 1:
            super().step(batch_size)


def test_the_first_step_bounds_a_hang_while_clocks_are_warmed() -> None:
    """The smallest size hangs from its second step on: for a hang's limit, with a prediction and without one."""
    sessions = Sessions(FakeDevice(affine(1e-3, 1e-4), behaviours=(HangsLater({1}),), gives_up=True))
    for candidates in (given(1, 2, 4), [Candidate(n, predicted_seconds=1e-3) for n in (1, 2, 4)]):
        measured = go(sessions, candidates)
        assert (statuses(measured)[1], statuses(measured)[4]) == ("timeout", "ok")
    assert all(session.clock.now() < HANG_SECONDS + 25 for session in sessions.opened)


def test_steps_longer_than_the_whole_budget_are_an_answer() -> None:
    """Steps of 40 s in a budget of 5 s come back: the second, which compiles nothing any more, is the timing."""
    sessions = Sessions(FakeDevice(affine(40.0, 1e-3)))
    measured = go(sessions, given(1, 2), budget=5.0)
    assert (statuses(measured)[1], [timing.batch_size for timing in measured.timings]) == ("ok", [1])
    assert measured.timings[0].seconds == pytest.approx(40.001)
    assert sessions.opened[0].clock.now() < 81


def test_a_first_step_that_hangs_in_a_worker_says_what_allows_longer_ones() -> None:
    """What hangs and what is slow look alike: it has half a minute, or as long as the budget is."""
    sessions = Sessions(FakeDevice(FLAT, behaviours=(Hangs({1}),), gives_up=True))
    measured = go(sessions, given(1, 2), budget=5.0)
    reason = outcome_of(measured, 1).stop_reason
    assert reason == "a reading of batch size 1 did not come back within 30.0 s. A larger budget allows longer steps."
    assert 30 <= sessions.opened[0].clock.now() < 36


def test_a_hang_that_came_back_is_a_timeout_too() -> None:
    """Without a limit the step returns after a million seconds: a timeout, and the budget is gone."""
    measured = go(FakeDevice(FLAT, behaviours=(Hangs({16}),)), given())
    assert statuses(measured)[16] == "timeout"
    assert statuses(measured)[32] == "not_run"


# --- what is no failure of a size's --------------------------------------------------------------------------


class Cancelled(BaseException):
    """What some libraries end a task with."""


@pytest.mark.parametrize("error", [GeneratorExit, Cancelled, ValueError, MemoryError])
def test_whatever_ends_a_run_from_outside_leaves_it_interrupted(error: type[BaseException]) -> None:
    """Also an error of `progress`: it comes out as it is, is no fault of a size's, and all that was read is kept."""
    book, sessions = Recorder(), Sessions(FakeDevice(FLAT, noise=0.05))
    with pytest.raises(error):
        go(sessions, given(), keeper=book, progress=stop_after(7, error))
    assert len(book.measured.timings) == 7
    assert set(statuses(book.measured).values()) == {"interrupted"}
    assert sessions.opened[0].closed


def test_a_runner_with_a_process_of_its_own_has_a_new_one_for_a_second_try() -> None:
    """What was tried in one that may be broken says little; after memory ran out in a first try it lives on."""
    ended: list[int] = []

    class Worker(FakeRunner):
        def restart(self) -> None:
            ended.append(self.prepared[-1])

    device = FakeDevice(
        RISES, memory_bytes=100 * 1024, behaviours=(FailsLater(8, after=3, error=MemoryError), Fails({32}))
    )
    measured = go(lambda: Worker(device), given())
    assert sorted(ended) == [8, 32]
    assert measured.of(8)
    assert (statuses(measured)[32], statuses(measured)[128]) == ("error", "out_of_memory")
