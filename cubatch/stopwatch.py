"""
One visit to one batch size: prepare, discard the first steps, take one timing.

Clocks are warmed before the first timing of a process.  A timing taken under a clearly lowered
clock is flagged, and the device is given a rest before the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from cubatch.budget import FIRST_WARMUPS, LATER_WARMUPS, Budget, repeats_for
from cubatch.errors import DeviceFailed, TimedOut
from cubatch.results import Timing
from cubatch.runner import Reading, Runner
from cubatch.stopping import median

# A timing spans at least this: a thousand times what starting a kernel, waking a thread or one tick of
# the clock takes, and short beside a round.
MIN_SPAN_SECONDS = 0.01
# Energy counters of GPUs move every 20 to 100 ms, so a timing must hold several of their ticks.
MIN_ENERGY_SPAN_SECONDS = 0.5
# Clocks rise within some 0.1 s of work and settle within 3 s (triton#2306; CUTLASS, measurement guidelines).
WARM_SECONDS, MAX_WARM_SECONDS, MAX_WARM_SHARE = 0.5, 3.0, 0.05
SETTLED = 0.01  # a quarter of a second changes the readings by less than this share
THROTTLED_CLOCK = 0.75  # of the highest clock seen, as in NVBench
FIRST_REST_SECONDS, MAX_REST_SECONDS, MAX_REST_SHARE = 0.05, 1.6, 0.1
# A step hangs if it takes this many times what it should, and not less than the floor: a first step may compile.
HANG_FACTOR, HANG_SECONDS = 20.0, 30.0


@runtime_checkable
class HasStepLimit(Protocol):
    """A runner that gives up on a reading that takes too long: TimedOut, and the next `prepare` works again."""

    step_seconds: float | None  # how long one clock reading may take; set before each


class Stopwatch:
    """
    Takes timings of a runner.

    Args:
        runner: What is timed.
        budget: Checked before every step.
        span_seconds: What a timing must span at least.
        clocks_mhz: SM clocks read in earlier runs.
    """

    def __init__(
        self, runner: Runner, budget: Budget, *, span_seconds: float, clocks_mhz: Iterable[float] = ()
    ) -> None:
        self.runner, self.budget, self.span_seconds = runner, budget, span_seconds
        self.prepare_seconds: dict[int, float] = {}
        self._prepared: int | None = None
        self._visited: set[int] = set()
        self._is_warm = False
        self._rests, self._rested = 0, 0.0
        self._highest_clock = max(clocks_mhz, default=0.0)

    def time(self, batch_size: int, *, round_number: int, step_seconds: float | None, likely: float | None) -> Timing:
        """
        Visit a size and take one timing.

        Args:
            batch_size: The size.
            round_number: Written into the timing.
            step_seconds: Seconds of a step by earlier timings; None for a size without any.
            likely: The same, extrapolated or predicted, to tell a hang from a long step; None where nothing is known.

        Raises:
            OutOfBudget: If the budget does not hold the next step.
            TimedOut: If a step took so long that it counts as hung.
            Exception: Whatever the runner raises.
        """
        self._prepare(batch_size)
        expected = step_seconds or likely
        if not self._is_warm:
            self._warm_clocks(expected)
        for _ in range(LATER_WARMUPS if self.has_visited(batch_size) else FIRST_WARMUPS):
            self.budget.check()
            expected = self._read(1, expected).seconds
        self._visited.add(batch_size)
        step = step_seconds or expected or self.span_seconds
        repeats = repeats_for(step, self.span_seconds)
        self.budget.check(repeats * step)
        reading = self._read(repeats, step)
        clock = reading.sm_clock_mhz
        return Timing(
            batch_size=batch_size,
            round=round_number,
            seconds=reading.seconds,
            repeats=repeats,
            throttled=reading.throttled or (clock is not None and clock < THROTTLED_CLOCK * self._highest_clock),
            sm_clock_mhz=clock,
            joules=reading.joules,
            peak_bytes=self.runner.peak_bytes,
            peak_device_bytes=self.runner.peak_device_bytes,
        )

    def has_visited(self, batch_size: int) -> bool:
        """Whether the size ran before in this process, so that fewer steps are discarded."""
        return batch_size in self._visited

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
        self._visited.clear()

    def _prepare(self, batch_size: int) -> None:
        if self._prepared == batch_size:
            return
        self._prepared = None
        self.budget.check()
        before = self.runner.clock.now()
        self.runner.prepare(batch_size)
        self.prepare_seconds[batch_size] = self.runner.clock.now() - before
        self._prepared = batch_size

    def _warm_clocks(self, expected: float | None) -> None:
        """Work until the clocks have risen and the readings no longer trend; nothing of it is kept."""
        self._read(1, None)  # may compile or load: says nothing of the clocks, and only the budget bounds it
        began, most = self.runner.clock.now(), min(MAX_WARM_SECONDS, MAX_WARM_SHARE * self.budget.left())
        history: list[tuple[float, float]] = []
        repeats, worked = 1, 0.0
        while worked < most:
            self.budget.check()
            seconds = self._read(repeats, expected).seconds
            worked = max(worked + repeats * seconds, self.runner.clock.now() - began)
            history.append((worked, seconds))
            if worked >= WARM_SECONDS and _is_settled(history, max(WARM_SECONDS / 2, repeats * seconds)):
                break
            repeats = repeats_for(seconds, self.span_seconds)
        self._is_warm = True

    def _read(self, repeats: int, expected: float | None) -> Reading:
        """Read the clock once; what takes far longer than expected counts as hung, also if it came back."""
        limit = max(HANG_SECONDS, self.budget.left() if expected is None else HANG_FACTOR * expected * repeats)
        if isinstance(self.runner, HasStepLimit):
            self.runner.step_seconds = limit
        reading = self.runner.clock.time(self.runner.step, repeats)
        if not 0 < reading.seconds < math.inf:
            raise DeviceFailed("the stopwatch", f"a reading of {reading.seconds!r} s for {repeats} steps")
        if reading.seconds * repeats > limit:
            raise TimedOut(f"batch size {self._prepared}", limit)
        self._highest_clock = max(self._highest_clock, reading.sm_clock_mhz or 0.0)
        return reading


def _is_settled(history: Sequence[tuple[float, float]], window: float) -> bool:
    """Say whether the median reading of the last `window` seconds is that of the `window` before."""
    end = history[-1][0]
    recent = [seconds for when, seconds in history if when > end - window]
    before = [seconds for when, seconds in history if end - 2 * window < when <= end - window]
    return bool(before) and abs(median(recent) - median(before)) <= SETTLED * median(before)
