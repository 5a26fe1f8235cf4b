"""
Devices that are not there: runners with a known curve, their own clock, and bad habits.

A FakeDevice says what is true (seconds of a step at every batch size, bytes it takes) and which
behaviours spoil the measuring of it.  Calling it opens a session, which is a Runner.  Time in a
session is virtual: `clock.now`, `clock.time` and `clock.sleep` all speak of it, preparing and
stepping spend it, and hours of it pass in milliseconds.  Everything random comes from the seed.

    device = FakeDevice(affine(2e-4, 1e-6), noise=0.01, behaviours=(ColdStart(), Throttling()), seed=3)
    runner = device()                      # a Runner; the device itself is a RunnerFactory
    device.true_best(1024)                 # (batch size, samples per second), over every integer

Noise belongs to a reading and not to a step: a reading of a thousand steps is as noisy as one
of a single step, as it is on hardware, where what disturbs a step disturbs its neighbours too.
"""

from __future__ import annotations

import copy
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterable

import attrs

from cubatch.errors import TimedOut
from cubatch.measure.runner import Reading

Curve = Callable[[int], float]

BOOST_CLOCK_MHZ = 1500.0


def _sizes(batch_sizes: Iterable[int]) -> frozenset[int]:
    return frozenset(batch_sizes)


class FakeOutOfMemoryError(MemoryError):
    """What CuPy raises: a MemoryError with numbers, of no class that cubatch defines."""


# --- curves: the truth ---------------------------------------------------------------------------------------


def affine(overhead_seconds: float, seconds_per_sample: float) -> Curve:
    """Give a fixed cost per step and a cost per sample: throughput rises smoothly to a plateau."""
    return lambda batch_size: overhead_seconds + seconds_per_sample * batch_size


def sawtooth(overhead_seconds: float, seconds_per_wave: float, samples_per_wave: int) -> Curve:
    """Give a step cost that grows a whole wave at a time."""
    return lambda batch_size: overhead_seconds + seconds_per_wave * math.ceil(batch_size / samples_per_wave)


def cliff(curve: Curve, at: int, factor: float) -> Curve:
    """Make every step above `at` samples `factor` times slower: a cache that no longer holds the work."""
    return lambda batch_size: curve(batch_size) * (factor if batch_size > at else 1.0)


# --- behaviours: what spoils the measuring -------------------------------------------------------------------


class Behaviour:
    """
    One bad habit of a device; a session works on its own copy, so state may be kept on `self`.

    `prepare` and `step` may raise; `factor` is how much slower than the truth a step runs now, `delay`
    what it takes on top; `spend` is told of every second that passes; `clock` is the share of the boost clock.
    """

    throttled = False

    def prepare(self, batch_size: int) -> None:
        """Be told of a size that is made ready."""

    def step(self, batch_size: int) -> None:
        """Be told of a step that is about to run."""

    def factor(self) -> float:
        """Give how many times slower than the truth a step runs now."""
        return 1.0

    def delay(self) -> float:
        """Give seconds that the step takes on top."""
        return 0.0

    def clock(self) -> float:
        """Give the share of the boost clock that the SM clock reads now."""
        return 1.0

    def spend(self, seconds: float, *, busy: bool) -> None:
        """Be told that time passed, with the device at work or idle."""


@attrs.define
class ColdStart(Behaviour):
    """
    The first seconds of work in a session are slower, and the very first step far slower.

    Attributes:
        slower: How much slower at first: 0.28 is what triton#2306 saw.
        seconds: Seconds of work until it has worn off, linearly.
        first_step: How many times longer the first step of the session takes (dorado#229: 54).
        first_step_of_size: The same for the first step after each `prepare`.
    """

    slower: float = 0.28
    seconds: float = 2.0
    first_step: float = 50.0
    first_step_of_size: float = 3.0
    _worked: float = attrs.field(default=0.0, init=False)
    _next_step: float = attrs.field(default=0.0, init=False)
    _current_step: float = attrs.field(default=1.0, init=False)

    def prepare(self, batch_size: int) -> None:
        """Make the next step a first one."""
        self._next_step = max(self._next_step, self.first_step_of_size) if self._worked else self.first_step

    def step(self, batch_size: int) -> None:
        """Take the penalty of a first step, once."""
        self._current_step, self._next_step = max(1.0, self._next_step), 1.0

    def factor(self) -> float:
        """Slower by what is left of the cold start."""
        return self._current_step * (1.0 + self.slower * max(0.0, 1.0 - self._worked / self.seconds))

    def spend(self, seconds: float, *, busy: bool) -> None:
        """Warm up by working."""
        if busy:
            self._worked += seconds


