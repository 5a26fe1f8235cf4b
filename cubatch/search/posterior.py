"""Times, confidence intervals and the recommendation, from all timings of a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import attrs

from cubatch.measure.goal import Goal
from cubatch.measure.records import Timing
from cubatch.measure.stopping import median
from cubatch.search.curve_posterior import Z_90, CurvePosterior, fit_curve, usual_errors
from cubatch.search.noise import Noise, estimate, estimate_noise
from cubatch.search.recommend import Recommendation, recommend

Interval = tuple[float, float]


@attrs.frozen(eq=False)
class Posterior:
    """
    Hold the posterior of the step cost.

    Attributes:
        goal: Objective and limits.
        noise: The noise model of the run.
        seconds, cost: Posterior of the log seconds of a step, and of its log cost by the objective; None without
            timings.  They differ if the objective is energy.
    """

    goal: Goal
    noise: Noise
    seconds: CurvePosterior | None
    cost: CurvePosterior | None

    @classmethod
    def of(cls, timings: Mapping[int, Sequence[Timing]], goal: Goal, sizes: Sequence[int] = ()) -> Self:
        """Compute the posterior at some sizes, by default the measured ones, from the timings of each size."""
        with usual_errors():
            noise, cost = _fit(timings, goal, sizes)
            seconds = cost if goal.objective != "energy" else _fit(timings, Goal(), sizes)[1]
        return cls(goal, noise, seconds, cost)

    @property
    def reference(self) -> dict[str, Any] | None:
        """The reference step as `batch_size` and median `seconds`; None without a reference step."""
        if self.noise.reference_batch_size is None:
            return None
        return {"batch_size": self.noise.reference_batch_size, "seconds": self.noise.reference_seconds}

    @property
    def sizes(self) -> list[int]:
        """The sizes whose time was measured, ascending."""
        return [] if self.seconds is None else self.seconds.sizes.tolist()

    def has_cost(self, n: int) -> bool:
        """Return whether the cost of size `n` was measured."""
        return self.cost is not None and n in self.cost

    def recommend(self, feasible: Sequence[int], favored: Collection[int] | None) -> Recommendation:
        """Return the recommendation among these sizes, each of which has a cost."""
        if self.cost is None:
            raise ValueError("nothing was measured")
        return recommend(self.cost, feasible, self.goal, favored=favored)

    def seconds_of(self, n: int, timings: Sequence[Timing]) -> tuple[float | None, Interval | None]:
        """Return the seconds of a step of size `n`, and their 90 % interval; median and None without a posterior."""
        if self.seconds is None or n not in self.seconds:
            return (median([timing.seconds for timing in timings]) if timings else None), None
        return self.seconds.cost(n), self.seconds.interval(n)

    def joules_of(self, n: int, timings: Sequence[Timing]) -> float | None:
        """
        Return the joules of a step of size `n`; None if not measured.

        It is the posterior mean if energy is the objective, else the median timing.
        """
        if self.goal.objective == "energy" and self.cost is not None and n in self.cost:
            return self.cost.cost(n)
        read = [timing.joules for timing in timings if timing.joules is not None]
        return median(read) if read else None

    def cost_interval(self, n: int) -> Interval | None:
        """Return the 90 % interval (low, high) of a size's cost, see `Goal.cost`; None if it was not measured."""
        if self.cost is None or n not in self.cost:
            return None
        low, high = self.cost.interval(n)
        return (low, high) if self.goal.objective == "latency" else (low / n, high / n)

    def ratio_interval(self, first: int, second: int) -> Interval:
        """Return the 90 % interval of log(seconds per sample of `first` / seconds per sample of `second`)."""
        curve = self.seconds
        if curve is None or first not in curve or second not in curve:
            raise ValueError(f"{first} and {second} were not both measured")
        a, b = curve.place(first), curve.place(second)
        mean = float(curve.mean[a] - curve.mean[b]) - math.log(first / second)
        half = Z_90 * curve.difference_sd(a, b)
        return mean - half, mean + half


def _fit(
    timings: Mapping[int, Sequence[Timing]], goal: Goal, sizes: Sequence[int]
) -> tuple[Noise, CurvePosterior | None]:
    noise = estimate_noise(timings.values(), goal)
    estimates = [size for n in sorted(timings) if (size := estimate(timings[n], noise, goal)) is not None]
    if not estimates:
        return noise, None
    at = sizes or [size.batch_size for size in estimates]
    return noise, fit_curve(estimates, at, slope_variance=noise.slope_variance, host=noise.is_paired)
