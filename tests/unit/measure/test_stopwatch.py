"""One visit to one size: what is discarded, what counts, what is begun at all, and what hangs."""

from __future__ import annotations

import statistics
from typing import Any

import attrs
import pytest

from cubatch.errors import DeviceFailed, TimedOut, WorkerDied
from cubatch.measure.budget import MOST_TIMINGS, Budget, OutOfBudget
from cubatch.measure.records import PER_TRIAL, Timing
from cubatch.measure.runner import Reading
from cubatch.measure.stopwatch import (
    HANG_FACTOR,
    HANG_SECONDS,
    MAX_REST_SECONDS,
    MAX_WARM_SECONDS,
    MIN_SPAN_SECONDS,
    MOST_WARMUPS,
    SETTLE_SECONDS,
    WARM_SECONDS,
    HasStepLimit,
    Stopwatch,
)
from tests.fakes import Behaviour, ColdStart, Curve, FakeDevice, FakeOutOfMemoryError, FakeRunner, Hangs, affine

STEADY = affine(0.02, 0.0)


def open_stopwatch(device: FakeDevice, seconds: float = 60.0, *, warm: bool = False, **more: Any) -> Stopwatch:
    """Open a session with a budget that counts; its clocks warm already, if asked."""
    runner = device()
    stopwatch = Stopwatch(runner, Budget(seconds), span_seconds=0.01, **more)
    stopwatch.budget.start(runner.clock.now)
    stopwatch._is_warm = warm
    return stopwatch


def visit(stopwatch: Stopwatch, batch_size: int = 8, *, likely: float | None = None, first: int = 0) -> list[Timing]:
    """Take the readings of a visit."""
    kept: list[Timing] = []
    stopwatch.run_trial(batch_size, first_round=first, likely=likely, keep=kept.append)
    return kept


@attrs.define
class Settles(Behaviour):
    """The first steps after preparing take these many times as long; each size anew."""

    factors: tuple[float, ...] = ()
    _steps: int = attrs.field(default=0, init=False)

    def prepare(self, batch_size: int) -> None:
        """Begin anew."""
        self._steps = 0

    def step(self, batch_size: int) -> None:
        """Count."""
        self._steps += 1

    def factor(self) -> float:
        """Slower, as long as there are factors."""
        return self.factors[self._steps - 1] if self._steps <= len(self.factors) else 1.0


@attrs.define
class Scripted:
    """A runner and clock whose readings are listed; every reading takes its seconds, and asking for memory 0.25 s."""

    readings: list[Reading]
    asks: float = 0.0
    passed: float = 0.0
    repeats: list[int] = attrs.field(factory=list)
    slept: list[float] = attrs.field(factory=list)

    @property
    def clock(self) -> Scripted:
        return self

    @property
    def peak_bytes(self) -> int:
        self.passed += self.asks
        return 1000

    @property
    def peak_device_bytes(self) -> int:
        self.passed += self.asks
        return 2000

    def now(self) -> float:
        return self.passed

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.passed += seconds

    def time(self, step: Any, repeats: int) -> Reading:
        reading = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        self.repeats.append(repeats)
        self.passed += reading.seconds * repeats
        return reading

    def prepare(self, batch_size: int) -> None:
        self.passed += 0.5

    def step(self) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...


def scripted(*readings: Reading | float, seconds: float = 60.0, asks: float = 0.0, **more: Any) -> Stopwatch:
    """A warm stopwatch on listed readings; the last one repeats itself."""
    listed = [Reading(seconds=one) if isinstance(one, float) else one for one in readings]
    runner: Any = Scripted(listed, asks=asks)
    stopwatch = Stopwatch(runner, Budget(seconds), span_seconds=0.01, **more)
    stopwatch._is_warm = True
    stopwatch.budget.start(runner.now)
    return stopwatch


