"""
Clocks: the host's clock around a step, or CUDA events in its stream.

A host clock measures until the call returns.  Only an event measures until the device is done, so only events can time
steps that are enqueued and return at once.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from cubatch.errors import CubatchError, DeviceFailed, DeviceNotAvailable
from cubatch.hardware import driver, gpu_library, host
from cubatch.hardware.nvml import Monitor, Snapshot
from cubatch.measure.runner import Reading


class HostClock:
    """The host's monotone clock, for steps that return when they are done."""

    def __init__(self) -> None:
        self._reference: tuple[Callable[[], object], int] | None = None

    def hold_reference(self, step: Callable[[], object], repeats: int) -> None:
        """Run `step` `repeats` times as the reference, before and after each timing from now on."""
        self._reference = step, repeats

    def drop_reference(self) -> None:
        """Run no reference step from now on."""
        self._reference = None

    def now(self) -> float:
        """Return seconds on the monotone clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds, in which the device cools."""
        time.sleep(seconds)

    def wait(self) -> None:
        """Wait until enqueued steps are done; steps of this clock always are."""

    def free_bytes(self) -> int | None:
        """Return the bytes of main memory available without swapping; None if unknown."""
        return host.available_memory_bytes()

    def time(self, step: Callable[[], object], repeats: int) -> Reading:
        """
        Return the mean seconds of `repeats` back-to-back steps, including the wait for the device and the last result.

        With a reference step, a block of reference steps is timed right before and right after.  It empties the caches.
        So the first step after it is not timed, unless `repeats` is 1: steps that long hardly notice.
        """
        if self._reference is None:
            return self._time_steps(step, repeats)
        before = self._time_steps(*self._reference)  # always: ranks that skip a block would wait for each other
        if repeats > 1:
            self._time_steps(step, 1)
        reading = self._time_steps(step, repeats)
        self._time_steps(self._reference[0], 1)  # a large candidate empties the caches: this step is not counted
        after = self._time_steps(*self._reference)
        return attrs.evolve(
            reading, reference_before_seconds=before.seconds, reference_after_seconds=after.seconds
        )  # fmt: skip

    def _time_steps(self, step: Callable[[], object], repeats: int) -> Reading:
        last: object = None
        ends = [time.perf_counter_ns()]
        for _ in range(repeats):
            last = None  # each earlier result is freed before the next step
            last = step()
            ends.append(time.perf_counter_ns())  # before looking for something to wait for, which takes time itself
        is_enqueued = _wait_for(last)
        total = (time.perf_counter_ns() if is_enqueued else ends[-1]) - ends[0]
        longest = max(end - begun for begun, end in itertools.pairwise(ends))
        return Reading(
            seconds=total * 1e-9 / repeats,
            longest_step=None if is_enqueued or not total else longest * repeats / total,
        )


class GpuHostClock(HostClock):
    """
    The host's clock, for steps on a GPU that return when they are done.

    Args:
        monitor: Reads the state of the GPU; None without NVML.
    """

    def __init__(self, monitor: Monitor | None) -> None:
        super().__init__()
        self._monitor = monitor

    def free_bytes(self) -> int | None:
        """Return the free bytes of GPU memory by NVML, without those that CUDA could still evict; None if unknown."""
        return self._monitor.free_bytes() if self._monitor else None


