"""
The budget of a run: what is spent, what a size would take before it was ever run, and whether that fits.

Everything here is arithmetic on seconds, apart from the clock that the budget is told by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import attrs

from cubatch.stopping import MIN_ROUNDS
from cubatch.units import format_seconds

# The first step of a size meets compilers, allocators and cold pages; the second one says how long a step is.
FIRST_WARMUPS, LATER_WARMUPS = 2, 1
MAX_REPEATS = 10_000


class OutOfBudget(Exception):
    """The budget does not hold what was about to begin."""


@attrs.define
class Budget:
    """
    Seconds of measuring, and what is left of them.

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

    def spent(self) -> float:
        """Give the seconds that are gone, those of earlier runs included."""
        return self.spent_before + (self._now() - self._started if self._now else 0.0)

    def left(self) -> float:
        """Give the seconds that are left, never less than zero."""
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
    Give how many back-to-back steps a timing takes to span so many seconds.

    Example:
        >>> repeats_for(0.003, 0.01), repeats_for(5.0, 0.01)
        (4, 1)
    """
    return min(MAX_REPEATS, max(1, math.ceil(span_seconds / step_seconds)))


def rounds_seconds(step_seconds: float, span_seconds: float, rounds: int, *, is_first: bool) -> float:
    """
    Guess what so many rounds of a size take: discarded steps and timings, without preparing.

    Args:
        step_seconds: Seconds of one step.
        span_seconds: What a timing must span at least.
        rounds: How many rounds.
        is_first: Whether the first of them is the first of the process, with more discarded steps.
    """
    warmups = rounds * LATER_WARMUPS + (FIRST_WARMUPS - LATER_WARMUPS) * is_first
    return warmups * step_seconds + rounds * repeats_for(step_seconds, span_seconds) * step_seconds


def extrapolate_seconds(batch_size: int, known: Mapping[int, float]) -> float | None:
    """
    Guess the seconds of a step from those of smaller sizes, before it was ever run.

    A line through the nearest smaller size and one of at most half of that; never less than the
    nearest took, never more than in proportion to it.

    Returns:
        Seconds, or None where no smaller size is known.

    Example:
        >>> extrapolate_seconds(400, {100: 2.0, 200: 3.0}), extrapolate_seconds(400, {200: 3.0})
        (5.0, 6.0)
    """
    smaller = [n for n in known if n < batch_size]
    if not smaller:
        return None
    nearest = max(smaller)
    proportional = known[nearest] * batch_size / nearest
    halves = [n for n in smaller if 2 * n <= nearest]
    if not halves:
        return proportional
    before = max(halves)
    slope = (known[nearest] - known[before]) / (nearest - before)
    return min(max(known[nearest] + slope * (batch_size - nearest), known[nearest]), proportional)


def guess_prepare(batch_size: int, known: Mapping[int, float]) -> float:
    """
    Guess the seconds that preparing a size takes: along the line of smaller ones, or less by proportion to any.

    A size that something was compiled for, or that met cold pages, is dear: the cheapest guess counts,
    and a single size says nothing.

    Example:
        >>> guess_prepare(400, {100: 5.0, 200: 1.0}), guess_prepare(400, {100: 5.0})
        (1.0, 0.0)
    """
    if len(known) <= 1:
        return 0.0
    in_proportion = min(seconds * max(1.0, batch_size / n) for n, seconds in known.items())
    line = None if batch_size in known else extrapolate_seconds(batch_size, known)
    return in_proportion if line is None else min(in_proportion, line)


def why_not_first(
    batch_size: int,
    known: Mapping[int, float],
    *,
    left: float,
    unfinished: Mapping[int, int],
    waiting: Collection[int],
    prepare_seconds: Mapping[int, float],
    span_seconds: float,
) -> str | None:
    """
    Say why the budget does not hold a size that has not run yet; None if it does.

    The minimum number of rounds must fit what is left, less what the sizes that have begun still
    need for theirs, divided by the sizes that wait for their first.  The largest of those take no
    share while they would not fit into theirs: a size that cannot run must not keep others from it.

    Args:
        batch_size: The size.
        known: Seconds of a step of every size that has run.
        left: Seconds left of the budget.
        unfinished: Rounds done, of the sizes that have begun and are still measured.
        waiting: Sizes that wait for their first round, this one included.
        prepare_seconds: What preparing took the last time, by size.
        span_seconds: What a timing must span at least.
    """
    step = extrapolate_seconds(batch_size, known)
    if step is None:
        return None

    def needed(size: int) -> float:
        guess = extrapolate_seconds(size, known) or step
        prepare = guess_prepare(size, prepare_seconds)
        return MIN_ROUNDS * prepare + rounds_seconds(guess, span_seconds, MIN_ROUNDS, is_first=True)

    owed = {n: MIN_ROUNDS - done for n, done in unfinished.items() if done < MIN_ROUNDS}
    promised = sum(
        rounds * guess_prepare(n, prepare_seconds) + rounds_seconds(known[n], span_seconds, rounds, is_first=False)
        for n, rounds in owed.items()
    )
    free = max(0.0, left - promised)
    needs = sorted(map(needed, waiting))
    sharing = next((count for count in range(len(needs), 0, -1) if needs[count - 1] <= free / count), 0)
    need, share = needed(batch_size), free / (sharing + 1)  # a size more would have this
    if sharing and need <= needs[sharing - 1]:
        return None
    promised = min(promised, left)
    return (
        f"{MIN_ROUNDS} rounds with steps of about {format_seconds(step)} would take {format_seconds(need)}, "
        f"its share of the budget is {format_seconds(share)} ({format_seconds(left)} left, "
        f"{format_seconds(promised)} of them promised, {sharing} of {len(needs)} waiting sizes share the rest)"
    )
