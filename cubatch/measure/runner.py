"""
Interfaces of runners and clocks.

A runner prepares a batch size and runs its steps: a network, a user's callable, a worker process, or a fake in tests.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NotRequired, Protocol, TypedDict, runtime_checkable

import attrs

REFERENCE_SHARE = 0.05
"""Share of the memory limit that a reference step may hold, so that sizes near the limit still fit."""


@attrs.frozen(kw_only=True)
class Reading:
    """
    The mean seconds of a step over one timing, and the state of the GPU.

    A field is None if it is unavailable: on a CPU, without NVML, or where the GPU does not report it.
    """

    seconds: float  # mean seconds of a step, over back-to-back steps
    sm_clock_mhz: float | None = None  # SM clock during the last steps
    throttled: bool = False  # whether the device reports that it lowered its clock
    joules: float | None = None  # energy of a step
    event_reasons: int | None = None  # all reasons for the clock, as bits of nvml.h
    # temperature_celsius, power_watts, utilization_percent, used_bytes: state of the GPU right after the steps, as
    # `nvml.Snapshot`
    temperature_celsius: float | None = None
    power_watts: float | None = None
    utilization_percent: float | None = None
    used_bytes: int | None = None
    # reference_before_seconds, reference_after_seconds: mean seconds of a reference step right before and right after;
    # None without a reference
    reference_before_seconds: float | None = None
    reference_after_seconds: float | None = None
    longest_step: float | None = None  # seconds of the longest step / `seconds`; None if steps are only enqueued


class Clock(Protocol):
    """Clock of a runner: seconds for budgets, and timings of steps."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock, for budgets and deadlines."""

    def time(self, step: Callable[[], object], repeats: int) -> Reading:
        """Run `step` `repeats` times back to back; return its mean seconds on the device, with the GPU's state."""

    def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds, in which the device cools."""


class Runner(Protocol):
    """
    A workload that can be prepared for a batch size and stepped.

    `prepare` replaces the size prepared before.  If a size does not fit, it raises OutOfMemory or an error for which
    `is_out_of_memory` is true.
    """

    @property
    def clock(self) -> Clock:
        """The clock that times the steps of this runner."""

    @property
    def peak_bytes(self) -> int | None:
        """Peak bytes of device memory that the engine allocated since the last `prepare`; None if unknown."""

    @property
    def peak_device_bytes(self) -> int | None:
        """Bytes of device memory that the process holds by the driver, context included; None if unknown."""

    def prepare(self, batch_size: int) -> float | None:
        """
        Allocate and load what steps of this batch size need.

        Returns:
            float | None: Seconds of the very first step of the size in its process. It is None if no step of the size
                has run yet.
        """

    def step(self) -> object:
        """Run or enqueue one step of the prepared batch size; the clock waits for the returned value if it can."""

    def release(self) -> None:
        """Free the memory of the last `prepare`, also after an error; memory pools are emptied."""

    def close(self) -> None:
        """Free everything; the runner cannot be used again."""


@runtime_checkable
class HasWorker(Protocol):
    """A runner whose steps run in a worker process, which a failure may leave unusable."""

    def restart(self) -> None:
        """End the worker; the next `prepare` starts a new one."""


@runtime_checkable
class HoldsReference(Protocol):
    """
    A runner that can run a reference step before and after each timing.

    The reference step runs the same workload at a small fixed batch size.  Host drift slows both steps, so that their
    ratio is comparable across a run (duet benchmarking: Bulej et al., ICPE 2020).
    """

    def hold_reference(self, repeats: int) -> bool:
        """
        Keep the prepared batch size as the reference, which `release` does not free.

        It replaces an earlier reference.  Before other steps, a batch size must be prepared again, also after False.

        Args:
            repeats: Reference steps before each timing, and as many after it.

        Returns:
            bool: Whether the reference is held; False if this runner cannot, as on a GPU.
        """


@runtime_checkable
class Compiles(Protocol):
    """A runner whose steps are compiled when a batch size is prepared."""

    @property
    def compile_seconds(self) -> float:
        """Seconds of the last `prepare` in which something was compiled; 0 if nothing was."""


@runtime_checkable
class KnowsFree(Protocol):
    """A clock that also reads the free memory of its device."""

    def free_bytes(self) -> int | None:
        """Return the bytes of the device's memory that are free now, by the driver or the OS; None if unknown."""