class EventClock(GpuHostClock):
    """
    A clock that times steps by CUDA events of CuPy or PyTorch, and reads the state of the GPU from NVML.

    Args:
        make_event: Function that makes an event with `record()` and `synchronize()`.
        elapsed_seconds: Function that returns the seconds between two recorded events.
        monitor: Reads the state of the GPU; None without NVML.
    """

    def __init__(
        self,
        make_event: Callable[[], Any],
        elapsed_seconds: Callable[[Any, Any], float],
        monitor: Monitor | None,
    ) -> None:
        super().__init__(monitor)
        self._make_event, self._elapsed_seconds = make_event, elapsed_seconds

    def wait(self) -> None:
        """Wait until all that is enqueued in the current stream is done."""
        event = self._make_event()
        event.record()
        event.synchronize()

    def time(self, step: Callable[[], object], repeats: int) -> Reading:
        """
        Return the mean seconds of `repeats` back-to-back steps on the device, with the state of the GPU.

        The seconds include the wait for the result of the last step.

        Two of eight NVML queries are made while the last steps run, the others before the first event and after the
        last.  They do not affect the time.  A MIG device has one query.
        """
        before = self._monitor.energy_joules() if self._monitor else None
        start, end = self._make_event(), self._make_event()
        start.record()
        last = _run(step, repeats)
        end.record()
        if _wait_for(last):  # work of a library in streams without these events
            end.record()
        reading = self._wait_between(start, end, repeats)
        after = self._monitor.energy_joules() if self._monitor else None
        vitals = self._monitor.vitals() if self._monitor else Snapshot()
        # The counter is constant between its ticks: equal values are no measurement.
        joules = (after - before) / repeats if before is not None and after is not None and after > before else None
        return attrs.evolve(
            reading,
            joules=joules,
            temperature_celsius=vitals.temperature_celsius,
            power_watts=vitals.power_watts,
            utilization_percent=vitals.utilization_percent,
            used_bytes=vitals.used_bytes,
        )

    def _wait_between(self, start: Any, end: Any, repeats: int) -> Reading:
        """Wait for the second event; return the mean seconds of a step, with SM clock and throttling of the GPU."""
        # Read while the last steps still run: an idle GPU lowers its clock within milliseconds.
        pace = self._monitor.pace() if self._monitor else None
        with gpu_library.translating("waiting for what was timed"):
            end.synchronize()
        return Reading(
            seconds=self._elapsed_seconds(start, end) / repeats,
            sm_clock_mhz=pace.sm_clock_mhz if pace else None,
            throttled=bool(pace and pace.throttled),
            event_reasons=pace.event_reasons if pace else None,
        )


def _run(step: Callable[[], object], repeats: int) -> object:
    """Run steps back to back and return the last result; each earlier result is freed before the next step."""
    last: object = None
    for _ in range(repeats):
        last = None
        last = step()
    return last


def _wait_for(result: object) -> bool:
    """Wait until the result of a step is computed, as for JAX; return whether the result can be waited for."""
    waits = [wait for leaf in _leaves(result) if callable(wait := _attribute(leaf, "block_until_ready"))]
    for wait in waits:
        wait()
    return bool(waits)


def _leaves(result: object) -> Iterator[object]:
    """Yield the innermost items of tuples, lists, dictionaries and classes registered with JAX, MOST_LEAVES at most."""
    jax, waiting = sys.modules.get("jax"), collections.deque([result])
    seen: dict[int, object] = {}  # holds the items, so that no id is reused
    while waiting and len(seen) < MOST_LEAVES:
        item = waiting.popleft()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, dict | tuple | list):
            waiting += itertools.islice(item.values() if isinstance(item, dict) else item, MOST_LEAVES)
            continue
        yield item
        if jax is not None:
            with contextlib.suppress(Exception):  # it runs code of user classes, and fails on keys that it cannot sort
                waiting += jax.tree_util.tree_leaves(item)


def _attribute(item: object, name: str) -> object:
    """Return an attribute; None if there is none or if reading it raises."""
    try:
        return getattr(item, name, None)
    except Exception:  # noqa: BLE001 - of a user's class, which may raise anything
        return None


def cupy_clock(uuid: str | None) -> EventClock:
    """
    Return a clock that times steps by CuPy's events on the current device.

    NVML reads the state of the GPU `uuid`; None: it is not read.
    """
    cupy: Any = gpu_library.cupy()
    return EventClock(cupy.cuda.Event, _cupy_seconds, monitor_of(uuid))


def _cupy_seconds(start: Any, end: Any) -> float:
    return float(gpu_library.cupy().cuda.get_elapsed_time(start, end)) * 1e-3


def torch_clock(index: int) -> EventClock:
    """Return a clock that times steps by PyTorch's events on the GPU of this CUDA device index."""
    import torch

    return EventClock(
        lambda: torch.cuda.Event(enable_timing=True),
        lambda start, end: float(start.elapsed_time(end)) * 1e-3,
        monitor_of(_uuid_of(index)),
    )


