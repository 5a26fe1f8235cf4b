"""
Several ways to do the same thing, timed in turns until it is known which is fastest.

Every round times each of them once, in a new random order, so that a sinking clock meets all alike.  What is
clearly slower than the fastest of its side is dropped; the rules are those that batch sizes are measured by.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import attrs

from cubatch.bench.guard import Guarded
from cubatch.measure.budget import repeats_for
from cubatch.measure.goal import Goal
from cubatch.measure.records import Timing
from cubatch.measure.runner import Clock
from cubatch.measure.stopping import MAX_ROUNDS, StopRule, is_clearly_worse, median, median_interval
from cubatch.measure.stopwatch import WARM_SECONDS
from cubatch.measure.throttling import HighestClocks

SPAN_SECONDS = 0.002
"""A timing spans at least this: hundreds of times what two events around nothing are apart."""

TARGET_WIDTH = 0.01
_GOAL = Goal(objective="latency", tolerance=TARGET_WIDTH)


@attrs.define
class Entrant:
    """
    A way to do it.

    Attributes:
        name: Unique in its contest.
        side: Entrants of one side are dropped when another of it is clearly faster.
        step: Does it once, or enqueues it.
        timings: Taken so far, at most one each round.
        status: "ok", "dropped" for what was clearly slower, or "error" for what failed: its steps are empty since.
        reason: Why measuring it ended.
    """

    name: str
    side: str
    step: Callable[[], None]
    timings: list[Timing] = attrs.field(factory=list, init=False)
    status: str = attrs.field(default="ok", init=False)
    reason: str = attrs.field(default="", init=False)
    rule: StopRule = attrs.field(factory=lambda: StopRule(TARGET_WIDTH), init=False)
    repeats: int = attrs.field(default=1, init=False)

    @property
    def used(self) -> Sequence[Timing]:
        """The timings that count: those of an unthrottled clock, or all where there are none."""
        return [timing for timing in self.timings if not timing.throttled] or self.timings

    @property
    def seconds(self) -> float | None:
        """The median, None before the first timing."""
        return median([timing.seconds for timing in self.used]) if self.timings else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the median lies with 90 %; None with under five timings."""
        return median_interval([timing.seconds for timing in self.used])


@attrs.define
class Contest:
    """
    Times entrants in turns.

    Args:
        clock: Takes the timings.
        span_seconds: What a timing spans at least.
        seed: Of the order within rounds.
    """

    clock: Clock
    span_seconds: float = SPAN_SECONDS
    seed: int = 0
    _clocks: HighestClocks = attrs.field(factory=HighestClocks, init=False)
    _contests: int = attrs.field(default=0, init=False)
    _is_warm: bool = attrs.field(default=False, init=False)

    def run(self, entrants: Sequence[Entrant], seconds: float) -> None:
        """
        Time until every median is known to 1 %, or the seconds are over; each that runs gets one timing at least.

        Args:
            entrants: Their timings, status and reason are filled in.
            seconds: How long, discarded first steps included.
        """
        begun, order = self.clock.now(), random.Random(self.seed)  # noqa: S311 - an order, not a secret
        self._contests += 1
        for entrant in entrants:
            self.clock.time(entrant.step, 1)  # may compile, load, or choose an algorithm
            entrant.repeats = repeats_for(max(self.clock.time(entrant.step, 1).seconds, 1e-9), self.span_seconds)
        if entrants:
            self._warm(entrants[0])
        running = list(entrants)
        for number in range(MAX_ROUNDS):
            if not running or (number and self.clock.now() - begun > seconds):
                break
            order.shuffle(running)
            for entrant in running:
                self._time(entrant, number)
            running = [entrant for entrant in running if self._goes_on(entrant, entrants)]
        for entrant in entrants:
            entrant.reason = entrant.reason or entrant.rule.reason

    def _warm(self, entrant: Entrant) -> None:
        """Work until the clocks have risen; once for all that is measured in this process."""
        begun, repeats = self.clock.now(), entrant.repeats
        while not self._is_warm:
            reading = self.clock.time(entrant.step, repeats)
            repeats = min(2 * repeats, repeats_for(reading.seconds, WARM_SECONDS / 4))
            self._is_warm = self.clock.now() - begun >= WARM_SECONDS

    def _time(self, entrant: Entrant, number: int) -> None:
        reading = self.clock.time(entrant.step, entrant.repeats)
        if isinstance(entrant.step, Guarded) and entrant.step.failure:
            entrant.status, entrant.reason = "error", entrant.step.failure
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
        entrant.rule.add(reading.seconds, throttled=throttled)

    def _goes_on(self, entrant: Entrant, entrants: Sequence[Entrant]) -> bool:
        if entrant.status == "error":
            return False
        rivals = [other for other in entrants if other.side == entrant.side and other is not entrant]
        for other in rivals:
            if other.status != "error" and is_clearly_worse(entrant.rule, other.rule, _GOAL):
                entrant.status, entrant.reason = "dropped", f"clearly slower than {other.name}"
                return False
        # While a pair is compared both go on, or there would be no rounds in common.
        return not all(other.rule.is_finished() for other in entrants if other.status == "ok")
