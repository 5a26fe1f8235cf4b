"""The walk over the candidates, on fake devices with a clock of their own."""

from __future__ import annotations

import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest

import cubatch
from cubatch import choose, profiler
from cubatch.budget import FIRST_WARMUPS, LATER_WARMUPS
from cubatch.errors import EnergyNotAvailable, TimedOut, WorkerFailed
from cubatch.profiler import Event, measure
from cubatch.results import Candidate, Goal, Measured, Outcome, Recorder, Timing
from cubatch.stopping import MAX_ROUNDS, MIN_ROUNDS, MIN_ROUNDS_TO_DROP
from cubatch.stopwatch import HANG_SECONDS, MIN_SPAN_SECONDS
from cubatch.store import open_run
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


def ladder(*sizes: int, over: Iterable[int] = ()) -> list[Candidate]:
    """Give candidates."""
    return [Candidate(n, over_limit=n in over) for n in sizes or SIZES]


def go(device: Callable[[], FakeRunner], candidates: list[Candidate], **more: Any) -> Measured:
    """Measure with a goal, a budget and a seed unless told otherwise."""
    arguments: dict[str, Any] = {"goal": Goal(), "budget": 60.0, "seed": 0}
    return measure(device, candidates, **arguments | more)


def statuses(measured: Measured) -> dict[int, str]:
    """Give the status of every size."""
    return {outcome.batch_size: outcome.status for outcome in measured.outcomes}


def reason(measured: Measured, batch_size: int) -> str:
    """Give the stop reason of a size."""
    return next(outcome.stop_reason for outcome in measured.outcomes if outcome.batch_size == batch_size)


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
class Interrupts(Behaviour):
    """Raises at the n-th step of a session, as Ctrl-C does."""

    at_step: int
    error: type[BaseException] = KeyboardInterrupt
    _steps: int = 0

    def step(self, batch_size: int) -> None:
        """Count, and raise at the right one."""
        self._steps += 1
        if self._steps == self.at_step:
            raise self.error


# --- the walk ------------------------------------------------------------------------------------------------


def test_every_candidate_ends_and_the_best_ones_are_known_well() -> None:
    """On a plateau with 1 % noise nobody is left open, and what may be the answer has the minimum of rounds."""
    measured = go(FakeDevice(affine(1e-3, 1e-4), noise=0.01), ladder())
    assert set(statuses(measured)) == set(SIZES)
    assert set(statuses(measured).values()) <= {"ok", "dropped"}
    for n, status in statuses(measured).items():
        assert len(measured.of(n)) >= (MIN_ROUNDS if status == "ok" else MIN_ROUNDS_TO_DROP)
        assert [timing.round for timing in measured.of(n)] == list(range(len(measured.of(n))))


def test_the_first_round_ascends_and_the_others_are_shuffled_by_the_seed() -> None:
    """Order by seed: the first round always goes up, later rounds differ from it, and a seed repeats itself."""

    def orders(seed: int) -> list[list[int]]:
        timings = go(
            FakeDevice(FLAT, noise=0.2), ladder(*SIZES[::-1]), seed=seed, goal=Goal(objective="latency")
        ).timings
        return [[t.batch_size for t in timings if t.round == number] for number in range(3)]

    first, again, other = orders(1), orders(1), orders(2)
    assert first == again
    assert first[0] == other[0] == list(SIZES)
    assert all(order != first[0] and sorted(order) == list(SIZES) for order in first[1:])
    assert first[1:] != other[1:]


def test_each_visit_discards_steps_and_keeps_one_timing() -> None:
    """After the clocks are warm, a first visit runs two steps that are not kept, a later one a single one."""
    sessions = Sessions(FakeDevice(FLAT))
    taken: list[int] = []
    go(
        sessions,
        ladder(8, 16),
        progress=lambda event: taken.append(sessions.opened[0].steps) if event.kind == "timing" else None,
    )
    visits = [after - before for before, after in pairwise(taken)]
    assert visits == [FIRST_WARMUPS + 1] + [LATER_WARMUPS + 1] * (len(visits) - 1)


