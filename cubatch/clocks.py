"""
How time is told: the host's clock around a step, or CUDA events in its stream.

A host clock measures when the calling thread got its answer, an event when the device did; only
the second can time work that is merely enqueued.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cubatch import cuda_driver
from cubatch.errors import DeviceNotAvailable
from cubatch.runner import Reading

if TYPE_CHECKING:
    from cubatch.monitor import Monitor


class HostClock:
    """
    The host's monotone clock.

    Args:
        synchronize: Waits until a device has done what was enqueued; None where a step returns when it is done.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize

    def now(self) -> float:
        """Seconds on the monotone clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let the device rest."""
        time.sleep(seconds)

    def time(self, step: Callable[[], None], repeats: int) -> Reading:
        """Time `repeats` steps back to back, the wait for the device included."""
        if self._synchronize:
            self._synchronize()
        begun = time.perf_counter_ns()
        for _ in range(repeats):
            step()
        if self._synchronize:
            self._synchronize()
        return Reading(seconds=(time.perf_counter_ns() - begun) * 1e-9 / repeats)


class EventClock(HostClock):
    """
    CUDA events of CuPy or PyTorch around the steps, and NVML's view of clock, throttling and energy.

    Args:
        make_event: Makes an event with `record()` and `synchronize()`.
        elapsed_seconds: Seconds between two recorded events.
        monitor: Reads the GPU's state; None where NVML does not know it.
    """

    def __init__(
        self,
        make_event: Callable[[], Any],
        elapsed_seconds: Callable[[Any, Any], float],
        monitor: Monitor | None,
    ) -> None:
        super().__init__()
        self._make_event, self._elapsed_seconds, self._monitor = make_event, elapsed_seconds, monitor

    def time(self, step: Callable[[], None], repeats: int) -> Reading:
        """Time `repeats` steps back to back on the device."""
        before = self._monitor.energy_joules() if self._monitor else None
        start, end = self._make_event(), self._make_event()
        start.record()
        for _ in range(repeats):
            step()
        end.record()
        # Read while the last steps still run: an idle GPU lowers its clock within milliseconds.
        state = self._monitor.snapshot() if self._monitor else None
        end.synchronize()
        after = self._monitor.energy_joules() if self._monitor else None
        # The counter stands still between its ticks: no movement is no reading.
        joules = (after - before) / repeats if before is not None and after is not None and after > before else None
        return Reading(
            seconds=self._elapsed_seconds(start, end) / repeats,
            sm_clock_mhz=state.sm_clock_mhz if state else None,
            throttled=bool(state and state.throttled),
            joules=joules,
        )


def cupy_clock(uuid: str | None) -> EventClock:
    """Make a clock of CuPy's events for the current device."""
    import cupy

    def elapsed(start: Any, end: Any) -> float:
        return float(cupy.cuda.get_elapsed_time(start, end)) * 1e-3

    return EventClock(cupy.cuda.Event, elapsed, monitor_of(uuid))


def callable_clock() -> HostClock:
    """
    Make the clock for a user's step: events of CuPy or PyTorch, whichever is loaded and has a GPU.

    With neither it is the host's clock, and a step must return only when it is done.
    """
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
        return EventClock(
            lambda: torch.cuda.Event(enable_timing=True),
            lambda start, end: float(start.elapsed_time(end)) * 1e-3,
            monitor_of(None if uuid is None else f"GPU-{uuid}"),
        )
    if cupy is not None and cupy.cuda.is_available():
        return cupy_clock(cuda_driver.visible_gpus()[cupy.cuda.Device().id].uuid)
    return HostClock()


def monitor_of(uuid: str | None) -> Monitor | None:
    """Open NVML for a GPU; None where NVML is missing or does not list it."""
    from cubatch.monitor import Monitor

    try:
        return None if uuid is None else Monitor(uuid)
    except DeviceNotAvailable:  # no NVML in this container, or a GPU it does not list: time all the same
        return None
