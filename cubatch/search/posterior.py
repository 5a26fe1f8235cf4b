"""
Times, confidence intervals and the recommendation, from all timings of a run.

Raw medians on a plateau pick the size with the luckiest timing.  One lucky timing moves the posterior little.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Self

import attrs

from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Timing
from cubatch.measure.stopping import median
from cubatch.search.curve_posterior import Z_90, CurvePosterior, fit_curve, usual_errors
from cubatch.search.noise import Noise, estimate, estimate_noise

Interval = tuple[float, float]
_Timings = Mapping[int, Sequence[Timing]]

CONFIDENCE_Z = 1.2816  # standard deviations: 90 % one-sided
# how reasons of candidates begin
_HARDWARE = ("coulom", "crest", "past crest", "tensor-core", "asked for", "current", "multiple of", "divides")


def is_round(n: int) -> bool:
    """Return whether a size is a power of two or 1.5 times one."""
    odd = n // (n & -n)
    return odd in (1, 3)


def is_favored(candidate: Candidate) -> bool:
    """Return whether a size is round, or is a candidate because of the hardware or a request of the user."""
    return is_round(candidate.batch_size) or any(reason.startswith(_HARDWARE) for reason in candidate.reasons)


@attrs.frozen(eq=False)
class Recommendation:
    """The recommended size, and the sizes that are about as good."""

    batch_size: int
    fastest: int  # the size with the best posterior mean of those that may be recommended
    within: tuple[int, ...]  # sizes whose expected loss against the fastest is within the tolerance, ascending
    equal: tuple[int, ...]  # sizes whose difference from the fastest may be zero, by its 90 % interval


@attrs.frozen(eq=False)
class Posterior:
    """The posterior of the step cost, and the recommendation from it."""

    goal: Goal
    noise: Noise
    seconds: CurvePosterior  # of the log seconds of a step
    cost: CurvePosterior  # of the log cost by the objective, which differs from `seconds` if that is energy

    @classmethod
    def of(cls, timings: _Timings, goal: Goal, sizes: Sequence[int] = (), *, on_host: bool = False) -> Self:
        """Compute the posterior at `sizes` (none: measured ones) from timings by size; `on_host`: taken on a CPU."""
        with usual_errors():
            noise, cost = _fit(timings, goal, sizes, on_host=on_host)
            seconds = cost if goal.objective != "energy" else _fit(timings, Goal(), sizes, on_host=on_host)[1]
        return cls(goal, noise, seconds, cost)

    def recommend(self, feasible: Collection[int], favored: Collection[int] | None = None) -> Recommendation:
        """
        Return the recommendation among the sizes that ran within every limit.

        By throughput and energy it is the smallest size whose expected loss against the best is within the tolerance,
        by latency the largest.  A size that is not favored must beat the nearest favored sizes on both sides.  It must
        do so by more than the tolerance with 90 % confidence.

        Args:
            feasible: The measured sizes within every limit, at least one.
            favored: Sizes that need not beat their neighbors to be recommended; None: all sizes.
        """
        curve, is_latency = self.cost, self.goal.objective == "latency"
        value = {n: (0.0 if is_latency else math.log(n)) - curve.mean[curve.place(n)] for n in sorted(feasible)}
        tolerance = math.log1p(self.goal.tolerance) if is_latency else -math.log1p(-self.goal.tolerance)
        plain = [n for n in value if favored is None or is_latency or n in favored]

        def leads(n: int, other: int, z: float) -> float:
            return float(value[n] - value[other] - z * curve.difference_sd(curve.place(n), curve.place(other)))

        def is_eligible(n: int) -> bool:
            neighbors = [*[m for m in plain if m < n][-1:], *[m for m in plain if m > n][:1]]
            return n in plain or all(leads(n, m, CONFIDENCE_Z) > tolerance for m in neighbors)

        eligible = [n for n in value if is_eligible(n)]  # without a favored size all are
        fastest = max(eligible, key=lambda n: (value[n], -n))
        # Also allowing one standard deviation doubled the regret on fake hosts, and repeated runs agreed no better.
        within = tuple(n for n in eligible if value[n] >= value[fastest] - tolerance)
        equal = tuple(n for n in value if n != fastest and leads(fastest, n, Z_90) <= 0)
        return Recommendation(within[-1 if is_latency else 0], fastest, within, equal)

    def seconds_of(self, n: int, timings: Sequence[Timing]) -> tuple[float | None, Interval | None]:
        """Return the seconds of a step of size `n`, and their 90 % interval; without a posterior, median and None."""
        if n not in self.seconds.sizes:
            return (median([timing.seconds for timing in timings]) if timings else None), None
        return self.seconds.cost(n), self.seconds.interval(n)

    def joules_of(self, n: int, timings: Sequence[Timing]) -> float | None:
        """Return the joules of a step: the posterior's if energy is the objective, else the median; None if unknown."""
        if self.goal.objective == "energy" and n in self.cost.sizes:
            return self.cost.cost(n)
        read = [timing.joules for timing in timings if timing.joules is not None]
        return median(read) if read else None

    def cost_interval(self, n: int) -> Interval | None:
        """Return the 90 % interval (low, high) of `Goal.cost` of batch size `n`; None if it was not measured."""
        if n not in self.cost.sizes:
            return None
        low, high = self.cost.interval(n)
        return (low, high) if self.goal.objective == "latency" else (low / n, high / n)

    def ratio_interval(self, first: int, second: int) -> Interval:
        """Return the 90 % interval of log(seconds per sample of `first` / of `second`); both must be measured."""
        curve = self.seconds
        if first not in curve.sizes or second not in curve.sizes:
            raise ValueError(f"{first} and {second} were not both measured")
        a, b = curve.place(first), curve.place(second)
        mean = float(curve.mean[a] - curve.mean[b]) - math.log(first / second)
        half = Z_90 * curve.difference_sd(a, b)
        return mean - half, mean + half


def _fit(timings: _Timings, goal: Goal, sizes: Sequence[int], *, on_host: bool) -> tuple[Noise, CurvePosterior]:
    noise = estimate_noise(timings.values(), goal, on_host=on_host)
    estimates = [size for n in sorted(timings) if (size := estimate(timings[n], noise, goal)) is not None]
    at = sizes or [size.batch_size for size in estimates]
    return noise, fit_curve(estimates, at, slope_variance=noise.slope_variance, host=noise.is_paired)
