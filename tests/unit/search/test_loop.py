"""The walk over the sizes, on fake devices with a clock of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import cubatch
from cubatch.errors import EnergyNotAvailable
from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_TRIAL, Measured, Recorder, Timing
from cubatch.search import trial_rules
from cubatch.search.events import Event
from cubatch.search.noise import usable
from cubatch.search.state import SearchState
from cubatch.search.trial_rules import MOST_TRIALS
from cubatch.tuning import answer
from tests.fakes import ColdStart, Drift, FakeDevice, FakeRunner, affine
from tests.unit.search.walking import (
    FLAT,
    RISES,
    SIZES,
    Sessions,
    first_visits,
    given,
    go,
    outcome_of,
    seek,
    statuses,
)

ROOT = Path(cubatch.__file__).parents[1]


# --- the walk ------------------------------------------------------------------------------------------------


def test_decisions_compute_on_one_blas_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle threads would spin into the next timing; afterwards the user's threads are back."""
    decide, seen = trial_rules.next_trials, []

    def threads() -> set[int]:
        return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

    def recorded(state: SearchState) -> list[int]:
        seen.append(threads())
        return decide(state)

    monkeypatch.setattr(trial_rules, "next_trials", recorded)
    with threadpool_limits(2, user_api="blas"):
        before = threads()
        go(FakeDevice(affine(1e-3, 1e-4)), given())
        assert threads() == before == {2}
    assert seen
    assert all(each == {1} for each in seen)


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


