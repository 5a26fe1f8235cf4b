"""
One look at all that was read: what a decision of the search rests on.

No clock and no device here: numbers in, numbers out.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import attrs
import numpy as np
from numpy.random import default_rng  # not when it is first used: its import swallows a Ctrl-C that comes meanwhile

from cubatch.measure import goal as goals
from cubatch.measure.counting import host_state
from cubatch.measure.goal import Goal
from cubatch.search import race
from cubatch.search.belief import Array, Belief, Seen, believe
from cubatch.search.history import Noise, Record, has_reference, noise_of, seen_of, suspect

KNOWN = 0.5
"""The answer is known where going on would win, on average, less than this share of the tolerance."""
LEAST_TOLERANCE = 0.005  # finer than this, two runs of one program differ by its place in memory
UNTRIED, UNTRIED_SHARE = 1.5, 0.4  # steps so much longer than any that was read are guesses: of what is left
SURE = 1.645  # standard deviations: 90 % two-sided
LEAST_VARIANCE = 1e-12  # of a difference of two sizes, which may be one
RUNS_BEYOND, TRIES_ON = 0.25, 1.5  # probability that a size runs though one that is so much smaller failed
RUNS_BEYOND_ERROR = 0.5  # the same of one that failed otherwise: an error may be of that size alone


@attrs.frozen(kw_only=True)
class Situation:
    """
    All that a decision rests on.

    Attributes:
        goal: What is to be as good as possible.
        ladder: Sizes that may be visited.
        model: What a model of time says of a step, by size; None where it says nothing of any.
        records: What was read, by size; also of sizes beside the ladder.
        closed: Sizes that are not visited any more.
        failed: Those of them that ran out of memory, or failed otherwise and never ran: larger sizes mostly do too.
        broken: Those of `failed` that ended otherwise than by memory: "error" or "timeout".
        visit_seconds: What a visit to a size takes, given seconds of a step.
        left, budget: Seconds.
        fruitless, fruitless_seconds: Visits since the best one found became clearly better, and what they took.
        visited: The size of each visit, in their order.
        extends: Whether sizes beside the ladder may be visited.
        multiple: Of which those are multiples.
        seed: Shuffles sweeps.
        untried_share: Share of what is left that a visit may take whose steps are much longer than any that was read.
    """

    goal: Goal
    ladder: Collection[int]
    model: Mapping[int, float] | None
    records: Mapping[int, Record]
    closed: Collection[int]
    failed: Collection[int]
    visit_seconds: Callable[[int, float], float]
    left: float
    budget: float
    broken: Mapping[int, str] = attrs.field(factory=dict)
    fruitless: int = 0
    fruitless_seconds: float = 0.0
    visited: Sequence[int] = ()
    extends: bool
    multiple: int = 1
    seed: int = 0
    untried_share: float = UNTRIED_SHARE


class View:
    """One look at a situation; what is dear to know is worked out when it is asked for."""

    def __init__(self, situation: Situation) -> None:
        self.of, self.goal = situation, situation.goal
        timings = itertools.chain.from_iterable(record.timings for record in situation.records.values())
        self.state = host_state(timings, self.goal)
        records = {n: attrs.evolve(record, state=self.state) for n, record in sorted(situation.records.items())}
        self.read = {n: record for n, record in records.items() if record.cost is not None}
        self.tolerance = -math.log(1 - max(self.goal.tolerance, LEAST_TOLERANCE))
        able = {n: 1 / (record.cost or math.inf) for n, record in self.read.items() if self.is_able(n)}
        if self.goal.objective == "latency":
            able = {n: 1 / value for n, value in able.items()}
        able = {n: value for n, value in able.items() if self.read[n].is_comparable} or able
        picked = goals.pick(able, self.goal) if able else None
        self.answer = picked[0] if picked else None
        self.fastest = picked[1] if picked else None

    def is_able(self, n: int) -> bool:
        """Whether a size that was read may be the answer."""
        limit = self.goal.latency_limit
        return n not in self.of.failed and (limit is None or self.read[n].seconds * self.read[n].times <= limit)

    @functools.cached_property
    def noise(self) -> Noise:
        """How far readings scatter."""
        return noise_of(self.read.values())

    @functools.cached_property
    def has_reference(self) -> bool:
        """See `history.has_reference`."""
        return has_reference(self.read.values())

    @functools.cached_property
    def suspects(self) -> set[int]:
        """Sizes that were read at a bad time, as others tell or a reference: nothing is ruled out by that."""
        return suspect(self.read)

    @functools.cached_property
    def seen(self) -> list[Seen]:
        """What was read, less what was read at a bad time."""
        return seen_of(self.read, self.noise)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """All sizes that may be visited, or were."""
        of = self.of
        known = {n for n in of.ladder if n not in of.closed} | set(self.read)
        found = set(known)
        if of.extends:
            found |= set(race.openings(known | set(of.failed), of.multiple)) - set(of.closed)
        return sorted(found)

    @functools.cached_property
    def belief(self) -> Belief:
        """What steps of all sizes may cost."""
        return believe(self.seen, self.sizes, self.model)

    @functools.cached_property
    def model(self) -> dict[int, float] | None:
        """Seconds by the model of time, between its sizes along straight lines of logarithms; None without a model."""
        known = self.of.model
        if known is None or self.goal.objective == "energy":
            return None
        at, given = np.log(sorted(known)), np.log([known[n] for n in sorted(known)])
        sizes = sorted({*self.sizes, *self.read})
        return dict(zip(sizes, np.exp(np.interp(np.log(sizes), at, given)).tolist(), strict=True))

    def place(self, n: int) -> int:
        """Say where a size stands in `sizes`."""
        return int(np.searchsorted(self.belief.sizes, n))

    @functools.cached_property
    def steps(self) -> Array:
        """Seconds of a step, as far as is believed."""
        if self.goal.objective != "energy":
            return np.exp(self.belief.mean)
        seen = [Seen(n, math.log(record.seconds), self.noise.variance(1)) for n, record in self.read.items()]
        return np.exp(believe(seen, self.sizes).mean)

    @functools.cached_property
    def visit_seconds(self) -> Array:
        """Seconds of a visit."""
        pairs = zip(self.sizes, self.steps, strict=True)
        return np.array([self.of.visit_seconds(n, float(seconds)) for n, seconds in pairs])

    @functools.cached_property
    def allowed(self) -> Array:
        """Probability that a size runs and keeps the latency limit; none where the budget does not hold a visit."""
        in_reach = (self.visit_seconds <= self.within_reach) | np.isin(self.sizes, list(self.read))
        return np.where(in_reach, self.may_run, 0.0)

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
        """Say how likely a size runs at all: memory need not be monotone, but near a size that failed it mostly is."""
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
        """What the rules of the race look at; only where there is an answer."""
        if self.answer is None:
            raise ValueError("no size that was read may be the answer")
        value = -self.belief.mean
        if self.goal.objective != "latency":
            value = value + np.log(self.belief.sizes)
        return race.Field(self.belief, value, self.allowed, self.place(self.answer), self.tolerance)

    @functools.cached_property
    def lost(self) -> Array:
        """What may be lost by answering now, in draws from what may be."""
        return race.losses(self.field)

    @functools.cached_property
    def to_gain(self) -> Array:
        """The same if the budget held every visit: where it holds none, nothing is lost by ending."""
        return race.losses(attrs.evolve(self.field, allowed=self.may_run))

    def gain(self, n: int) -> float:
        """Say how far a size is believed to be above the fastest one, as a logarithm."""
        fastest = self.fastest or n
        return float(self.field.value[self.place(n)] - self.field.value[self.place(fastest)])

    def ahead(self, n: int) -> tuple[float, float]:
        """Say how far a size is believed to be above the answer, as a logarithm, and how unsure that is."""
        place, answer, spread = self.place(n), self.field.answer, self.belief.covariance
        variance = spread[place, place] + spread[answer, answer] - 2 * spread[place, answer]
        return float(self.field.value[place] - self.field.value[answer]), math.sqrt(max(variance, LEAST_VARIANCE))

    def likely_ahead(self, n: int, by: float) -> float:
        """Say how likely a size is above the answer by more than this, as a logarithm."""
        mean, sd = self.ahead(n)
        return 0.5 * math.erfc((by - mean) / sd / math.sqrt(2))

    def shuffled(self, sizes: Sequence[int]) -> list[int]:
        """Give sizes in an order that the seed and the readings so far fix."""
        count = sum(len(record.timings) for record in self.read.values())
        return [sizes[place] for place in default_rng((self.of.seed, count)).permutation(len(sizes))]

    def affordable(self, n: int, share: float = 1.0) -> bool:
        """Whether a visit to a size takes at most this share of what is left."""
        return bool(self.visit_seconds[self.place(n)] <= share * self.within_reach[self.place(n)])

    @functools.cached_property
    def within_reach(self) -> Array:
        """What a visit may take: what is left, or a part of that where steps are longer than any that was read."""
        longest = max((record.seconds for record in self.read.values()), default=0.0)
        return np.where(self.steps > UNTRIED * longest, self.of.untried_share, 1.0) * self.of.left
