"""
Recommend a batch size from the posterior of the step cost at the measured sizes.

Raw medians on a plateau pick the size with the luckiest timing.  The posterior pools all sizes, so that a single
lucky timing moves it little.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import attrs

from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate
from cubatch.search.curve_posterior import Z_90, CurvePosterior

CONFIDENCE_Z = 1.2816  # standard deviations: 90 % one-sided
_HARDWARE = (  # how reasons of candidates begin
    "coulom", "crest", "past crest", "tensor-core", "asked for", "current", "multiple of", "divides",
)  # fmt: skip


@attrs.frozen(eq=False)
class Recommendation:
    """
    The recommended size, and the sizes that are about as good.

    Attributes:
        batch_size: The recommended size.
        fastest: The size with the best posterior mean of those that may be recommended.
        within: Sizes whose expected loss against the fastest is within the tolerance, ascending.
        equal: Sizes whose difference from the fastest may be zero, by a 90 % interval of the difference.
    """

    batch_size: int
    fastest: int
    within: tuple[int, ...]
    equal: tuple[int, ...]


def is_round(n: int) -> bool:
    """Return whether a size is a power of two or 1.5 times one."""
    odd = n // (n & -n)
    return odd in (1, 3)


def is_favored(candidate: Candidate) -> bool:
    """Return whether a size is round, or is a candidate because of the hardware or a request of the user."""
    return is_round(candidate.batch_size) or any(reason.startswith(_HARDWARE) for reason in candidate.reasons)


def recommend(
    curve: CurvePosterior, feasible: Sequence[int], goal: Goal, *, favored: Collection[int] | None = None
) -> Recommendation:
    """
    Return the recommendation among the sizes that ran within every limit.

    By throughput and energy it is the smallest size whose expected loss against the best is within the tolerance, by
    latency the largest.  A size that is not `favored` must beat the nearest favored sizes on both sides.  It must do so
    by more than the tolerance with 90 % confidence.

    Args:
        curve: Posterior of the log step cost.
        feasible: The measured sizes within every limit.
        goal: Objective and tolerance.
        favored: Sizes that need not beat their neighbors to be recommended; None: all sizes.
    """
    places = {n: curve.place(n) for n in sorted(feasible)}
    is_latency = goal.objective == "latency"
    value = {n: (0.0 if is_latency else math.log(n)) - float(curve.mean[place]) for n, place in places.items()}
    tolerance = math.log1p(goal.tolerance) if is_latency else -math.log1p(-goal.tolerance)
    plain = set(places) if favored is None or is_latency else {n for n in places if n in favored}
    eligible = {
        n for n in places if n in plain or _beats_neighbors(curve, places, value, plain, n, tolerance=tolerance)
    }
    eligible = eligible or set(places)
    fastest = max(eligible, key=lambda n: (value[n], -n))
    # Also allowing one standard deviation doubled the regret on fake hosts, and repeated runs agreed no better.
    within = tuple(sorted(n for n in eligible if value[n] >= value[fastest] - tolerance))
    equal = tuple(
        n
        for n, place in places.items()
        if n != fastest and value[fastest] - value[n] <= Z_90 * curve.difference_sd(place, places[fastest])
    )
    return Recommendation(within[-1 if is_latency else 0], fastest, within, equal)


def _beats_neighbors(
    curve: CurvePosterior, places: dict[int, int], value: dict[int, float], plain: set[int], n: int, *, tolerance: float
) -> bool:
    """
    Return whether size `n` beats the nearest favored sizes by more than the tolerance with 90 % confidence.

    Args:
        curve: Posterior of the log step cost.
        places: Position of each size in the posterior.
        value: Mean log of the objective, by size.
        plain: The favored sizes.
        n: The size.
        tolerance: Share of the value that may be lost.
    """
    neighbors = [*sorted(m for m in plain if m < n)[-1:], *sorted(m for m in plain if m > n)[:1]]
    return all(
        value[n] - value[m] - CONFIDENCE_Z * curve.difference_sd(places[n], places[m]) > tolerance for m in neighbors
    )
