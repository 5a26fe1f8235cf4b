"""
Which timings of a run count.

What is compared is what sizes do undisturbed, on a host that is the same for all of them.  A virtual machine may have
states of some seconds each, in which steps take a sixth to a half longer, those of small batches most; a small
operation that is timed before and after each reading takes half as long again there, and tells.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import attrs

from cubatch.measure.goal import Goal
from cubatch.measure.records import PER_VISIT, Timing

UNSETTLED = 0.5
"""First timings of a visit that take so much longer than all after them came before the size had settled."""

FEWEST_SETTLED = 2  # one that is faster than all before it proves nothing

DISTURBED = 0.1
"""A visit whose median is so much above that of the best visit to its size was disturbed."""

SLOW = 1.25
"""Times the shortest reference of a run: where it takes longer the host is in its slow state."""

HELD_UP = 10.0
"""
Times the shortest reference of a run: where it takes longer another process had a CPU that a thread waited for.  The
slow state of a host takes a half longer, and a lowered clock a few times as long; beside a busy process it took 6 us or
7.6 ms, on two CPUs.
"""

CONTENDS = 0.06
"""A size that is behind the best by no more, in a state of the host in which both were read, may be the best."""

_STATES = (True, False)  # quick, slow


@attrs.frozen
class HostState:
    """
    The state of the host in which sizes are compared.

    Attributes:
        between_seconds: The reference takes less in the quick state, and more in the slow one.
        most_seconds: Where it takes longer a timing was held up, and is of neither.
        is_quick: Whether it is the quick one.
        times: What a step takes in it, in steps of the other state: the median of sizes read in both; 1 without any.
        contenders: Sizes that may be the best by what was read of them in either, within the latency limit.
    """

    between_seconds: float
    most_seconds: float
    is_quick: bool
    times: float
    contenders: frozenset[int]

    def holds(self, timing: Timing) -> bool:
        """Whether a timing was taken in this state; one that does not tell counts as one that was."""
        is_same = self.was_quick(timing) == self.is_quick and not self.was_held_up(timing)
        return timing.reference_seconds is None or is_same

    def was_quick(self, timing: Timing) -> bool:
        """Whether the host was quick when a timing was taken."""
        return (timing.reference_seconds or 0.0) <= self.between_seconds

    def was_held_up(self, timing: Timing) -> bool:
        """Whether another process had a CPU of this one's when a timing was taken."""
        return (timing.reference_seconds or 0.0) > self.most_seconds


def host_state(timings: Iterable[Timing], goal: Goal) -> HostState | None:
    """
    Say in which state of the host the sizes of a run are compared: that in which most that may be the best were read.

    Of equals it is the one in which more timings were taken.  Timings that were held up by another process are of none.

    Returns:
        HostState | None: None where timings do not tell of states, or all met the same and none was held up.

    Example:
        >>> told = ((4, 0, 5e-6), (4, 16, 9e-6), (8, 0, 8e-6))
        >>> read = [Timing(batch_size=n, round=r, seconds=n, reference_seconds=met) for n, r, met in told]
        >>> host_state(read, Goal()).is_quick, host_state(read[:1], Goal())
        (False, None)
    """
    told = [(t, t.reference_seconds) for t in timings if t.reference_seconds is not None and not t.throttled]
    shortest = min((reference for _, reference in told), default=0.0)
    between, most = SLOW * shortest, HELD_UP * shortest
    if all(reference <= between for _, reference in told):
        return None
    clear = [(timing, reference) for timing, reference in told if reference <= most]
    met = {quick: [timing for timing, reference in clear if (reference <= between) == quick] for quick in _STATES}
    costs = {quick: _costs(those, goal) for quick, those in met.items()}
    contenders = frozenset(
        n for of in costs.values() for n, cost in of.items() if cost <= (1 + CONTENDS) * min(of.values())
    )
    is_quick = min(_STATES, key=lambda quick: (len(contenders - costs[quick].keys()), -len(met[quick])))
    own, other = costs[is_quick], costs[not is_quick]
    both = [own[n] / other[n] for n in own.keys() & other.keys()]
    return HostState(between, most, is_quick, statistics.median(both) if both else 1.0, contenders)


