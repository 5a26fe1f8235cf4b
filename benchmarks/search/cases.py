"""
A device, the request to a finder, and the regret of its result.

Regret is the share of throughput lost beyond the tolerance, by the true curve, against the best size that fits and
keeps the latency limit.  By latency it is the relative additional time.  A result that is missing or does not fit has a
regret of 1, which is the maximum.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Sequence

import attrs

from benchmarks.search.finders import GIB, Task
from benchmarks.search.sessions import LoadsCode, Noise, SearchDevice
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate
from cubatch.tuning import ladder
from cubatch.tuning.request import Request
from tests.fakes import Behaviour, ColdStart, Curve, affine

TOLERANCE = 0.01  # throughput that a finder may lose for a smaller batch, here and in the request to cubatch
WORST = 1.0  # regret of no answer
STILL_RISES = 0.95  # of the largest that is allowed: where the ideal answer is not below, the limit decides it
MAXIMA = (100, 128, 200, 256, 300, 400, 512, 700, 1000, 1024, 1500, 2048, 3000, 4096)
# Effects of any device, apart from loading code: caches and clocks are cold at first, as is the first step of a size.
ORDINARY_START = ColdStart(slower=0.02, seconds=0.5, first_step=2.0, first_step_of_size=2.0)


@attrs.frozen(kw_only=True)
class Case:
    """
    A device of the comparison.

    Attributes:
        kind: Its class.
        device: The truth, and what spoils the measuring of it.
        goal: The objective and its limits.
        task: Facts that rivals get.
        candidates: Lists the sizes that our search is given.
        planned_limit: The largest size that fits by the memory plan; None where there is none.
        largest: The largest size that fits, is allowed and keeps the latency limit.
        best_batch_size, best_cost: The best of all integers, and its true cost (see Goal).
        knee: The ideal answer: the smallest integer within TOLERANCE of the best, by latency the largest.
        is_limited: The ideal answer lies at a limit of memory or latency.
    """

    kind: str
    device: SearchDevice
    goal: Goal
    task: Task
    candidates: Callable[[], Sequence[Candidate]]
    planned_limit: int | None
    largest: int
    best_batch_size: int
    best_cost: float
    knee: int
    is_limited: bool

    def cost(self, batch_size: int) -> float:
        """Return the true cost of a size."""
        return true_cost(self.goal, self.device.curve, batch_size)

    def is_usable(self, batch_size: int | None) -> bool:
        """Return whether a size fits and keeps the latency limit within the tolerance; False for None, no answer."""
        if batch_size is None or not self.device.fits(batch_size):
            return False
        limit = self.goal.latency_limit or math.inf
        return self.device.curve(batch_size) <= limit * (1.0 + TOLERANCE)

    def regret(self, batch_size: int | None, tolerance: float | None = None) -> float:
        """Return the regret of a size beyond the tolerance: 0 within it, 1 for None."""
        if batch_size is None or not self.is_usable(batch_size):
            return WORST
        goal = self.goal if tolerance is None else attrs.evolve(self.goal, tolerance=tolerance)
        times = self.cost(batch_size) / goal.allowed(self.best_cost)
        lost = times - 1.0 if goal.objective == "latency" else 1.0 - 1.0 / times
        return min(max(lost, 0.0), WORST)


def true_cost(goal: Goal, curve: Curve, batch_size: int) -> float:
    """Return the true cost of a size."""
    return curve(batch_size) / (1 if goal.objective == "latency" else batch_size)


def judged(
    kind: str,
    device: SearchDevice,
    goal: Goal,
    task: Task,
    candidates: Callable[[], Sequence[Candidate]],
    *,
    planned_limit: int | None = None,  # the largest size that fits by the memory plan; None without a plan
    sizes: Iterable[int] | None = None,  # the allowed sizes; None: all integers up to the maximum
) -> Case:
    """Return a case with the sizes that are best by the true times."""
    limit = goal.latency_limit or math.inf
    candidate_sizes = range(1, task.max_batch_size + 1) if sizes is None else sorted(sizes)
    allowed = [n for n in candidate_sizes if device.fits(n) and device.curve(n) <= limit]
    costs = {n: true_cost(goal, device.curve, n) for n in allowed}
    by_latency = goal.objective == "latency"
    best = min(allowed, key=lambda n: (costs[n], -n if by_latency else n))
    good = [n for n in allowed if costs[n] <= goal.allowed(costs[best])]
    knee, largest = max(good) if by_latency else min(good), allowed[-1]
    return Case(
        kind=kind,
        device=device,
        goal=goal,
        task=task,
        candidates=functools.cache(candidates),
        planned_limit=planned_limit,
        largest=largest,
        best_batch_size=best,
        best_cost=costs[best],
        knee=knee,
        is_limited=not by_latency and largest < candidate_sizes[-1] and knee >= STILL_RISES * largest,
    )


class Traits:
    """Traits that are drawn for every device, before its class changes some of them."""

    parameters = 1_000_000

    def __init__(self, rng: random.Random) -> None:
        self.max_batch_size = rng.choice(MAXIMA)
        self.noise_of_timings = Noise(rng.choice((0.002, 0.003, 0.005, 0.01)), outliers=0.02)
        self.behaviours: list[Behaviour] = [ORDINARY_START]
        self.load_seconds = log_uniform(rng, 0.05, 1.0)
        self.is_stationary = True
        self.tells_clock = True
        self.prepare_seconds = log_uniform(rng, 0.005, 0.15)
        self.curve: Curve = affine(1e-3, 1e-5)
        self.goal = Goal(tolerance=TOLERANCE)
        self.total_bytes = rng.choice((8, 11, 16, 24, 40, 80)) * GIB
        self.fixed_bytes = int(rng.uniform(0.3, 1.0) * GIB)
        self.true_limit = int(self.max_batch_size * rng.uniform(1.0, 3.0))
        self.planned_limit: int | None = None
        self.memory_fails_at = "prepare"
        self.workspace: Callable[[int], int] = lambda batch_size: 0  # noqa: ARG005

    def candidates(self) -> list[Candidate]:
        """List the candidates for something of which nothing is known."""
        return ladder.plain(Request(max_batch_size=self.max_batch_size))

    def case(self, kind: str, seed: int) -> Case:
        """Put the device together, and look up its best size over all integers."""
        room = self.total_bytes - self.fixed_bytes
        bytes_per_sample = room // (self.true_limit + 1) + 1
        device = SearchDevice(
            self.curve,
            noise_of_timings=self.noise_of_timings,
            is_stationary=self.is_stationary,
            tells_clock=self.tells_clock,
            bytes_needed=lambda n: self.fixed_bytes + n * bytes_per_sample + self.workspace(n),
            memory_bytes=self.total_bytes,
            memory_fails_at=self.memory_fails_at,
            prepare_seconds=self.prepare_seconds,
            behaviours=(*self.behaviours, LoadsCode(self.load_seconds)),  # last: nothing multiplies it
            seed=seed,
        )
        task = Task(
            max_batch_size=self.max_batch_size,
            total_bytes=self.total_bytes,
            fixed_bytes=self.fixed_bytes,
            bytes_per_sample=room / ((self.planned_limit or self.true_limit) + 1),
            parameters=self.parameters,
            goal=self.goal,
        )
        return judged(kind, device, self.goal, task, self.candidates, planned_limit=self.planned_limit)


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """Draw a number whose logarithm is uniform."""
    return low * (high / low) ** rng.random()
