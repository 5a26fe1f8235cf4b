"""
How time is told: the host's clock around a step, or CUDA events in its stream.

A host clock measures when the calling thread got its answer, an event when the device did; only
the second can time work that is merely enqueued.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs

from cubatch.errors import CubatchError, DeviceFailed, DeviceNotAvailable
from cubatch.hardware import driver, gpu_library, host
from cubatch.measure.runner import Reading

if TYPE_CHECKING:
    from cubatch.hardware.nvml import Monitor


class HostClock:
    """
    The host's monotone clock.

    Args:
        synchronize: Waits until a device has done what was enqueued; None where a step returns when it is done.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._reference: tuple[Callable[[], object], int] | None = None

    def hold_reference(self, step: Callable[[], object], repeats: int) -> None:
        """Time `repeats` of these steps before and after each reading from now on."""
        self._reference = step, repeats

    def now(self) -> float:
        """Seconds on the monotone clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let the device rest."""
        time.sleep(seconds)

    def free_bytes(self) -> int | None:
        """Bytes of main memory that could be taken without swapping; None where the system does not tell."""
        return host.available_memory_bytes()

    def time(self, step: Callable[[], object], repeats: int) -> Reading:
        """
        Time `repeats` steps back to back, the wait for the device and for what the last one returned included.

        Where a reference is held, a block of its steps is timed right before and right after.
        """
        if self._reference is None:
            return Reading(seconds=self._time_steps(step, repeats))
        before = self._time_steps(*self._reference)  # always: ranks that skip a block would wait for each other
        seconds = self._time_steps(step, repeats)
        self._time_steps(self._reference[0], 1)  # a large candidate empties the caches: this step is not counted
        after = self._time_steps(*self._reference)
        return Reading(seconds=seconds, reference_before_seconds=before, reference_after_seconds=after)

    def _time_steps(self, step: Callable[[], object], repeats: int) -> float:
        """Return the seconds of one of `repeats` steps."""
        if self._synchronize:
            self._synchronize()
        begun = time.perf_counter_ns()
        last = _run(step, repeats)
        if self._synchronize:
            self._synchronize()
        ended = time.perf_counter_ns()  # what need not be waited for is looked at in no time that counts
        if _waited_for(last):
            ended = time.perf_counter_ns()
        return (ended - begun) * 1e-9 / repeats


class GpuHostClock(HostClock):
    """
    The host's clock, for steps on a GPU that return when it is done.

    Args:
        monitor: Reads the GPU's state; None where NVML does not know it.
    """

    def __init__(self, monitor: Monitor | None) -> None:
        super().__init__()
        self._monitor = monitor

    def free_bytes(self) -> int | None:
        """Bytes of the GPU's own memory that nobody holds, by NVML: CUDA may count what it would move out of it."""
        return self._monitor.free_bytes() if self._monitor else None


class EventClock(GpuHostClock):
    """
    CUDA events of CuPy or PyTorch around the steps, and what NVML tells of the GPU meanwhile.

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
        super().__init__(monitor)
        self._make_event, self._elapsed_seconds = make_event, elapsed_seconds

    def time(self, step: Callable[[], object], repeats: int) -> Reading:
        """
        Time `repeats` steps back to back on the device, the wait for what the last one returned included.

        NVML is asked eight times, on a MIG device once: twice while the last steps run, the others before the first
        event and after the last, in no time that counts.
        """
        before = self._monitor.energy_joules() if self._monitor else None
        start, end = self._make_event(), self._make_event()
        start.record()
        last = _run(step, repeats)
        end.record()
        if _waited_for(last):  # work of a library whose streams these events do not see
            end.record()
        # Read while the last steps still run: an idle GPU lowers its clock within milliseconds.
        pace = self._monitor.pace() if self._monitor else None
        with gpu_library.translating("waiting for what was timed"):
            end.synchronize()
        after = self._monitor.energy_joules() if self._monitor else None
        vitals = attrs.asdict(self._monitor.vitals()) if self._monitor else {}
        # The counter stands still between its ticks: no movement is no reading.
        joules = (after - before) / repeats if before is not None and after is not None and after > before else None
        return Reading(
            seconds=self._elapsed_seconds(start, end) / repeats,
            sm_clock_mhz=pace.sm_clock_mhz if pace else None,
            throttled=bool(pace and pace.throttled),
            event_reasons=pace.event_reasons if pace else None,
            joules=joules,
            **vitals,
        )


def _run(step: Callable[[], object], repeats: int) -> object:
    """Run steps back to back, and give what the last one returned; what others did is let go of before the next."""
    last: object = None
    for _ in range(repeats):
        last = None
        last = step()
    return last


def _waited_for(result: object) -> bool:
    """Wait until what a step returned is computed, as JAX's may not be; say whether that can be waited for."""
    waits = [wait for leaf in _leaves(result) if callable(wait := _looked_up(leaf, "block_until_ready"))]
    for wait in waits:
        wait()
    return bool(waits)


