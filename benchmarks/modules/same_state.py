"""Rates of sizes that were timed in rounds, compared in one state of the host (cubatch/measure/counting.py)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from cubatch.measure.counting import HostState, comparable, host_state
from cubatch.measure.goal import Goal
from cubatch.measure.records import Timing

HELD = "held up"

Read = Mapping[int, Sequence[Timing]]
"""Timings of each size, one a round, as many as came before it did not run."""


def samples_per_second(read: Read) -> dict[int, float]:
    """Give the median rate of each size, in the state of the host in which sizes are compared."""
    state = _state(read)
    return {n: n / statistics.median(t.seconds for t in comparable(those, state)) for n, those in read.items()}


def reached(read: Read, size: int, best: int) -> list[float]:
    """
    Give what a size reached of the best one's rate, in each round that read both in one state of the host.

    Where no round did, every round counts; a size without a timing has none, nor has any where the best one did
    not run.
    """
    state = _state(read)
    rounds = list(zip(read.get(size, ()), read.get(best, ()), strict=False))
    alike = [(own, other) for own, other in rounds if state is None or _met(state, own) == _met(state, other) != HELD]
    return [size / own.seconds / (best / other.seconds) for own, other in alike or rounds]


def _met(state: HostState, timing: Timing) -> str:
    return HELD if state.was_held_up(timing) else "quick" if state.was_quick(timing) else "slow"


def _state(read: Read) -> HostState | None:
    return host_state(itertools.chain.from_iterable(read.values()), Goal())