def test_a_timing_keeps_all_that_its_reading_told() -> None:
    """Whatever a reading has a field for is in the record of it, by the same name."""
    told = Reading(
        seconds=0.02, sm_clock_mhz=1500.0, throttled=True, joules=3.0, event_reasons=4, temperature_celsius=61.0,
        power_watts=412.5, utilization_percent=97.0, used_bytes=9, reference_before_seconds=0.004,
        reference_after_seconds=0.005, longest_step=1.25,
    )  # fmt: skip
    assert None not in attrs.asdict(told).values()
    stopwatch = scripted(told)
    stopwatch.reference_batch_size = 4
    for timing in visit(stopwatch):
        assert {name: getattr(timing, name) for name in attrs.asdict(told)} == attrs.asdict(told)
        assert timing.reference_batch_size == 4
    stopwatch = scripted(0.02)  # a reading without a reference, as of a new worker that could not hold it
    stopwatch.reference_batch_size = 4
    assert {timing.reference_batch_size for timing in visit(stopwatch)} == {None}


# --- the steps before the first reading ----------------------------------------------------------------------


def test_steps_are_discarded_until_they_agree() -> None:
    """Steps of 80, 40 and 24 ms fall by more than a tenth, 20 and 20 agree: the last of them is the first reading."""
    stopwatch = open_stopwatch(FakeDevice(affine(0.02, 0.0), behaviours=(Settles((4.0, 2.0, 1.2)),)), warm=True)
    kept = visit(stopwatch)
    assert [timing.seconds for timing in kept] == pytest.approx([0.02] * len(kept))
    assert stopwatch.spent[8].warmup_seconds == pytest.approx(0.02 * (4.0 + 2.0 + 1.2 + 1.0 + 1.0))
    assert stopwatch.runner.steps == 5 + len(kept) - 1


@pytest.mark.parametrize(("second", "steps"), [(0.91, 2), (0.89, 3)])
def test_a_step_agrees_that_is_less_than_a_tenth_faster(second: float, steps: int) -> None:
    """From 100 ms to 91 is noise, to 89 is a cache that fills; one that is slower agrees as well."""
    stopwatch = scripted(0.1, 0.1 * second, 0.1 * second)
    visit(stopwatch)
    assert stopwatch.spent[8].warmup_seconds == pytest.approx(0.1 + 0.1 * second * (steps - 1))


def test_expensive_steps_are_not_repeated_until_they_agree() -> None:
    """A step of 3 s and one of 2 s, of 60 s: the second counts, since a third would take as long as a timing."""
    stopwatch = scripted(3.0, 2.0, 2.0)
    kept = visit(stopwatch)
    assert stopwatch.spent[8].warmup_seconds == pytest.approx(3.0 + 2.0)
    assert [timing.seconds for timing in kept] == pytest.approx([2.0, 2.0])


def test_short_steps_are_run_for_forty_milliseconds_at_least() -> None:
    """
    Steps of 1 ms agree at once, but what ran a moment ago takes longer to fall asleep: one step, then four blocks
    of ten; a fifth would not be waited for.
    """
    stopwatch = scripted(0.001)
    kept = visit(stopwatch)
    assert stopwatch.runner.repeats[:5] == [1, 10, 10, 10, 10]  # type: ignore[attr-defined]
    assert SETTLE_SECONDS == 0.04
    assert stopwatch.spent[8].warmup_seconds == pytest.approx(0.041)
    assert {timing.repeats for timing in kept} == {10}
    assert stopwatch.runner.repeats == [1] + [10] * (4 + len(kept) - 1)  # type: ignore[attr-defined]


def test_steps_that_never_agree_end_somewhere() -> None:
    """Each step an eighth faster than the one before: after 21 of them readings are taken all the same."""
    stopwatch = scripted(*[0.15 * 0.875**k for k in range(60)])
    visit(stopwatch)
    steps = sum(0.15 * 0.875**k for k in range(MOST_WARMUPS + 1))
    assert stopwatch.spent[8].warmup_seconds == pytest.approx(steps)


def test_a_visit_takes_readings_in_rounds_of_its_own() -> None:
    """Nine at most, numbered on from the first; 20 ms each, as a step spans the minimum; memory stands in each."""
    stopwatch = scripted(0.02)
    kept = visit(stopwatch, first=3 * PER_TRIAL)
    assert [timing.round for timing in kept] == list(range(48, 48 + len(kept)))
    assert len(kept) == 9  # it took half a second to get there
    assert len(kept) < PER_TRIAL
    assert {(t.batch_size, t.seconds, t.repeats, t.peak_bytes, t.peak_device_bytes) for t in kept} == {
        (8, 0.02, 1, 1000, 2000)
    }


