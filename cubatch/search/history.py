"""
What was read of each size so far, and how far readings may be trusted.

A visit prepares a size and takes a handful of readings back to back.  They scatter about what that visit
would tell, and visits about what is true: other places in memory, another state of the machine.  Both
spreads are taken from what was read, as medians, so that a few disturbed readings do not count.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs

from cubatch.measure.counting import (
    UNSETTLED,
    HostState,
    by_visit,
    comparable,
    counting,
    is_comparable,
    is_held_up,
)
from cubatch.measure.goal import Goal
from cubatch.measure.records import Timing
from cubatch.measure.stopping import MEDIAN_SD, TO_SD, median
from cubatch.search.belief import Seen

# Before anything was read: what hardware shows, as if it had been seen so many times.
_READING_SD, _READING_SEEN = 0.005, 3
_VISIT_SD, _VISIT_SEEN = 0.005, 4
_HOST_VISIT_SD = 0.02  # the same of PyTorch's on a CPU: where results come to lie in the heap differs by visit
_LEAST_SD = 0.001  # finer than this nothing repeats itself
SUSPECT = 0.1  # a size that takes so much longer than a larger one did was read at a bad time
SUPERLINEAR = 2.0  # first steps that take so much longer a sample than those of a smaller size are doubted
NEVER = 8.0  # times as long a sample as a smaller size: no curve does that, another process did
FIRST_STEPS, FIRST_VISITS = 8, 3  # of a size: slow ones say nothing of those to come


@attrs.define(eq=False)
class Record:
    """
    The readings of one size.

    Attributes:
        batch_size: The size.
        timings: In the order they were taken.
        goal: What its cost is.
        state: Of the host, in which sizes are compared, by the timings of all.
    """

    batch_size: int
    goal: Goal
    timings: list[Timing] = attrs.field(factory=list)
    state: HostState | None = None

    def add(self, timing: Timing) -> None:
        """Take in a reading."""
        self.timings.append(timing)

    @property
    def counting(self) -> tuple[Timing, ...]:
        """The readings that count."""
        return counting(self.timings, state=self.state)

    @property
    def visits(self) -> int:
        """How often it was visited, undisturbed or not."""
        return len(by_visit(self.timings))

    @property
    def is_comparable(self) -> bool:
        """Whether a reading was taken in the state in which sizes are compared."""
        return is_comparable(self.timings, self.state)

    @property
    def times(self) -> float:
        """How many times as long a step should take in the state in which sizes are compared as was read."""
        return 1.0 if self.state is None or self.is_comparable or self.is_held_up else self.state.times

    @property
    def comparable_visits(self) -> int:
        """How many visits were made, undisturbed or not, in the state of the readings that count."""
        return len(by_visit(comparable(self.timings, self.state)))

    @property
    def is_fresh(self) -> bool:
        """Whether all that was read are its first steps, which may load, compile or fill caches."""
        return self.visits <= FIRST_VISITS and sum(timing.repeats for timing in self.timings) <= FIRST_STEPS

    @property
    def is_held_up(self) -> bool:
        """Whether another process held up all that was read."""
        return is_held_up(self.timings, self.state)

    @property
    def is_mute(self) -> bool:
        """Whether visits gave no reading of what the goal compares: energy of a step too short for the counter."""
        return self.visits > 1 and self.cost is None

    @property
    def seconds(self) -> float:
        """Median time of a step."""
        return median([timing.seconds for timing in self.counting])

    @property
    def least_seconds(self) -> float:
        """The shortest time of a step that was read."""
        return min(timing.seconds for timing in self.counting)

    @property
    def least_of_visits(self) -> list[float]:
        """The shortest time of a step that each visit read, disturbed or not."""
        return [min(timing.seconds for timing in those) for those in by_visit(self.timings).values()]

    def step_costs(self) -> dict[int, list[float]]:
        """Give what a step costs, seconds or joules, of each visit; energy that was not read is left out."""
        is_energy, costs = self.goal.objective == "energy", {}
        for visit, those in by_visit(self.counting).items():
            read = [timing.joules if is_energy else timing.seconds for timing in those]
            costs[visit] = [cost for cost in read if cost is not None]
        return {visit: known for visit, known in costs.items() if known}

    @property
    def cost(self) -> float | None:
        """The median of what the goal compares, less is better; None where it was not read."""
        costs = [cost for visit in self.step_costs().values() for cost in visit]
        if not costs:
            return None
        return median(costs) if self.goal.objective == "latency" else median(costs) / self.batch_size


@attrs.frozen
class Noise:
    """
    How far readings scatter, as shares of what is read.

    Attributes:
        reading: Standard deviation of the readings of one visit.
        visit: Of what one visit tells from what is true.
    """

    reading: float
    visit: float

    def variance(self, readings: int, visits: int = 1) -> float:
        """Give the variance of the median of so many readings in so many visits."""
        return (MEDIAN_SD * self.reading) ** 2 / readings + self.visit**2 / visits


def noise_of(records: Collection[Record]) -> Noise:
    """
    Estimate both spreads from all sizes together.

    Visits are thought to differ by more, before any tell, where a reference was timed: on a CPU.

    Example:
        >>> noise_of([])
        Noise(reading=0.005, visit=0.005)
    """
    visit_sd = _HOST_VISIT_SD if has_reference(records) else _VISIT_SD
    within, between = [_READING_SD / TO_SD] * _READING_SEEN, [visit_sd / TO_SD] * _VISIT_SEEN
    several: list[list[list[float]]] = []
    for record in records:
        visits = [[math.log(cost) for cost in visit] for visit in record.step_costs().values()]
        for visit in visits:
            if len(visit) > 1:
                within += _distances(visit)
        if len(visits) > 1:
            several.append(visits)
    reading = max(_LEAST_SD, TO_SD * median(within))
    for visits in several:
        between += _distances([median(visit) for visit in visits])
    explained = (MEDIAN_SD * reading) ** 2 * median([1 / len(v) for visits in several for v in visits] or [0.0])
    return Noise(reading, math.sqrt(max((TO_SD * median(between)) ** 2 - explained, _LEAST_SD**2)))


def has_reference(records: Iterable[Record]) -> bool:
    """Whether a reference was timed with readings, as PyTorch's is on a CPU."""
    return any(timing.reference_seconds is not None for record in records for timing in record.timings)