@attrs.define
class Drift(Behaviour):
    """
    The clock sinks slowly as the device warms: `amount` slower in the end, two thirds of it after `seconds`.

    With `period` the clock also swings up and down by as much again around that.
    """

    amount: float = 0.05
    seconds: float = 20.0
    period: float | None = None
    _now: float = attrs.field(default=0.0, init=False)

    def factor(self) -> float:
        """Slower by the drift so far."""
        swing = math.sin(2 * math.pi * self._now / self.period) if self.period else 0.0
        return 1.0 + self.amount * (1.0 - math.exp(-self._now / self.seconds) + swing)

    def clock(self) -> float:
        """Show the drift in the SM clock."""
        return 1.0 / self.factor()

    def spend(self, seconds: float, *, busy: bool) -> None:
        """Drift with time."""
        self._now += seconds


@attrs.define
class Throttling(Behaviour):
    """
    Work heats, rest cools; too hot, the device slows itself down and says so until it is cool again.

    Attributes:
        slower: How much slower while throttled.
        hot_after: Seconds of work, from cold, until it throttles.
        cool_at: It recovers when the heat has fallen to this share of `hot_after`.
        rest_cools: Seconds of work undone by a second of rest.
        throttled_cools: Seconds of work undone by a second of throttled work.
    """

    slower: float = 0.5
    hot_after: float = 4.0
    cool_at: float = 0.7
    rest_cools: float = 6.0
    throttled_cools: float = 0.5
    throttled: bool = attrs.field(default=False, init=False)
    _heat: float = attrs.field(default=0.0, init=False)

    def factor(self) -> float:
        """Slower while throttled."""
        return 1.0 + self.slower * self.throttled

    def clock(self) -> float:
        """Show it in the SM clock."""
        return 1.0 / self.factor()

    def spend(self, seconds: float, *, busy: bool) -> None:
        """Heat up or cool down, and throttle or recover."""
        if not busy:
            self._heat -= seconds * self.rest_cools
        elif self.throttled:
            self._heat -= seconds * self.throttled_cools
        else:
            self._heat += seconds
        self._heat = min(max(self._heat, 0.0), self.hot_after)
        if self._heat >= self.hot_after:
            self.throttled = True
        elif self._heat <= self.cool_at * self.hot_after:
            self.throttled = False


@attrs.define
class Fails(Behaviour):
    """Some sizes raise an error that is not about memory, as soon as they are prepared or at their first step."""

    at: frozenset[int] = attrs.field(converter=_sizes)
    error: Exception = attrs.field(factory=lambda: RuntimeError("an illegal memory access was encountered"))
    when: str = attrs.field(default="step", validator=attrs.validators.in_(("prepare", "step")))

    def prepare(self, batch_size: int) -> None:
        """Raise for one of the sizes."""
        if self.when == "prepare" and batch_size in self.at:
            raise self.error

    def step(self, batch_size: int) -> None:
        """Raise for one of the sizes."""
        if self.when == "step" and batch_size in self.at:
            raise self.error


@attrs.define
class Hangs(Behaviour):
    """
    Some sizes never come back.

    On the virtual clock a step of theirs takes `seconds`, longer than any budget; with `really` the
    process sleeps that long, for tests in which another process is watching.
    """

    at: frozenset[int] = attrs.field(converter=_sizes)
    seconds: float = 1e6
    really: bool = False
    _added: float = attrs.field(default=0.0, init=False)

    def step(self, batch_size: int) -> None:
        """Sleep, for real or virtually."""
        self._added = self.seconds if batch_size in self.at else 0.0
        if self._added and self.really:
            time.sleep(self.seconds)

    def delay(self) -> float:
        """Give the virtual seconds that the step takes on top."""
        return 0.0 if self.really else self._added