def test_what_a_visit_took_is_kept_apart() -> None:
    """Half a second to prepare, two steps of 1 s, 0.25 s twice for memory; a second visit prepares no more."""
    stopwatch = scripted(1.0, seconds=2000.0, asks=0.25)
    visit(stopwatch)
    spent = stopwatch.spent[8]
    assert attrs.astuple(spent) == (1, 0.5, 2.0, 0.5, 1.0)
    assert stopwatch.prepare_seconds == {8: 0.5}
    visit(stopwatch, first=PER_TRIAL)
    assert attrs.astuple(spent) == (2, 0.5, 4.0, 1.0, 1.0)
    assert stopwatch.prepare_seconds == {8: 0.5}


# --- clocks --------------------------------------------------------------------------------------------------


def test_steady_clocks_are_warm_after_the_minimum() -> None:
    """A device that never changes works for WARM_SECONDS before its first reading, and a few steps more."""
    stopwatch = open_stopwatch(FakeDevice(STEADY, prepare_seconds=0.0))
    visit(stopwatch)
    assert WARM_SECONDS <= stopwatch.spent[8].warmup_seconds <= WARM_SECONDS + 4 * 0.02 + 1e-9


@pytest.mark.parametrize("curve", [affine(0.002, 0.0), affine(0.02, 0.0), affine(0.3, 0.0)])
def test_rising_clocks_are_waited_for(curve: Curve) -> None:
    """A clock that takes 0.8 s of work to rise by 28 % (triton#2306) leaves the readings' median within 5 %."""
    device = FakeDevice(curve, behaviours=(ColdStart(slower=0.28, seconds=0.8, first_step=1.0),))
    stopwatch = open_stopwatch(device)
    kept = visit(stopwatch)
    assert statistics.median(timing.seconds for timing in kept) == pytest.approx(curve(8), rel=0.05)
    assert stopwatch.spent[8].warmup_seconds < MAX_WARM_SECONDS + SETTLE_SECONDS + 3 * max(MIN_SPAN_SECONDS, curve(8))


def test_clocks_are_warmed_for_a_fortieth_of_the_budget_at_most() -> None:
    """Of 4 s that is 0.1 s, although a second would be worth it elsewhere; clocks are warmed once."""
    stopwatch = open_stopwatch(FakeDevice(STEADY), seconds=4.0)
    visit(stopwatch)
    assert stopwatch.spent[8].warmup_seconds <= 0.02 + 0.1 + 2 * 0.02 + 0.02
    visit(stopwatch, 16)
    assert stopwatch.spent[16].warmup_seconds == pytest.approx(3 * 0.02)  # 40 ms after the first step


def test_the_very_first_step_does_not_count_against_the_budget() -> None:
    """55 s of compiling before steps of 20 ms do not count, 5 s of preparing do: there is a reading."""
    device = FakeDevice(STEADY, prepare_seconds=5.0, behaviours=(Settles((2750.0,)),))
    stopwatch = open_stopwatch(device)
    kept = visit(stopwatch, likely=0.02)
    assert [timing.seconds for timing in kept] == pytest.approx([0.02] * len(kept))
    now = stopwatch.runner.clock.now()
    assert now > 60.0
    assert stopwatch.budget.spent() == pytest.approx(now - 55.0)


def test_a_lowered_clock_is_flagged_against_the_highest_seen() -> None:
    """Of the same size 1.5 GHz and then 890 MHz is lowered, 910 is not; a runner that says so itself is believed."""
    for clock, flagged, expected in ((890.0, False, True), (910.0, False, False), (910.0, True, True)):
        stopwatch = scripted(
            Reading(seconds=0.02, sm_clock_mhz=1500.0), Reading(seconds=0.02, sm_clock_mhz=clock, throttled=flagged)
        )
        kept = visit(stopwatch)
        assert {(timing.throttled, timing.sm_clock_mhz) for timing in kept} == {(expected, clock)}
    for clock, expected in ((750.0, True), (760.0, False)):  # of other sizes: half, which no power limit explains
        earlier = scripted(Reading(seconds=0.02, sm_clock_mhz=clock), clocks_mhz=[900.0, 1500.0])
        assert {timing.throttled for timing in visit(earlier)} == {expected}
    assert not any(timing.throttled for timing in visit(scripted(0.02)))


