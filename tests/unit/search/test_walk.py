"""The walk over the sizes, on fake devices with a clock of their own."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest

import cubatch
from cubatch.errors import EnergyNotAvailable, NothingMeasured, TimedOut, WorkerDied, WorkerFailed
from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_VISIT, Candidate, Measured, Outcome, Recorder, Timing, counting
from cubatch.measure.stopwatch import HANG_SECONDS, MAX_REST_SHARE, MIN_SPAN_SECONDS
from cubatch.search import walk
from cubatch.search.rules import MOST_VISITS
from cubatch.search.walk import Event, measure
from cubatch.tuning import answer, ladder
from cubatch.tuning.results import TuningResult
from cubatch.tuning.store import open_run
from tests.fakes import (
    Behaviour,
    ColdStart,
    Drift,
    Fails,
    FakeDevice,
    FakeOutOfMemoryError,
    FakeRunner,
    Hangs,
    Throttling,
    affine,
)

ROOT = Path(cubatch.__file__).parents[1]
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
FLAT = affine(0.02, 0.0)  # every step 20 ms: one step is one timing
RISES = affine(0.02, 1e-6)  # the largest size is the best by far


def given(*sizes: int, over: Iterable[int] = ()) -> list[Candidate]:
    """Give candidates."""
    return [Candidate(n, over_limit=n in over) for n in sizes or SIZES]


def go(device: Callable[[], FakeRunner], candidates: Sequence[Candidate], **more: Any) -> Measured:
    """Measure a ladder to which no size is added, with a goal, a budget and a seed unless told otherwise."""
    arguments: dict[str, Any] = {"goal": Goal(), "budget": 60.0, "seed": 0}
    return measure(device, candidates, **arguments | more)


def seek(
    device: Callable[[], FakeRunner], top: int | Sequence[Candidate] = 512, **more: Any
) -> tuple[Measured, TuningResult]:
    """Measure as `autotune_callable` does, where the search adds sizes, and choose."""
    steps = ladder.plain_candidates(top) if isinstance(top, int) else list(top)
    goal = more.get("goal") or Goal()
    measured = go(device, steps, **{"extend": functools.partial(ladder.between, steps=steps)} | more)
    rungs = [*steps, *measured.added]
    setting = {"limits": {"max_batch_size": top if isinstance(top, int) else None}}
    return measured, answer.answer(rungs, measured, goal=goal, setting=setting)


def statuses(measured: Measured) -> dict[int, str]:
    """Give the status of every size."""
    return {outcome.batch_size: outcome.status for outcome in measured.outcomes}


def outcome_of(measured: Measured, batch_size: int) -> Outcome:
    """Give the outcome of a size."""
    return next(outcome for outcome in measured.outcomes if outcome.batch_size == batch_size)


def first_visits(measured: Measured) -> list[int]:
    """Give the sizes in the order of their first timings."""
    return list(dict.fromkeys(timing.batch_size for timing in measured.timings))


def share_of_best(device: FakeDevice, result: TuningResult, top: int) -> float:
    """Give what the answer truly does, as a share of the best of all integers."""
    assert result.batch_size is not None
    return device.throughput(result.batch_size) / device.true_best(top)[1]


@attrs.define
class Sessions:
    """A factory that remembers its runners."""

    device: FakeDevice
    opened: list[FakeRunner] = attrs.field(factory=list)

    def __call__(self) -> FakeRunner:
        """Open a session."""
        self.opened.append(self.device())
        return self.opened[-1]


@attrs.define
class FailsLater(Behaviour):
    """One size raises so many times, after so many of its steps came back."""

    at: int
    after: int = 0
    times: int = 1
    error: type[Exception] = ValueError
    _steps: int = 0
    _raised: int = 0

    def step(self, batch_size: int) -> None:
        """Count the steps of the size, and raise."""
        if batch_size != self.at:
            return
        if self._steps >= self.after and self._raised < self.times:
            self._raised += 1
            raise self.error("somebody pulled the plug")
        self._steps += 1


@attrs.define
class SlowFirst(Behaviour):
    """The first steps of a session take longer, as beside another process."""

    count: int = 6
    extra: float = 0.68
    _steps: int = 0

    def step(self, batch_size: int) -> None:
        """Count."""
        self._steps += 1

    def delay(self) -> float:
        """Give what they take on top."""
        return self.extra if self._steps <= self.count else 0.0


def stop_after(count: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[[Event], None]:
    """Interrupt after so many timings, as Ctrl-C does between two of them."""
    taken = []

    def progress(event: Event) -> None:
        if event.kind == "timing":
            taken.append(event)
            if len(taken) == count:
                raise error

    return progress


# --- the walk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("adds", [False, True])
def test_every_candidate_ends_with_one_outcome_and_a_reason(noise: float, *, adds: bool) -> None:
    """Nobody is left open, whether sizes are added or not; what has timings is ok or dropped."""
    device = FakeDevice(affine(1e-3, 1e-4), noise=noise)
    measured = seek(device, given())[0] if adds else go(device, given())
    assert [outcome.batch_size for outcome in measured.outcomes] == sorted(
        {*SIZES, *(candidate.batch_size for candidate in measured.added)}
    )
    assert set(statuses(measured).values()) <= {"ok", "dropped"}
    assert all(outcome.stop_reason for outcome in measured.outcomes)


def test_the_same_seed_visits_the_same_sizes_and_another_shuffles_otherwise() -> None:
    """Timings come in an order that seed and readings fix; sweeps are shuffled, and differ between seeds."""
    device = FakeDevice(affine(0.0, 1e-3), noise=0.05)

    def order(seed: int) -> list[tuple[int, int]]:
        measured = go(device, given(32, 48, 64, 96), seed=seed)
        return [(timing.batch_size, timing.round) for timing in measured.timings]

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_scouts_ascend_and_are_far_apart() -> None:
    """The first sizes are 1, 8, 64 and 512, whatever order the ladder comes in."""
    steps = ladder.plain_candidates(512)[::-1]
    measured, _ = seek(FakeDevice(affine(0.02, 1e-5)), steps)
    assert first_visits(measured)[:4] == [1, 8, 64, 512]


def test_sizes_asked_for_are_each_visited_once_before_any_twice_and_none_is_added() -> None:
    """Without `extend` all sizes have round 0 before the first timing of a later visit, ascending."""
    measured = go(FakeDevice(affine(1e-3, 1e-4), noise=0.02), given(48, 1, 7, 100))
    assert first_visits(measured) == [1, 7, 48, 100]
    visits = [timing.round // PER_VISIT for timing in measured.timings]
    assert visits == sorted(visits)
    assert all(any(timing.round == 0 for timing in measured.of(n)) for n in (1, 7, 48, 100))
    assert (measured.added, set(statuses(measured))) == ((), {1, 7, 48, 100})


def test_a_timing_spans_its_minimum() -> None:
    """Steps of 0.3 ms are repeated until they span the minimum; long ones run once."""
    measured = go(FakeDevice(affine(3e-4, 0.0)), given(1))
    assert all(t.repeats * 3e-4 >= MIN_SPAN_SECONDS > (t.repeats - 1) * 3e-4 for t in measured.timings)
    assert {t.repeats for t in go(FakeDevice(FLAT), given(1)).timings} == {1}


def test_the_prepared_size_is_not_prepared_again() -> None:
    """One candidate is prepared once, for all of its visits, and the runner is closed."""
    sessions = Sessions(FakeDevice(FLAT))
    measured = go(sessions, given(8))
    assert len({timing.round // PER_VISIT for timing in measured.timings}) > 1
    assert sessions.opened[0].prepared == [8]
    assert sessions.opened[0].closed


def test_no_size_and_round_is_measured_twice() -> None:
    """Rounds are the key under which the store keeps timings; a visit keeps within its numbers."""
    measured, _ = seek(FakeDevice(affine(0.02, 1e-4), noise=0.02))
    keys = [(timing.batch_size, timing.round) for timing in measured.timings]
    assert len(keys) == len(set(keys))
    assert max(timing.round % PER_VISIT for timing in measured.timings) < PER_VISIT - 1


def test_a_cold_start_stays_out_of_the_timings_that_count() -> None:
    """A first step 50 times too long and a clock that takes a second to rise leave what counts within 10 %."""
    device = FakeDevice(affine(1e-3, 1e-4), behaviours=(ColdStart(slower=0.28, seconds=1.0),))
    measured = go(device, given())
    for n in SIZES:
        for timing in counting(measured.of(n)):
            assert timing.seconds == pytest.approx(device.curve(n), rel=0.1)


def test_slow_drift_does_not_favour_what_came_first() -> None:
    """The clock sinks by a tenth while all sizes are equally fast: the answer costs no more than the drift."""
    device = FakeDevice(affine(0.0, 1e-3), behaviours=(Drift(amount=0.1, seconds=10.0),))
    measured = go(device, given(32, 48, 64, 96))
    assert set(statuses(measured).values()) <= {"ok", "dropped"}
    rates = [n / min(t.seconds for t in counting(measured.of(n))) for n in (32, 48, 64, 96)]
    assert max(rates) / min(rates) < 1.06


def test_clearly_slower_sizes_are_dropped_with_their_timings() -> None:
    """On a steep curve the small sizes end after one visit, naming who beat them and by how much."""
    measured = go(FakeDevice(RISES, noise=0.005), given())
    assert statuses(measured)[1] == "dropped"
    assert {timing.round // PER_VISIT for timing in measured.of(1)} == {0}
    assert outcome_of(measured, 1).stop_reason.startswith("99.2 % behind batch size 128 after ")
    assert statuses(measured)[128] == "ok"


@pytest.mark.parametrize(("scatter", "status"), [(0.001, "dropped"), (0.1, "ok")])
def test_a_size_is_dropped_only_where_the_readings_are_sure(scatter: float, status: str) -> None:
    """3 % behind after nine readings is behind where they scatter by 0.1 %, and may be as good where by 10 %."""
    timings = [
        Timing(batch_size=n, round=number, seconds=seconds * (1 + scatter * (number % 3 - 1)))
        for n, seconds in ((64, 0.64), (96, 0.96 * 1.03))
        for number in range(9)
    ]
    kept = Measured(timings=tuple(timings), seconds_spent=60.0)
    measured = go(lambda: pytest.fail("nothing is left to measure with"), given(64, 96), kept=kept)
    assert statuses(measured) == {64: "ok", 96: status}
    assert outcome_of(measured, 64).facts == {"limit": "budget"}


def test_noise_that_never_settles_ends() -> None:
    """With 30 % noise one size has at most the visits that are worth their time, and is ok."""
    measured = go(FakeDevice(FLAT, noise=0.3), given(8))
    assert statuses(measured) == {8: "ok"}
    assert 2 <= len({timing.round // PER_VISIT for timing in measured.timings}) <= MOST_VISITS


def test_a_plateau_ends_long_before_the_budget_and_the_rest_is_dropped() -> None:
    """Where nothing more is to be gained measuring ends, and sizes that never ran say what their neighbours say."""
    measured, result = seek(FakeDevice(affine(1e-4, 1e-3), noise=0.003), 4096)
    assert measured.seconds_spent < 30
    assert set(statuses(measured).values()) == {"ok", "dropped"}
    unread = [n for n in statuses(measured) if not measured.of(n)]
    assert unread
    assert all("nothing is" in text or "by its neighbours' readings" in text
               for n in unread if (text := outcome_of(measured, n).stop_reason))  # fmt: skip
    assert result.decided_by == "plateau"


def test_events_tell_the_story() -> None:
    """Timings carry their rounds, outcomes end every size, time only passes, and the end is the last event."""
    events: list[Event] = []
    measured = go(FakeDevice(FLAT), given(1, 128), progress=events.append)
    timings = [(event.batch_size, event.round) for event in events if event.kind == "timing"]
    assert timings == [(timing.batch_size, timing.round) for timing in measured.timings]
    assert sorted(event.batch_size or 0 for event in events if event.kind == "outcome") == [1, 128]
    assert any(event.kind == "round" and event.message.startswith("sweep 1: ") for event in events)
    assert (events[-1].kind, events[-1].total) == ("end", 60.0)
    assert events[-1].done == pytest.approx(measured.seconds_spent)
    assert all(before.seconds_left >= after.seconds_left for before, after in pairwise(events))
    assert all(event.done + event.seconds_left == pytest.approx(60.0) for event in events)


def test_events_tell_the_best_so_far_and_what_it_could_gain() -> None:
    """There is no best before the first reading; in the end it is the answer, its rate, and little is left to gain."""
    events: list[Event] = []
    _, result = seek(FakeDevice(affine(0.02, 1e-3), noise=0.002), progress=events.append)
    first, last = events[0], events[-1]
    assert (first.best_batch_size, first.best_rate, first.could_gain) == (None, None, None)
    assert last.best_batch_size == result.batch_size
    chosen = next(m for m in result.measurements if m.batch_size == result.batch_size)
    assert last.best_rate == pytest.approx(chosen.samples_per_second)
    gains = [event.could_gain for event in events if event.could_gain is not None]
    assert gains[0] > 0.5
    assert 0 <= gains[-1] < 0.05


# --- the answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overhead", "work"), [(0.3, 0.02), (0.1, 0.05), (0.02, 0.01)])
def test_dear_steps_get_an_answer_within_3_percent_of_the_best(overhead: float, work: float) -> None:
    """60 s hold few steps of up to 26 s: they go where the answer may lie, not to 1, 2, 3 and 4."""
    device = FakeDevice(affine(overhead, work), noise=0.002)
    measured, result = seek(device, 512)
    assert share_of_best(device, result, 512) >= 0.97
    assert measured.seconds_spent < 60 + device.curve(512)


def test_one_slow_timing_at_the_start_costs_no_size() -> None:
    """0.7 s for six calls where 24 ms are right: within 25 s all is looked at, and the answer is right."""
    device = FakeDevice(affine(0.02, 0.004), behaviours=(SlowFirst(),))
    measured, result = seek(device, 64, budget=25.0)
    assert len(ladder.plain_candidates(64)) == 12
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
    """A tooth between the rungs is found; each size beside the ladder is kept once, and a multiple of 8."""
    device = FakeDevice(lambda n: 0.02 + 1e-3 * n * (0.8 if 200 < n <= 240 else 1.0))
    book = Recorder()
    measured, _ = seek(device, given(8, 64, 128, 256, 512), keep=book, multiple=8)
    sizes = [candidate.batch_size for candidate in measured.added]
    assert sizes
    assert len(sizes) == len(set(sizes))
    assert all(n % 8 == 0 for n in sizes)
    assert not set(sizes) & {8, 64, 128, 256, 512}
    assert book.measured.added == measured.added
    assert set(sizes) <= set(statuses(measured))
    assert "between 128 and 256" in {text for candidate in measured.added for text in candidate.reasons}


@pytest.mark.parametrize("budget", [2.0, 0.5, 0.01])
@pytest.mark.parametrize("first", [0.01, 1.5, 20.0])
def test_a_budget_that_holds_one_step_gives_an_answer(budget: float, first: float) -> None:
    """The first step of a run may compile and does not count, and one step that came back is a reading."""
    device = FakeDevice(affine(0.9 * min(first, budget), 1e-3), behaviours=(ColdStart(0.0, 1.0, first_step=10.0),))
    measured, result = seek(device, 512, budget=budget)
    assert result.batch_size is not None
    assert measured.timings
    assert set(statuses(measured)) >= {1, 2, 512}


def test_the_first_step_of_a_run_does_not_count() -> None:
    """100 s of compiling before a step of 20 ms, where a hang's limit would be 30 s and the budget is 60."""
    device = FakeDevice(FLAT, behaviours=(ColdStart(slower=0.0, first_step=5000.0),), gives_up=True)
    sessions = Sessions(device)
    measured = go(sessions, [Candidate(1, predicted_seconds=0.02)], budget=200.0)
    assert statuses(measured) == {1: "ok"}
    assert measured.seconds_spent < 10
    assert sessions.opened[0].clock.now() > 100


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


