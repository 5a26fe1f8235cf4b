"""
Sessions on fake devices, fast enough for thousands of searches, whose true median timing is known.

They differ from those of `tests.fakes` in three things.  A timing of many steps advances in leaps of some milliseconds
instead of step by step.  Its noise may have heavy tails.  A session records how fast its device was, so that stated
intervals can be judged.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable

import attrs
import numpy as np

from cubatch.measure.runner import Reading
from tests.fakes import BOOST_CLOCK_MHZ, Behaviour, FakeClock, FakeDevice, FakeRunner

LEAP_SECONDS = 0.005  # interval of behaviors within a timing; they change after 0.2 s at the earliest
SLOWEST, QUICKEST = 10.0, 0.5  # limits of the noise factor of a timing, also with heavy tails
_DRAWS = 1024
_MEDIAN_DRAWS = 200_000  # errs by 1/350 of a spread


@attrs.frozen
class Noise:
    """
    Noise factors of timings.

    Attributes:
        spread: Relative spread of ordinary timings.
        outliers: Share of timings that are 5 % to 100 % too long.
        freedom: Degrees of freedom of Student's t, which logarithms follow; None is the normal distribution.
        late: Timings are late by `spread` times a lognormal factor of this sigma, never early; None is symmetric.
    """

    spread: float = 0.0
    outliers: float = 0.0
    freedom: float | None = None
    late: float | None = None

    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draw factors, all of them positive."""
        if self.late is not None:
            factors = 1.0 + self.spread * np.exp(self.late * rng.standard_normal(count))
        elif self.freedom is not None:
            factors = np.exp(np.clip(self.spread * rng.standard_t(self.freedom, count), -5.0, 5.0))
        else:
            factors = np.exp(self.spread * rng.standard_normal(count))
        if self.outliers:
            factors *= np.where(rng.random(count) < self.outliers, 1.0 + rng.uniform(0.05, 1.0, count), 1.0)
        return np.clip(factors, QUICKEST, SLOWEST)

    @property
    def median(self) -> float:
        """Median of the factors."""
        return _median(self)


@functools.lru_cache(maxsize=4096)
def _median(noise: Noise) -> float:
    return float(np.median(noise.sample(np.random.default_rng(0), _MEDIAN_DRAWS)))


@attrs.define
class LoadsCode(Behaviour):
    """
    The first step of a session takes longer because code is loaded, at any batch size.

    Attributes:
        seconds: How much longer.
    """

    seconds: float
    _is_loaded: bool = attrs.field(init=False, default=False)
    _added: float = attrs.field(init=False, default=0.0)

    def step(self, batch_size: int) -> None:  # noqa: ARG002
        """Load, once."""
        self._added, self._is_loaded = 0.0 if self._is_loaded else self.seconds, True

    def delay(self) -> float:
        """Return the additional seconds of the step."""
        return self._added


@attrs.define
class Bimodal(Behaviour):
    """
    The clock has two states and changes between them at random times.

    Attributes:
        slower: How much slower the low state is.
        fast_seconds, slow_seconds: How long each state lasts, on average.
        seed: Of the times.
    """

    slower: float
    fast_seconds: float
    slow_seconds: float
    seed: int
    _random: random.Random = attrs.field(
        init=False, default=attrs.Factory(lambda self: random.Random(self.seed), takes_self=True)
    )
    _is_slow: bool = attrs.field(init=False, default=False)
    _left: float = attrs.field(init=False, default=0.0)

    def __attrs_post_init__(self) -> None:
        self._is_slow = self._random.random() < self.slow_seconds / (self.fast_seconds + self.slow_seconds)
        self._left = self._dwell()

    def factor(self) -> float:
        """Slower in the low state."""
        return 1.0 + self.slower * self._is_slow

    def clock(self) -> float:
        """Show it in the SM clock."""
        return 1.0 / self.factor()

    def spend(self, seconds: float, *, busy: bool) -> None:  # noqa: ARG002 - the clock changes under rest, too
        """Change the state when its time has come."""
        self._left -= seconds
        while self._left <= 0.0:
            self._is_slow = not self._is_slow
            self._left += self._dwell()

    def _dwell(self) -> float:
        return self._random.expovariate(1.0 / (self.slow_seconds if self._is_slow else self.fast_seconds))