def test_a_timing_spans_its_minimum() -> None:
    """Steps of 0.3 ms are repeated until they span the minimum; long ones run once."""
    measured = go(FakeDevice(affine(3e-4, 0.0)), ladder(1))
    assert all(t.repeats * 3e-4 >= MIN_SPAN_SECONDS > (t.repeats - 1) * 3e-4 for t in measured.timings)
    assert {t.repeats for t in go(FakeDevice(FLAT), ladder(1)).timings} == {1}


def test_the_prepared_size_is_not_prepared_again() -> None:
    """One candidate is prepared once, for all of its rounds."""
    sessions = Sessions(FakeDevice(FLAT))
    go(sessions, ladder(8))
    assert sessions.opened[0].prepared == [8]
    assert sessions.opened[0].closed


def test_a_cold_start_stays_out_of_the_timings() -> None:
    """A first step 50 times too long and a clock that takes seconds to rise leave every kept timing within 10 %."""
    device = FakeDevice(affine(1e-3, 1e-4), behaviours=(ColdStart(slower=0.28, seconds=1.5),))
    measured = go(device, ladder())
    for timing in measured.timings:
        assert timing.seconds == pytest.approx(device.curve(timing.batch_size), rel=0.1)


def test_slow_drift_does_not_favour_what_came_first() -> None:
    """The clock sinks by a fifth while all sizes are equally fast: none of them is dropped, and all medians agree."""
    measured = go(FakeDevice(affine(0.0, 1e-3), behaviours=(Drift(amount=0.2, seconds=10.0),)), ladder(32, 48, 64, 96))
    assert set(statuses(measured).values()) == {"ok"}
    rates = [n / statistics.median(t.seconds for t in measured.of(n)) for n in (32, 48, 64, 96)]
    assert max(rates) / min(rates) < 1.05


def test_clearly_slower_sizes_are_dropped_with_their_timings() -> None:
    """On a steep curve the small sizes end after the stated minimum of rounds, naming who beat them."""
    measured = go(FakeDevice(affine(0.02, 1e-6), noise=0.005), ladder())
    assert statuses(measured)[1] == "dropped"
    assert len(measured.of(1)) == MIN_ROUNDS_TO_DROP
    assert reason(measured, 1) == "clearly worse than batch size 128 after 3 rounds"
    assert statuses(measured)[128] == "ok"


def test_noise_that_never_settles_ends_at_the_maximum_of_rounds() -> None:
    """With 30 % noise one size takes MAX_ROUNDS timings and says how well the median is known."""
    measured = go(FakeDevice(FLAT, noise=0.3), ladder(8))
    assert len(measured.timings) == MAX_ROUNDS
    assert f"after {MAX_ROUNDS} timings, 1 % was asked" in reason(measured, 8)


def test_events_tell_the_story() -> None:
    """Rounds, timings and outcomes arrive in order, `done` grows to `total`, and the end is the last event."""
    events: list[Event] = []
    measured = go(FakeDevice(FLAT), ladder(1, 128), progress=events.append)
    assert events[0].kind == "round"
    assert [event.kind for event in events].count("timing") == len(measured.timings)
    assert [event.kind for event in events].count("outcome") == 2
    assert (events[-1].kind, events[-1].done, events[-1].total) == ("end", len(measured.timings), len(measured.timings))
    assert all(before.seconds_left >= after.seconds_left for before, after in pairwise(events))


# --- failures ------------------------------------------------------------------------------------------------


def test_out_of_memory_is_an_outcome_and_tuning_goes_on() -> None:
    """A MemoryError of no class of ours ends one size; the smaller ones are measured and the runner lives on."""
    sessions = Sessions(FakeDevice(affine(1e-3, 1e-4), memory_bytes=64 * 1024, memory_fails_at="step"))
    measured = go(sessions, ladder())
    assert statuses(measured)[128] == "out_of_memory"
    assert statuses(measured)[64] == "ok"
    assert measured.outcomes[-1].facts["type"] == FakeOutOfMemoryError.__name__
    assert len(sessions.opened) == 1