@attrs.define
class Dies(Behaviour):
    """Some sizes take the whole process with them, as the out-of-memory killer does. For tests of the worker only."""

    at: frozenset[int] = attrs.field(converter=_sizes)
    signal: int = signal.SIGKILL

    def step(self, batch_size: int) -> None:
        """Kill this process."""
        if batch_size in self.at:
            os.kill(os.getpid(), self.signal)


# --- the device and its sessions -----------------------------------------------------------------------------


@attrs.frozen
class FakeDevice:
    """
    A device whose truth is known; calling it opens a session, a Runner.

    Attributes:
        curve: True seconds of one step at a batch size.
        noise: Relative spread of a reading: 0.002 to 0.05 is what hardware shows.
        outliers: Share of readings that are disturbed, and come out 5 % to 100 % too long.
        bytes_needed: Device memory that a batch size takes; it need not be monotone. None: 1 KiB a sample.
        memory_bytes: What there is; a size that needs more raises FakeOutOfMemoryError. None: no limit.
        memory_fails_at: Where it raises: "prepare", or "step" for memory that is taken lazily; "never" where what is
            not there is taken from somewhere else.
        joules: True energy of one step at a batch size; None: the device does not tell.
        prepare_seconds: What making a size ready costs, in virtual seconds.
        gives_up: Sessions have a `step_seconds`, and cut a reading that takes longer with TimedOut, as a worker does.
        behaviours: Bad habits; each session gets fresh copies.
        seed: Of the noise. The same device opened twice reads the same.
    """

    curve: Curve
    noise: float = attrs.field(default=0.0, kw_only=True)
    outliers: float = attrs.field(default=0.0, kw_only=True)
    bytes_needed: Callable[[int], int] = attrs.field(default=lambda batch_size: 1024 * batch_size, kw_only=True)
    memory_bytes: int | None = attrs.field(default=None, kw_only=True)
    memory_fails_at: str = attrs.field(
        default="prepare", kw_only=True, validator=attrs.validators.in_(("prepare", "step", "never"))
    )
    joules: Curve | None = attrs.field(default=None, kw_only=True)
    prepare_seconds: float = attrs.field(default=0.02, kw_only=True)
    gives_up: bool = attrs.field(default=False, kw_only=True)
    behaviours: tuple[Behaviour, ...] = attrs.field(default=(), kw_only=True)
    seed: int = attrs.field(default=0, kw_only=True)

    def __call__(self) -> FakeRunner:
        """Open a session."""
        return ImpatientFakeRunner(self) if self.gives_up else FakeRunner(self)

    def fits(self, batch_size: int) -> bool:
        """Say whether a size truly fits."""
        return self.memory_bytes is None or self.bytes_needed(batch_size) <= self.memory_bytes

    def throughput(self, batch_size: int) -> float:
        """Give the true samples per second."""
        return batch_size / self.curve(batch_size)

    def true_best(self, limit: int) -> tuple[int, float]:
        """Give the best size among all integers up to `limit` that fit, the smallest on a tie, and its samples/s."""
        sizes = [batch_size for batch_size in range(1, limit + 1) if self.fits(batch_size)]
        best = max(sizes, key=lambda batch_size: (self.throughput(batch_size), -batch_size))
        return best, self.throughput(best)