# --- failures ------------------------------------------------------------------------------------------------


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


def test_each_size_has_a_second_try_of_its_own() -> None:
    """Two sizes that fail once each are both ok."""
    sessions = Sessions(FakeDevice(affine(0.0, 1e-3), behaviours=(FailsLater(64, 3), FailsLater(96, 3))))
    measured = go(sessions, given(1, 64, 96))
    assert [behaviour._raised for behaviour in sessions.opened[0].behaviours] == [1, 1]  # type: ignore[attr-defined]
    assert statuses(measured) == {1: "ok", 64: "ok", 96: "ok"}
    assert not any("cut_short" in outcome.facts for outcome in measured.outcomes)


def test_what_was_behind_a_fallen_leader_gets_its_chance() -> None:
    """Batch 128 turns out to break the latency limit after its first visit: 64, far behind it, is the answer."""

    first = [Timing(batch_size=128, round=number, seconds=0.0201) for number in range(3)]
    later = [Timing(batch_size=128, round=PER_VISIT + number, seconds=0.0205) for number in range(9)]
    slow = Measured(timings=(*first, *later))
    goal = Goal(latency_limit=0.0203)
    measured = go(FakeDevice(RISES), given(), kept=slow, goal=goal)
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
    measured = go(FakeDevice(affine(0.0195, 8e-6)), given(32, 64, 128), kept=kept, goal=goal)
    assert statuses(measured) == {32: "dropped", 64: "ok", 128: "over_limit"}
    assert measured.of(32), "it was never read, and is looked at now"
    assert answer.answer(given(32, 64, 128), measured, goal=goal, setting={}).batch_size == 64


