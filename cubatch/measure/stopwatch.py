"""
Run one trial of a batch size: prepare it, run steps until they agree, take a few timings.

The first trial of a process also warms up the clocks of the device.  A timing under a clearly lowered clock is marked,
and the device rests before the next one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import attrs

from cubatch.errors import DeviceFailed, OutOfMemory, TimedOut, WorkerDied
from cubatch.measure.budget import Budget, cheap_seconds, repeats_for, timing_seconds, timings_for
from cubatch.measure.records import PER_TRIAL, Timing
from cubatch.measure.runner import Compiles, HoldsReference, KnowsFree, Reading, Runner
from cubatch.measure.stopping import median
from cubatch.measure.throttling import HighestClocks
from cubatch.units import format_seconds

# A timing spans at least this: a thousand times a kernel launch, a thread wake-up or a tick of the clock, and short
# compared with a round.
MIN_SPAN_SECONDS = 0.01
# Energy counters of GPUs move every 20 to 100 ms, so a timing must hold several of their ticks.
MIN_ENERGY_SPAN_SECONDS = 0.5
# Clocks rise within some 0.1 s of work and settle within 3 s (triton#2306; CUTLASS, measurement guidelines).
WARM_SECONDS, MAX_WARM_SECONDS, MAX_WARM_SHARE = 0.3, 0.7, 0.025
# A reference step empties the caches, so shorter steps run in blocks whose first step is not timed.
PAIRED_SPAN_SECONDS = 0.05
# Seconds of a reference block: much shorter than a trial, and at least a thousand ticks of the clock.
REFERENCE_BLOCK_SECONDS = 0.01
# A timing that takes longer than a later one of its trial by this share was taken before the size had settled.
UNSETTLED = 0.5
# A size is warm if a step is at most this share faster than the step before: noise of one step.
AGREE, MOST_WARMUPS, SETTLE_SECONDS = 0.1, 20, 0.04
# A first step that takes this many times the expected seconds probably compiled.  If it took less than a share of the
# budget, further steps may take another share of its seconds.
COMPILES, COMPILES_SHARE, SPARE_SHARE = 10.0, 0.1, 0.1
MOST_OF_TRIAL = PER_TRIAL - 2  # timings
SETTLED = 0.01  # clocks are warm if a quarter of a second changes timings by less than this share
FIRST_REST_SECONDS, MAX_REST_SECONDS, MAX_REST_SHARE = 0.05, 1.6, 0.1
# The bus to main memory is at least ten times slower than a GPU's own memory; no other algorithm costs as much.
SPILLED = 2.5
# A step hangs if it takes this many times the expected seconds and at least 30 s: a first step may compile.
HANG_FACTOR, HANG_SECONDS = 20.0, 30.0
HANG_SHARE = 0.25  # share of the seconds left, instead of the 30 s, after a step has hung
LONGER = "A larger budget allows longer steps."
_HANGS = "%s has not returned for %s. Press Ctrl-C to end the run, or use isolation, which ends such steps."

_log = logging.getLogger(__name__)


@runtime_checkable
class HasStepLimit(Protocol):
    """A runner that ends a timing that takes too long with TimedOut; the next `prepare` works again."""

    step_seconds: float | None  # most seconds of one timing, set before each; None: no limit


@attrs.define
class Spent:
    """
    The number of trials of a batch size, and the seconds that they took in addition to timings.

    A measurement in JSON has the same fields.
    """

    visits: int = 0  # number of trials
    prepare_seconds: float = 0.0  # seconds of all preparations, such as allocating the batch
    warmup_seconds: float = 0.0  # seconds of the steps before the first timing of each trial
    query_seconds: float = 0.0  # seconds of reading the peak memory after each warm-up
    first_seconds: float | None = None  # seconds of the very first step of the size; None if unknown


class Stopwatch:
    """
    Take the timings of a runner.

    Args:
        runner: The runner.
        budget: Seconds of measuring.  Once they are spent, no trial starts except the first.  A timing starts only if
            it ends within them, except the first of a trial.
        span_seconds: Least seconds of a timing, of as many steps as that takes; more with a reference step.
        clocks_mhz: SM clocks of earlier runs, by which a lowered clock is recognized.

    Attributes:
        reference_batch_size: Batch size of the reference step around each timing; None without one.
        around_seconds: Seconds of the reference blocks around a timing, by the latest one; 0 without a reference.
        prepare_seconds: Seconds of the last preparation, by size.
        spent: Number of trials, and their seconds in addition to timings, by size.
    """

    def __init__(
        self,
        runner: Runner,
        budget: Budget,
        *,
        span_seconds: float,
        clocks_mhz: Iterable[float] = (),
    ) -> None:
        self.runner, self.budget, self.span_seconds = runner, budget, span_seconds
        self.reference_batch_size: int | None = None
        self._reference_repeats, self.around_seconds = 0, 0.0
        self.prepare_seconds: dict[int, float] = {}
        self.spent: dict[int, Spent] = {}
        self._prepared: int | None = None
        self._is_warm = False
        self._first_seconds: dict[int | None, float] = {}
        self._forgiven: set[type[Exception]] = set()
        self._rests, self._rested = 0, 0.0
        self._clocks = HighestClocks(clocks_mhz)

    def hold_reference(self, batch_size: int, step_seconds: float) -> bool:
        """Keep a batch size as the reference step; return False if the runner cannot hold a reference."""
        if not isinstance(self.runner, HoldsReference):
            return False
        self._prepare(batch_size)
        self._prepared = None
        repeats = repeats_for(step_seconds, REFERENCE_BLOCK_SECONDS)
        with self._waiting(f"holding batch size {batch_size} as the reference", HANG_SECONDS):
            is_held = self.runner.hold_reference(repeats)
        if is_held:
            self.reference_batch_size = batch_size
            self.span_seconds = max(self.span_seconds, PAIRED_SPAN_SECONDS)
            self._reference_repeats, self.around_seconds = repeats, (2 * repeats + 1) * step_seconds
        return is_held

    def run_trial(
        self,
        batch_size: int,
        *,
        first_round: int,  # round number of the first timing; the next ones follow
        likely: float | None,  # expected seconds of a step, to detect a hang; None if unknown
        keep: Callable[[Timing], None],  # called with each timing
        expected: float | None = None,  # seconds of a step expected from smaller sizes; None without any
    ) -> None:
        """
        Run a trial of a size: prepare it, run warm-up steps, take timings.

        If it lasts long enough, or the budget holds no other, the last warm-up step is the first timing.

        Raises:
            OutOfBudget: If the budget is spent before the first step.
            OutOfMemory: If the size does not fit, or its steps are slow and hold more memory than is free.
            TimedOut: If a step or preparing hangs.
            DeviceFailed: If the clock returns no positive number of seconds.
        """
        spent, now = self.spent.setdefault(batch_size, Spent()), self.runner.clock.now
        began = now()
        self._prepare(batch_size)
        spent.visits += 1
        prepared = now()
        spent.prepare_seconds += prepared - began
        last, repeats = self._settle(*(([], 1) if self._is_warm else self._warm_clocks(likely)), likely)
        settled = now()
        spent.warmup_seconds += settled - prepared
        spent.first_seconds = self._first_seconds.get(batch_size)
        memory = self.runner.peak_bytes, self.runner.peak_device_bytes
        spent.query_seconds += now() - settled
        times = 0.0 if expected is None else last.seconds / expected
        if times > SPILLED and self._check_spilled(batch_size, times, memory[0]):
            last, repeats = self._settle([], 1, likely)
        step = last.seconds
        count, taken = self._count_timings(step, now() - began), 0
        if repeats >= repeats_for(step, self.span_seconds) or self.budget.left() <= step:
            timing = self._timing(batch_size, first_round, last, repeats, memory)
            keep(timing)
            self.rest(timing)
            taken = 1
        while taken < count:
            repeats = repeats_for(step, self.span_seconds)
            if taken and self.budget.left() < timing_seconds(step, self.span_seconds, self.around_seconds):
                return
            reading = self._read(repeats, step)
            timing = self._timing(batch_size, first_round + taken, reading, repeats, memory)
            keep(timing)
            self.rest(timing)
            taken += 1
            if reading.seconds * (1 + UNSETTLED) < step:  # it has settled only now: the earlier timings do not count
                count = min(MOST_OF_TRIAL, taken + self._count_timings(reading.seconds, 0.0))
            step = min(step, reading.seconds)

    def _count_timings(self, step_seconds: float, overhead_seconds: float) -> int:
        return timings_for(
            step_seconds, self.span_seconds, overhead_seconds=overhead_seconds, left=self.budget.left(),
            around_seconds=self.around_seconds,
        )  # fmt: skip

    def _check_spilled(self, batch_size: int, times: float, held: int | None) -> bool:
        """
        Raise OutOfMemory if a step `times` slower than expected holds more memory than is free without it.

        Drivers for Windows, managed memory and swapping give out memory that the device does not have.  There is no
        error, but steps take many times longer. `held` are its bytes, None if unknown.

        Return whether the size was released and prepared again; False if the free memory is unknown.
        """
        clock = self.runner.clock
        if held is None or not isinstance(clock, KnowsFree) or clock.free_bytes() is None:
            return False
        self.forget()
        self.runner.release()
        free, stays = clock.free_bytes(), self.runner.peak_bytes or 0
        if free is not None and held > free + stays:
            raise OutOfMemory(
                f"a step of batch size {batch_size}, {times:.1f} times slower than expected from smaller sizes,",
                held, free + stays, remedy="The rest is in main memory or swapped to disk, which is slow.",
            )  # fmt: skip
        self._prepare(batch_size)
        return True

    def _settle(self, steps: list[Reading], repeats: int, expected: float | None) -> tuple[Reading, int]:
        """
        Run steps until a step is not clearly faster than the step before: caches and allocators are warm.

        Other processes need longer to become idle than a short step lasts.  So short steps run in blocks, for at least
        SETTLE_SECONDS.  Expensive steps run twice.  A first step that compiled may have spent the budget: a few more
        steps follow if it took a small share of the whole budget.

        Args:
            steps: Results of steps that have run already; empty if none has.
            repeats: Number of steps of the last of these results.
            expected: Seconds of a step as expected from smaller batch sizes; None without any.

        Returns:
            The result for the last step, and its number of repeats.
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
            left = self.budget.left()
            most = max(left if len(steps) == 1 else cheap_seconds(left), spare)
            if wanted * steps[-1].seconds >= most or len(steps) > MOST_WARMUPS:
                break
            repeats = wanted
            steps.append(self._read(repeats, expected or steps[-1].seconds))
            worked += repeats * steps[-1].seconds
            spare -= repeats * steps[-1].seconds
        return steps[-1], repeats

    def _timing(
        self, batch_size: int, number: int, reading: Reading, repeats: int, memory: tuple[int | None, int | None]
    ) -> Timing:
        throttled = reading.throttled or self._clocks.is_lowered(batch_size, reading.sm_clock_mhz)
        return Timing(
            batch_size=batch_size,
            round=number,
            repeats=repeats,
            peak_bytes=memory[0],
            peak_device_bytes=memory[1],
            reference_batch_size=None if reading.reference_before_seconds is None else self.reference_batch_size,
            **attrs.asdict(attrs.evolve(reading, throttled=throttled)),
        )

    def rest(self, timing: Timing) -> None:
        """Wait after a throttled timing, so that the device cools: longer each time, at most 10 % of the budget."""
        self._rests = self._rests + 1 if timing.throttled else 0
        if not self._rests:
            return
        pause = min(FIRST_REST_SECONDS * 2 ** (self._rests - 1), MAX_REST_SECONDS)
        pause = min(pause, self.budget.left(), MAX_REST_SHARE * self.budget.seconds - self._rested)
        if pause > 0:
            self.runner.clock.sleep(pause)
            self._rested += pause

    def forget(self) -> None:
        """Record that no batch size is prepared, as after a failure."""
        self._prepared = None

    def _prepare(self, batch_size: int) -> None:
        if self._prepared == batch_size:
            return
        self._prepared = None
        if self._is_warm:  # the first size is measured in any case
            self.budget.check()
        before = self.runner.clock.now()
        with self._waiting(f"preparing batch size {batch_size}", HANG_SECONDS):
            first = self.runner.prepare(batch_size)
        if first is not None:
            self._first_seconds.setdefault(batch_size, first)
        seconds = self.runner.clock.now() - before
        if isinstance(self.runner, Compiles):
            seconds -= self.budget.forgive_compiling(self.runner.compile_seconds)
        self.prepare_seconds[batch_size] = seconds
        self._prepared = batch_size

    def _warm_clocks(self, expected: float | None) -> tuple[list[Reading], int]:
        """
        Run steps until the clocks of the GPU are constant; return the last two results and their number of steps.

        `expected` is the seconds of a step as expected from smaller batch sizes, None without any.
        """
        before = self.budget.spent()
        steps = [self._read(1, None)]  # the first step may compile or load, which does not count as measuring
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
        Time `repeats` steps and return the mean seconds of a step, with the state of the GPU.

        Raises TimedOut if they take far longer than `expected` seconds each, or than the budget if None.

        A late step in this process may have been suspended, by Ctrl-Z or with the machine.  It is timed once more, and
        if the second time is as expected, the first does not count.  The first step of a run has no expectation.
        """
        floor, left = HANG_SECONDS, self.budget.left()
        if TimedOut in self._forgiven:  # steps hang here: the next hang must not take the whole budget
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
        before_seconds, after_seconds = reading.reference_before_seconds, reading.reference_after_seconds
        if before_seconds is None or after_seconds is None:  # none is held, or no longer: a new worker could not
            self.around_seconds = 0.0
        else:  # the faster block: interference slows one
            self.around_seconds = (2 * self._reference_repeats + 1) * min(before_seconds, after_seconds)
        self._clocks.see(self._prepared, reading.sm_clock_mhz)
        self._first_seconds.setdefault(self._prepared, reading.seconds)
        return reading

    def _read_once(self, repeats: int, limit: float) -> Reading:
        if isinstance(self.runner, HasStepLimit):
            self.runner.step_seconds = limit + HANG_FACTOR * self.around_seconds
        with self._waiting(f"a step of batch size {self._prepared}", limit + HANG_FACTOR * self.around_seconds):
            reading = self.runner.clock.time(self.runner.step, repeats)
        if not 0 < reading.seconds < math.inf:
            raise DeviceFailed("the clock", f"a time of {reading.seconds!r} s for {repeats} steps")
        return reading

    @contextlib.contextmanager
    def _waiting(self, what: str, seconds: float) -> Iterator[None]:
        """
        Wait for the runner in the block; warn after `seconds` that `what` hangs, if it runs in this process.

        This process cannot end a step of its own.

        The first hang and the first death of a worker do not count: they may last longer than the whole budget.
        """
        before = self.budget.spent()
        warning = _HANGS, what, format_seconds(seconds)
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), _log.warning, warning)
        timer.daemon = True
        if not isinstance(self.runner, HasStepLimit):
            timer.start()
        try:
            yield
        except (TimedOut, WorkerDied) as error:
            if type(error) not in self._forgiven:
                self.budget.forgive(self.budget.spent() - before)
            self._forgiven.add(type(error))
            raise
        finally:
            timer.cancel()


def _agree(steps: Sequence[Reading]) -> bool:
    return len(steps) > 1 and steps[-1].seconds >= steps[-2].seconds * (1 - AGREE)


def _is_settled(history: Sequence[tuple[float, float]], window: float) -> bool:
    """Return whether the medians of the last two windows of `window` seconds differ by at most 1 %."""
    end = history[-1][0]
    recent = [seconds for when, seconds in history if when > end - window]
    before = [seconds for when, seconds in history if end - 2 * window < when <= end - window]
    return bool(before) and abs(median(recent) - median(before)) <= SETTLED * median(before)