def _distances(values: Sequence[float]) -> list[float]:
    """Give how far values lie from their median, made up for its having been drawn towards them."""
    middle, share = median(values), math.sqrt(len(values) / (len(values) - 1))
    return [abs(value - middle) * share for value in values]


def seen_of(records: Mapping[int, Record], noise: Noise) -> list[Seen]:
    """
    Say what was read of each size, for `belief`.

    A size that was read at a bad time (`suspect`), as under another process's load, counts as not read until it is
    visited again.  Where all were, they are what is known.
    """
    found, suspects = [], suspect(records)
    if suspects >= {n for n, record in records.items() if record.timings}:
        suspects = set()
    for n, record in sorted(records.items()):
        costs = record.step_costs()
        if costs and n not in suspects:
            values = [math.log(cost * record.times) for visit in costs.values() for cost in visit]
            found.append(Seen(n, median(values), noise.variance(len(values), len(costs))))
    return found


def suspect(records: Mapping[int, Record]) -> set[int]:
    """
    Name the sizes whose only visit came at a bad time: a larger size took clearly less.

    So did more visits than one, where they hold but the first steps of a size and those took far longer; or far longer
    than in proportion to a smaller size.  And so did up to FIRST_VISITS visits that another process held up, by a
    reference, or by what they took: NEVER times as long a sample as a smaller size.

    Example:
        >>> def read(n, seconds): return Record(n, Goal(), [Timing(batch_size=n, round=0, seconds=seconds)])
        >>> suspect({1: read(1, 0.7), 8: read(8, 0.06), 64: read(64, 0.3)})
        {1}
    """
    found: set[int] = set()
    least = math.inf
    for n in sorted(records, reverse=True):
        record = records[n]
        if record.timings:
            share = SUSPECT if record.visits == 1 else UNSETTLED if record.is_fresh else math.inf
            if record.seconds * record.times > least * (1 + share):
                found.add(n)
            least = min(least, record.least_seconds * record.times)
    per_sample = math.inf  # of the smaller sizes, the least
    for n, record in sorted(records.items()):
        if record.timings:
            cost = record.least_seconds * record.times / n
            is_new = record.visits <= FIRST_VISITS
            most = SUPERLINEAR if record.is_fresh else NEVER if is_new else math.inf
            if (record.is_held_up and is_new) or cost > most * per_sample:
                found.add(n)
            per_sample = min(per_sample, cost)
    return found