def test_after_a_failure_the_size_is_prepared_anew() -> None:
    """What was prepared may have gone with the worker."""
    sessions = Sessions(FakeDevice(FLAT, behaviours=(FailsLater(8, after=3),)))
    go(sessions, given(1, 8))
    assert sessions.opened[0].prepared[:3] == [1, 8, 8]


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


@attrs.define
class HangsLater(Hangs):
    """Hangs from the second step of a session on."""

    _steps: int = 0

    def step(self, batch_size: int) -> None:
        """Let the first step through."""
        self._steps += 1
        if self._steps > 1:
            super().step(batch_size)


def test_what_is_predicted_bounds_a_hang_while_clocks_are_warmed() -> None:
    """The smallest size hangs: without a prediction that takes the whole budget, with one a hang's limit."""
    device = FakeDevice(affine(1e-3, 1e-4), behaviours=(HangsLater({1}),), gives_up=True)
    blind = go(device, given(1, 2, 4))
    assert statuses(blind)[1] == "timeout"
    assert blind.seconds_spent >= 60
    foreseen = go(device, [Candidate(n, predicted_seconds=1e-3) for n in (1, 2, 4)])
    assert statuses(foreseen)[1] == "timeout"
    assert statuses(foreseen)[4] == "ok"
    assert foreseen.seconds_spent < HANG_SECONDS + 25