class MemoryLook(TypedDict):
    """
    Result of examining memory by a trace and by small steps; it can be written as JSON.

    Keys:
        largest: The largest batch size that fits, 0 if none does; None if unknown.
        why_not: Reason if there is no trace, else None. Without a trace `largest` is unknown, or based on measured
            steps alone.
        raised: Message of the error that a real step raised if there is no trace; None if it succeeded or did not run.
        first: Bytes of a step with a batch of one sample; None if unknown.
        memory_bytes: Bytes that a step may take: the memory limit, less a copy of parameters that steps change.
        num_samples: Samples of the data set that batches are made of; None if unknown.
        multiple: A number of which all batch sizes of the user's data are multiples; 1 if all sizes are possible.
        is_compiled: Whether the first step of a size may be compiled.
        dtype: Type of the computation, such as "float32".
    """

    largest: int | None
    why_not: str | None
    raised: NotRequired[str | None]
    first: int | None
    memory_bytes: NotRequired[int]
    num_samples: NotRequired[int | None]
    multiple: NotRequired[int]
    is_compiled: NotRequired[bool]
    dtype: str


class MemoryForecast(TypedDict):
    """
    The `largest` batch size that fits, whether it `is_rough`, and `bytes`.

    It is rough if the sizes that ran took too little memory. `bytes` are pairs of a batch size and the predicted bytes
    of its step.
    """

    largest: int
    is_rough: bool
    bytes: list[tuple[int, int]]


class Remark(TypedDict):
    """A note about a runner for the user: the `code` and `values` of a `tuning.notes.Note`."""

    code: str
    values: dict[str, Any]


class MemoryReport(TypedDict):
    """
    Memory figures of a runner after its last step; it can be written as JSON.

    Keys:
        history: For each `batch_size` that ran: `predicted_bytes` just before (None if unknown), and `measured_bytes`.
        forecast: The largest batch size that fits, and predicted bytes; None if `look` was not called.
        remarks: Notes for the user.
    """

    history: list[dict[str, Any]]
    forecast: MemoryForecast | None
    remarks: list[Remark]


class LearnsMemory(Runner, Protocol):
    """A runner that predicts the memory of large batches from steps of small ones."""

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker that computes; None if it is this process."""

    def look(self, *, seconds: float, top: int | None, trace_seconds: float) -> MemoryLook:
        """
        Trace steps and try small batch sizes; return the predicted memory of larger ones.

        Args:
            seconds: Most seconds of trying sizes; 0: no size is tried, unless there is no trace.
            top: The largest batch size of interest; None: no maximum.
            trace_seconds: Most seconds of the trace.
        """

    def predicted(self, batch_size: int) -> int | None:
        """Return the predicted peak bytes of a step, including those held at all batch sizes; None if unknown."""

    def report(self) -> MemoryReport:
        """Return predicted and measured bytes by batch size, and the notes so far."""


RunnerFactory = Callable[[], Runner]


@attrs.frozen
class FactoryRef:
    """A runner factory by name, so that another process can call it."""

    path: str  # "module:function"
    # keyword arguments that can be written as JSON; a worker receives tuples as lists
    arguments: Mapping[str, Any] = attrs.field(factory=dict)

    def __call__(self) -> Runner:
        """Import the factory and return the runner that it builds in this process."""
        module, _, name = self.path.partition(":")
        factory: Callable[..., Runner] = getattr(importlib.import_module(module), name)
        return factory(**self.arguments)
