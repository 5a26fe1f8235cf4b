"""
The state of a search: estimates and probabilities that its rules use, computed from all timings of a run.

This module uses no clock and no device.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import attrs
import numpy as np
from numpy.random import default_rng  # at import time: a first import later would swallow a Ctrl-C

from cubatch.measure.goal import Goal
from cubatch.measure.records import Timing
from cubatch.search import acquisition
from cubatch.search.curve_posterior import Array, CurvePosterior
from cubatch.search.noise import has_cost
from cubatch.search.posterior import Posterior

KNOWN = 0.5
"""The search ends where the expected loss of stopping is less than this share of the tolerance."""
LEAST_TOLERANCE = 0.005  # two runs of one program differ by about this, by their place in memory
UNTRIED, UNTRIED_SHARE = 1.5, 0.4
"""Factor above the longest measured step: a trial may then take this share of the time left."""
RUNS_BEYOND, TRIES_ON = 0.25, 1.5  # probability that a size runs though a size smaller by this factor failed
RUNS_BEYOND_ERROR = 0.5  # the same for each size that raised another error, which may concern that size alone


@attrs.frozen(kw_only=True)
class SearchInputs:
    """
    All that a decision of the search depends on.

    Attributes:
        goal: Objective and limits.
        ladder: The candidates: sizes that may be measured.
        favored: Sizes that need not beat their neighbors to be recommended; None: all. Others must beat them clearly.
        model: Predicted seconds of a step, by size; None without a prediction.
        timings: The timings, by size; also of sizes that are no candidates.
        closed: Sizes that are not measured again.
        failed: Status of the closed sizes that failed, for lack of memory or otherwise, and never ran.
        trial_seconds: Function that returns the seconds of a trial from a size and its seconds of a step.
        left, budget: Seconds left, and seconds in all.
        extends: Whether sizes between the candidates may be measured.
        requested: Sizes that are measured in any case.
        multiple: Sizes between the candidates are multiples of it.
        accepts: Whether the user allows a size between the candidates.
        seed: Fixes the order of trials.
    """

    goal: Goal
    ladder: Collection[int]
    favored: Collection[int] | None = None
    model: Mapping[int, float] | None
    timings: Mapping[int, Sequence[Timing]]
    closed: Collection[int]
    failed: Mapping[int, str]
    trial_seconds: Callable[[int, float], float]
    left: float
    budget: float
    extends: bool
    requested: Collection[int] = ()
    multiple: int = 1
    accepts: Callable[[int], bool] = lambda _: True
    seed: int = 0


class SearchState:
    """
    Compute estimates from the inputs of a decision; expensive ones on first use.

    Attributes:
        measured: Timings of the sizes whose cost was measured, ascending.
        sizes: Sizes that were or may be measured; those between two neighboring candidates once both were tried.
        noise: The noise model of the run.
        seconds: Estimated seconds of a step at the usual host speed, of each measured size.
        recommended, fastest: The size to recommend now, and the one with the best posterior mean; None without one.
    """

    def __init__(self, inputs: SearchInputs) -> None:
        self.inputs, self.goal = inputs, inputs.goal
        self.tolerance = -math.log(1 - max(self.goal.tolerance, LEAST_TOLERANCE))
        timings = {n: taken for n, taken in sorted(inputs.timings.items()) if taken}
        self.measured = {n: taken for n, taken in timings.items() if has_cost(taken, self.goal)}
        self.sizes = self._list_sizes()
        self._fitted = Posterior.of(timings, self.goal, self.sizes)
        self.noise = self._fitted.noise
        curve = self._fitted.seconds
        self.seconds = {} if curve is None else {n: curve.cost(n) for n in self.measured}
        feasible = [n for n in self.measured if self.is_feasible(n)]
        best = self._fitted.recommend(feasible, inputs.favored) if feasible else None
        self.recommended: int | None = best.batch_size if best else None
        self.fastest: int | None = best.fastest if best else None

    def is_feasible(self, n: int) -> bool:
        """Return whether a measured size may be recommended: it did not fail, and keeps the latency limit."""
        limit = self.goal.latency_limit
        return n not in self.inputs.failed and (limit is None or self.seconds[n] <= limit)

    def _list_sizes(self) -> list[int]:
        inputs = self.inputs
        known = {n for n in inputs.ladder if n not in inputs.closed and self.is_accepted(n)} | set(self.measured)
        if not inputs.extends:
            return sorted(known)
        tried = set(self.measured) | set(inputs.failed)
        pairs = itertools.pairwise(sorted(known | set(inputs.failed)))
        between = {
            n
            for pair in pairs
            if tried.issuperset(pair) and not self._errors.issuperset(pair)
            for n in acquisition.sizes_between(pair, inputs.multiple)
        }
        allowed = {n for n in between if inputs.accepts(n) and self.is_accepted(n, is_new=True)}
        return sorted(known | (allowed - set(inputs.closed)))

    def is_accepted(self, n: int, *, is_new: bool = False) -> bool:
        """
        Return whether a size is likely to run, by what sizes that ran have in common and sizes that raised errors lack.

        `is_new` is whether the search made up the size.
        """
        if not self.inputs.extends:
            return True
        ran = [size for size in self.measured if size not in self.inputs.failed]
        return is_likely(n, ran, self._errors, is_new=is_new)

    @functools.cached_property
    def _errors(self) -> set[int]:
        """Sizes that raised an error that is not about memory."""
        return {n for n in self.inputs.failed if self.inputs.failed[n] == "error"}

    @property
    def posterior(self) -> CurvePosterior:
        """The posterior of the log step cost at all sizes."""
        if self._fitted.cost is None:
            raise ValueError("nothing was measured")
        return self._fitted.cost

    def place(self, n: int) -> int:
        """Return the position of a size in `sizes`."""
        return int(np.searchsorted(self.sizes, n))

    @functools.cached_property
    def step_seconds(self) -> Array:
        """Expected seconds of a step of each of `sizes`."""
        return np.exp((self._fitted.seconds or self.posterior).mean)

    @functools.cached_property
    def trial_seconds(self) -> Array:
        """Expected seconds of a trial of each of `sizes`."""
        pairs = zip(self.sizes, self.step_seconds, strict=True)
        return np.array([self.inputs.trial_seconds(n, float(seconds)) for n, seconds in pairs])

    @functools.cached_property
    def feasibility(self) -> Array:
        """
        Probability of each of `sizes` that it runs within the latency limit.

        It is 0 for an unmeasured size whose trial the budget does not hold, and on a CPU for one that is not favored.
        """
        in_reach = self.trial_seconds <= self.affordable_seconds
        if self.noise.is_paired and self.inputs.favored is not None:  # on a CPU only round sizes win
            in_reach &= np.isin(self.sizes, list(self.inputs.favored))
        return np.where(in_reach | np.isin(self.sizes, list(self.measured)), self.run_probability, 0.0)

    @functools.cached_property
    def run_probability(self) -> Array:
        """Probability of each of `sizes` that it runs within the latency limit, regardless of the budget."""
        top = max((n for n in self.measured if n not in self.inputs.failed), default=0)
        return np.array([self._runs(n, top) * self._keeps_limit(place) for place, n in enumerate(self.sizes)])

    @functools.cached_property
    def bounding_failures(self) -> set[int]:
        """Sizes that ran out of memory or hung: larger sizes are expected to fail too."""
        return set(self.inputs.failed) - self._errors

    def _runs(self, n: int, top: int) -> float:
        """Return the probability that size `n` runs, by the failed sizes and the largest size that ran (`top`)."""
        if n in self.measured or n < top:
            return 1.0
        if any(top < size < n and status == "timeout" for size, status in self.inputs.failed.items()):
            return 0.0  # each hang costs its whole deadline
        last = top
        errors = [size for size in self._errors if size > top]
        probability = RUNS_BEYOND_ERROR ** len(errors)
        if n < min(errors, default=n):
            probability = (min(errors) - n) / (min(errors) - top)
        for size in sorted(size for size in self.bounding_failures if size > top):
            if size > n:
                return (size - n) / (size - top) if last == top else 0.0
            if size > TRIES_ON * last or last == top:  # sizes that bisection tried in between add no evidence
                probability *= RUNS_BEYOND
            last = size
        return probability if n > TRIES_ON * last or last == top else 0.0

    def _keeps_limit(self, place: int) -> float:
        limit, n = self.goal.latency_limit, self.sizes[place]
        if limit is None:
            return 1.0
        if n in self.measured:
            return float(self.is_feasible(n))
        far = (math.log(limit) - math.log(self.step_seconds[place])) / max(self.posterior.sd[place], LEAST_TOLERANCE)
        return 0.5 * math.erfc(-far / math.sqrt(2))

    @functools.cached_property
    def acquisition_inputs(self) -> acquisition.AcquisitionInputs:
        """Inputs of the acquisition functions; raises ValueError without a recommendation."""
        if self.recommended is None:
            raise ValueError("no size is recommended yet: measure one that is within every limit first")
        value = -self.posterior.mean
        if self.goal.objective != "latency":
            value = value + np.log(self.posterior.sizes)
        return acquisition.AcquisitionInputs(
            self.posterior, value, self.feasibility, self.place(self.recommended), self.tolerance
        )

    @functools.cached_property
    def losses(self) -> Array:
        """
        Random draws of the loss if the search stopped now, over the sizes that the budget allows to measure.

        A loss is the logarithm of the best value over that of the recommended size, less the tolerance, and at least 0.
        """
        return acquisition.draw_losses(self.acquisition_inputs)

    @functools.cached_property
    def unbounded_losses(self) -> Array:
        """
        Random draws of the loss if the search stopped now, over all sizes, regardless of the time of a trial.

        A loss is the logarithm of the best value over that of the recommended size, less the tolerance, and at least 0.
        """
        return acquisition.draw_losses(attrs.evolve(self.acquisition_inputs, feasibility=self.run_probability))

    def gain(self, n: int) -> float:
        """Return log(value of the objective at size `n` / that at the fastest size)."""
        fastest = self.fastest or n
        return float(self.acquisition_inputs.value[self.place(n)] - self.acquisition_inputs.value[self.place(fastest)])

    def ahead(self, n: int) -> tuple[float, float]:
        """Return mean and standard deviation of log(value at size `n` / value at the recommended size)."""
        place, inputs = self.place(n), self.acquisition_inputs
        mean = float(inputs.value[place] - inputs.value[inputs.recommended])
        return mean, self.posterior.difference_sd(place, inputs.recommended)

    def shuffled(self, sizes: Sequence[int]) -> list[int]:
        """Return the sizes in a random order that depends on the seed and the number of timings."""
        count = sum(map(len, self.measured.values()))
        return [sizes[place] for place in default_rng((self.inputs.seed, count)).permutation(len(sizes))]

    def affordable(self, n: int, share: float = 1.0) -> bool:
        """Return whether a trial of a size is expected to take at most this share of `affordable_seconds`."""
        return bool(self.trial_seconds[self.place(n)] <= share * self.affordable_seconds[self.place(n)])

    @functools.cached_property
    def affordable_seconds(self) -> Array:
        """Seconds that a trial of each of `sizes` may take: the time left, or a share of it for much longer steps."""
        longest = max(self.seconds.values(), default=0.0)
        return np.where(self.step_seconds > UNTRIED * longest, UNTRIED_SHARE, 1.0) * self.inputs.left


def is_likely(n: int, ran: Collection[int], failed: Collection[int], *, is_new: bool = False) -> bool:
    """
    Return whether a size may run, by what sizes that ran have in common and the failed ones lack.

    Two rules are considered: all accepted sizes are multiples of one number, or all divide one number.  A rule that
    contradicts the failures is ignored.  Only a failure between sizes that ran is a sign of a rule: other
    failures may show the largest or smallest size of the workload.

    Args:
        n: The size.
        ran, failed: Sizes that ran, and sizes that raised an error.
        is_new: Whether the size was made up by the search; it then has no prime factor that no accepted size has.

    Example:
        >>> is_likely(16, [1, 2, 8], [3]), is_likely(12, [1, 2, 8], [3]), is_likely(10, [1, 2, 8], [3], is_new=True)
        (True, False, False)
        >>> is_likely(24, [8, 16], [1, 2, 4, 12]), is_likely(20, [8, 16], [1, 2, 4, 12])
        (True, False)
    """
    if not any(min(ran, default=0) < size < max(ran, default=0) for size in failed):
        return True
    common = math.gcd(*ran)
    divisors = (d for d in range(2, common + 1) if common % d == 0 and all(size % d for size in failed))
    if (divisor := next(divisors, None)) is not None:
        return n % divisor == 0
    multiple = math.lcm(*ran)
    if any(multiple % size == 0 for size in failed):
        return True
    if is_new and multiple % _odd(n):
        return False
    together = math.lcm(multiple, n)
    return all(together % size for size in failed)


def _odd(n: int) -> int:
    return n // (n & -n)
