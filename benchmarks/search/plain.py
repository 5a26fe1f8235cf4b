"""
Devices of which nothing is known but how to run them: curves and noises of many kinds.

The tuner is given powers of two and 1.5 times them up to a maximum, no memory plan and no model of
time.  The largest step takes some 20 ms to 1 s.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import attrs

from benchmarks.search.cases import Case, Traits, log_uniform
from benchmarks.search.sessions import Bimodal, Noise
from tests.fakes import Curve, Drift, affine, cliff


class Callables(Traits):
    """Something that can be called: an ordinary curve, on which the class may put another."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.tells_clock = rng.random() < 0.5
        self.full_seconds = log_uniform(rng, 0.02, 1.0)
        self.seconds_per_sample = self.full_seconds / self.max_batch_size
        self.half = 10 ** rng.uniform(0.0, 2.0)  # samples at which half of the best throughput is reached
        self.curve = self.ordinary(rng)

    def smooth(self) -> Curve:
        """Rise to a plateau."""
        return affine(self.seconds_per_sample * self.half, self.seconds_per_sample)

    def ordinary(self, rng: random.Random) -> Curve:
        """Draw a plateau, a sawtooth, or a broad peak."""
        shape = rng.choice(("plateau", "plateau", "sawtooth", "crest"))
        if shape == "sawtooth":
            return self.sawtooth(rng)
        smooth = self.smooth()
        if shape == "plateau":
            return smooth
        lost, power = rng.uniform(0.05, 0.4), rng.uniform(0.5, 2.0)
        return lambda n: smooth(n) * (1.0 + lost * (n / self.max_batch_size) ** power)

    def sawtooth(self, rng: random.Random) -> Curve:
        """Run a share of the work in waves of a period that no finder knows."""
        period = int(log_uniform(rng, 3.0, max(4.0, self.max_batch_size / 3)))
        tail, share = rng.choice((1.0, 0.55)), rng.uniform(0.3, 1.0)
        overhead, per_sample = self.seconds_per_sample * self.half, self.seconds_per_sample

        def seconds(batch_size: int) -> float:
            full, rest = divmod(batch_size, period)
            waves = full + (tail + (1.0 - tail) * rest / period if rest else 0.0)
            return overhead + per_sample * (share * period * waves + (1.0 - share) * batch_size)

        return seconds


def _plateau(traits: Callables, rng: random.Random) -> None:
    """Half of the best throughput at a twentieth of the maximum, or sooner."""
    traits.half = log_uniform(rng, 1.0, traits.max_batch_size / 20)
    traits.curve = traits.smooth()


def _sawtooth(traits: Callables, rng: random.Random) -> None:
    traits.curve = traits.sawtooth(rng)


def _cache_cliff(traits: Callables, rng: random.Random) -> None:
    """Above some size each step is slower, at once or more and more over the next doubling."""
    at, factor = int(traits.max_batch_size ** rng.uniform(0.5, 0.95)), rng.uniform(1.05, 1.6)
    before = traits.curve
    if rng.random() < 0.5:
        traits.curve = cliff(before, at, factor)
    else:
        traits.curve = lambda n: before(n) * (1.0 + (factor - 1.0) * min(max(n / at - 1.0, 0.0), 1.0))


def _drift(traits: Callables, rng: random.Random) -> None:
    period = rng.choice((None, 15.0, 60.0))
    traits.behaviours.append(Drift(rng.uniform(0.03, 0.10), seconds=rng.uniform(5.0, 40.0), period=period))
    traits.is_stationary = False


def _noise(traits: Callables, rng: random.Random) -> None:
    traits.noise_of_timings = Noise(rng.uniform(0.02, 0.10), outliers=rng.choice((0.0, 0.05)))


def _heavy_tails(traits: Callables, rng: random.Random) -> None:
    spread = rng.uniform(0.005, 0.03)
    if rng.random() < 0.5:
        traits.noise_of_timings = Noise(spread, freedom=rng.choice((1.5, 2.0, 3.0)))
    else:
        traits.noise_of_timings = Noise(spread, late=rng.choice((1.0, 1.5, 2.0)))