def test_a_step_of_ten_times_its_prediction_is_no_hang() -> None:
    """A prediction may be wrong by far more than its interval before a long step counts as hung."""
    measured = go(FakeDevice(affine(40.0, 0.0)), [Candidate(1, predicted_seconds=4.0)], budget=10_000.0)
    assert statuses(measured) == {1: "ok"}


def test_a_hang_that_came_back_is_a_timeout_too() -> None:
    """Without a limit the step returns after a million seconds: a timeout, and the budget is gone."""
    measured = go(FakeDevice(FLAT, behaviours=(Hangs({16}),)), given())
    assert statuses(measured)[16] == "timeout"
    assert statuses(measured)[32] == "not_run"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clock_that_reads_nonsense_is_an_error(seconds: float) -> None:
    """No timing of zero, infinite or undefined length is ever kept."""
    measured = go(FakeDevice(affine(seconds, 0.0)), given(8))
    assert (statuses(measured), measured.timings) == ({8: "error"}, ())


# --- limits --------------------------------------------------------------------------------------------------


def test_a_size_planned_over_the_limit_is_never_tried() -> None:
    """It is over_limit without being prepared, and if nothing else is left no runner is made."""
    sessions = Sessions(FakeDevice(FLAT))
    measured = go(sessions, given(8, 16, over=[16]))
    assert (statuses(measured)[16], outcome_of(measured, 16).facts) == ("over_limit", {"limit": "memory"})
    assert 16 not in sessions.opened[0].prepared
    assert statuses(go(lambda: pytest.fail("a runner was made"), given(16, over=[16]))) == {16: "over_limit"}