def test_memory_need_not_be_monotone() -> None:
    """Batch 16 runs out of memory, batch 32 runs (deeplearning4j#5461): the larger size is still tried."""
    device = FakeDevice(affine(1e-3, 1e-4), memory_bytes=100, bytes_needed=lambda n: 1000 if n == 16 else 1)
    measured = go(device, ladder())
    assert [n for n, status in statuses(measured).items() if status == "out_of_memory"] == [16]
    assert statuses(measured)[128] == "ok"


def test_what_ran_out_of_memory_is_released_before_the_next_size() -> None:
    """Pools are emptied after every failure."""
    released: list[int] = []

    class Releases(FakeRunner):
        def release(self) -> None:
            released.append(self.prepared[-1])
            super().release()

    go(lambda: Releases(FakeDevice(FLAT, memory_bytes=1024 * 2)), ladder(1, 2, 4, 8))
    assert released == [4, 8, *released[2:]]


@pytest.mark.parametrize("when", ["prepare", "step"])
def test_an_error_of_a_candidate_is_its_outcome(when: str) -> None:
    """Type and message are kept, and the other sizes are measured."""
    device = FakeDevice(affine(1e-3, 1e-4), behaviours=(Fails({64}, error=ZeroDivisionError("by nought"), when=when),))
    measured = go(device, ladder())
    assert statuses(measured)[64] == "error"
    assert reason(measured, 64) == "ZeroDivisionError: by nought"
    assert statuses(measured)[128] == "ok"


def test_after_a_failure_sizes_are_warmed_as_if_new() -> None:
    """What runs next may be another process, so the next visit to size 1 discards two steps again."""
    sessions = Sessions(FakeDevice(FLAT, behaviours=(Fails({2}),)))
    visits: list[tuple[int | None, int]] = []

    def progress(event: Event) -> None:
        if event.kind == "timing":
            visits.append((event.batch_size, sessions.opened[0].steps))

    go(sessions, ladder(1, 2), progress=progress)
    steps = [after - before for (_, before), (_, after) in pairwise(visits)]
    assert steps == [FIRST_WARMUPS + 1] + [LATER_WARMUPS + 1] * (MIN_ROUNDS - 2)


def test_a_failed_release_does_not_end_the_run() -> None:
    """A worker that died cannot release; the next size starts another."""

    class Dead(FakeRunner):
        def release(self) -> None:
            raise WorkerFailed("it has ended")

    measured = go(lambda: Dead(FakeDevice(FLAT, behaviours=(Fails({2}),))), ladder(1, 2, 4))
    assert statuses(measured)[2] == "error"
    assert statuses(measured)[4] == "ok"


def test_a_hang_is_a_timeout_and_leaves_budget_for_the_others() -> None:
    """A runner that gives up costs a hang's limit, and the larger sizes are measured."""
    device = FakeDevice(affine(1e-3, 1e-4), behaviours=(Hangs({16}),), gives_up=True)
    measured = go(device, ladder())
    assert statuses(measured)[16] == "timeout"
    assert statuses(measured)[128] == "ok"
    assert measured.seconds_spent < HANG_SECONDS + 20


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
    blind = go(device, ladder(1, 2, 4))
    assert statuses(blind) == {1: "timeout", 2: "not_run", 4: "not_run"}
    foreseen = go(device, [Candidate(n, predicted_seconds=1e-3) for n in (1, 2, 4)])
    assert statuses(foreseen)[1] == "timeout"
    assert statuses(foreseen)[4] == "ok"
    assert foreseen.seconds_spent < HANG_SECONDS + 20


def test_only_the_budget_bounds_the_first_step_which_may_compile() -> None:
    """100 s of compiling before a step of 20 ms, where a hang's limit would be 30 s."""
    device = FakeDevice(FLAT, behaviours=(ColdStart(slower=0.0, first_step=5000.0),), gives_up=True)
    measured = go(device, [Candidate(1, predicted_seconds=0.02)], budget=300.0)
    assert statuses(measured) == {1: "ok"}
    assert measured.seconds_spent > 100


