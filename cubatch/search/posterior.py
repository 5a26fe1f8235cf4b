"""Times, confidence intervals and the recommendation, from all timings of a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import attrs
import numpy as np

from cubatch.measure.goal import Goal
from cubatch.measure.records import Timing
from cubatch.measure.stopping import median
from cubatch.search.curve_posterior import CurvePosterior, fit_curve
from cubatch.search.noise import Noise, Record, estimate, estimate_noise
from cubatch.search.recommend import TIE_Z, Recommendation, recommend

Interval = tuple[float, float]


@attrs.frozen(eq=False)
class Posterior:
    """
    Hold the posterior of the step cost at every measured size.

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
    def of(cls, timings: Mapping[int, Sequence[Timing]], goal: Goal) -> Self:
        """Compute the posterior from the timings of each size."""
        records = {n: Record(n, goal, list(taken)) for n, taken in timings.items()}
        noise = estimate_noise(records.values())
        cost = _fit(records, noise, goal)
        if goal.objective != "energy":
            return cls(goal, noise, cost, cost)
        timed = {n: Record(n, Goal(), list(taken)) for n, taken in timings.items()}
        return cls(goal, noise, _fit(timed, estimate_noise(timed.values()), Goal()), cost)

    @property
    def reference(self) -> dict[str, Any] | None:
        """Batch size and median seconds of the reference step; None without one."""
        if self.noise.reference_batch_size is None:
            return None
        return {"batch_size": self.noise.reference_batch_size, "seconds": self.noise.reference_seconds}

    @property
    def sizes(self) -> list[int]:
        """The sizes whose time was measured, ascending."""
        return [] if self.seconds is None else self.seconds.sizes.tolist()

    def has_cost(self, n: int) -> bool:
        """Return whether the cost of a size was measured."""
        return _place(self.cost, n) is not None

    def recommend(self, feasible: Sequence[int], favored: Collection[int] | None) -> Recommendation:
        """Return the recommendation among these sizes, each of which has a cost."""
        if self.cost is None:
            raise ValueError("nothing was measured")
        return recommend(self.cost, feasible, self.goal, favored=favored)

    def seconds_of(self, n: int, timings: Sequence[Timing]) -> tuple[float | None, Interval | None]:
        """Return the seconds of a step and their 90 % interval; without a posterior, the median timing and None."""
        place = _place(self.seconds, n)
        if place is None or self.seconds is None:
            return (median([timing.seconds for timing in timings]), None) if timings else (None, None)
        return math.exp(self.seconds.mean[place]), _interval(self.seconds, place)

    def joules_of(self, n: int, timings: Sequence[Timing]) -> float | None:
        """Return the joules of a step: the posterior mean if energy is the objective, else the median timing."""
        place = _place(self.cost, n)
        if self.goal.objective == "energy" and place is not None and self.cost is not None:
            return math.exp(self.cost.mean[place])
        read = [timing.joules for timing in timings if timing.joules is not None]
        return median(read) if read else None

    def cost_interval(self, n: int) -> Interval | None:
        """Return the 90 % interval of a size's `Goal.cost`; None where it was not measured."""
        place = _place(self.cost, n)
        if place is None or self.cost is None:
            return None
        low, high = _interval(self.cost, place)
        return (low, high) if self.goal.objective == "latency" else (low / n, high / n)

    def ratio_interval(self, first: int, second: int) -> Interval:
        """Return the 90 % interval of log(seconds per sample of `first` / seconds per sample of `second`)."""
        a, b = _place(self.seconds, first), _place(self.seconds, second)
        if a is None or b is None or self.seconds is None:
            raise ValueError(f"{first} and {second} were not both measured")
        mean = float(self.seconds.mean[a] - self.seconds.mean[b]) - math.log(first / second)
        half = TIE_Z * self.seconds.difference_sd(a, b)
        return mean - half, mean + half


def _fit(records: Mapping[int, Record], noise: Noise, goal: Goal) -> CurvePosterior | None:
    estimates = [size for n in sorted(records) if (size := estimate(records[n], noise, goal)) is not None]
    if not estimates:
        return None
    return fit_curve(
        estimates, [size.batch_size for size in estimates], slope_variance=noise.slope_variance, host=noise.is_paired
    )


def _place(curve: CurvePosterior | None, n: int) -> int | None:
    if curve is None:
        return None
    place = int(np.searchsorted(curve.sizes, n))
    return place if place < len(curve.sizes) and curve.sizes[place] == n else None


def _interval(curve: CurvePosterior, place: int) -> Interval:
    half = TIE_Z * float(curve.sd[place])
    return math.exp(curve.mean[place] - half), math.exp(curve.mean[place] + half)