def near(low: int, high: int) -> bool:
    """Say whether two sizes are within 2 % of each other, or 1."""
    return high - low <= max(1, int(0.02 * low))


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
    [(0.3, 100), (0.3, 503), (0.3, 877), (0.3, 2633), (0.1, 1312), (0.05, 978)],  # the last: hardly a rise is left
)
def test_where_the_latency_limit_lies_is_found_to_2_percent_or_1(overhead: float, top: int) -> None:
    """The largest size that keeps it is the best: it is found, and the next larger one that was read breaks it."""
    device = FakeDevice(affine(overhead, 1e-4))
    goal = Goal(latency_limit=overhead + 1e-4 * (top + 0.5))
    measured, result = seek(device, 4096, goal=goal)
    over = min(n for n, status in statuses(measured).items() if status == "over_limit")
    assert result.largest_measured >= over > top
    kept = max(n for n, status in statuses(measured).items() if status == "ok")
    assert kept <= top
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


def test_where_steps_are_dear_the_first_size_keeps_the_latency_limit_by_the_model() -> None:
    """The model would begin with the largest size, whose steps take five minutes where 100 s are allowed."""
    steps = [Candidate(2**k, predicted_seconds=20 + 3 * 2**k) for k in range(9)]
    measured, _ = seek(FakeDevice(affine(20.0, 3.0)), steps, budget=400.0, goal=Goal(latency_limit=100.0))
    assert first_visits(measured)[0] == 16


def test_smaller_sizes_are_tried_where_the_first_breaks_the_latency_limit() -> None:
    """The model is wrong by half: what it began with is too slow, and the answer is a smaller size."""
    steps = [Candidate(2**k, predicted_seconds=5 + 0.3 * 2**k) for k in range(9)]
    measured, result = seek(FakeDevice(affine(4.0, 0.9)), steps, budget=120.0, goal=Goal(latency_limit=8.0))
    assert first_visits(measured)[:2] == [8, 1]
    assert statuses(measured)[8] == "over_limit"
    assert 2 <= result.batch_size <= 4


def test_no_size_is_dropped_for_a_faster_one_above_the_latency_limit() -> None:
    """128 has four times the throughput of 4 and may not be the answer, so 4 must stay."""
    measured = go(FakeDevice(affine(9e-3, 1e-4)), given(1, 2, 4, 128), goal=Goal(latency_limit=0.01))
    assert statuses(measured) == {1: "dropped", 2: "dropped", 4: "ok", 128: "over_limit"}


@pytest.mark.parametrize("budget", [60.0, 0.08])
def test_a_latency_limit_is_held_against_the_timings_that_count(budget: float) -> None:
    """Most timings were throttled and took 12 ms: those that count took 9 of the 10 ms allowed."""
    goal = Goal(latency_limit=0.01)
    kept = Measured(
        timings=tuple(
            Timing(batch_size=8, round=n, seconds=0.012 if n % 3 else 0.009, throttled=n % 3 > 0) for n in range(11)
        )
    )
    measured = go(FakeDevice(lambda _: 0.009), given(8), goal=goal, kept=kept, budget=budget)
    result = answer.answer(given(8), measured, goal=goal, setting={})
    assert result.measurements[0].latency_seconds == pytest.approx(0.009)
    assert (statuses(measured), result.batch_size) == ({8: "ok"}, 8)


def test_a_larger_budget_reconsiders_what_one_slow_timing_put_above_the_latency_limit(tmp_path: Path) -> None:
    """A first timing of 12 ms was all that the budget held; the size takes 9 of the 10 ms allowed."""
    goal = Goal(latency_limit=0.01)
    asked: dict[str, Any] = {"path": tmp_path / "store.sqlite3", "identity": {}, "conditions": {}}
    slow = Timing(batch_size=8, round=0, seconds=0.012)
    for budget, status in ((1e-3, "over_limit"), (60.0, "ok")):
        with open_run(**asked, budget=budget) as run:
            kept = run.kept if run.kept.timings else Measured(timings=(slow,), seconds_spent=1e-3)
            run.timing(slow)
            measured = go(FakeDevice(lambda _: 0.009), given(8), goal=goal, kept=kept, keep=run, budget=budget)
            run.finish()
        assert statuses(measured) == {8: status}


