"""The budget of a run in seconds, and the expected seconds of a trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs

MAX_REPEATS = 10_000
WARMUPS = 2  # steps before the first timing of a trial, if they agree
FEWEST_TIMINGS, MOST_TIMINGS = 3, 9
LEAST_TIMINGS = 2  # of a size that may be recommended
EXPENSIVE_SHARE, EXPENSIVE_SECONDS = 0.007, 0.2
"""Share of the seconds left, and seconds, above which a timing is expensive: LEAST_TIMINGS are taken."""


FREE_COMPILE_SECONDS, FREE_COMPILE_SHARE = 10.0, 0.5
"""Seconds of compiling that do not count: this many, or this share of the budget, and the first compilation, without
which there is no result.  The rest counts, so that a run whose steps are compiled for each size ends in time."""


class OutOfBudget(Exception):
    """Raised if the seconds left do not suffice for the next step."""


@attrs.define
class Budget:
    """
    The seconds that a run may spend on measuring, and those that it has spent.

    Args:
        seconds: Allowed seconds, over all resumed runs.
        spent_before: Seconds that earlier runs took.
    """

    seconds: float
    spent_before: float = 0.0
    _now: Callable[[], float] | None = attrs.field(default=None, init=False)  # the clock; None before `start`
    _started: float = attrs.field(default=0.0, init=False)
    _compiled: float = attrs.field(default=0.0, init=False)

    def start(self, now: Callable[[], float]) -> None:
        """Start counting by `now`, which returns the seconds of a monotonic clock."""
        self._now, self._started = now, now()

    def forgive(self, seconds: float) -> None:
        """Do not count this number of seconds, which have just passed."""
        self._started += seconds

    def forgive_compiling(self, seconds: float) -> float:
        """
        Do not count seconds of compiling, and return those not counted.

        The first compilation does not count at all.  Later ones do not count until all together, the first included,
        took 10 s, or half of the budget if that is more.
        """
        most = max(FREE_COMPILE_SECONDS, FREE_COMPILE_SHARE * self.seconds)
        free = min(seconds, max(0.0, most - self._compiled)) if self._compiled else seconds
        self._compiled += free
        self.forgive(free)
        return free

    def spent(self) -> float:
        """Return the seconds spent, including those of earlier runs."""
        return self.spent_before + (self._now() - self._started if self._now else 0.0)

    def left(self) -> float:
        """Return the seconds left, at least 0."""
        return max(0.0, self.seconds - self.spent())

    def check(self, seconds: float = 0.0) -> None:
        """Raise OutOfBudget if the budget has no seconds left, or fewer than `seconds`."""
        left = self.left()
        if left <= 0 or seconds > left:
            raise OutOfBudget


def repeats_for(step_seconds: float, span_seconds: float) -> int:
    """
    Return the number of back-to-back steps of a timing that spans `span_seconds`: 1 to MAX_REPEATS.

    Example:
        >>> repeats_for(0.003, 0.01), repeats_for(5.0, 0.01)
        (4, 1)
    """
    return min(MAX_REPEATS, max(1, math.ceil(span_seconds / step_seconds)))


def timing_seconds(step_seconds: float, span_seconds: float, around_seconds: float) -> float:
    """
    Return the expected seconds of a timing, with the steps around it that are not timed.

    Next to a reference step, which takes `around_seconds` (0 without one), a block of several steps has one more.

    Example:
        >>> timing_seconds(0.25, 1.0, 0.0), timing_seconds(0.25, 1.0, 0.5), timing_seconds(2.0, 1.0, 0.5)
        (1.0, 1.75, 2.5)
    """
    repeats = repeats_for(step_seconds, span_seconds)
    return (repeats + (repeats > 1 and around_seconds > 0)) * step_seconds + around_seconds


def cheap_seconds(left: float) -> float:
    """Return the seconds above which a timing is expensive; `left` is the seconds left of the budget."""
    return min(EXPENSIVE_SHARE * left, EXPENSIVE_SECONDS)


def timings_for(
    step_seconds: float, span_seconds: float, *, overhead_seconds: float, left: float, around_seconds: float = 0.0
) -> int:
    """
    Return the number of timings that a trial takes.

    The timings last about as long as the start of the trial.  Their number is between FEWEST_TIMINGS and MOST_TIMINGS.
    A timing that takes more than `cheap_seconds` is taken LEAST_TIMINGS times.

    Args:
        step_seconds: Seconds of a step.
        span_seconds: Seconds that a timing spans at least.
        overhead_seconds: Seconds from the start of the trial to its first timing.
        left: Seconds of the budget that are left.
        around_seconds: Seconds of the reference steps before and after a timing; 0 without any.

    Example:
        >>> timings_for(0.002, 0.01, overhead_seconds=0.08, left=60.0)
        8
        >>> timings_for(4.0, 0.01, overhead_seconds=8.1, left=30.0)
        2
    """
    if repeats_for(step_seconds, span_seconds) * step_seconds > cheap_seconds(left):
        return LEAST_TIMINGS
    seconds = timing_seconds(step_seconds, span_seconds, around_seconds)
    return min(MOST_TIMINGS, max(FEWEST_TIMINGS, int(overhead_seconds / seconds)))


def trial_seconds(
    step_seconds: float, span_seconds: float, *, prepare_seconds: float, left: float, around_seconds: float = 0.0
) -> float:
    """
    Return the expected seconds of a trial: preparing, warm-up steps, timings.

    `prepare_seconds` are the seconds of preparing the batch size; the other arguments are those of `timings_for`.
    """
    overhead = prepare_seconds + WARMUPS * (step_seconds + around_seconds)
    count = timings_for(step_seconds, span_seconds, overhead_seconds=overhead, left=left, around_seconds=around_seconds)
    count -= repeats_for(step_seconds, span_seconds) == 1  # the last warm-up step is a timing
    return overhead + count * timing_seconds(step_seconds, span_seconds, around_seconds)


def guess_prepare(batch_size: int, known: Mapping[int, float]) -> float:
    """
    Return the expected seconds of preparing a size, by those of other sizes; 0 if no other size is known.

    Each known size is a guess: preparing a larger batch takes proportionally longer, a smaller one as long.  The least
    guess is returned, since compiling and first use of memory made some sizes slower.

    Example:
        >>> guess_prepare(400, {100: 5.0, 200: 1.0}), guess_prepare(100, {200: 1.0}), guess_prepare(8, {})
        (2.0, 1.0, 0.0)
    """
    return min((seconds * max(1.0, batch_size / n) for n, seconds in known.items()), default=0.0)
