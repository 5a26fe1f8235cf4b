"""
One visit to one batch size: prepare, step until steps agree, then a handful of readings.

Clocks are warmed before the first reading of a process.  A reading taken under a clearly lowered
clock is flagged, and the device is given a rest before the next.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import attrs

from cubatch.errors import DeviceFailed, OutOfMemory, TimedOut, WorkerDied
from cubatch.measure.budget import Budget, readings_for, repeats_for
from cubatch.measure.records import PER_VISIT, Timing
from cubatch.measure.runner import HoldsReference, KnowsFree, Reading, Runner
from cubatch.measure.stopping import median
from cubatch.measure.throttling import HighestClocks
from cubatch.measure.watch import Watch

# A timing spans at least this: a thousand times what starting a kernel, waking a thread or one tick of
# the clock takes, and short beside a round.
MIN_SPAN_SECONDS = 0.01
# Energy counters of GPUs move every 20 to 100 ms, so a timing must hold several of their ticks.
MIN_ENERGY_SPAN_SECONDS = 0.5
# Clocks rise within some 0.1 s of work and settle within 3 s (triton#2306; CUTLASS, measurement guidelines).
WARM_SECONDS, MAX_WARM_SECONDS, MAX_WARM_SHARE = 0.3, 0.7, 0.025
# A reference block lasts about so long: much shorter than a trial, and a thousand ticks of the clock or more.
REFERENCE_BLOCK_SECONDS = 0.01
# A timing of a trial that takes so much longer than a later one came before the size had settled.
UNSETTLED = 0.5
# A size is warm when a step is no faster than the one before by more than this share: noise of one step.
AGREE, MOST_WARMUPS, SETTLE_SECONDS, SETTLE_SHARE = 0.1, 20, 0.04, 0.1
# A first step that takes so many times what is likely compiled, it seems.  What it may take of the budget for others to
# follow whatever is left, and what those may take of it in all.
COMPILES, COMPILES_SHARE, SPARE_SHARE = 10.0, 0.1, 0.1
MOST_OF_VISIT = PER_VISIT - 2  # readings: rounds of their own are kept free
SETTLED = 0.01  # a quarter of a second changes the readings by less than this share
FIRST_REST_SECONDS, MAX_REST_SECONDS, MAX_REST_SHARE = 0.05, 1.6, 0.1
# The bus to main memory is ten times slower than a GPU's own memory and more; no algorithm or wave costs so much.
SPILLED = 2.5
# A step hangs if it takes this many times what it should, and not less than the floor: a first step may compile.
HANG_FACTOR, HANG_SECONDS = 20.0, 30.0
HANG_SHARE = 0.25  # of what is left of the budget, in the place of the floor, once one has hung
LONGER = "A larger budget allows longer steps."


@runtime_checkable
class HasStepLimit(Protocol):
    """A runner that gives up on a reading that takes too long: TimedOut, and the next `prepare` works again."""

    step_seconds: float | None  # how long one clock reading may take; set before each


@attrs.define
class Spent:
    """
    What visits to a size took besides its readings.

    Attributes:
        visits: How many there were.
        prepare_seconds: Preparing, in all of them.
        warmup_seconds: Steps that are not readings, in all of them.
        query_seconds: Asking for memory and power, and whatever else is neither.
    """

    visits: int = 0
    prepare_seconds: float = 0.0
    warmup_seconds: float = 0.0
    query_seconds: float = 0.0


class Stopwatch:
    """
    Takes readings of a runner.

    Args:
        runner: What is timed.
        budget: No visit begins when it is spent, and no reading that it does not hold but the first, and one or a few
            where that compiled.
        span_seconds: What a reading must span at least.
        clocks_mhz: SM clocks read in earlier runs.
        watch: Says it where a runner that never gives up hangs; None for one that does.

    Attributes:
        reference_batch_size: Batch size of the reference step that surrounds each reading; None without one.
        around_seconds: Seconds of the reference blocks around a timing; 0 without a reference.
        prepare_seconds: What preparing took the last time, by size.
        spent: What visits took besides their readings, by size.
    """

    def __init__(
        self,
        runner: Runner,
        budget: Budget,
        *,
        span_seconds: float,
        clocks_mhz: Iterable[float] = (),
        watch: Watch | None = None,
    ) -> None:
        self.runner, self.budget, self.span_seconds, self._watch = runner, budget, span_seconds, watch
        self.reference_batch_size: int | None = None
        self.around_seconds = 0.0
        self.prepare_seconds: dict[int, float] = {}
        self.spent: dict[int, Spent] = {}
        self._prepared: int | None = None
        self._is_warm = False
        self._forgiven: set[type[Exception]] = set()
        self._rests, self._rested = 0, 0.0
        self._clocks = HighestClocks(clocks_mhz)

    def hold_reference(self, batch_size: int, step_seconds: float) -> bool:
        """
        Keep a batch size as the reference step, and return whether the runner could.

        Args:
            batch_size: The size, which has run.
            step_seconds: Seconds of one of its steps.
        """
        if not isinstance(self.runner, HoldsReference):
            return False
        self._prepare(batch_size)
        repeats = repeats_for(step_seconds, REFERENCE_BLOCK_SECONDS)
        with self._waiting(f"holding batch size {batch_size} as the reference", HANG_SECONDS):
            is_held = self.runner.hold_reference(repeats)
        if is_held:
            self._prepared, self.reference_batch_size = None, batch_size
            self.around_seconds = (2 * repeats + 1) * step_seconds
        return is_held

    def visit(
        self,
        batch_size: int,
        *,
        first_round: int,
        likely: float | None,
        keep: Callable[[Timing], None],
        expected: float | None = None,
        at_least: int = 0,
    ) -> None:
        """
        Visit a size and take readings.

        The last of the steps that agreed is the first reading.  However little is left, a step that came back is one:
        the first size of a run may be all that it measures.

        Args:
            batch_size: The size.
            first_round: Written into the first reading; the others take the numbers after it.
            likely: Seconds of a step by what is known, to tell a hang from a long step; None where nothing is.
            keep: Called with each reading as it is taken.
            expected: Seconds of a step by what was read of smaller sizes; None where nothing was.
            at_least: How many readings to take, budget allowing; more, where they are cheap.

        Raises:
            OutOfBudget: If the budget does not hold the first step.
            TimedOut: If a step took so long that it counts as hung.
            OutOfMemory: If steps take far longer than expected, and hold more memory than the device has free.
            Exception: Whatever the runner raises.
        """
        spent, now = self.spent.setdefault(batch_size, Spent()), self.runner.clock.now
        began = now()
        self._prepare(batch_size)
        spent.visits += 1
        prepared = now()
        spent.prepare_seconds += prepared - began
        last, repeats = self._settle(*(([], 1) if self._is_warm else self._warm_clocks(likely)), likely)
        asked = now()
        spent.warmup_seconds += asked - prepared
        memory = self.runner.peak_bytes, self.runner.peak_device_bytes
        spent.query_seconds += now() - asked
        times = 0.0 if expected is None else last.seconds / expected
        if times > SPILLED and self._is_prepared_anew(batch_size, times, memory[0]):
            last, repeats = self._settle([], 1, likely)
        step = last.seconds
        count = self._readings(step, now() - began)
        count, taken = max(count, at_least), 0
        if repeats >= repeats_for(step, self.span_seconds) or self.budget.left() <= step:
            timing = self._timing(batch_size, first_round, last, repeats, memory)
            keep(timing)
            self.rest(timing)
            taken = 1
        while taken < count:
            repeats = repeats_for(step, self.span_seconds)
            if taken and self.budget.left() < repeats * step + self.around_seconds:
                return
            reading = self._read(repeats, step)
            timing = self._timing(batch_size, first_round + taken, reading, repeats, memory)
            keep(timing)
            self.rest(timing)
            taken += 1
            if reading.seconds * (1 + UNSETTLED) < step:  # only now it has settled: those before do not count
                count = min(MOST_OF_VISIT, taken + max(self._readings(reading.seconds, 0.0), at_least))
            step = min(step, reading.seconds)

    def _readings(self, step_seconds: float, overhead_seconds: float) -> int:
        """Return how many timings a trial takes."""
        return readings_for(
            step_seconds, self.span_seconds, overhead_seconds=overhead_seconds, left=self.budget.left(),
            around_seconds=self.around_seconds,
        )  # fmt: skip

    def _is_prepared_anew(self, batch_size: int, times: float, held: int | None) -> bool:
        """
        Refuse a step whose memory was not all there, by what is free without it; else say whether that was looked at.

        Drivers for Windows give memory that the device does not have, as CUDA's managed memory and swapping systems do:
        no error says so, and steps take many times as long.
        """
        clock = self.runner.clock
        if held is None or not isinstance(clock, KnowsFree) or clock.free_bytes() is None:
            return False
        self.forget()
        self.runner.release()
        free, stays = clock.free_bytes(), self.runner.peak_bytes or 0
        if free is not None and held > free + stays:
            raise OutOfMemory(
                f"batch size {batch_size} takes {times:.1f} times as long as smaller ones let expect, as a step",
                held, free + stays, remedy="What is not there lies in main memory or on disk meanwhile.",
            )  # fmt: skip
        self._prepare(batch_size)
        return True

    def _settle(self, steps: list[Reading], repeats: int, expected: float | None) -> tuple[Reading, int]:
        """
        Step until a reading is not clearly faster than the reading before: caches, allocators and compilers are done.

        What was running a moment ago takes longer to fall asleep than a short step lasts, so that short
        steps are read in blocks, for SETTLE_SECONDS at least.  Of steps that are dear two have to do.  Where the first
        compiled with what was left, and that was little of the budget, others follow: one, and what fits into a tenth.

        Returns:
            The last reading, and of how many steps it is.
        """
        worked = spare = 0.0
        if not steps:
            self.budget.check()
            steps = [self._read(1, expected)]
            first = steps[0].seconds
            if expected is not None and COMPILES * expected < first < COMPILES_SHARE * self.budget.seconds:
                steps.append(self._read(1, expected))
                spare = SPARE_SHARE * first
        while worked < SETTLE_SECONDS or not _agree(steps):
            wanted = repeats_for(steps[-1].seconds, self.span_seconds)
            share = 1.0 if len(steps) == 1 else SETTLE_SHARE
            if wanted * steps[-1].seconds >= max(share * self.budget.left(), spare) or len(steps) > MOST_WARMUPS:
                break
            repeats = wanted
            steps.append(self._read(repeats, expected or steps[-1].seconds))
            worked += repeats * steps[-1].seconds
            spare -= repeats * steps[-1].seconds
        return steps[-1], repeats

    def _timing(
        self, batch_size: int, number: int, reading: Reading, repeats: int, memory: tuple[int | None, int | None]
    ) -> Timing:
        return Timing(
            batch_size=batch_size,
            round=number,
            seconds=reading.seconds,
            repeats=repeats,
            throttled=reading.throttled or self._clocks.is_lowered(batch_size, reading.sm_clock_mhz),
            sm_clock_mhz=reading.sm_clock_mhz,
            joules=reading.joules,
            peak_bytes=memory[0],
            peak_device_bytes=memory[1],
            event_reasons=reading.event_reasons,
            temperature_celsius=reading.temperature_celsius,
            power_watts=reading.power_watts,
            utilization_percent=reading.utilization_percent,
            used_bytes=reading.used_bytes,
            reference_batch_size=None if reading.reference_before_seconds is None else self.reference_batch_size,
            reference_before_seconds=reading.reference_before_seconds,
            reference_after_seconds=reading.reference_after_seconds,
        )

    def rest(self, timing: Timing) -> None:
        """Let a throttled device cool, longer each time in a row, but never for more than a share of the budget."""
        self._rests = self._rests + 1 if timing.throttled else 0
        if not self._rests:
            return
        pause = min(FIRST_REST_SECONDS * 2 ** (self._rests - 1), MAX_REST_SECONDS)
        pause = min(pause, self.budget.left(), MAX_REST_SHARE * self.budget.seconds - self._rested)
        if pause > 0:
            self.runner.clock.sleep(pause)
            self._rested += pause

    def forget(self) -> None:
        """After a failure nothing is prepared, and what runs next may be another process that was never warmed."""
        self._prepared = None

    def _prepare(self, batch_size: int) -> None:
        if self._prepared == batch_size:
            return
        self._prepared = None
        if self._is_warm:  # whatever the first size takes to prepare, it is to have its step
            self.budget.check()
        before = self.runner.clock.now()
        with self._waiting(f"preparing batch size {batch_size}", HANG_SECONDS):
            self.runner.prepare(batch_size)
        self.prepare_seconds[batch_size] = self.runner.clock.now() - before
        self._prepared = batch_size

    def _warm_clocks(self, expected: float | None) -> tuple[list[Reading], int]:
        """Work until the clocks have risen and the readings no longer trend; the last two, and of how many steps."""
        before = self.budget.spent()
        steps = [self._read(1, None)]  # may compile or load, which is not measuring: only the budget bounds it
        self.budget.forgive(self.budget.spent() - before)
        began, most = self.runner.clock.now(), min(MAX_WARM_SECONDS, MAX_WARM_SHARE * self.budget.left())
        history: list[tuple[float, float]] = []
        repeats, worked = 1, 0.0
        while worked < most:
            repeats = 1 if not history else repeats_for(steps[-1].seconds, self.span_seconds)
            steps.append(self._read(repeats, expected or steps[-1].seconds))
            seconds = steps[-1].seconds
            worked = max(worked + repeats * seconds, self.runner.clock.now() - began)
            history.append((worked, seconds))
            if worked >= WARM_SECONDS and _is_settled(history, max(WARM_SECONDS / 2, repeats * seconds)):
                break
        self._is_warm = True
        return steps[-2:], repeats

    def _read(self, repeats: int, expected: float | None) -> Reading:
        """
        Read the clock; what takes far longer than expected counts as hung, also if it came back.

        What came back late in this process may have been suspended, by Ctrl-Z or with the machine: it is read once
        more, and if it is as it should be, the seconds before were nobody's.  Of the very first step nothing says how
        long it should be: whatever comes back is read.
        """
        floor, left = HANG_SECONDS, self.budget.left()
        if TimedOut in self._forgiven:  # here steps hang: none of the next is to take all that there is
            left *= HANG_SHARE
            floor = min(floor, left)
        gives_up, is_first = isinstance(self.runner, HasStepLimit), expected is None and not self._is_warm
        limit = max(floor, left if expected is None else HANG_FACTOR * expected * repeats)
        before = self.budget.spent()
        try:
            reading = self._read_once(repeats, limit)
        except TimedOut as error:
            error.remedy = LONGER if expected is None else ""
            raise
        late = self.budget.spent() - before
        if reading.seconds * repeats > limit and not gives_up and not is_first:
            reading = self._read_once(repeats, limit)
            if reading.seconds * repeats <= limit:
                self.budget.forgive(late)
        if reading.seconds * repeats > limit and not is_first:
            raise TimedOut(f"batch size {self._prepared}", limit)
        self._clocks.see(self._prepared, reading.sm_clock_mhz)
        return reading

    def _read_once(self, repeats: int, limit: float) -> Reading:
        if isinstance(self.runner, HasStepLimit):
            self.runner.step_seconds = limit + HANG_FACTOR * self.around_seconds
        with self._waiting(f"a step of batch size {self._prepared}", limit + HANG_FACTOR * self.around_seconds):
            reading = self.runner.clock.time(self.runner.step, repeats)
        if not 0 < reading.seconds < math.inf:
            raise DeviceFailed("the stopwatch", f"a reading of {reading.seconds!r} s for {repeats} steps")
        return reading

    @contextlib.contextmanager
    def _waiting(self, what: str, seconds: float) -> Iterator[None]:
        """
        Wait for a runner, and have it said where that takes longer.

        The first time that it hangs, and that it dies, is not counted: it may be longer than the whole budget, and
        other sizes are to have theirs.
        """
        before = self.budget.spent()
        try:
            with contextlib.nullcontext() if self._watch is None else self._watch.over(what, seconds):
                yield
        except (TimedOut, WorkerDied) as error:
            if type(error) not in self._forgiven:
                self.budget.forgive(self.budget.spent() - before)
            self._forgiven.add(type(error))
            raise


def _agree(steps: Sequence[Reading]) -> bool:
    """Return whether the last of at least two readings is not clearly faster than the reading before."""
    return len(steps) > 1 and steps[-1].seconds >= steps[-2].seconds * (1 - AGREE)


def _is_settled(history: Sequence[tuple[float, float]], window: float) -> bool:
    """Return whether the median reading of the last `window` seconds is that of the `window` before."""
    end = history[-1][0]
    recent = [seconds for when, seconds in history if when > end - window]
    before = [seconds for when, seconds in history if end - 2 * window < when <= end - window]
    return bool(before) and abs(median(recent) - median(before)) <= SETTLED * median(before)