def _costs(timings: Iterable[Timing], goal: Goal) -> dict[int, float]:
    """Give the median cost of each size that keeps the latency limit and of which it was read."""
    read: dict[int, list[Timing]] = {}
    for timing in timings:
        read.setdefault(timing.batch_size, []).append(timing)
    found = {}
    for n, taken in read.items():
        those = counting(taken)
        costs = [c for t in those if (c := goal.cost(n, seconds=t.seconds, joules=t.joules)) is not None]
        if costs and statistics.median(t.seconds for t in those) <= (goal.latency_limit or math.inf):
            found[n] = statistics.median(costs)
    return found


def comparable(timings: Sequence[Timing], state: HostState | None = None) -> list[Timing]:
    """
    Give the timings of one size that were taken at a full clock and in a state of the host, as far as there are.

    Where there are none those of the other state come before what another process held up.
    """
    clear = [timing for timing in timings if not timing.throttled] or list(timings)
    if state is None:
        return clear
    free = [timing for timing in clear if not state.was_held_up(timing)] or clear
    return [timing for timing in free if state.holds(timing)] or free


def is_held_up(timings: Sequence[Timing], state: HostState | None) -> bool:
    """Whether another process held up all timings of a size, so that they say little of it."""
    return state is not None and bool(timings) and all(map(state.was_held_up, timings))


def is_comparable(timings: Sequence[Timing], state: HostState | None) -> bool:
    """Whether a size can be compared by its timings: those that count were taken in the state of the host for that."""
    return state is None or all(map(state.holds, comparable(timings, state)))


def counting(
    timings: Sequence[Timing], *, state: HostState | None = None, every_visit: bool = False
) -> tuple[Timing, ...]:
    """
    Give the timings of one size that count: those of a full clock and of visits that nothing disturbed.

    Throttled ones, and those of another state of the host, count where there are no others.  A visit that took clearly
    longer than another one to the same size met another process, a cold cache or a compiler, and so did the first
    timings of a visit that took far longer than all after them, two at least.  Where a reference tells of others, a
    visit that took longer in the same state of the host is what the size does at times, and counts: as the C library
    keeps what a step has freed, or fetches it anew.

    Args:
        timings: Of one size.
        state: Of the host, in which sizes are compared; None where it has but one.
        every_visit: Whether disturbed visits count too: where each size has equally many, medians over visits suffer
            less from them than from a choice that leaves few.

    Example:
        >>> seconds = [0.7, 0.7, 0.024, 0.025]
        >>> read = [Timing(batch_size=1, round=r, seconds=s) for r, s in zip((0, 1, 16, 17), seconds)]
        >>> [timing.seconds for timing in counting(read)]
        [0.024, 0.025]
    """
    clear = comparable(timings, state)
    settled = {visit: _settled(those) for visit, those in by_visit(clear).items()}
    medians = {visit: statistics.median(timing.seconds for timing in those) for visit, those in settled.items()}
    is_told = any(timing.reference_seconds is not None for timing in clear)
    most = math.inf if every_visit or is_told else min(medians.values(), default=0.0) * (1 + DISTURBED)
    used = {id(timing) for visit, those in settled.items() if medians[visit] <= most for timing in those}
    return tuple(timing for timing in clear if id(timing) in used)


def by_visit(timings: Iterable[Timing]) -> dict[int, list[Timing]]:
    """Group the timings of one size by its visits, which are numbered from 0."""
    visits: dict[int, list[Timing]] = {}
    for timing in timings:
        visits.setdefault(timing.round // PER_VISIT, []).append(timing)
    return visits


def _settled(visit: Sequence[Timing]) -> Sequence[Timing]:
    """Leave out the first timings of a visit, where all of them took far longer than any that came after."""
    ordered = sorted(visit, key=lambda timing: timing.round)
    longest = 0.0  # of those that come after
    for place in range(len(ordered) - 1, 0, -1):
        longest = max(longest, ordered[place].seconds)
        if len(ordered) - place < FEWEST_SETTLED:
            continue
        if min(timing.seconds for timing in ordered[:place]) > longest * (1 + UNSETTLED):
            return ordered[place:]
    return ordered
