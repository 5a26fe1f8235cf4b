"""
One look at all timings of a run: what a decision of the search rests on.

No clock and no device here: numbers in, numbers out.
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
from cubatch.search import race
from cubatch.search.belief import Array, Belief, Seen, believe
from cubatch.search.noise import Noise, Record, estimate
from cubatch.search.posterior import Posterior
from cubatch.search.recommend import recommend

KNOWN = 0.5
"""The search ends where going on would win, on average, less than this share of the tolerance."""
LEAST_TOLERANCE = 0.005  # finer than this, two runs of one program differ by its place in memory
UNTRIED, UNTRIED_SHARE = 1.5, 0.4  # steps so much longer than any measured are guesses: a trial may take this share
SURE = 1.645  # standard deviations: 90 % two-sided
RUNS_BEYOND, TRIES_ON = 0.25, 1.5  # probability that a size runs though one that is so much smaller failed
RUNS_BEYOND_ERROR = 0.5  # the same where the smaller size failed otherwise: an error may concern that size alone


@attrs.frozen(kw_only=True)
class Situation:
    """
    All that a decision rests on.

    Attributes:
        goal: What is to be as good as possible.
        ladder: Sizes that may be measured.
        favored: Sizes that may be recommended on equal terms; others must beat their favored neighbors clearly.
        model: Predicted seconds of a step, by size; None without a prediction.
        records: The timings, by size; also of sizes that are not in the ladder.
        closed: Sizes that are not measured again.
        failed: Sizes among them that failed, by memory or otherwise, and never ran: larger sizes mostly fail too.
        broken: The failed sizes that ended by "error" or "timeout", with that status.
        visit_seconds: What a trial of a size takes, given seconds of a step.
        left, budget: Seconds.
        extends: Whether sizes that are not in the ladder may be measured.
        multiple: Sizes that are not in the ladder are multiples of it.
        seed: Orders trials.
    """

    goal: Goal
    ladder: Collection[int]
    favored: Collection[int] | None = None
    model: Mapping[int, float] | None
    records: Mapping[int, Record]
    closed: Collection[int]
    failed: Collection[int]
    visit_seconds: Callable[[int, float], float]
    left: float
    budget: float
    broken: Mapping[int, str] = attrs.field(factory=dict)
    extends: bool
    multiple: int = 1
    seed: int = 0


class View:
    """
    One look at a situation; what is expensive is computed on first use.

    Attributes:
        read: Records of the sizes whose cost was measured, ascending.
        seconds: Estimated seconds of a step at the usual host speed, of each of these sizes.
        answer, fastest: The sizes that would be recommended and have the best posterior mean now; None without one.
    """

    def __init__(self, situation: Situation) -> None:
        self.of, self.goal = situation, situation.goal
        self.tolerance = -math.log(1 - max(self.goal.tolerance, LEAST_TOLERANCE))
        records = dict(sorted(situation.records.items()))
        posterior = Posterior.of({n: record.timings for n, record in records.items() if record.timings}, self.goal)
        self.noise: Noise = posterior.noise
        self.read = {n: record for n, record in records.items() if record.has_cost}
        self.seen = [seen for record in self.read.values() if (seen := estimate(record, self.noise)) is not None]
        timed = {n: posterior.seconds_of(n, ())[0] for n in self.read}
        self.seconds = {n: seconds for n, seconds in timed.items() if seconds is not None}
        able = [n for n in self.read if self.is_able(n)]
        self.answer: int | None = None
        self.fastest: int | None = None
        if able:
            found = recommend(self.belief, able, self.goal, favored=situation.favored)
            self.answer, self.fastest = found.batch_size, found.fastest

    def is_able(self, n: int) -> bool:
        """Return whether a measured size may be the answer."""
        limit = self.goal.latency_limit
        return n not in self.of.failed and (limit is None or self.seconds[n] <= limit)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """All sizes that may be measured, or were: between two of the ladder only once both have an outcome."""
        of = self.of
        known = {n for n in of.ladder if n not in of.closed} | set(self.read)
        if not of.extends:
            return sorted(known)
        tried = set(self.read) | set(of.failed)
        pairs = itertools.pairwise(sorted(known | set(of.failed)))
        between = {n for pair in pairs if tried.issuperset(pair) for n in race.openings(pair, of.multiple)}
        return sorted(known | (between - set(of.closed)))

    @functools.cached_property
    def belief(self) -> Belief:
        """The posterior of the log step cost at all sizes."""
        noise = self.noise
        return believe(self.seen, self.sizes, slope_variance=noise.slope_variance, host=noise.is_paired)

    def place(self, n: int) -> int:
        """Return the position of a size in `sizes`."""
        return int(np.searchsorted(self.belief.sizes, n))

    @functools.cached_property
    def steps(self) -> Array:
        """Expected seconds of a step."""
        if self.goal.objective != "energy":
            return np.exp(self.belief.mean)
        seen = [Seen(n, math.log(seconds), self.noise.variance(1)) for n, seconds in self.seconds.items()]
        return np.exp(believe(seen, self.sizes).mean)

    @functools.cached_property
    def visit_seconds(self) -> Array:
        """Expected seconds of a trial."""
        pairs = zip(self.sizes, self.steps, strict=True)
        return np.array([self.of.visit_seconds(n, float(seconds)) for n, seconds in pairs])

    @functools.cached_property
    def allowed(self) -> Array:
        """Probability that a size runs and keeps the latency limit; 0 where the budget does not hold a trial."""
        in_reach = self.visit_seconds <= self.within_reach
        if self.noise.is_paired and self.of.favored is not None:  # on a CPU only round sizes win
            in_reach &= np.isin(self.sizes, list(self.of.favored))
        return np.where(in_reach | np.isin(self.sizes, list(self.read)), self.may_run, 0.0)

    @functools.cached_property
    def may_run(self) -> Array:
        """Probability that a size runs and keeps the latency limit, whatever the budget holds."""
        top = max((n for n in self.read if n not in self.of.failed), default=0)
        return np.array([self._runs(n, top) * self._keeps_limit(place) for place, n in enumerate(self.sizes)])

    @functools.cached_property
    def walls(self) -> set[int]:
        """
        Failed sizes above which the others are expected to fail too.

        One error above all that ran may be of that size alone; two are not.
        """
        top = max((n for n in self.read if n not in self.of.failed), default=0)
        errors = [n for n in self.of.failed if n > top and self.of.broken.get(n) == "error"]
        return set(self.of.failed) - (set(errors) if len(errors) == 1 else set())

    def _runs(self, n: int, top: int) -> float:
        """Return how likely a size runs: memory need not be monotone, but near a size that failed it mostly is."""
        if n in self.read or n < top:
            return 1.0
        probability, last = 1.0, top
        if any(top < size < n for size in self.of.failed if size not in self.walls):
            probability = RUNS_BEYOND_ERROR
        for size in sorted(size for size in self.walls if size > top):
            if size > n:
                return (size - n) / (size - top) if last == top else 0.0
            if size > TRIES_ON * last or last == top:  # what bisection tried in between says nothing new
                probability *= RUNS_BEYOND
            last = size
        return probability if n > TRIES_ON * last or last == top else 0.0

    def _keeps_limit(self, place: int) -> float:
        limit, n = self.goal.latency_limit, self.sizes[place]
        if limit is None:
            return 1.0
        if n in self.read:
            return float(self.is_able(n))
        far = (math.log(limit) - math.log(self.steps[place])) / max(self.belief.sd[place], LEAST_TOLERANCE)
        return 0.5 * math.erfc(-far / math.sqrt(2))

    @functools.cached_property
    def field(self) -> race.Field:
        """What the value of a trial is computed from; only where there is an answer."""
        if self.answer is None:
            raise ValueError("no measured size may be the answer")
        value = -self.belief.mean
        if self.goal.objective != "latency":
            value = value + np.log(self.belief.sizes)
        return race.Field(self.belief, value, self.allowed, self.place(self.answer), self.tolerance)

    @functools.cached_property
    def lost(self) -> Array:
        """The loss of answering now, in draws from the posterior."""
        return race.losses(self.field)

    @functools.cached_property
    def to_gain(self) -> Array:
        """The same if the budget held every trial: where it holds none, nothing is lost by ending."""
        return race.losses(attrs.evolve(self.field, allowed=self.may_run))

    def gain(self, n: int) -> float:
        """Return how far a size's posterior mean is above that of the fastest, as a logarithm."""
        fastest = self.fastest or n
        return float(self.field.value[self.place(n)] - self.field.value[self.place(fastest)])

    def ahead(self, n: int) -> tuple[float, float]:
        """Return the mean and standard deviation of how far a size is above the answer, as a logarithm."""
        place, answer = self.place(n), self.field.answer
        return float(self.field.value[place] - self.field.value[answer]), self.belief.difference_sd(place, answer)

    def shuffled(self, sizes: Sequence[int]) -> list[int]:
        """Return sizes in an order that the seed and the number of timings fix."""
        count = sum(len(record.timings) for record in self.read.values())
        return [sizes[place] for place in default_rng((self.of.seed, count)).permutation(len(sizes))]

    def affordable(self, n: int, share: float = 1.0) -> bool:
        """Return whether a trial of a size takes at most this share of what is left."""
        return bool(self.visit_seconds[self.place(n)] <= share * self.within_reach[self.place(n)])

    @functools.cached_property
    def within_reach(self) -> Array:
        """What a trial may take: what is left, or a part of that where steps are longer than any measured."""
        longest = max(self.seconds.values(), default=0.0)
        return np.where(self.steps > UNTRIED * longest, UNTRIED_SHARE, 1.0) * self.of.left
