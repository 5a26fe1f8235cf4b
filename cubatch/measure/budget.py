"""
The budget of a run: what is spent, and what a visit to a size would take.

Everything here is arithmetic on seconds, apart from the clock that the budget is told by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs

MAX_REPEATS = 10_000
WARMUPS = 2  # steps before the first reading of a visit, where they agree
FEWEST_READINGS, MOST_READINGS = 3, 9
DEAR_SHARE, DEAR_SECONDS = 0.007, 0.2  # of what is left, or in all: what takes more is read twice, if twice that once


class OutOfBudget(Exception):
    """The budget does not hold what was about to begin."""


@attrs.define
class Budget:
    """
    The seconds that measuring may take, and those that are left.

    Args:
        seconds: The whole of it, resumes included.
        spent_before: What earlier runs took.
    """

    seconds: float
    spent_before: float = 0.0
    _now: Callable[[], float] | None = attrs.field(default=None, init=False)
    _started: float = attrs.field(default=0.0, init=False)

    def start(self, now: Callable[[], float]) -> None:
        """Begin to count, by this clock."""
        self._now, self._started = now, now()

    def forgive(self, seconds: float) -> None:
        """Do not count seconds that have just passed."""
        self._started += seconds

    def spent(self) -> float:
        """Return the seconds that are gone, those of earlier runs included."""
        return self.spent_before + (self._now() - self._started if self._now else 0.0)

    def left(self) -> float:
        """Return the seconds that are left, never less than zero."""
        return max(0.0, self.seconds - self.spent())

    def check(self, seconds: float = 0.0) -> None:
        """
        Make sure that so many seconds are left.

        Raises:
            OutOfBudget: If they are not, or nothing is.
        """
        left = self.left()
        if left <= 0 or seconds > left:
            raise OutOfBudget


def repeats_for(step_seconds: float, span_seconds: float) -> int:
    """
    Return how many back-to-back steps a timing takes to span so many seconds.

    Example:
        >>> repeats_for(0.003, 0.01), repeats_for(5.0, 0.01)
        (4, 1)
    """
    return min(MAX_REPEATS, max(1, math.ceil(span_seconds / step_seconds)))


def readings_for(
    step_seconds: float, span_seconds: float, *, overhead_seconds: float, left: float, around_seconds: float = 0.0
) -> int:
    """
    Return how many timings a trial takes: as long as its start took, at least FEWEST_READINGS, at most MOST_READINGS.

    Of expensive steps it takes two or one.

    Args:
        step_seconds: Seconds of a step.
        span_seconds: Seconds that a timing spans at least.
        overhead_seconds: Seconds from the start of the trial to its first timing.
        left: Seconds of the budget that are left.
        around_seconds: Seconds of the reference blocks of a timing.

    Example:
        >>> readings_for(0.002, 0.01, overhead_seconds=0.08, left=60.0)
        8
        >>> readings_for(4.0, 0.01, overhead_seconds=8.1, left=30.0)
        1
    """
    reading = repeats_for(step_seconds, span_seconds) * step_seconds
    dear = min(DEAR_SHARE * left, DEAR_SECONDS)
    if reading > dear:
        return 2 if reading <= 2 * dear else 1
    return min(MOST_READINGS, max(FEWEST_READINGS, int(overhead_seconds / (reading + around_seconds))))


def trial_seconds(
    step_seconds: float, span_seconds: float, *, prepare_seconds: float, left: float, around_seconds: float = 0.0
) -> float:
    """Return the expected seconds of a trial: preparing, the steps before the first timing, the timings."""
    overhead = prepare_seconds + WARMUPS * (step_seconds + around_seconds)
    readings = readings_for(
        step_seconds, span_seconds, overhead_seconds=overhead, left=left, around_seconds=around_seconds
    )
    repeats = repeats_for(step_seconds, span_seconds)
    own = readings - 1 if repeats == 1 else readings  # the last step before the timings is one of them
    return overhead + own * (repeats * step_seconds + around_seconds)


def guess_prepare(batch_size: int, known: Mapping[int, float]) -> float:
    """
    Guess the seconds that preparing a size takes, from others: the cheapest that they say.

    A size that something was compiled for, or that met cold pages, was dear. Preparing a larger batch takes no
    more than in proportion, and no less than a smaller one.

    Example:
        >>> guess_prepare(400, {100: 5.0, 200: 1.0}), guess_prepare(100, {200: 1.0}), guess_prepare(8, {})
        (2.0, 1.0, 0.0)
    """
    return min((seconds * max(1.0, batch_size / n) for n, seconds in known.items()), default=0.0)