def test_sizes_asked_for_are_each_visited_once_before_any_twice_and_none_is_added() -> None:
    """Without `extend` all sizes have round 0 before the first timing of a later visit, ascending."""
    measured = go(FakeDevice(affine(1e-3, 1e-4), noise=0.02), given(48, 1, 7, 100))
    assert first_visits(measured) == [1, 7, 48, 100]
    visits = [timing.round // PER_TRIAL for timing in measured.timings]
    assert visits == sorted(visits)
    assert all(any(timing.round == 0 for timing in measured.of(n)) for n in (1, 7, 48, 100))
    assert (measured.added, set(statuses(measured))) == ((), {1, 7, 48, 100})


def test_the_prepared_size_is_not_prepared_again() -> None:
    """One candidate is prepared once, for all of its visits, and the runner is closed."""
    sessions = Sessions(FakeDevice(FLAT))
    measured = go(sessions, given(8))
    assert len({timing.round // PER_TRIAL for timing in measured.timings}) > 1
    assert sessions.opened[0].prepared == [8]
    assert sessions.opened[0].closed


def test_no_size_and_round_is_measured_twice() -> None:
    """Rounds are the key under which the store keeps timings; a visit keeps within its numbers."""
    measured, _ = seek(FakeDevice(affine(0.02, 1e-4), noise=0.02))
    keys = [(timing.batch_size, timing.round) for timing in measured.timings]
    assert len(keys) == len(set(keys))
    assert max(timing.round % PER_TRIAL for timing in measured.timings) < PER_TRIAL - 1


def test_a_cold_start_stays_out_of_the_timings_that_count() -> None:
    """A first step 50 times too long and a clock that takes a second to rise leave what counts within 10 %."""
    device = FakeDevice(affine(1e-3, 1e-4), behaviours=(ColdStart(slower=0.28, seconds=1.0),))
    measured = go(device, given())
    for n in SIZES:
        for timing in usable(measured.of(n)):
            assert timing.seconds == pytest.approx(device.curve(n), rel=0.1)


def test_slow_drift_does_not_favour_what_came_first() -> None:
    """The clock sinks by a tenth while all sizes are equally fast: the answer costs no more than the drift."""
    device = FakeDevice(affine(0.0, 1e-3), behaviours=(Drift(amount=0.1, seconds=10.0),))
    measured = go(device, given(32, 48, 64, 96))
    assert set(statuses(measured).values()) <= {"ok", "dropped"}
    rates = [n / min(t.seconds for t in usable(measured.of(n))) for n in (32, 48, 64, 96)]
    assert max(rates) / min(rates) < 1.06


def test_clearly_slower_sizes_are_dropped_with_their_timings() -> None:
    """On a steep curve the small sizes end after one visit, naming who beat them and by how much."""
    measured = go(FakeDevice(RISES, noise=0.005), given())
    assert statuses(measured)[1] == "dropped"
    assert {timing.round // PER_TRIAL for timing in measured.of(1)} == {0}
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
    measured = go(lambda: pytest.fail("nothing is left to measure with"), given(64, 96), earlier=kept)
    assert statuses(measured) == {64: "ok", 96: status}
    assert outcome_of(measured, 64).facts == {"limit": "budget"}


def test_noise_that_never_settles_ends() -> None:
    """With 30 % noise one size has at most the visits that are worth their time, and is ok."""
    measured = go(FakeDevice(FLAT, noise=0.3), given(8))
    assert statuses(measured) == {8: "ok"}
    assert 2 <= len({timing.round // PER_TRIAL for timing in measured.timings}) <= MOST_TRIALS


def test_a_plateau_ends_long_before_the_budget_and_the_rest_is_dropped() -> None:
    """Where nothing more is to be gained measuring ends, and sizes that never ran say what their neighbors say."""
    measured, result = seek(FakeDevice(affine(1e-4, 1e-3), noise=0.003), 4096)
    assert measured.seconds_spent < 30
    assert set(statuses(measured).values()) == {"ok", "dropped"}
    unread = [n for n in statuses(measured) if not measured.of(n)]
    assert unread
    assert all("nothing is" in text or "by the timings of its neighbors" in text
               for n in unread if (text := outcome_of(measured, n).stop_reason))  # fmt: skip
    assert result.decided_by == "plateau"


def test_events_tell_the_story() -> None:
    """Timings carry their rounds, outcomes end every size, time only passes, and the end is the last event."""
    events: list[Event] = []
    measured = go(FakeDevice(FLAT), given(1, 128), progress=events.append)
    timings = [(event.batch_size, event.round) for event in events if event.kind == "timing"]
    assert timings == [(timing.batch_size, timing.round) for timing in measured.timings]
    assert sorted(event.batch_size or 0 for event in events if event.kind == "outcome") == [1, 128]
    assert any(event.kind == "round" and event.message.startswith("round 1: ") for event in events)
    assert (events[-1].kind, events[-1].total) == ("end", 60.0)
    assert events[-1].done == pytest.approx(measured.seconds_spent)
    assert all(before.seconds_left >= after.seconds_left for before, after in pairwise(events))
    assert all(event.done + event.seconds_left == pytest.approx(60.0) for event in events)


def test_events_tell_the_best_so_far_and_what_it_could_gain() -> None:
    """There is no best before the first reading; in the end it is the answer, its rate, and far less is to gain."""
    events: list[Event] = []
    _, result = seek(FakeDevice(affine(0.02, 1e-3), noise=0.002), progress=events.append)
    first, last = events[0], events[-1]
    assert (first.best_batch_size, first.best_rate, first.could_gain) == (None, None, None)
    assert last.best_batch_size == result.batch_size
    chosen = next(m for m in result.measurements if m.batch_size == result.batch_size)
    # While it searches it knows the size by its own timings, the result by those of its neighbors too.
    assert last.best_rate == pytest.approx(chosen.samples_per_second, rel=0.002)
    gains = [event.could_gain for event in events if event.could_gain is not None]
    assert gains[0] > 0.5
    assert 0 <= gains[-1] < gains[0] / 5


@pytest.mark.parametrize("seconds", [1.0, 2.0])
def test_what_the_budget_does_not_hold_may_be_gained_all_the_same(seconds: float) -> None:
    """Where a visit takes a second and five are left of the best sizes none is read: that 0 % is to gain is not so."""
    events: list[Event] = []
    device = FakeDevice(affine(1e-4, 1e-6), noise=0.02, prepare_seconds=seconds)
    _, result = seek(device, budget=5.0, progress=events.append)
    assert result.largest_measured < 256
    assert events[-1].best_batch_size == result.fastest_batch_size
    assert {event.could_gain for event in events} == {None}  # it is more than all that there is


# --- energy --------------------------------------------------------------------------------------------------


def test_energy_is_tuned_by_joules() -> None:
    """Steps all take 20 ms; energy per sample is least at 32, and that is the answer."""
    device = FakeDevice(FLAT, joules=lambda n: 1.0 + (n - 32) ** 2 * n)
    goal = Goal(objective="energy")
    measured = go(device, given(), goal=goal)
    assert answer.answer(given(), measured, goal=goal, setting={}).batch_size == 32
    assert min(timing.seconds * timing.repeats for timing in measured.timings) >= 0.5 - 1e-9


def test_energy_without_readings_ends_after_one_visit() -> None:
    """It does not spend the budget first."""
    taken = Recorder()
    with pytest.raises(EnergyNotAvailable):
        go(FakeDevice(FLAT), given(), goal=Goal(objective="energy"), keeper=taken)
    assert {(timing.batch_size, timing.round // PER_TRIAL) for timing in taken.measured.timings} == {(1, 0)}


# --- resuming ------------------------------------------------------------------------------------------------


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


def test_nothing_is_imported_while_measuring() -> None:
    """Some modules swallow a Ctrl-C that comes while they are imported, as numpy.random does: measuring would go on."""
    script = """
        import sys
        from cubatch.search.loop import Candidate, Goal, Search
        from tests.fakes import FakeDevice, affine

        before = set(sys.modules)
        measured = Search(
            factory=FakeDevice(affine(1e-3, 1e-5)), ladder=[Candidate(1), Candidate(2), Candidate(64)], goal=Goal(),
            budget=60.0, seed=0, extend=Candidate, progress=lambda event: None,
        ).run()
        print(len(measured.timings) > 2, sorted(set(sys.modules) - before))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True []\n"


class Compiler(FakeRunner):
    """Compiles at each size that it prepares, or only at the first."""

    def __init__(self, device: FakeDevice, seconds: float, *, each: bool) -> None:
        super().__init__(device)
        self.seconds, self.each, self.compile_seconds = seconds, each, 0.0

    def prepare(self, batch_size: int) -> None:
        self.compile_seconds = self.seconds if self.each or not self.prepared else 0.0
        super().prepare(batch_size)
        self.clock.sleep(self.compile_seconds)


@pytest.mark.parametrize(("compiling", "budget"), [(9.0, 5.0), (28.0, 60.0), (22.0, 4.0)])
def test_compiling_once_takes_nothing_from_the_budget(compiling: float, budget: float) -> None:
    """The search does what it does on a device that compiles nothing, and counts the same seconds."""
    device = FakeDevice(affine(1e-3, 1e-5), noise=0.01)
    plain, _ = seek(lambda: FakeRunner(device), 256, budget=budget)
    compiled, _ = seek(lambda: Compiler(device, compiling, each=False), 256, budget=budget)
    assert [t.batch_size for t in compiled.timings] == [t.batch_size for t in plain.timings]
    assert compiled.seconds_spent == pytest.approx(plain.seconds_spent, rel=1e-3)


@pytest.mark.parametrize(("budget", "free"), [(5.0, 10.0), (60.0, 30.0)])
def test_compiling_each_size_ends_in_time(budget: float, free: float) -> None:
    """4 s for each size: no more than 10 s or half the budget come on top of it, and one size more."""
    runners: list[Compiler] = []

    def opened() -> Compiler:
        runners.append(Compiler(FakeDevice(affine(1e-3, 1e-5), noise=0.01), 4.0, each=True))
        return runners[-1]

    measured, result = seek(opened, 256, budget=budget)
    assert result.batch_size is not None
    assert len({t.batch_size for t in measured.timings}) > 1
    assert runners[0].clock.now() <= budget + free + 2 * 4.0