def test_a_throttled_device_rests_ever_longer_up_to_a_share_of_the_budget() -> None:
    """0.05, 0.1, 0.2 s and so on up to 1.6 s in a row; anew after a clear one; a tenth of the budget at most."""
    stopwatch = scripted(0.02, seconds=60.0)
    hot, cool = (Timing(batch_size=8, round=0, seconds=0.02, throttled=flag) for flag in (True, False))
    for _ in range(7):
        stopwatch.rest(hot)
    runner: Any = stopwatch.runner
    assert runner.slept == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, MAX_REST_SECONDS])
    stopwatch.rest(cool)
    stopwatch.rest(hot)
    assert runner.slept[-1] == pytest.approx(0.05)
    for _ in range(30):
        stopwatch.rest(hot)
    assert sum(runner.slept) == pytest.approx(6.0)
    late = scripted(0.02, seconds=60.0)
    late.budget.spent_before = 59.98
    late.rest(hot)
    assert late.runner.slept == pytest.approx([0.02])  # type: ignore[attr-defined]
    visited = scripted(Reading(seconds=0.02, throttled=True))
    assert len(visit(visited)) == len(visited.runner.slept) + 1  # type: ignore[attr-defined]


# --- the budget ----------------------------------------------------------------------------------------------


def test_nothing_is_prepared_when_the_budget_is_spent() -> None:
    """Preparing takes time too; and a size that is prepared still takes no step."""
    stopwatch = open_stopwatch(FakeDevice(STEADY), 0.0, warm=True)
    with pytest.raises(OutOfBudget):
        visit(stopwatch)
    assert isinstance(stopwatch.runner, FakeRunner)
    assert stopwatch.runner.prepared == []
    ready = scripted(1.0, seconds=0.5)
    with pytest.raises(OutOfBudget):
        visit(ready)
    assert ready.runner.repeats == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("seconds", [0.6, 1.4, 2.6, 3.4])
def test_however_little_is_left_a_step_that_came_back_is_a_timing(seconds: float) -> None:
    """Half a second to prepare and steps of 1 s: one step came back at least, and one reading is kept at least."""
    stopwatch = scripted(1.0, seconds=seconds)
    kept = visit(stopwatch)
    assert len(kept) == 1
    assert kept[0].seconds == 1.0
    assert stopwatch.budget.spent() <= seconds + 1.0