# --- throttling and disturbance ------------------------------------------------------------------------------


def test_throttled_timings_are_kept_flagged_and_the_device_rests() -> None:
    """A device that heats up gives flagged timings, it rests after each, and what is clear is right."""
    rests: list[float] = []

    @attrs.define
    class Rests(Behaviour):
        def spend(self, seconds: float, *, busy: bool) -> None:
            if not busy and seconds != pytest.approx(0.02):  # what preparing takes
                rests.append(seconds)

    device = FakeDevice(FLAT, noise=0.01, behaviours=(Throttling(hot_after=0.8, rest_cools=1.0), Rests()))
    measured = go(device, given())
    flagged = [timing for timing in measured.timings if timing.throttled]
    assert flagged
    assert 0 < len(rests) <= len(flagged)
    clear = [timing.seconds for timing in measured.timings if not timing.throttled]
    assert all(value == pytest.approx(0.02, rel=0.1) for value in clear)


def test_a_fallen_clock_is_throttling_even_if_the_device_does_not_say_so() -> None:
    """Below three quarters of the highest clock of the run, those of earlier runs included, a timing is flagged."""

    @attrs.define
    class Falls(Behaviour):
        passed: float = 0.0

        def clock(self) -> float:
            return 0.5 if self.passed > 0.6 else 1.0

        def spend(self, seconds: float, *, busy: bool) -> None:
            self.passed += seconds

    measured = go(FakeDevice(FLAT, noise=0.05, behaviours=(Falls(),)), given(8, 16))
    assert {t.throttled for t in measured.timings if t.sm_clock_mhz == 750.0} == {True}
    assert {t.throttled for t in measured.timings if t.sm_clock_mhz == 1500.0} <= {False}
    kept = Measured(timings=(Timing(batch_size=8, round=0, seconds=0.02, sm_clock_mhz=3000.0),))
    again = go(FakeDevice(FLAT, noise=0.05), given(8, 16), kept=kept)
    assert {timing.throttled for timing in again.timings[1:]} == {True}


def test_a_device_that_always_throttles_is_measured_all_the_same() -> None:
    """If every timing would be thrown away all are used, and rests stay within their share."""

    class Always(Throttling):
        def factor(self) -> float:
            self.throttled = True
            return 1.5

    measured = go(FakeDevice(FLAT, behaviours=(Always(),)), given(8))
    result = answer.answer(given(8), measured, goal=Goal(), setting={})
    assert statuses(measured) == {8: "ok"}
    assert result.measurements[0].throttled == len(result.measurements[0].timings_seconds) > 0
    assert measured.seconds_spent < MAX_REST_SHARE * 60 + 3


def test_a_disturbed_visit_does_not_count_and_is_counted() -> None:
    """Another process was there at the first visit: the result is what the size does undisturbed, and says so."""
    measured = go(FakeDevice(FLAT, behaviours=(SlowFirst(21, 0.01),)), given(8))
    result = answer.answer(given(8), measured, goal=Goal(), setting={})
    (m,) = result.measurements
    assert m.latency_seconds == pytest.approx(0.02)
    assert m.disturbed == sum(timing.seconds > 0.025 for timing in measured.timings) > 0
    assert len(m.timings_seconds) + m.disturbed == len(measured.timings)


