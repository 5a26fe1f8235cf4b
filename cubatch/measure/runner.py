"""
Runners: what can be prepared for a batch size and stepped.

The profiler knows nothing of networks or GPUs.  It is given a Runner, which may be a network on
our engine, a user's callable, a process far away, or a fake with a clock of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NotRequired, Protocol, TypedDict, runtime_checkable

import attrs

REFERENCE_SHARE = 0.05
"""Of the memory that a run may take, that a reference step may hold: sizes near the limit are to run next to it."""


@attrs.frozen(kw_only=True)
class Reading:
    """
    What one clock reading gave.

    Attributes:
        seconds: Mean time of one step, over `repeats` back-to-back steps.
        sm_clock_mhz: SM clock while it ran; None where it cannot be read.
        throttled: Whether the device says that it slowed itself down meanwhile.
        joules: Energy of one step; None where it cannot be read.
        event_reasons: All reasons for that clock, bits of nvml.h; None where they cannot be read.
        temperature_celsius, power_watts, utilization_percent, used_bytes: What the GPU was like right after it, as
            `nvml_records.Vitals`; None where they cannot be read.
        reference_before_seconds, reference_after_seconds: Mean time of one reference step right before and right after
            the timed steps; None where the runner holds no reference.
    """

    seconds: float
    sm_clock_mhz: float | None = None
    throttled: bool = False
    joules: float | None = None
    event_reasons: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    utilization_percent: float | None = None
    used_bytes: int | None = None
    reference_before_seconds: float | None = None
    reference_after_seconds: float | None = None


class Clock(Protocol):
    """How a runner's time is told: the budget's clock, and the stopwatch of the device."""

    def now(self) -> float:
        """Seconds on a monotone clock, for budgets and deadlines."""
        ...

    def time(self, step: Callable[[], object], repeats: int) -> Reading:
        """Run `step` `repeats` times back to back and say how long one took on the device."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let the device rest."""
        ...


class Runner(Protocol):
    """
    One thing to tune, that can be prepared for any batch size and stepped.

    `prepare` replaces whatever was prepared before; it raises OutOfMemory (or a foreign error that
    `is_out_of_memory` knows) where the size does not fit.
    """

    @property
    def clock(self) -> Clock:
        """The clock that its time is told by."""
        ...

    @property
    def peak_bytes(self) -> int | None:
        """High water of device memory taken by the engine since the last `prepare`; None where unknown."""
        ...

    @property
    def peak_device_bytes(self) -> int | None:
        """What the driver says the process holds, context included; None where unknown."""
        ...

    def prepare(self, batch_size: int) -> None:
        """Make ready for steps of this batch size."""
        ...

    def step(self) -> object:
        """Enqueue one step of the prepared batch size; what it returns the clock waits for, where that is possible."""
        ...

    def release(self) -> None:
        """Give back what the last `prepare` took, also after an error: pools are emptied."""
        ...

    def close(self) -> None:
        """Release everything for good."""
        ...


@runtime_checkable
class HasWorker(Protocol):
    """A runner whose work is done in a process of its own, which a failure may leave broken."""

    def restart(self) -> None:
        """End that process: the next `prepare` has a new one."""
        ...


@runtime_checkable
class HoldsReference(Protocol):
    """
    A runner that can time a reference step before and after each reading.

    The reference is the same workload at a small fixed batch size.  Host drift slows both, so that their ratio is
    comparable across a run (duet benchmarking: Bulej et al., ICPE 2020).
    """

    def hold_reference(self, repeats: int) -> bool:
        """
        Keep the prepared batch size as the reference, which `release` does not give back.

        Args:
            repeats: Reference steps in each block.

        Returns:
            bool: False where this runner cannot hold one, as on a GPU.
        """
        ...


@runtime_checkable
class KnowsFree(Protocol):
    """A clock that can also say how much of its device's memory nobody holds."""

    def free_bytes(self) -> int | None:
        """Bytes that are physically free now; None where that is not told."""
        ...


class MemoryLook(TypedDict):
    """
    What a runner finds out about memory by a trace and by small steps; JSON can hold it.

    Keys:
        largest: The largest batch size that fits, 0 if none does; None if it cannot be known: `why_not` says why.
        raised: What a real step raises then, if that was to be found out.
        first: Bytes of a step of one sample.
        memory_bytes: What a step may take.
        dtype: What it computes with.
    """

    largest: int | None
    why_not: str | None
    raised: NotRequired[str | None]
    first: int | None
    memory_bytes: NotRequired[int]
    dtype: str


class MemoryForecast(TypedDict):
    """The `largest` batch size that fits, and `bytes`: pairs of a batch size and the predicted bytes of its step."""

    largest: int
    bytes: list[tuple[int, int]]


class Remark(TypedDict):
    """What a user should know of a runner: the `code` and `values` of a `tuning.notes.Note`."""

    code: str
    values: dict[str, Any]


class MemoryReport(TypedDict):
    """
    What a runner knows of memory after its last step; JSON can hold it.

    Keys:
        history: For each `batch_size` that ran: bytes predicted just before (`said`), measured (`took`) and traced
            (`walked`).
        forecast: None if `look` was not called.
        remarks: What a user should know.
        page_faults: Rows of `PageFaults`.
    """

    history: list[dict[str, int]]
    forecast: MemoryForecast | None
    remarks: list[Remark]
    page_faults: list[dict[str, Any]]


class LearnsMemory(Runner, Protocol):
    """A runner that predicts the memory of large batches from steps of small ones."""

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker that computes; None if it is this process."""
        ...

    def look(self, *, seconds: float, top: int | None) -> MemoryLook:
        """Try small sizes for at most so many seconds, up to `top`; 0 tries none, None has no maximum."""
        ...

    def predicted(self, batch_size: int) -> int | None:
        """Return the predicted bytes of a step; None where unknown."""
        ...

    def report(self) -> MemoryReport:
        """Return what is known now."""
        ...


RunnerFactory = Callable[[], Runner]


@attrs.frozen
class FactoryRef:
    """
    A runner factory by name, so that another process can call it too.

    Attributes:
        path: Where it is: "module:function".
        arguments: Keyword arguments that JSON can hold; in a worker, tuples arrive as lists.

    Example:
        >>> FactoryRef("fractions:Fraction", {"numerator": 3, "denominator": 4})()
        Fraction(3, 4)
    """

    path: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict)

    def __call__(self) -> Runner:
        """Import the factory and build the runner in this process."""
        module, _, name = self.path.partition(":")
        factory: Callable[..., Runner] = getattr(importlib.import_module(module), name)
        return factory(**self.arguments)