def callable_clock() -> HostClock:
    """
    Return the clock for a user's step: events of PyTorch or CuPy if it is loaded and has a GPU, else the host's clock.

    With the host's clock a step must return when it is done, or return a result that can be waited for.
    """
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch_clock(torch.cuda.current_device())
    if cupy is not None and cupy.cuda.is_available():
        return cupy_clock(_uuid_of(cupy.cuda.Device().id))
    return HostClock()


def _uuid_of(index: int) -> str | None:
    """
    Return the NVML UUID of a CUDA device index; None without a driver or such a device.

    PyTorch does not distinguish a MIG slice's UUID from a GPU's.
    """
    with contextlib.suppress(CubatchError):  # no NVIDIA driver
        return next((gpu.uuid for gpu in driver.visible_gpus() if gpu.index == index), None)
    return None


def monitor_of(uuid: str | None) -> Monitor | None:
    """Return NVML's monitor of the GPU `uuid`; None if `uuid` is None or NVML is missing, lacks this GPU or fails."""
    from cubatch.hardware.nvml import Monitor

    try:
        return None if uuid is None else Monitor(uuid)
    except (DeviceNotAvailable, DeviceFailed):  # such as a container without NVML
        return None


MOST_LEAVES = 10_000
"""Most items of a result that are searched for something to wait for: a result may hold millions of numbers."""

HOST_BOUND = 0.8
"""Share of a timing that enqueueing may take; above it the device may have waited for the host."""

HEAD_START = 1.5
"""Factor by which the filler work lasts longer than enqueueing."""

MAX_QUEUED = 250
"""Most steps in the queue: a stream holds about a thousand launches before the host waits, and a step may be four."""

FILLER_BYTES = 1 << 28
"""Size of each of two arrays whose copy is the filler work: it lasts many times longer than its launch."""


class KernelClock(EventClock):
    """
    A clock that times steps by CUDA events while the device does not wait for the host between steps.

    Args:
        make_event, elapsed_seconds, monitor: As of `EventClock`.
        occupy: Function that enqueues filler work for at least the given seconds.
        host_seconds: Function that returns seconds on the host's clock.
    """

    def __init__(
        self,
        make_event: Callable[[], Any],
        elapsed_seconds: Callable[[Any, Any], float],
        occupy: Callable[[float], None],
        monitor: Monitor | None,
        host_seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(make_event, elapsed_seconds, monitor)
        self._occupy, self._host_seconds = occupy, host_seconds

    def time(self, step: Callable[[], object], repeats: int) -> Reading:
        """
        Return the mean seconds of `repeats` back-to-back steps.

        If enqueueing takes more than 0.8 of their seconds, at most MAX_QUEUED are timed again, after filler work.
        """
        reading, enqueueing = self._read(step, repeats, 0.0)
        if enqueueing <= HOST_BOUND * reading.seconds * repeats:
            return reading
        queued = min(repeats, MAX_QUEUED)
        return self._read(step, queued, HEAD_START * enqueueing * queued / repeats)[0]

    def _read(self, step: Callable[[], object], repeats: int, head_start: float) -> tuple[Reading, float]:
        start, end = self._make_event(), self._make_event()
        if head_start:
            self._occupy(head_start)
        start.record()
        begun = self._host_seconds()
        for _ in range(repeats):
            step()
        enqueueing = self._host_seconds() - begun
        end.record()
        return self._wait_between(start, end, repeats), enqueueing


def cupy_kernel_clock(uuid: str | None, filler_bytes: int = FILLER_BYTES) -> KernelClock:
    """
    Return a clock that times launches on CuPy's current device; its filler work is copies of memory.

    Args:
        uuid: NVML's UUID of the device, to read its SM clock; None: it is not read.
        filler_bytes: Bytes of each of the two arrays that the clock holds for the copies.
    """
    cupy: Any = gpu_library.cupy()

    # Outside the pool, whose size is compared with the memory plan.
    with cupy.cuda.using_allocator(None):
        source, target = (cupy.zeros(filler_bytes, dtype=cupy.uint8) for _ in range(2))

    def copy() -> None:
        cupy.copyto(target, source)

    copy()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    copy()
    end.record()
    end.synchronize()
    each = _cupy_seconds(start, end)

    def occupy(seconds: float) -> None:
        for _ in range(math.ceil(seconds / each)):
            copy()

    return KernelClock(cupy.cuda.Event, _cupy_seconds, occupy, monitor_of(uuid))
