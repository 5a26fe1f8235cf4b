"""Rates of sizes that were timed in rounds, compared in one state of the host (cubatch/measure/counting.py)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from cubatch.measure.counting import HostState, comparable, host_state
from cubatch.measure.goal import Goal
from cubatch.measure.records import Timing

Read = Mapping[int, Sequence[Timing]]
"""Timings of each size, one a round, as many as came before it did not run."""


def samples_per_second(read: Read) -> dict[int, float]:
    """Give the median rate of each size, in the state of the host in which sizes are compared."""
    state = _state(read)
    return {n: n / statistics.median(t.seconds for t in comparable(those, state)) for n, those in read.items()}


def reached(read: Read, size: int, best: int) -> list[float]:
    """Give what a size reached of the best one's rate, in each round that read both in one state of the host."""
    state = _state(read)
    rounds = zip(read.get(size, ()), read[best], strict=False)
    return [
        size / own.seconds / (best / other.seconds)
        for own, other in rounds
        if state is None or state.was_quick(own) == state.was_quick(other)
    ]


def _state(read: Read) -> HostState | None:
    return host_state(itertools.chain.from_iterable(read.values()), Goal())