def test_a_step_of_ten_times_its_prediction_is_no_hang() -> None:
    """A prediction may be wrong by far more than its interval before a long step counts as hung."""
    measured = go(FakeDevice(affine(40.0, 0.0)), [Candidate(1, predicted_seconds=4.0)], budget=10_000.0)
    assert statuses(measured) == {1: "ok"}


def test_a_hang_that_came_back_is_a_timeout_too() -> None:
    """Without a limit the step returns after a million seconds: a timeout, and the budget is gone."""
    measured = go(FakeDevice(FLAT, behaviours=(Hangs({16}),)), ladder())
    assert statuses(measured)[16] == "timeout"
    assert statuses(measured)[32] == "not_run"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clock_that_reads_nonsense_is_an_error(seconds: float) -> None:
    """No timing of zero, infinite or undefined length is ever kept."""
    measured = go(FakeDevice(affine(seconds, 0.0)), ladder(8))
    assert (statuses(measured), measured.timings) == ({8: "error"}, ())


# --- limits --------------------------------------------------------------------------------------------------


def test_a_size_planned_over_the_limit_is_never_tried() -> None:
    """It is over_limit without being prepared, and if nothing else is left no runner is made."""
    sessions = Sessions(FakeDevice(FLAT))
    measured = go(sessions, ladder(8, 16, over=[16]))
    assert statuses(measured)[16] == "over_limit"
    assert 16 not in sessions.opened[0].prepared
    assert statuses(go(lambda: pytest.fail("a runner was made"), ladder(16, over=[16]))) == {16: "over_limit"}


def test_a_size_above_the_latency_limit_is_over_limit_with_its_timings() -> None:
    """Steps of 11.4 ms break a limit of 10 ms after enough rounds; the fastest allowed size is the answer."""
    goal = Goal(latency_limit=0.01)
    measured = go(FakeDevice(affine(5e-3, 1e-4), noise=0.005), ladder(), goal=goal)
    over = {n for n, status in statuses(measured).items() if status == "over_limit"}
    assert over == {64, 128}
    assert all(len(measured.of(n)) == MIN_ROUNDS_TO_DROP for n in over)
    assert "above the latency limit of 10.0 ms" in reason(measured, 64)
    assert choose.answer(ladder(), measured, goal=goal, setting={}).batch_size == 32


def test_no_size_is_dropped_for_a_faster_one_above_the_latency_limit() -> None:
    """128 has four times the throughput of 4 and may not be the answer, so 4 must stay."""
    measured = go(FakeDevice(affine(9e-3, 1e-4)), ladder(1, 2, 4, 128), goal=Goal(latency_limit=0.01))
    assert statuses(measured) == {1: "dropped", 2: "dropped", 4: "ok", 128: "over_limit"}


def test_no_size_is_dropped_for_one_that_may_yet_break_the_latency_limit() -> None:
    """One of three timings of 128 kept the limit: it is not over it for sure, and must not beat 4."""
    slow = [Timing(batch_size=128, round=number, seconds=value) for number, value in enumerate((0.009, 0.011, 0.011))]
    kept = Measured(timings=(*slow, *(Timing(batch_size=4, round=number, seconds=0.0094) for number in range(3))))
    measured = go(FakeDevice(affine(9e-3, 1e-4)), ladder(4, 128), goal=Goal(latency_limit=0.01), kept=kept)
    assert statuses(measured) == {4: "ok", 128: "over_limit"}