def test_what_visits_took_is_in_the_result() -> None:
    """20 ms of preparing and at least a step of warming a visit; visits that had to prepare nothing count too."""
    device = FakeDevice(affine(0.0, 1e-3), noise=0.003)
    measured = go(device, given(32, 48))
    result = answer.answer(given(32, 48), measured, goal=Goal(), setting={})
    for m in result.measurements:
        visits = len({timing.round // PER_VISIT for timing in measured.of(m.batch_size)})
        assert m.visits == visits
        assert m.prepare_seconds == pytest.approx(0.02 * round(m.prepare_seconds / 0.02))
        assert 0.02 - 1e-9 <= m.prepare_seconds <= 0.02 * visits + 1e-9
        assert m.warmup_seconds >= 0.9e-3 * m.batch_size * visits
        assert m.query_seconds == 0.0
    assert TuningResult.from_json(result.to_json()) == result


# --- energy --------------------------------------------------------------------------------------------------


def test_energy_is_tuned_by_joules() -> None:
    """Steps all take 20 ms; energy per sample is least at 32, and that is the answer."""
    device = FakeDevice(FLAT, joules=lambda n: 1.0 + (n - 32) ** 2 * n)
    goal = Goal(objective="energy")
    measured = go(device, given(), goal=goal)
    assert answer.answer(given(), measured, goal=goal, setting={}).batch_size == 32
    assert min(timing.seconds * timing.repeats for timing in measured.timings) >= 0.5


def test_energy_without_readings_ends_after_one_visit() -> None:
    """It does not spend the budget first."""
    taken = Recorder()
    with pytest.raises(EnergyNotAvailable):
        go(FakeDevice(FLAT), given(), goal=Goal(objective="energy"), keep=taken)
    assert {(timing.batch_size, timing.round // PER_VISIT) for timing in taken.measured.timings} == {(1, 0)}


# --- resuming ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 21, 34, 55])
def test_a_kill_at_any_point_loses_nothing(count: int, *, adds: bool) -> None:
    """Cut off after any number of timings, a rerun keeps all of them, repeats none, and answers as well."""
    device = FakeDevice(affine(0.02, 1e-4), noise=0.003, seed=5)
    steps = ladder.plain_candidates(512) if adds else given()
    more: dict[str, Any] = {"extend": functools.partial(ladder.between, steps=steps)} if adds else {}
    book = Recorder()
    try:
        go(device, steps, keep=book, progress=stop_after(count), **more)
    except KeyboardInterrupt:
        assert len(book.measured.timings) == count
        assert "interrupted" in statuses(book.measured).values()
    kept = book.measured
    added = Recorder()
    whole = go(device, steps, kept=kept, keep=added, **more)
    before = {(timing.batch_size, timing.round) for timing in kept.timings}
    new = [(timing.batch_size, timing.round) for timing in added.measured.timings]
    assert not before & set(new)
    assert len(new) == len(set(new))
    assert whole.timings[: len(kept.timings)] == kept.timings
    assert whole.added[: len(kept.added)] == kept.added
    assert "interrupted" not in statuses(whole).values()
    assert {rung.batch_size for rung in (*steps, *whole.added)} == set(statuses(whole))
    assert whole.seconds_spent >= kept.seconds_spent
    alone = go(device, steps, **more)
    answers = [answer.answer([*steps, *m.added], m, goal=Goal(), setting={}).batch_size for m in (whole, alone)]
    assert device.throughput(answers[0]) >= 0.985 * device.throughput(answers[1])


def test_a_finished_run_makes_no_runner() -> None:
    """With an outcome for every size nothing is left to do, whatever the outcomes are."""
    outcomes = [
        Outcome(n, status)
        for n, status in zip(
            SIZES, ("dropped", "out_of_memory", "timeout", "error", "over_limit", "not_run", "ok", "ok"), strict=True
        )
    ]
    kept = Measured(outcomes=tuple(outcomes), seconds_spent=5.0)
    assert go(lambda: pytest.fail("a runner was made"), given(), kept=kept) == kept


def test_a_run_killed_before_its_outcomes_were_kept_makes_no_runner_either() -> None:
    """All timings are there, only the outcomes are missing: the rules need no device."""
    timings = go(FakeDevice(FLAT), given(8)).timings
    measured = go(lambda: pytest.fail("a runner was made"), given(8), kept=Measured(timings=timings))
    assert statuses(measured) == {8: "ok"}
    assert measured.timings == timings


def test_interrupted_is_not_final() -> None:
    """A size that Ctrl-C cut off is measured to its end."""
    kept = Measured(timings=(Timing(batch_size=8, round=0, seconds=0.02),), outcomes=(Outcome(8, "interrupted"),))
    measured = go(FakeDevice(FLAT), given(8), kept=kept)
    assert statuses(measured) == {8: "ok"}
    assert len(measured.timings) > 3


def test_the_budget_bounds_the_sum_over_resumes() -> None:
    """59.9 of 60 s are gone: a tenth of a second is left, and a visit that it does not hold is not begun."""
    kept = Measured(timings=(Timing(batch_size=1, round=0, seconds=0.02),), seconds_spent=59.9)
    measured = go(FakeDevice(FLAT, noise=0.3), given(), kept=kept)
    assert 59.9 <= measured.seconds_spent < 60.1
    assert "not_run" in statuses(measured).values()
    spent = Measured(timings=kept.timings, seconds_spent=60.0)
    measured = go(lambda: pytest.fail("a runner was made"), given(), kept=spent)
    assert measured.seconds_spent == 60.0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_keeps_everything_and_goes_on_up(error: type[BaseException]) -> None:
    """Timings, the time spent and "interrupted" are kept, the runner is closed, and the exception arrives as it was."""
    book = Recorder()
    sessions = Sessions(FakeDevice(FLAT, noise=0.05))
    with pytest.raises(error):
        go(sessions, given(), keep=book, progress=stop_after(7, error))
    assert len(book.measured.timings) == 7
    assert set(statuses(book.measured).values()) == {"interrupted"}
    assert outcome_of(book.measured, 128).stop_reason == "interrupted after 0 timings"
    assert book.measured.seconds_spent > 0
    assert sessions.opened[0].closed


def test_each_timing_is_kept_as_it_is_taken() -> None:
    """When a timing's event arrives, the keeper has it."""
    book = Recorder()

    def progress(event: Event) -> None:
        if event.kind == "timing":
            last = book.measured.timings[-1]
            assert (last.batch_size, last.round) == (event.batch_size, event.round)

    go(FakeDevice(FLAT), given(), keep=book, progress=progress)
    assert book.measured.timings


def test_seconds_are_kept_after_every_visit() -> None:
    """A kill between two visits loses none of the time that was spent before."""
    told: list[tuple[int, float]] = []

    class Keeps(Recorder):
        def spent(self, seconds: float) -> None:
            told.append((len(self.measured.timings), seconds))
            super().spent(seconds)

    measured = go(FakeDevice(FLAT), given(), keep=Keeps())
    assert len(told) > len(SIZES)
    assert told == sorted(told)
    assert told[-1] == (len(measured.timings), measured.seconds_spent)


def test_a_larger_budget_reopens_what_was_not_run_and_added_sizes_stay(tmp_path: Path) -> None:
    """A rerun's ladder holds the sizes that were added; with more seconds none is left over for lack of time."""
    device = FakeDevice(affine(0.3, 0.02), noise=0.002)
    asked: dict[str, Any] = {"path": tmp_path / "store.sqlite3", "identity": {"spec": "x"}, "conditions": {}}
    steps = ladder.plain_candidates(512)
    extend = functools.partial(ladder.between, steps=steps)
    with open_run(**asked, budget=15.0) as run:
        run.save_ladder(steps, {})
        first = go(device, steps, kept=run.kept, keep=run, budget=15.0, extend=extend)
        run.finish()
    assert "not_run" in statuses(first).values()
    with open_run(**asked, budget=15.0) as run:
        assert run.finished
        assert {c.batch_size for c in run.ladder or ()} == {c.batch_size for c in (*steps, *first.added)}
    with open_run(**asked, budget=300.0) as run:
        assert not run.finished
        assert run.ladder is not None
        assert run.kept.timings == first.timings
        second = go(device, run.ladder, kept=run.kept, keep=run, budget=300.0, extend=extend)
        run.finish()
    assert "not_run" not in statuses(second).values()
    assert second.timings[: len(first.timings)] == first.timings
    result = answer.answer([*run.ladder, *second.added], second, goal=Goal(), setting={})
    assert share_of_best(device, result, 512) >= 0.97
    with open_run(**asked, budget=300.0) as run:
        assert run.finished
        assert run.kept.timings == second.timings
        assert {c.batch_size for c in run.ladder or ()} == set(statuses(second))


def test_nothing_is_imported_while_measuring() -> None:
    """Some modules swallow a Ctrl-C that comes while they are imported, as numpy.random does: measuring would go on."""
    script = """
        import sys
        from cubatch.search.walk import Candidate, Goal, measure
        from tests.fakes import FakeDevice, affine

        before = set(sys.modules)
        measured = measure(
            FakeDevice(affine(1e-3, 1e-5)), [Candidate(1), Candidate(2), Candidate(64)], goal=Goal(), budget=60.0,
            seed=0, extend=Candidate, progress=lambda event: None,
        )
        print(len(measured.timings) > 2, sorted(set(sys.modules) - before))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True []\n"


def test_is_out_of_memory_and_goal_are_at_hand_for_workers() -> None:
    """The names that runners of other processes need come with the profiler."""
    assert walk.is_out_of_memory(MemoryError())
    assert walk.Goal is Goal
    assert str(TimedOut("a step", 30.0)) == "a step did not come back within 30.0 s"


def test_a_kept_leader_that_no_longer_fits_leaves_the_answer_to_the_others() -> None:
    """After a kill the fastest size is planned above what memory is left: the others are judged among themselves."""
    device = FakeDevice(affine(1e-3, 1e-5), noise=0.002)
    kept = tuple(go(device, given()).timings)
    most = max(timing.batch_size for timing in kept)
    measured = go(device, [Candidate(n, over_limit=n == most) for n in SIZES], kept=Measured(timings=kept))
    statuses = {outcome.batch_size: outcome.status for outcome in measured.outcomes}
    assert statuses[most] == "over_limit"
    assert "ok" in {status for n, status in statuses.items() if n != most}


def test_a_size_without_energy_readings_ends_all_the_same() -> None:
    """Of sizes whose energy is read but for one, that one has an outcome, and the others are chosen from."""

    class Silent(FakeRunner):
        def prepare(self, batch_size: int) -> None:
            super().prepare(batch_size)
            self.true_joules = None if batch_size == 16 else self.true_joules

    device = FakeDevice(affine(1e-3, 1e-4), joules=affine(1.0, 0.01))
    measured = go(lambda: Silent(device), given(), goal=Goal(objective="energy"))
    assert {outcome.batch_size for outcome in measured.outcomes} >= set(SIZES)
    assert "interrupted" not in {outcome.status for outcome in measured.outcomes}
