"""
Telling the time of single kernels, which may be shorter than what the host takes to enqueue them.

Events then time the host, not the kernel.  So where enqueueing turns out to take as long as the work, the
reading is taken again behind a piece of other work, long enough for the host to get ahead of the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cubatch.clocks import HostClock, monitor_of
from cubatch.runner import Reading

if TYPE_CHECKING:
    from cubatch.monitor import Monitor

HOST_BOUND = 0.8
"""Share of a reading that enqueueing may take; above it the device may have waited for the host."""

HEAD_START = 1.5
"""How much longer than enqueueing took the other work lasts."""

MAX_QUEUED = 250
"""Launches that a stream holds before the host is made to wait are about a thousand; a step may be four."""

FILLER_BYTES = 1 << 28
"""Size of each of the two arrays whose copy is the other work: it lasts many times as long as starting it."""


class KernelClock(HostClock):
    """
    CUDA events around steps that the device runs without waiting for the host.

    Args:
        make_event: Makes an event with `record()` and `synchronize()`.
        elapsed_seconds: Seconds between two recorded events.
        occupy: Enqueues work that keeps the device busy for at least so many seconds.
        monitor: Reads the GPU's state; None where NVML does not know it.
        host_seconds: The host's own clock.
    """

    def __init__(
        self,
        make_event: Callable[[], Any],
        elapsed_seconds: Callable[[Any, Any], float],
        occupy: Callable[[float], None],
        monitor: Monitor | None,
        host_seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._make_event, self._elapsed_seconds, self._occupy = make_event, elapsed_seconds, occupy
        self._monitor, self._host_seconds = monitor, host_seconds

    def time(self, step: Callable[[], None], repeats: int) -> Reading:
        """Time `repeats` steps back to back on the device, fewer where the stream does not hold so many."""
        reading, enqueueing = self._read(step, repeats, 0.0)
        if enqueueing <= HOST_BOUND * reading.seconds * repeats:
            return reading
        queued = min(repeats, MAX_QUEUED)
        return self._read(step, queued, HEAD_START * enqueueing * queued / repeats)[0]

    def _read(self, step: Callable[[], None], repeats: int, head_start: float) -> tuple[Reading, float]:
        start, end = self._make_event(), self._make_event()
        if head_start:
            self._occupy(head_start)
        start.record()
        begun = self._host_seconds()
        for _ in range(repeats):
            step()
        enqueueing = self._host_seconds() - begun
        end.record()
        # Read while the last steps still run: an idle GPU lowers its clock within milliseconds.
        state = self._monitor.snapshot() if self._monitor else None
        end.synchronize()
        reading = Reading(
            seconds=self._elapsed_seconds(start, end) / repeats,
            sm_clock_mhz=state.sm_clock_mhz if state else None,
            throttled=bool(state and state.throttled),
        )
        return reading, enqueueing


def cupy_kernel_clock(uuid: str | None, filler_bytes: int = FILLER_BYTES) -> KernelClock:
    """
    Make the clock of CuPy's current device: its events, and copies of its memory as the other work.

    Args:
        uuid: The device in NVML, which tells its clock; None leaves that out.
        filler_bytes: Size of each of two arrays, which are held as long as the clock.
    """
    import cupy

    source, target = (cupy.zeros(filler_bytes, dtype=cupy.uint8) for _ in range(2))

    def elapsed(start: Any, end: Any) -> float:
        return float(cupy.cuda.get_elapsed_time(start, end)) * 1e-3

    def copy() -> None:
        cupy.copyto(target, source)

    copy()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    copy()
    end.record()
    end.synchronize()
    each = elapsed(start, end)

    def occupy(seconds: float) -> None:
        for _ in range(math.ceil(seconds / each)):
            copy()

    return KernelClock(cupy.cuda.Event, elapsed, occupy, monitor_of(uuid))