@pytest.mark.parametrize("budget", [60.0, 0.08])
def test_a_latency_limit_is_held_against_the_timings_that_count(budget: float) -> None:
    """Most timings were throttled and took 12 ms: those that count took 9 of the 10 ms allowed."""
    goal = Goal(latency_limit=0.01)
    kept = Measured(
        timings=tuple(
            Timing(batch_size=8, round=n, seconds=0.012 if n % 3 else 0.009, throttled=n % 3 > 0) for n in range(11)
        )
    )
    measured = go(FakeDevice(lambda _: 0.009), ladder(8), goal=goal, kept=kept, budget=budget)
    result = choose.answer(ladder(8), measured, goal=goal, setting={})
    assert result.measurements[0].latency_seconds == pytest.approx(0.009)
    assert (statuses(measured), result.batch_size) == ({8: "ok"}, 8)


def test_a_larger_budget_reconsiders_what_one_slow_timing_put_above_the_latency_limit(tmp_path: Path) -> None:
    """A first timing of 12 ms was all that the budget held; the size takes 9 of the 10 ms allowed."""
    goal = Goal(latency_limit=0.01)
    asked: dict[str, Any] = {"path": tmp_path / "store.sqlite3", "identity": {}, "conditions": {}}
    slow = Timing(batch_size=8, round=0, seconds=0.012)
    for budget, status in ((1e-3, "over_limit"), (60.0, "ok")):
        with open_run(**asked, budget=budget) as run:
            kept = run.kept if run.kept.timings else Measured(timings=(slow,))
            run.timing(slow)
            measured = go(FakeDevice(lambda _: 0.009), ladder(8), goal=goal, kept=kept, keep=run, budget=budget)
            run.finish()
        assert statuses(measured) == {8: status}


# --- throttling ----------------------------------------------------------------------------------------------


def test_throttled_timings_are_kept_flagged_and_the_device_rests() -> None:
    """A device that heats up gives flagged timings; each has its own round, and enough clear ones follow."""
    rests: list[float] = []

    @attrs.define
    class Rests(Behaviour):
        def spend(self, seconds: float, *, busy: bool) -> None:
            if not busy and seconds != pytest.approx(0.02):  # what preparing takes
                rests.append(seconds)

    device = FakeDevice(FLAT, noise=0.01, behaviours=(Throttling(hot_after=0.8, rest_cools=1.0), Rests()))
    measured = go(device, ladder())
    flagged = [timing for timing in measured.timings if timing.throttled]
    assert flagged
    assert len(rests) == len(flagged)
    assert len({(t.batch_size, t.round) for t in measured.timings}) == len(measured.timings)
    clear = [timing.seconds for timing in measured.timings if not timing.throttled]
    assert all(value == pytest.approx(0.02, rel=0.1) for value in clear)


def test_a_fallen_clock_is_throttling_even_if_the_device_does_not_say_so() -> None:
    """Below three quarters of the highest clock of the run a timing does not count."""

    @attrs.define
    class Falls(Behaviour):
        passed: float = 0.0

        def clock(self) -> float:
            return 0.5 if self.passed > 1.0 else 1.0

        def spend(self, seconds: float, *, busy: bool) -> None:
            self.passed += seconds

    measured = go(FakeDevice(FLAT, noise=0.05, behaviours=(Falls(),)), ladder(8, 16))
    assert {t.throttled for t in measured.timings if t.sm_clock_mhz == 750.0} == {True}
    assert {t.throttled for t in measured.timings if t.sm_clock_mhz == 1500.0} == {False}


def test_a_device_that_always_throttles_is_measured_all_the_same() -> None:
    """If every timing would be thrown away all are used, the outcome says so, and rests stay within their share."""

    class Always(Throttling):
        def factor(self) -> float:
            self.throttled = True
            return 1.5

    measured = go(FakeDevice(FLAT, behaviours=(Always(),)), ladder(8))
    assert statuses(measured) == {8: "ok"}
    assert "all of them were throttled" in reason(measured, 8)
    assert measured.seconds_spent < 0.1 * 60 + 2


# --- energy --------------------------------------------------------------------------------------------------


