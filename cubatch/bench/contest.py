"""
Several ways to do the same work, timed in turns until the fastest is known.

Each round times every entrant once in a new random order, so that a falling clock affects all alike.  An entrant that
is clearly slower than another of its side is dropped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import attrs

from cubatch.measure.budget import repeats_for
from cubatch.measure.records import Timing
from cubatch.measure.runner import Clock, Reading
from cubatch.measure.stopping import MIN_ROUNDS, median, median_interval
from cubatch.measure.stopwatch import WARM_SECONDS
from cubatch.measure.throttling import HighestClocks
from cubatch.units import format_percent

OURS = "ours"
"""Side of the cubatch kernels."""

SPAN_SECONDS = 0.002
"""A timing spans at least this: hundreds of times the distance of two events without work between them."""

TARGET_WIDTH = 0.01  # of the interval of a median, as a share of it
MAX_ROUNDS = 30  # more rounds do not average out noise that 30 leave
_MIN_ROUNDS_TO_DROP = 3
_CLEARLY = 1.06  # times as slow: the target and 5 %, because three timings are few


@attrs.define
class Entrant:
    """An implementation that a contest times against others."""

    name: str  # unique in its contest
    side: str  # `OURS` or the name of a rival. An entrant is dropped when another of its side is clearly faster
    # runs the implementation once, or enqueues it. If the step of a rival fails, the others are still timed
    step: Callable[[], object]
    timings: list[Timing] = attrs.field(factory=list, init=False)  # at most one per round
    status: str = attrs.field(default="ok", init=False)  # "ok", "dropped" (clearly slower) or "error"
    reason: str = attrs.field(default="", init=False)  # why measuring it ended
    repeats: int = attrs.field(default=1, init=False)

    @property
    def used(self) -> Sequence[Timing]:
        """The timings at an unthrottled clock; all timings if the clock was always throttled."""
        return [timing for timing in self.timings if not timing.throttled] or self.timings

    @property
    def seconds(self) -> float | None:
        """Median of its timings in seconds; `None` before the first timing."""
        return median([timing.seconds for timing in self.used]) if self.timings else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """90 % confidence interval of the median of its timings; `None` for fewer than five timings."""
        return median_interval([timing.seconds for timing in self.used])

    @property
    def width(self) -> float:
        """Width of the confidence interval / median; infinite without an interval."""
        return math.inf if self.interval is None else (self.interval[1] - self.interval[0]) / (self.seconds or math.nan)

    @property
    def is_known(self) -> bool:
        """Whether timing can end: the median's interval is at most 1 % wide, or all of enough timings are throttled."""
        if all(timing.throttled for timing in self.timings):
            return len(self.timings) >= 2 * MIN_ROUNDS
        return self.width <= TARGET_WIDTH

    def is_clearly_slower(self, other: Entrant) -> bool:
        """Return whether its interval lies more than 6 % above that of `other`; False if either has under 3 timings."""
        if min(len(self.used), len(other.used)) < _MIN_ROUNDS_TO_DROP:
            return False
        return self._range[0] > _CLEARLY * other._range[1]

    @property
    def _range(self) -> tuple[float, float]:
        seconds = [timing.seconds for timing in self.used]
        return self.interval or (min(seconds), max(seconds))

    def __str__(self) -> str:
        known = "no interval" if self.interval is None else f"the median is known to {format_percent(self.width)}"
        throttled = sum(timing.throttled for timing in self.timings)
        return f"{known} after {len(self.timings)} timings" + (f", {throttled} of them throttled" if throttled else "")


def time_ratio(rival: Entrant, entrant: Entrant) -> tuple[float | None, tuple[float, float] | None]:
    """
    Return seconds of a rival / seconds of an entrant, with a 90 % confidence interval.

    The interval is that of the median ratio of rounds, which changes between rounds do not affect.  It is the whole
    range for few rounds, and `None` without a common round.  Both are `None` if one of the two was not timed.
    """
    if not rival.seconds or not entrant.seconds:
        return None, None
    theirs, ours = ({timing.round: timing.seconds for timing in each.used} for each in (rival, entrant))
    logs = [math.log(theirs[number] / ours[number]) for number in theirs.keys() & ours.keys()]
    if not logs:
        return rival.seconds / entrant.seconds, None
    low, high = median_interval(logs) or (min(logs), max(logs))
    return rival.seconds / entrant.seconds, (math.exp(low), math.exp(high))


