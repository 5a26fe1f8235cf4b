"""Rates of sizes that were timed in rounds, each relative to the reference step around it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from cubatch.measure.records import Timing

Rounds = Mapping[int, Sequence[Timing]]
"""Timings of each size, one a round, as many as came before it did not run."""


def samples_per_second(rounds: Rounds) -> dict[int, float]:
    """Return the median rate of each size at the usual speed of the host."""
    references = [timing.reference_seconds or 1.0 for taken in rounds.values() for timing in taken]
    usual = statistics.median(references) if references else 1.0
    return {n: n / (statistics.median(map(_relative, taken)) * usual) for n, taken in rounds.items()}


def reached(rounds: Rounds, size: int, best: int) -> list[float]:
    """Return the share of the best size's rate that a size reached, in each round that measured both."""
    pairs = zip(rounds.get(size, ()), rounds.get(best, ()), strict=False)
    return [size / _relative(own) / (best / _relative(other)) for own, other in pairs]


def _relative(timing: Timing) -> float:
    """Return the step time in reference steps; in seconds where there is no reference."""
    return timing.seconds / (timing.reference_seconds or 1.0)