def test_energy_is_tuned_by_joules() -> None:
    """Steps all take 20 ms; energy per sample is least at 32, and that is the answer."""
    device = FakeDevice(FLAT, joules=lambda n: 1.0 + (n - 32) ** 2 * n)
    goal = Goal(objective="energy")
    result = choose.answer(ladder(), go(device, ladder(), goal=goal), goal=goal, setting={})
    assert result.batch_size == 32


def test_energy_without_readings_ends_after_one_round() -> None:
    """It does not spend the budget first."""
    taken = Recorder()
    with pytest.raises(EnergyNotAvailable):
        go(FakeDevice(FLAT), ladder(), goal=Goal(objective="energy"), keep=taken)
    assert {timing.round for timing in taken.measured.timings} == {0}


# --- the budget ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0.001, 0.5, 2.0, 10.0, 100.0])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_budget_holds_but_for_the_last_step(budget: float, noise: float) -> None:
    """Whatever the budget, the run exceeds it by less than one preparation and one step of what was underway."""
    device = FakeDevice(affine(1e-2, 1e-3), noise=noise, seed=3)
    measured = go(device, ladder(*SIZES, 256, 512, 1024), budget=budget)
    assert measured.seconds_spent <= budget + device.prepare_seconds + 1.5 * device.curve(1024)
    assert set(statuses(measured)) == {*SIZES, 256, 512, 1024}


def test_a_size_that_would_not_fit_the_budget_is_not_run_and_says_the_numbers() -> None:
    """Eleven steps of 2.56 s and five times 20 ms of preparing do not fit 6 s: 128 is never prepared."""
    sessions = Sessions(FakeDevice(affine(0.0, 0.02)))
    measured = go(sessions, ladder(1, 8, 128), budget=6.0)
    assert statuses(measured)[128] == "not_run"
    assert "5 rounds with steps of about 2.56 s would take 28.3 s" in reason(measured, 128)
    assert 128 not in sessions.opened[0].prepared
    assert len(measured.of(8)) >= MIN_ROUNDS


def test_what_runs_gets_its_minimum_of_rounds() -> None:
    """A budget too small for all sizes leaves some not run and the others complete, rather than all half measured."""
    measured = go(FakeDevice(affine(1e-3, 1e-2), noise=0.02), ladder(), budget=15.0)
    assert "not_run" in statuses(measured).values()
    for n, status in statuses(measured).items():
        if status == "ok":
            assert len(measured.of(n)) >= MIN_ROUNDS


def test_a_size_cut_off_by_the_budget_says_so() -> None:
    """30 % noise in 2 s of budget: the size is ok with what there is, and the reason is the budget."""
    measured = go(FakeDevice(FLAT, noise=0.3), ladder(8), budget=0.5)
    assert statuses(measured) == {8: "ok"}
    assert "left of the budget do not hold another round" in reason(measured, 8)


# --- resuming ------------------------------------------------------------------------------------------------


def cut(measured: Measured, count: int) -> Measured:
    """Give what a kill after so many timings leaves: outcomes that were known by then are those of complete sizes."""
    timings = measured.timings[:count]
    complete = [
        outcome
        for outcome in measured.outcomes
        if {*measured.of(outcome.batch_size)} <= {*timings} and outcome.status != "ok"
    ]
    return Measured(timings=timings, outcomes=tuple(complete), seconds_spent=1.0)


@pytest.mark.parametrize("count", [0, 1, 7, 20, 33])
def test_a_rerun_measures_only_what_is_missing(count: int) -> None:
    """Killed after any number of timings, a rerun takes no (size, round) again and ends every size."""
    device = FakeDevice(affine(1e-3, 1e-4), noise=0.02, seed=5)
    kept = cut(go(device, ladder()), count)
    added = Recorder()
    whole = go(device, ladder(), kept=kept, keep=added)
    before = {(timing.batch_size, timing.round) for timing in kept.timings}
    new = {(timing.batch_size, timing.round) for timing in added.measured.timings}
    assert not before & new
    assert whole.timings[: len(kept.timings)] == kept.timings
    assert set(statuses(whole)) == set(SIZES)
    for n in SIZES:
        assert [timing.round for timing in whole.of(n)] == list(range(len(whole.of(n))))
    assert added.measured.seconds_spent == whole.seconds_spent > kept.seconds_spent