@attrs.define
class Contest:
    """
    Times entrants in turns.

    Args:
        clock: Takes the timings.
        span_seconds: Least seconds of a timing, which spans several steps if they are short.
        seed: Seed of the order within rounds.
        synchronize: Waits for all launches; raises an error if a step broke the context.
    """

    clock: Clock
    span_seconds: float = SPAN_SECONDS
    seed: int = 0
    synchronize: Callable[[], object] = lambda: None
    _clocks: HighestClocks = attrs.field(factory=HighestClocks, init=False)
    _contests: int = attrs.field(default=0, init=False)
    _is_warm: bool = attrs.field(default=False, init=False)

    def run(self, entrants: Sequence[Entrant], seconds: float) -> None:
        """
        Time the entrants in turns until every median is known to 1 %, or the seconds are over.

        Each entrant whose step does not fail gets at least one timing.

        Args:
            entrants: The implementations; their timings, status and reason are set.
            seconds: Time limit in seconds, discarded first steps included; the first round always ends.
        """
        begin, order = self.clock.now(), random.Random(self.seed)  # noqa: S311 - an order, not a secret
        self._contests += 1
        for entrant in entrants:
            self._read(entrant, 1)  # may compile, load, or choose an algorithm
            first = self._read(entrant, 1)
            entrant.repeats = repeats_for(max(first.seconds, 1e-9), self.span_seconds) if first else 1
        running = [entrant for entrant in entrants if entrant.status != "error"]
        if running:
            self._warm(running[0])
        for number in range(MAX_ROUNDS):
            if not running or (number and self.clock.now() - begin > seconds):
                break
            order.shuffle(running)
            for entrant in running:
                self._time(entrant, number)
            running = [entrant for entrant in running if self._continues(entrant, entrants)]
        for entrant in entrants:
            entrant.reason = entrant.reason or str(entrant)

    def _read(self, entrant: Entrant, repeats: int) -> Reading | None:
        """Return a timing over `repeats` steps; None for a rival that fails, whose status becomes "error"."""
        if entrant.status == "error":
            return None
        try:
            return self.clock.time(entrant.step, repeats)
        except (RuntimeError, MemoryError) as error:  # PyTorch and CuPy raise these
            if entrant.side == OURS:
                raise
            entrant.status, entrant.reason = "error", f"{type(error).__name__}: {error}"
        self.synchronize()  # raises if the context is broken
        return None

    def _warm(self, entrant: Entrant) -> None:
        """
        Run an entrant's steps for WARM_SECONDS, in which the clocks of the GPU rise; stop if a step fails.

        Do nothing if an earlier contest of this object has done so.
        """
        begin, repeats = self.clock.now(), entrant.repeats
        while not self._is_warm:
            reading = self._read(entrant, repeats)
            if reading is None:
                return
            repeats = min(2 * repeats, repeats_for(reading.seconds, WARM_SECONDS / 4))
            self._is_warm = self.clock.now() - begin >= WARM_SECONDS

    def _time(self, entrant: Entrant, number: int) -> None:
        reading = self._read(entrant, entrant.repeats)
        if reading is None:
            return
        clock, work = reading.sm_clock_mhz, (self._contests, entrant.name)
        self._clocks.see(work, clock)
        throttled = reading.throttled or self._clocks.is_lowered(work, clock)
        entrant.timings.append(
            Timing(
                batch_size=1, round=number, seconds=reading.seconds, repeats=entrant.repeats, throttled=throttled,
                sm_clock_mhz=clock, event_reasons=reading.event_reasons,
            )
        )  # fmt: skip

    def _continues(self, entrant: Entrant, entrants: Sequence[Entrant]) -> bool:
        if entrant.status == "error":
            return False
        for other in entrants:
            is_rival = other.side == entrant.side and other is not entrant and other.status != "error"
            if is_rival and entrant.is_clearly_slower(other):
                entrant.status, entrant.reason = "dropped", f"clearly slower than {other.name}"
                return False
        # While a pair is compared both go on, or there would be no rounds in common.
        return not all(other.is_known for other in entrants if other.status == "ok")
