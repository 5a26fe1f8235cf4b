"""
The state of a search: estimates, probabilities and the value of another trial, computed from all timings of a run.

Gains and losses are differences of the logarithm of the objective: shares, where they are small.  This module uses no
clock and no device.
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
from cubatch.measure.records import Candidate, Timing, by_trial
from cubatch.search.curve_posterior import LEAST_VARIANCE, Array, CurvePosterior
from cubatch.search.noise import has_cost
from cubatch.search.posterior import Posterior, is_favored
from cubatch.workload import common_divisor

CLOSED = 0.01
"""No size is tried between two sizes that differ by at most this share of the smaller, or by 1."""
LEAST_TOLERANCE = 0.005  # two runs of one program differ by about this, by their place in memory
RUNS_BEYOND_ERROR = 0.5  # probability that a size runs though a smaller one raised an error
RUNS_BEYOND, TRIES_ON = 0.25, 1.5  # the same for one that ran out of memory and is smaller by more than this factor
DRAWS = 256  # of the loss
_OUTCOMES = np.array([-2.5, -1.75, -1.0, -0.5, 0.0, 0.5, 1.0, 1.75, 2.5])  # of a trial, in standard deviations
_WEIGHTS = np.exp(-0.5 * _OUTCOMES**2) * np.gradient(_OUTCOMES)
_WEIGHTS /= _WEIGHTS.sum()


@attrs.frozen(kw_only=True, eq=False, slots=False)  # without slots for cached properties
class SearchState:
    """All that a decision of the search depends on, and estimates from it; each is computed on first use."""

    goal: Goal
    ladder: Mapping[int, Candidate]  # sizes that may be measured
    timings: Mapping[int, Sequence[Timing]]  # by size; also of sizes that are no candidates
    closed: Collection[int]  # sizes that are not measured again
    failed: Mapping[int, str]  # status of the closed sizes that failed, for lack of memory or otherwise, and never ran
    seconds_of_trial: Callable[[int, float], float]  # seconds of a trial, from a size and its seconds of a step
    left: float  # seconds of the budget
    budget: float
    extends: bool  # whether sizes between the candidates may be measured
    requested: Collection[int] = ()  # sizes that are measured in any case
    multiple: int = 1  # sizes between the candidates are multiples of it
    accepts: Callable[[int], bool] = lambda _: True  # whether the user allows a size between the candidates
    seed: int = 0  # fixes the order of trials
    on_host: bool = False  # whether steps run on a CPU

    # --- sizes ---

    @functools.cached_property
    def measured(self) -> Mapping[int, Sequence[Timing]]:
        """Timings of the sizes whose cost was measured, ascending."""
        return {n: taken for n, taken in sorted(self.timings.items()) if taken and has_cost(taken, self.goal)}

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Sizes that were or may be measured, ascending; once two neighbors were tried, some between them too."""
        known = {n for n in self.ladder if n not in self.closed and self.is_accepted(n)} | set(self.measured)
        if not self.extends:
            return sorted(known)
        tried, pairs = {*self.measured, *self.failed}, itertools.pairwise(sorted({*known, *self.failed}))
        gaps = [pair for pair in pairs if tried.issuperset(pair) and not self.errors.issuperset(pair)]
        between = {n for low, high in gaps for n in sizes_between(low, high, self.multiple) if self.may_add(n)}
        return sorted(known | between)

    @functools.cached_property
    def favored(self) -> set[int] | None:
        """Sizes that need not clearly beat their neighbors to be recommended; None: all."""
        return {n for n, candidate in self.ladder.items() if is_favored(candidate)} if self.extends else None

    @functools.cached_property
    def errors(self) -> set[int]:
        """Sizes that raised an error that is not about memory."""
        return {n for n, status in self.failed.items() if status == "error"}

    def is_accepted(self, n: int, *, is_new: bool = False) -> bool:
        """Return whether a size was requested, or is likely to run; `is_new` is whether the search made it up."""
        ran = [size for size in self.measured if size not in self.failed]
        return not self.extends or n in self.requested or is_likely(n, ran, self.errors, is_new=is_new)

    def may_add(self, n: int) -> bool:
        """Return whether the search may add a batch size that is no candidate."""
        return self.extends and self.accepts(n) and n not in self.closed and self.is_accepted(n, is_new=True)

    def place(self, n: int) -> int:
        """Return the index in `sizes` of batch size `n`, which must be one of them."""
        return int(np.searchsorted(self.sizes, n))

    def trials(self, n: int) -> int:
        """Return how many trials a size had."""
        return len(by_trial(self.timings.get(n, ())))

    def shuffled(self, sizes: Sequence[int]) -> list[int]:
        """Return the sizes in a random order that depends on the seed and the number of timings."""
        count = sum(map(len, self.measured.values()))
        return [sizes[place] for place in default_rng((self.seed, count)).permutation(len(sizes))]

    # --- seconds and the recommendation ---

    @functools.cached_property
    def fitted(self) -> Posterior:
        """The posterior at all sizes, with the noise model of the run."""
        return Posterior.of({n: t for n, t in self.timings.items() if t}, self.goal, self.sizes, on_host=self.on_host)

    @property
    def posterior(self) -> CurvePosterior:
        """The posterior of the log step cost at all sizes."""
        return self.fitted.cost

    @functools.cached_property
    def seconds(self) -> Mapping[int, float]:
        """Estimated seconds of a step at the usual host speed, of each measured size."""
        return {n: float(self.step_seconds[self.place(n)]) for n in self.measured}

    @functools.cached_property
    def step_seconds(self) -> Array:
        """Posterior median of the seconds of a step of each of `sizes`."""
        return np.exp(self.fitted.seconds.mean)

    @functools.cached_property
    def trial_seconds(self) -> Array:
        """Expected seconds of a trial of each of `sizes`."""
        pairs = zip(self.sizes, self.step_seconds, strict=True)
        return np.array([self.seconds_of_trial(n, float(seconds)) for n, seconds in pairs])

    def affordable(self, n: int, share: float = 1.0) -> bool:
        """Return whether a trial of a size is expected to take at most this share of the seconds left of the budget."""
        return bool(self.trial_seconds[self.place(n)] <= share * self.left)

    @functools.cached_property
    def tolerance(self) -> float:
        """Allowed loss: log(best value / recommended size's value) of the objective."""
        return -math.log(1 - max(self.goal.tolerance, LEAST_TOLERANCE))

    def is_feasible(self, n: int) -> bool:
        """Return whether a measured size may be recommended: it did not fail, and keeps the latency limit."""
        return n not in self.failed and self.seconds[n] <= (self.goal.latency_limit or math.inf)

    @functools.cached_property
    def _best(self) -> tuple[int | None, int | None]:
        feasible = [n for n in self.measured if self.is_feasible(n)]
        best = self.fitted.recommend(feasible, self.favored) if feasible else None
        return (best.batch_size, best.fastest) if best else (None, None)

    @property
    def recommended(self) -> int | None:
        """The size to recommend now; None if no measured size is within the limits."""
        return self._best[0]

    @property
    def fastest(self) -> int | None:
        """The size with the best posterior mean of all that may be recommended; None as for `recommended`."""
        return self._best[1]

    # --- probabilities and gains ---

    @functools.cached_property
    def most_seconds(self) -> float:
        """Most seconds of a step by the latency limit and, if latency is the objective, the tolerance; or infinite."""
        limit = self.goal.latency_limit or math.inf
        if self.goal.objective == "latency" and self.fastest is not None:
            return min(limit, self.goal.allowed(self.seconds[self.fastest]))
        return limit

    @functools.cached_property
    def run_probability(self) -> Array:
        """Probability of each of `sizes` that it runs within `most_seconds`, regardless of the budget."""
        far = math.log(self.most_seconds) - np.log(self.step_seconds)
        sd = np.maximum(self.posterior.sd, LEAST_TOLERANCE)
        keeps = [0.5 * math.erfc(-z / math.sqrt(2)) for z in far / sd]
        for n, seconds in self.seconds.items():
            keeps[self.place(n)] = float(n not in self.failed and seconds <= self.most_seconds)
        return np.array(keeps) * [self._runs(n) for n in self.sizes]

    def _runs(self, n: int) -> float:
        """Return the probability that size `n` runs, by the sizes that ran and those that failed."""
        top = max((size for size in self.measured if size not in self.failed), default=0)
        above = sorted(size for size in self.failed if size > top)
        if n in self.measured or n < top or not above:
            return 1.0
        if n < above[0]:
            return (above[0] - n) / (above[0] - top)
        probability = RUNS_BEYOND_ERROR ** sum(size < n for size in above if size in self.errors)
        bounds = [size for size in above if size not in self.errors]
        below = [size for size in bounds if size < n]
        if not below:
            return probability
        if n < bounds[-1] or n <= TRIES_ON * below[-1] or "timeout" in map(self.failed.get, below):
            return 0.0
        apart = 1 + sum(high > TRIES_ON * low for low, high in itertools.pairwise(below))
        return probability * RUNS_BEYOND**apart

    @functools.cached_property
    def feasibility(self) -> Array:
        """`run_probability`, but 0 for unmeasured sizes that the budget does not hold or, on a CPU, are not favored."""
        in_reach = self.trial_seconds <= self.left
        if self.fitted.noise.is_paired and self.favored is not None:  # on a CPU only round sizes win
            in_reach &= np.isin(self.sizes, list(self.favored))
        return np.where(in_reach | np.isin(self.sizes, list(self.measured)), self.run_probability, 0.0)

    @functools.cached_property
    def value(self) -> Array:
        """Mean log of the objective at each of `sizes`, up to a constant: more is better."""
        return -self.posterior.mean + (0.0 if self.goal.objective == "latency" else np.log(self.posterior.sizes))

    @functools.cached_property
    def _base(self) -> int:
        if self.recommended is None:
            raise ValueError("no size is recommended yet: measure one that is within every limit first")
        return self.place(self.recommended)

    def draw_losses(self, probability: Array) -> Array:
        """
        Return random draws of the loss if the search stopped now; `probability` is that of each of `sizes` to run.

        A loss is the logarithm of the best value over that of the recommended size, less the tolerance, and at least 0.
        """
        random, count = default_rng(0), len(self.value)  # the same draws each time: decisions are reproducible
        root = np.linalg.cholesky(self.posterior.covariance + LEAST_VARIANCE * np.eye(count))
        values = self.value[:, None] - root @ random.standard_normal((count, DRAWS))
        ahead = values - values[self._base] - self.tolerance
        ahead[random.random((count, DRAWS)) > probability[:, None]] = 0.0
        lost: Array = np.maximum(ahead.max(axis=0), 0.0)
        return lost

    @functools.cached_property
    def expected_loss(self) -> float:
        """Mean of `draw_losses` if the search stopped now, over the batch sizes that the budget allows to measure."""
        return float(self.draw_losses(self.feasibility).mean())

    @functools.cached_property
    def could_gain(self) -> float:
        """Share by which the recommendation may improve, at most, with a probability of 90 %, by any size."""
        return float(np.expm1(np.quantile(self.draw_losses(self.run_probability), 0.9, method="higher")))

    def knowledge_gradient(self, variance: float) -> Array:
        """
        Return, by size, how much one trial is expected to improve the log objective of the recommended size.

        The knowledge gradient with correlated beliefs (Frazier, Powell and Dayanik 2009).  A trial moves the posterior
        of all similar sizes, and the best measured size is recommended.  `variance` is that of the log cost that a
        trial measures.
        """
        covariance = self.posterior.covariance
        measured = np.array([n in self.measured and self.is_feasible(n) for n in self.sizes])
        moved = covariance / np.sqrt(np.diag(covariance) + variance)  # (any size, size of the trial)
        shift = moved - moved[self._base]
        ahead = self.value - self.value[self._base] - self.tolerance
        ahead[self._base] = 0.0
        known = (ahead[measured, None] - shift[measured] * _OUTCOMES[:, None, None]).max(axis=1)  # (outcomes, trial)
        own = ahead - np.diag(shift) * _OUTCOMES[:, None]
        gain: Array = _WEIGHTS @ (np.maximum(known, own) - ahead[measured].max())
        return np.maximum(gain, 0.0) * self.feasibility

    def ahead(self, n: int, other: int | None) -> tuple[float, float]:
        """Return mean and standard deviation of log(objective of size `n` / of `other`); `other` None: (0, about 0)."""
        place, base = self.place(n), self.place(n if other is None else other)
        return float(self.value[place] - self.value[base]), self.posterior.difference_sd(place, base)