def test_a_finished_run_makes_no_runner() -> None:
    """With an outcome for every size nothing is left to do, whatever the outcomes are."""
    outcomes = [
        Outcome(n, status)
        for n, status in zip(
            SIZES, ("dropped", "out_of_memory", "timeout", "error", "over_limit", "not_run", "ok", "ok"), strict=True
        )
    ]
    kept = Measured(outcomes=tuple(outcomes), seconds_spent=5.0)
    assert go(lambda: pytest.fail("a runner was made"), ladder(), kept=kept) == kept


def test_a_run_killed_before_its_outcomes_were_kept_makes_no_runner_either() -> None:
    """All timings are there, only the outcomes are missing: the rules need no device."""
    timings = tuple(Timing(batch_size=8, round=number, seconds=1.0) for number in range(MIN_ROUNDS))
    measured = go(lambda: pytest.fail("a runner was made"), ladder(8), kept=Measured(timings=timings))
    assert statuses(measured) == {8: "ok"}


def test_interrupted_is_not_final() -> None:
    """A size that Ctrl-C cut off is measured to its end."""
    kept = Measured(timings=(Timing(batch_size=8, round=0, seconds=0.02),), outcomes=(Outcome(8, "interrupted"),))
    measured = go(FakeDevice(FLAT), ladder(8), kept=kept)
    assert statuses(measured) == {8: "ok"}
    assert len(measured.timings) == MIN_ROUNDS


def test_the_budget_bounds_the_sum_over_resumes() -> None:
    """59.9 of 60 s are gone: a tenth of a second is left."""
    kept = Measured(seconds_spent=59.9)
    measured = go(FakeDevice(FLAT, noise=0.3), ladder(), kept=kept)
    assert 59.9 < measured.seconds_spent < 60.1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_keeps_everything_and_goes_on_up(error: type[BaseException]) -> None:
    """Timings, the time spent and "interrupted" are kept, the runner is closed, and the exception arrives as it was."""
    book = Recorder()
    sessions = Sessions(FakeDevice(FLAT, noise=0.05, behaviours=(Interrupts(60, error),)))
    with pytest.raises(error):
        go(sessions, ladder(), keep=book)
    assert book.measured.timings
    assert set(statuses(book.measured).values()) == {"interrupted"}
    assert book.measured.seconds_spent > 0
    assert sessions.opened[0].closed
    whole = go(FakeDevice(FLAT, noise=0.05), ladder(), kept=book.measured)
    assert "interrupted" not in statuses(whole).values()


def test_each_timing_is_kept_as_it_is_taken() -> None:
    """When a timing's event arrives, the keeper has it."""
    book = Recorder()
    counts: list[tuple[int, int]] = []

    def progress(event: Event) -> None:
        counts.append((event.done, len(book.measured.timings)))

    go(FakeDevice(FLAT), ladder(), keep=book, progress=progress)
    assert all(done == kept for done, kept in counts)


def test_nothing_is_imported_while_measuring() -> None:
    """Some modules swallow a Ctrl-C that comes while they are imported, as numpy.random does: measuring would go on."""
    script = """
        import sys
        from cubatch.profiler import Candidate, Goal, measure
        from tests.fakes import FakeDevice, affine

        before = set(sys.modules)
        measured = measure(
            FakeDevice(affine(1e-3, 1e-5)), [Candidate(1), Candidate(2)], goal=Goal(), budget=60.0, seed=0
        )
        print(len(measured.timings) > 2, sorted(set(sys.modules) - before))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True []\n"


def test_is_out_of_memory_and_goal_are_at_hand_for_workers() -> None:
    """The names that runners of other processes need come with the profiler."""
    assert profiler.is_out_of_memory(MemoryError())
    assert profiler.Goal is Goal
    assert str(TimedOut("a step", 30.0)) == "a step did not come back within 30.0 s"
