"""
Fake CPU hosts that switch between a fast and a slow state, as shared virtual machines do.

A state lasts 5 to 40 s.  A step takes 1.2 to 1.6 times as long in the slow state, and how much longer differs between
batch sizes.  Timings have 2 to 4 % of noise and 3 % of outliers.

    Ratios.PER_SIZE    each size has a ratio of its own; the truth is the fast state: the host without disturbance
    Ratios.SMOOTH      neighboring sizes have similar ratios, so that the two states have different best sizes; the
                       truth is the mean over both states.  A search that meets one state alone cannot know it.
"""

from __future__ import annotations

import enum
import functools
import math
import random
from collections.abc import Callable

import attrs
import numpy as np

from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate
from cubatch.measure.runner import Reading
from cubatch.tuning import ladder
from cubatch.tuning.request import Request

STATE_SECONDS = (5.0, 40.0)
SLOWER = (1.2, 1.6)
NOISE, OUTLIERS, OUTLIER_LATE = (0.02, 0.04), 0.03, (0.05, 1.0)
MAXIMA = (256, 512, 1024, 2048, 4096)
TOLERANCE = 0.01

Curve = Callable[[int], float]


class Ratios(enum.StrEnum):
    """How the slow/fast ratio varies between sizes."""

    PER_SIZE = "per size"
    SMOOTH = "smooth"


@attrs.frozen(kw_only=True, eq=False)
class Host:
    """
    A fake host and the workload on it.

    Attributes:
        ratios: How the slow/fast ratio varies between sizes, and what the truth is.
        max_batch_size: The largest size that may be tried.
        fast: Seconds of a step in the fast state, by batch size.
        times: How many times as long a step takes in the slow state, by batch size.
        noise: Standard deviation of the log of a clock reading.
        prepare_seconds: What preparing a size takes.
    """

    ratios: Ratios
    max_batch_size: int
    fast: Curve
    times: Curve
    noise: float
    prepare_seconds: float

    @classmethod
    def draw(
        cls, seed: int, index: int, spread: float, ratios: Ratios = Ratios.PER_SIZE, *, jumps: bool = False
    ) -> Host:  # fmt: skip
        """
        Return host `index` of a family.

        Args:
            seed: Of the family.
            index: Number of the host.
            spread: Standard deviation by which the log of the slow/fast ratio varies between sizes.
            ratios: How it varies.
            jumps: Whether steps from a small size on, or below it, take far longer, as on a busy host.
        """
        rng = random.Random(f"host {seed}/{index}")
        top = rng.choice(MAXIMA)
        fast = _with_jump(rng, _draw_curve(rng, top)) if jumps else _draw_curve(rng, top)
        ratio = rng.uniform(*SLOWER)
        waves = [(rng.uniform(3.0, 12.0), rng.uniform(0.0, 2 * math.pi)) for _ in range(3)]

        def times(n: int) -> float:
            if ratios is Ratios.PER_SIZE:
                return max(1.0, ratio * math.exp(random.Random(f"{seed}/{index}/{n}").gauss(0.0, spread)))
            shift = sum(math.cos(2 * math.pi * math.log2(n) / length + phase) for length, phase in waves)
            return max(1.0, ratio * math.exp(spread * math.sqrt(2 / len(waves)) * shift))

        return cls(
            ratios=ratios, max_batch_size=top, fast=functools.cache(fast), times=functools.cache(times),
            noise=rng.uniform(*NOISE), prepare_seconds=0.005 * 30 ** rng.random(),
        )  # fmt: skip

    def rate(self, n: int) -> float:
        """Return the true samples per second: of the fast state, or over both states, which last equally long."""
        return n / (self.fast(n) * (1.0 if self.ratios is Ratios.PER_SIZE else (1.0 + self.times(n)) / 2))

    @functools.cached_property
    def best_rate(self) -> float:
        """The best true rate of all sizes."""
        return max(self.rate(n) for n in range(1, self.max_batch_size + 1))

    def loss(self, n: int | None) -> float:
        """Return the share of the best rate that an answer loses; 1 for None, no answer."""
        return 1.0 if n is None else 1.0 - self.rate(n) / self.best_rate

    def candidates(self) -> list[Candidate]:
        """Return the sizes of the ladder."""
        return ladder.plain(Request(max_batch_size=self.max_batch_size))

    @property
    def goal(self) -> Goal:
        """The objective of a search."""
        return Goal(tolerance=TOLERANCE)