def _bimodal(traits: Callables, rng: random.Random) -> None:
    dwells = log_uniform(rng, 0.2, 5.0), log_uniform(rng, 0.2, 5.0)
    traits.behaviours.append(Bimodal(rng.uniform(0.05, 0.20), *dwells, seed=rng.randrange(2**31)))
    traits.is_stationary = False


def _rise_to_memory(traits: Callables, rng: random.Random) -> None:
    """A fixed cost of one to six times the work of the largest batch that fits, which is no rung of the ladder."""
    rungs = {candidate.batch_size for candidate in traits.candidates()}
    traits.true_limit = int(traits.max_batch_size * rng.uniform(0.3, 0.95))
    while traits.true_limit in rungs:
        traits.true_limit += 1
    traits.memory_fails_at = rng.choice(("prepare", "step"))
    fixed = rng.uniform(1.0, 6.0)
    work_seconds = traits.full_seconds / (1.0 + fixed)
    traits.curve = affine(fixed * work_seconds, work_seconds / traits.true_limit)


def _prime(traits: Callables, rng: random.Random) -> None:
    """A narrow peak at a prime: as steep on both sides, or one that falls at once behind it."""
    top = traits.max_batch_size
    wanted = int(log_uniform(rng, max(11.0, top**0.5), 0.95 * top))
    prime = next(n for n in range(wanted, 1, -1) if all(n % d for d in range(2, math.isqrt(n) + 1)))
    height, width = rng.uniform(0.03, 0.15), log_uniform(rng, 0.02, 0.2) * prime
    one_sided = rng.random() < 0.5
    # What a plateau still gains above the prime must be less than the peak.
    traits.half = min(traits.half, 0.3 * height * prime)
    smooth = traits.smooth()

    def seconds(n: int) -> float:
        bump = 0.0 if one_sided and n > prime else max(0.0, 1.0 - abs(n - prime) / width)
        return smooth(n) / (1.0 + height * bump)

    traits.curve = seconds


def _latency(traits: Callables, rng: random.Random) -> None:
    """A step takes the same up to some size: a floor, waves, or slow small sizes besides."""
    traits.goal = attrs.evolve(traits.goal, objective="latency")
    knee = log_uniform(rng, 2.0, traits.max_batch_size / 2)
    shape = rng.choice(("floor", "waves", "slow small ones"))
    floor = traits.seconds_per_sample * knee
    if shape == "waves":
        wave = max(2, int(knee))
        traits.curve = lambda n: floor * (0.2 + 0.8 * -(-n // wave))
        return
    power = rng.uniform(3.0, 10.0)
    slow_below, slower = int(log_uniform(rng, 2.0, max(3.0, knee))), rng.uniform(0.05, 0.3)

    def seconds(n: int) -> float:
        slow = 1.0 + slower * (shape == "slow small ones" and n < slow_below)
        return floor * (1.0 + (n / knee) ** power) ** (1.0 / power) * slow

    traits.curve = seconds


def _latency_limit(traits: Callables, rng: random.Random) -> None:
    """A step may take what some size takes at which the throughput still rises."""
    at = max(2, int(traits.max_batch_size * rng.uniform(0.1, 0.9)))
    traits.half = at * log_uniform(rng, 0.3, 3.0)
    traits.seconds_per_sample /= 1.0 + traits.half / traits.max_batch_size
    traits.curve = traits.smooth() if rng.random() < 0.75 else traits.sawtooth(rng)
    low, high = traits.curve(at), traits.curve(at + 1)
    traits.goal = attrs.evolve(traits.goal, latency_limit=low + rng.random() * max(0.0, high - low) + 1e-12)


CLASSES: dict[str, Callable[[Callables, random.Random], None]] = {
    "plateau": _plateau,
    "sawtooth": _sawtooth,
    "cache cliff": _cache_cliff,
    "drift 3 to 10 %": _drift,
    "noise 2 to 10 %": _noise,
    "heavy tails": _heavy_tails,
    "bimodal clocks": _bimodal,
    "rise to a memory limit": _rise_to_memory,
    "peak at a prime": _prime,
    "latency": _latency,
    "latency limit": _latency_limit,
}
"""Classes of callables, and what each changes about an ordinary one."""


def make(kind: str, rng: random.Random) -> Case:
    """Make a callable of one class."""
    traits = Callables(rng)
    CLASSES[kind](traits, rng)
    return traits.case(kind, rng.randrange(2**31))