@attrs.frozen
class SearchDevice(FakeDevice):
    """
    A fake device for searches.

    Attributes:
        noise_of_timings: Noise of its timings; `noise` and `outliers` are not used.
        is_stationary: Whether its speed is constant, so that a timing has one true median.
        tells_clock: Whether timings come with the SM clock.
    """

    noise_of_timings: Noise = attrs.field(default=Noise(), kw_only=True)
    is_stationary: bool = attrs.field(default=True, kw_only=True)
    tells_clock: bool = attrs.field(default=True, kw_only=True)

    def __call__(self) -> Session:
        """Open a session."""
        return Session(self)


class QuickClock(FakeClock):
    """The virtual clock of a session: it leaps over the steps of a timing."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._session = session

    def time(self, step: Callable[[], None], repeats: int) -> Reading:
        """Run the step `repeats` times and read the stopwatch."""
        reading = self._read(step, repeats)
        return reading if self._session.tells_clock else attrs.evolve(reading, sm_clock_mhz=None)

    def _read(self, step: Callable[[], None], repeats: int) -> Reading:
        session = self._session
        if step != session.step or repeats < 2:
            return super().time(step, repeats)
        before = self._now
        session.reading_noise, session.was_throttled = session.draw_noise(), False
        try:
            step()  # the first of a size may be special
            session.leap(repeats - 1)
        finally:
            session.reading_noise = None
        return Reading(
            seconds=(self._now - before) / repeats,
            sm_clock_mhz=session.clock_mhz(),
            throttled=session.was_throttled,
        )


class Session(FakeRunner):
    """A session on a SearchDevice: a Runner that remembers how fast its device was."""

    def __init__(self, device: SearchDevice) -> None:
        super().__init__(device)
        self._clock = QuickClock(self)
        self.tells_clock = device.tells_clock
        self._noise_of_timings = device.noise_of_timings
        self._is_stationary = device.is_stationary
        self._generator = np.random.default_rng(device.seed)
        self._drawn: list[float] = []
        self._speeds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}

    def draw_noise(self) -> float:
        """Draw the noise factor of a timing."""
        if not self._drawn:
            self._drawn = self._noise_of_timings.sample(self._generator, _DRAWS).tolist()
        return self._drawn.pop()

    def clock_mhz(self) -> float:
        """Return the present SM clock."""
        return BOOST_CLOCK_MHZ * math.prod(behaviour.clock() for behaviour in self.behaviours)

    def leap(self, count: int) -> None:
        """Run `count` steps, some milliseconds at a time."""
        batch_size, clock, behaviours = self._batch_size or 0, self._clock, self.behaviours
        unhindered = self._true_seconds * (self.reading_noise or 1.0)
        while count:
            factor, throttled = 1.0, False
            for behaviour in behaviours:
                behaviour.step(batch_size)
                factor *= behaviour.factor()
                throttled |= behaviour.throttled
            seconds = unhindered * factor
            steps = min(count, max(1, int(LEAP_SECONDS / seconds)))
            clock.spend(seconds * steps, busy=True)
            self.was_throttled |= throttled
            if not self._is_stationary:
                self._speeds[throttled].append((factor, seconds * steps))
            self.steps += steps
            count -= steps

    def true_median(self, batch_size: int) -> float:
        """
        Return the true median of a timing of this size.

        If the device changes its speed, it is the median over random moments of this session without throttling, from
        timings of more than one step.
        """
        speeds = self._speeds[False] or self._speeds[True]
        seconds = self.device.curve(batch_size)
        if not speeds:
            return seconds * self._noise_of_timings.median
        factors, weights = np.array(speeds).T
        rng = np.random.default_rng(0)
        drawn = rng.choice(factors, 20_000, p=weights / weights.sum())
        return seconds * float(np.median(drawn * self._noise_of_timings.sample(rng, len(drawn))))