def _with_jump(rng: random.Random, curve: Curve) -> Curve:
    """Return a curve with 3 to 300 times the seconds of one sample added from 2, 3, 4 or 8 samples on, or below."""
    first, more = rng.choice((2, 3, 4, 8)), curve(1) * math.exp(rng.uniform(math.log(3), math.log(300)))
    rises = rng.random() < 0.5
    return lambda n: curve(n) + more * ((n >= first) == rises)


def _draw_curve(rng: random.Random, top: int) -> Curve:
    """Draw seconds of a step: mostly a plateau, at times with a slow rise, a jump, or small waves."""
    full, half = 0.05 * 30 ** rng.random(), 64 ** rng.random()
    shape, amount = rng.choice(("plateau", "plateau", "rise", "cliff", "teeth")), rng.random()
    edge, period = top ** rng.uniform(0.5, 0.95), rng.uniform(0.7, 2.0)

    def seconds(n: int) -> float:
        smooth = full * (half + n) / (half + top)
        if shape == "rise":
            return smooth * (1.0 + 0.08 * amount * max(0.0, 1.0 - math.log2(top / n) / 3.0))
        if shape == "cliff":
            return smooth * (1.0 + (0.03 + 0.12 * amount) * (n > edge))
        if shape == "teeth":
            return smooth * (1.0 + 0.02 * amount * math.sin(2 * math.pi * math.log2(n) / period))
        return smooth

    return seconds


class Session:
    """
    A runner in virtual time on a host.

    Args:
        host: The host.
        seed: Draws noise and the times at which the state changes.
    """

    peak_bytes = peak_device_bytes = None

    def __init__(self, host: Host, seed: int) -> None:
        self.host, self.clock, self.prepared = host, self, list[int]()
        self._random, self._states = np.random.default_rng((seed, 1)), np.random.default_rng((seed, 2))
        self._now, self._is_slow = 0.0, bool(self._states.random() < 0.5)
        self._changes_at = self._states.uniform(0.0, STATE_SECONDS[1])
        self._size, self._is_first = 0, False
        self._reference: tuple[int, int] | None = None

    # --- the clock ---

    def now(self) -> float:
        """Return the virtual seconds that passed."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Advance the virtual clock."""
        self._spend(seconds)

    def time(self, step: Callable[[], object], repeats: int) -> Reading:
        """Time `repeats` steps, between two blocks of the reference if there is one."""
        if step != self.step:
            raise ValueError("only the session's own step can be timed")
        if self._reference is None:
            return Reading(seconds=self._read(self._size, repeats))
        before = self._read(*self._reference, first=0.0)
        if repeats > 1:
            self._read(self._size, 1)  # not timed, as by `HostClock`
        seconds = self._read(self._size, repeats)
        after = self._read(*self._reference, first=0.0)
        return Reading(seconds=seconds, reference_before_seconds=before, reference_after_seconds=after)

    # --- the runner ---

    def prepare(self, batch_size: int) -> None:
        """Make a size ready: its first step takes twice as long."""
        self._spend(self.host.prepare_seconds)
        self._size, self._is_first = batch_size, True
        self.prepared.append(batch_size)

    def hold_reference(self, repeats: int) -> bool:
        """Keep the prepared size as the reference."""
        self._reference = self._size, repeats
        return True

    def step(self) -> None:
        """Run one step."""
        self._read(self._size, 1)

    def release(self) -> None:
        """There is nothing to give back."""

    def close(self) -> None:
        """There is nothing to give back."""

    def _read(self, size: int, repeats: int, first: float | None = None) -> float:
        """
        Run steps and return what a clock reads of one of them.

        `first` is what the first step takes on top, in steps; None: one step if it is the very first, else nothing.
        """
        if first is None:
            first, self._is_first = float(self._is_first), False
        work, seconds = self.host.fast(size) * (repeats + first), 0.0
        while work > 0.0:  # of the fast state's seconds, as many as pass before the state changes
            times = self.host.times(size) if self._is_slow else 1.0
            part = min(work, (self._changes_at - self._now) / times + 1e-12)
            self._spend(part * times)
            work, seconds = work - part, seconds + part * times
        factor = math.exp(self.host.noise * self._random.standard_normal())
        if self._random.random() < OUTLIERS:
            factor *= 1.0 + self._random.uniform(*OUTLIER_LATE)
        self._spend(seconds * max(0.0, factor - 1.0))
        return seconds * factor / repeats

    def _spend(self, seconds: float) -> None:
        self._now += seconds
        while self._now >= self._changes_at:
            self._is_slow = not self._is_slow
            self._changes_at += self._states.uniform(*STATE_SECONDS)