class FakeClock:
    """The virtual clock of a session, and the stopwatch of its device."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self._now = 0.0

    def now(self) -> float:
        """Virtual seconds since the session was opened."""
        return self._now

    def free_bytes(self) -> int | None:
        """Bytes of the device's memory that nobody holds; None where it has no limit."""
        memory = self._runner.device.memory_bytes
        return None if memory is None else max(0, memory - (self._runner.peak_bytes or 0))

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass with the device idle."""
        self.spend(seconds, busy=False)

    def time(self, step: Callable[[], None], repeats: int) -> Reading:
        """Run the step `repeats` times and read the virtual stopwatch."""
        runner, before = self._runner, self._now
        runner.reading_noise, runner.was_throttled = runner.draw_noise(), False
        runner.reading_deadline = before + runner.longest_reading()
        try:
            for _ in range(repeats):
                step()
        finally:
            runner.reading_noise, runner.reading_deadline = None, math.inf
        return Reading(
            seconds=(self._now - before) / repeats,
            sm_clock_mhz=BOOST_CLOCK_MHZ * math.prod(behaviour.clock() for behaviour in runner.behaviours),
            throttled=runner.was_throttled,
            joules=runner.true_joules,
        )

    def spend(self, seconds: float, *, busy: bool) -> None:
        """Let virtual time pass."""
        self._now += seconds
        for behaviour in self._runner.behaviours:
            behaviour.spend(seconds, busy=busy)


class FakeRunner:
    """
    A session on a FakeDevice: a Runner.

    Attributes:
        prepared: Every batch size that was prepared, in order, also those that failed: the trials.
        ran: Sizes of which at least one step came back.
        steps: Steps that came back.
    """

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.behaviours = copy.deepcopy(device.behaviours)
        self.prepared: list[int] = []
        self.ran: set[int] = set()
        self.steps = 0
        self.closed = False
        self.reading_noise: float | None = None
        self.reading_deadline = math.inf
        self.was_throttled = False
        self._random = random.Random(device.seed)
        self._clock = FakeClock(self)
        self._batch_size: int | None = None
        self._true_seconds = 0.0
        self.true_joules: float | None = None
        self._peak_bytes: int | None = None

    @property
    def clock(self) -> FakeClock:
        """The virtual clock."""
        return self._clock

    @property
    def peak_bytes(self) -> int | None:
        """Bytes that the prepared size takes."""
        return self._peak_bytes

    @property
    def peak_device_bytes(self) -> int | None:
        """Unknown: a fake has no driver."""
        return None

    def prepare(self, batch_size: int) -> None:
        """Make a size ready: spends virtual time, and raises where it does not fit."""
        self.prepared.append(batch_size)
        self._batch_size = None
        self._clock.spend(self.device.prepare_seconds, busy=False)
        if self.device.memory_fails_at == "prepare":
            self._take_memory(batch_size)
        for behaviour in self.behaviours:
            behaviour.prepare(batch_size)
        self._peak_bytes = self.device.bytes_needed(batch_size)
        self._batch_size, self._true_seconds = batch_size, self.device.curve(batch_size)
        self.true_joules = self.device.joules(batch_size) if self.device.joules else None

    def step(self) -> None:
        """Run one step: spends as much virtual time as the truth, the noise and the behaviours ask for."""
        if self._batch_size is None:
            raise RuntimeError("step() without a prepared batch size")
        if self.device.memory_fails_at == "step":
            self._take_memory(self._batch_size)
        seconds = self._true_seconds * (self.draw_noise() if self.reading_noise is None else self.reading_noise)
        for behaviour in self.behaviours:
            behaviour.step(self._batch_size)
            seconds = seconds * behaviour.factor() + behaviour.delay()
            self.was_throttled |= behaviour.throttled
        left = self.reading_deadline - self._clock.now()
        if seconds > left:
            self._clock.spend(left, busy=True)
            raise TimedOut(f"a reading of batch size {self._batch_size}", self.longest_reading())
        self._clock.spend(seconds, busy=True)
        self.ran.add(self._batch_size)
        self.steps += 1

    def release(self) -> None:
        """Give back what was prepared."""
        self._batch_size, self._peak_bytes = None, None

    def close(self) -> None:
        """End the session."""
        self.release()
        self.closed = True

    def longest_reading(self) -> float:
        """Give the seconds that a reading may take; this runner waits for ever."""
        return math.inf

    def draw_noise(self) -> float:
        """Draw what a reading is multiplied by."""
        device = self.device
        noise = math.exp(device.noise * self._random.gauss(0.0, 1.0)) if device.noise else 1.0
        if device.outliers and self._random.random() < device.outliers:
            noise *= 1.0 + self._random.uniform(0.05, 1.0)
        return noise

    def _take_memory(self, batch_size: int) -> None:
        if not self.device.fits(batch_size):
            raise FakeOutOfMemoryError(
                f"{self.device.bytes_needed(batch_size):,} bytes asked, {self.device.memory_bytes:,} are there"
            )


class ImpatientFakeRunner(FakeRunner):
    """A session that gives up on a reading that takes longer than `step_seconds`, which whoever measures sets."""

    step_seconds: float | None = None

    def longest_reading(self) -> float:
        """Give the seconds that a reading may take."""
        return math.inf if self.step_seconds is None else self.step_seconds