def _leaves(result: object) -> Iterator[object]:
    """Return what is in tuples, lists and dictionaries, in each other too, and in classes that JAX looks into."""
    jax, waiting = sys.modules.get("jax"), collections.deque([result])
    seen: dict[int, object] = {}  # which keeps them, so that no number is another's
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
            with contextlib.suppress(Exception):  # it refuses what it cannot sort, and asks classes of the user's
                waiting += jax.tree_util.tree_leaves(item)


def _looked_up(item: object, name: str) -> object:
    """Return an attribute; None where there is none, or where its class fails to say so."""
    try:
        return getattr(item, name, None)
    except Exception:  # noqa: BLE001 - of a user's class, which may raise anything
        return None


def cupy_clock(uuid: str | None) -> EventClock:
    """Make a clock of CuPy's events for the current device."""
    cupy: Any = gpu_library.cupy()

    def elapsed(start: Any, end: Any) -> float:
        return float(cupy.cuda.get_elapsed_time(start, end)) * 1e-3

    return EventClock(cupy.cuda.Event, elapsed, monitor_of(uuid))


def torch_clock(index: int) -> EventClock:
    """Make a clock of PyTorch's events for the GPU of that number."""
    import torch

    return EventClock(
        lambda: torch.cuda.Event(enable_timing=True),
        lambda start, end: float(start.elapsed_time(end)) * 1e-3,
        monitor_of(_uuid_of(index)),
    )


def callable_clock() -> HostClock:
    """
    Make the clock for a user's step: events of CuPy or PyTorch, whichever is loaded and has a GPU.

    With neither it is the host's clock, and a step must return only when it is done, or what can be waited for.
    """
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch_clock(torch.cuda.current_device())
    if cupy is not None and cupy.cuda.is_available():
        return cupy_clock(_uuid_of(cupy.cuda.Device().id))
    return HostClock()


def _uuid_of(index: int) -> str | None:
    """Return the NVML UUID of a CUDA device index; PyTorch does not distinguish a MIG slice's UUID from a GPU's."""
    with contextlib.suppress(CubatchError):  # no driver of NVIDIA's: time all the same
        return next((gpu.uuid for gpu in driver.visible_gpus() if gpu.index == index), None)
    return None


def monitor_of(uuid: str | None) -> Monitor | None:
    """Open NVML for a GPU; None where NVML is missing, does not list it, or fails."""
    from cubatch.hardware.nvml import Monitor

    try:
        return None if uuid is None else Monitor(uuid)
    except (DeviceNotAvailable, DeviceFailed):  # no NVML in this container, or a GPU it loses: time all the same
        return None


MOST_LEAVES = 10_000
"""Of what a step returned, that are looked at for something to wait for: results may hold millions of numbers."""

HOST_BOUND = 0.8
"""Share of a reading that enqueueing may take; above it the device may have waited for the host."""

HEAD_START = 1.5
"""How much longer than enqueueing took the other work lasts."""

MAX_QUEUED = 250
"""Launches that a stream holds before the host is made to wait are about a thousand; a step may be four."""

FILLER_BYTES = 1 << 28
"""Size of each of the two arrays whose copy is the other work: it lasts many times as long as starting it."""


class KernelClock(GpuHostClock):
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
        super().__init__(monitor)
        self._make_event, self._elapsed_seconds, self._occupy = make_event, elapsed_seconds, occupy
        self._host_seconds = host_seconds

    def time(self, step: Callable[[], object], repeats: int) -> Reading:
        """Time `repeats` steps back to back on the device, fewer where the stream does not hold so many."""
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
        # Read while the last steps still run: an idle GPU lowers its clock within milliseconds.
        pace = self._monitor.pace() if self._monitor else None
        with gpu_library.translating("waiting for what was timed"):
            end.synchronize()
        reading = Reading(
            seconds=self._elapsed_seconds(start, end) / repeats,
            sm_clock_mhz=pace.sm_clock_mhz if pace else None,
            throttled=bool(pace and pace.throttled),
            event_reasons=pace.event_reasons if pace else None,
        )
        return reading, enqueueing


def cupy_kernel_clock(uuid: str | None, filler_bytes: int = FILLER_BYTES) -> KernelClock:
    """
    Make the clock of CuPy's current device: its events, and copies of its memory as the other work.

    Args:
        uuid: The device in NVML, which tells its clock; None leaves that out.
        filler_bytes: Size of each of two arrays, which are held as long as the clock.
    """
    cupy: Any = gpu_library.cupy()

    # Outside the pool, which what is measured has to itself: what the pool holds is compared with the plan.
    with cupy.cuda.using_allocator(None):
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