@pytest.mark.parametrize("seconds", [1e-6, 0.01, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("step", [1e-5, 1e-3, 0.02, 0.5])
def test_a_run_has_an_answer_after_its_first_visit(seconds: float, step: float) -> None:
    """Also of a budget that is gone with the first step: each reading says of how many steps it is."""
    stopwatch = open_stopwatch(FakeDevice(affine(step, 0.0)), seconds)
    kept = visit(stopwatch)
    assert kept
    assert all(timing.seconds == pytest.approx(step) for timing in kept)
    assert stopwatch.budget.spent() <= seconds + 2 * max(step, 0.011)


def test_a_step_that_compiled_with_the_rest_of_the_budget_is_no_timing() -> None:
    """One of 0.8 s where 0.1 ms are likely, as just-in-time compilers take: a block of 10 ms says what a step takes."""
    stopwatch = scripted(0.8, 0.0003, 0.0001, seconds=12.0)
    stopwatch.runner.passed = 11.0  # type: ignore[attr-defined]
    kept = visit(stopwatch, likely=0.0001)
    assert [(timing.seconds, timing.repeats) for timing in kept] == [(0.0001, 100)]
    assert stopwatch.budget.spent() < 11.0 + 0.5 + 0.8 + 2 * 0.08


@pytest.mark.parametrize(("first", "likely", "seconds"), [(0.5, 0.1, 6.0), (1.4, 0.1, 12.0)])
def test_a_step_is_believed_that_is_not_much_longer_than_likely_or_long_beside_the_budget(
    first: float, likely: float, seconds: float
) -> None:
    """Where another may take as long again, the budget is not exceeded by it."""
    stopwatch = scripted(first, first / 2, seconds=seconds)
    stopwatch.runner.passed = seconds - 0.6  # type: ignore[attr-defined]
    assert [timing.seconds for timing in visit(stopwatch, likely=likely)] == [first]
    assert stopwatch.runner.repeats == [1]  # type: ignore[attr-defined]


def test_the_only_step_of_a_budget_is_a_timing_however_short() -> None:
    """Half of a millisecond is left after one step of a millisecond: that step counts, and no block is begun."""
    stopwatch = scripted(0.001, seconds=0.5015)
    kept = visit(stopwatch)
    assert [(timing.seconds, timing.repeats) for timing in kept] == [(0.001, 1)]
    assert stopwatch.runner.repeats == [1]  # type: ignore[attr-defined]


def test_readings_that_took_the_budget_are_the_last() -> None:
    """Nine of 20 ms were to be taken of 57 s; two that were disturbed for 29 s each leave nothing for more."""
    kept = visit(scripted(0.02, 0.02, 0.02, 29.0, 29.0, 0.02, seconds=57.0))
    assert [timing.seconds for timing in kept] == [0.02, 29.0, 29.0]


def test_steps_that_became_faster_are_taken_more_at_a_time() -> None:
    """Two steps of 5 ms span 10 ms, ten of 1 ms do: the first reading that is faster says so for those after it."""
    stopwatch = scripted(*[0.005] * 5, 0.001)
    kept = visit(stopwatch)
    assert stopwatch.runner.repeats == [1] + [2] * 4 + [2] + [10] * (len(kept) - 2)  # type: ignore[attr-defined]
    assert [timing.repeats for timing in kept] == [2, 2] + [10] * (len(kept) - 2)
    assert len(kept) > 2


def test_readings_end_with_the_budget() -> None:
    """Steps of 20 ms: after preparing, three steps and some readings, one more would not fit."""
    stopwatch = scripted(0.02, seconds=0.5 + 4.5 * 0.02)
    kept = visit(stopwatch)
    assert len(kept) == 2  # the fewest of a trial, since steps are long for the time left
    assert stopwatch.budget.spent() <= 0.5 + 4.5 * 0.02


# --- failures and hangs --------------------------------------------------------------------------------------


def test_after_a_failure_a_size_is_prepared_again() -> None:
    """What runs next may be another process; a size that failed to prepare is not the prepared one."""
    stopwatch = open_stopwatch(FakeDevice(STEADY, memory_bytes=10_000))
    assert isinstance(stopwatch.runner, FakeRunner)
    visit(stopwatch)
    stopwatch.forget()
    visit(stopwatch)
    with pytest.raises(FakeOutOfMemoryError):
        visit(stopwatch, 16)
    visit(stopwatch)
    assert stopwatch.runner.prepared == [8, 8, 16, 8]
    assert (stopwatch.spent[16].visits, stopwatch.spent[8].visits) == (0, 3)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_reading_that_is_no_time_is_refused(seconds: float) -> None:
    """A clock that went wrong is named, with what it read."""
    with pytest.raises(DeviceFailed, match="the clock failed"):
        visit(scripted(seconds))


def test_a_step_that_takes_twenty_times_what_it_should_hangs() -> None:
    """Of 4 s expected, 79 s are long and 81 s a hang; of 0.1 s, 29 s are no hang yet: a first step may compile."""
    assert (HANG_FACTOR, HANG_SECONDS) == (20.0, 30.0)
    assert visit(scripted(79.0, seconds=1e4), likely=4.0)[0].seconds == 79.0
    with pytest.raises(TimedOut, match=r"batch size 8 did not come back within 80\.0 s"):
        visit(scripted(81.0, seconds=1e4), likely=4.0)
    with pytest.raises(TimedOut):
        visit(scripted(0.001, 4.0, seconds=1e4))  # ten of them
    assert visit(scripted(29.0, 0.1, seconds=1e4), likely=0.1)
    with pytest.raises(TimedOut):
        visit(scripted(31.0, 31.0, 0.1, seconds=1e4), likely=0.1)


@pytest.mark.parametrize("before", [0, 1, 4], ids=["the first step", "the second", "a reading"])
def test_a_reading_that_came_back_late_is_taken_again_and_its_seconds_are_nobodys(before: int) -> None:
    """Suspended for 340 s in any step, by Ctrl-Z or with the machine: no hang, no timing of it, no budget lost."""
    stopwatch = scripted(*[0.1] * before, 340.0, 0.1, seconds=60.0)
    kept = visit(stopwatch, likely=0.1)
    assert {timing.seconds for timing in kept} == {0.1}
    alone = scripted(0.1, seconds=60.0)
    visit(alone, likely=0.1)
    assert stopwatch.budget.spent() < alone.budget.spent() + MOST_TIMINGS * 0.1


def test_without_an_expectation_only_the_budget_bounds_a_step() -> None:
    """400 s are no hang where 1000 are left, and one where 60 are; later steps are bounded by the first."""
    assert visit(scripted(400.0, seconds=1000.0))
    with pytest.raises(TimedOut):
        visit(scripted(400.0, seconds=60.0))
    with pytest.raises(TimedOut):
        visit(scripted(1.0, 31.0, seconds=1000.0))


def test_a_block_of_steps_may_take_as_many_times_as_long() -> None:
    """Ten steps of 1 ms that are expected at 1 ms each: a hang is 30 s for all of them, or 20 times the ten."""
    runner = open_stopwatch(FakeDevice(affine(4.0, 0.0), gives_up=True), seconds=1e4, warm=True)
    assert isinstance(runner.runner, HasStepLimit)
    visit(runner, likely=4.0)
    assert runner.runner.step_seconds == 80.0
    blocks = open_stopwatch(FakeDevice(affine(4e-3, 0.0), gives_up=True), seconds=1e4, warm=True)
    blocks.span_seconds = 20.0
    visit(blocks)
    assert isinstance(blocks.runner, HasStepLimit)
    assert blocks.runner.step_seconds == pytest.approx(20 * 5000 * 4e-3, rel=1e-3)


def test_a_runner_that_gives_up_is_told_how_long_a_step_may_take() -> None:
    """A hang costs the limit and not the budget, the first one of a run not even that."""
    device = FakeDevice(STEADY, behaviours=(Hangs({16}),), gives_up=True)
    stopwatch = open_stopwatch(device, seconds=600.0)
    visit(stopwatch)
    for cost in (0.0, HANG_SECONDS):
        before = stopwatch.budget.spent()
        with pytest.raises(TimedOut):
            visit(stopwatch, 16, likely=0.02)
        assert stopwatch.budget.spent() - before == pytest.approx(cost, abs=0.1)


def test_a_hang_that_is_longer_than_the_budget_leaves_it_to_other_sizes() -> None:
    """It is waited for at least half a minute: once that is nobody's; then a hang takes a quarter of what is left."""
    device = FakeDevice(STEADY, behaviours=(Hangs({1, 2}),), gives_up=True)
    stopwatch = open_stopwatch(device, seconds=10.0)
    with pytest.raises(TimedOut):
        visit(stopwatch, 1)
    assert stopwatch.budget.spent() < 1
    assert visit(stopwatch, 8)
    again = open_stopwatch(device, seconds=10.0)
    for size in (1, 2):
        with pytest.raises(TimedOut):
            visit(again, size)
    assert again.budget.left() == pytest.approx(7.5, abs=0.1)
    assert visit(again, 8)


def test_a_worker_that_is_waited_for_and_dies_leaves_the_budget_too() -> None:
    """As one that was suspended does at its deadline, in a step or while it prepares; once, like a hang."""

    @attrs.define
    class Suspended(Behaviour):
        when: str

        def prepare(self, batch_size: int) -> None:
            if self.when == "prepare":
                raise WorkerDied("suspended")

        def step(self, batch_size: int) -> None:
            if self.when == "step":
                raise WorkerDied("suspended")

    for when in ("prepare", "step"):
        stopwatch = open_stopwatch(
            FakeDevice(STEADY, prepare_seconds=30.0, behaviours=(Suspended(when),)), seconds=50.0
        )
        for spent in (0.0 if when == "prepare" else 30.0, 30.0 if when == "prepare" else 60.0):
            with pytest.raises(WorkerDied):
                visit(stopwatch)
            stopwatch.forget()
            assert stopwatch.budget.spent() == spent