def is_closed(low: int, high: int) -> bool:
    """Return whether two sizes are so near to each other that no trial between them is worth it: within 1 % or 1."""
    return high - low <= max(1, int(CLOSED * low))


def sizes_between(low: int, high: int, multiple: int = 1) -> list[int]:
    """Return at most 3 multiples of `multiple` between two sizes, at even ratios; none if the two are too near."""
    between = {round(low * (high / low) ** part / multiple) * multiple for part in (0.25, 0.5, 0.75)}
    return [] if is_closed(low, high) else sorted(size for size in between if low < size < high)


def is_likely(n: int, ran: Collection[int], failed: Collection[int], *, is_new: bool = False) -> bool:
    """
    Return whether size `n` may run, by divisors that sizes that ran have in common and sizes that raised errors lack.

    Two rules are considered: all accepted sizes are multiples of one number, or all divide one number.  By the second,
    a size that the search made up (`is_new`) has no odd factor that the accepted sizes lack.  A rule that contradicts
    the failures is ignored.  Only a failure between sizes that ran shows a rule: others may show the end of the range.

    Example:
        >>> is_likely(16, [1, 2, 8], [3]), is_likely(12, [1, 2, 8], [3]), is_likely(10, [1, 2, 8], [3], is_new=True)
        (True, False, False)
        >>> is_likely(24, [8, 16], [1, 2, 4, 12]), is_likely(20, [8, 16], [1, 2, 4, 12])
        (True, False)
    """
    if not any(min(ran, default=0) < size < max(ran, default=0) for size in failed):
        return True
    if (divisor := common_divisor(ran, failed)) > 1:
        return n % divisor == 0
    multiple = math.lcm(*ran)
    if any(multiple % size == 0 for size in failed):
        return True
    together = math.lcm(multiple, n)
    is_odd_known = multiple % (n // (n & -n)) == 0
    return (is_odd_known or not is_new) and all(together % size for size in failed)
