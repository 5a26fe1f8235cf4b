"""Meters of peak memory of this process, on the host or on a GPU."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import Any, Protocol

from cubatch.frameworks import heap
from cubatch.hardware.nvml import Monitor
from cubatch.measure.resident_meter import ResidentMeter

RESIDENT_GRAIN = 16 * 2**20
"""Bytes by which the resident set varies for other reasons: loaded code, stacks, the heap of the C library."""

_SCATTER, _TIDY_SCATTER = 1.0, 0.2
"""Without mallopt a step used twice the predicted memory: benchmarks/results/amd-epyc-2-threads."""

_RUN_IN_A_WORKER = (
    "It may fit: name the module ('package.module:build'), and a worker measures its memory more exactly."
)


class Meter(Protocol):
    """
    Measures the peak memory of this process on a device.

    Attributes:
        scatter: Share by which the peaks of neighboring batch sizes may differ by chance.
        grain: Bytes by which a peak varies for reasons other than the batch, such as loaded code.
        remedy: What the user can do so that peaks scatter less; "" if there is nothing to do.
    """

    grain: int  # bytes by which the peak varies independently of the batch
    remedy: str = ""

    @property
    def scatter(self) -> float:
        """Share by which the peaks of neighboring batch sizes may differ by chance."""

    def start(self) -> None:
        """Free unused memory and reset the peak: later allocations count as those of the step."""

    def settle(self) -> None:
        """Prepare the allocator for timed steps, once libraries have allocated their workspaces."""
        return  # an empty body would be abstract to a type checker

    def tidy(self) -> bool:
        """Change how the allocator keeps memory so that later peaks vary less; return False if that is impossible."""
        return False

    def peak(self) -> int | None:
        """Return the peak bytes in excess of those at the start; None if unknown."""


class HostMeter(ResidentMeter, Meter):
    """
    Measures the resident set of this process; can keep large blocks apart from the heap, so that peaks scatter less.

    `settle` and `tidy` call `mallopt`, and so do nothing in the user's process: see `heap.is_owned`.
    """

    grain = RESIDENT_GRAIN

    def __init__(self) -> None:
        super().__init__()
        self._is_movable, self._is_tidy = heap.is_owned() and heap.is_movable(), False
        self.remedy = "" if heap.is_owned() or heap.is_apart() else _RUN_IN_A_WORKER
        self._held: list[int] = []

    @property
    def scatter(self) -> float:
        """Share by which peak bytes of neighboring sizes may differ; less if large blocks are apart from the heap."""
        return _TIDY_SCATTER if self._is_tidy or heap.is_apart() else _SCATTER

    def tidy(self) -> bool:
        """Keep large blocks apart from the heap after the next `start`; return False if impossible or already done."""
        if self._is_tidy or not self._is_movable:
            return False
        self._is_tidy = True
        return True

    def trim(self) -> None:
        """Return freed memory to the system; after `tidy`, map large blocks separately from now on."""
        if self._is_tidy:
            self.settle()  # free the blocks of an earlier start
        super().trim()
        if self._is_tidy:
            self._held = heap.keep_apart()

    def settle(self) -> None:
        """Make malloc take later blocks from the heap, so that the first batch size is not slower than others."""
        if self._is_movable:
            heap.put_together(self._held)
            self._held = []


class AllocatorMeter(Meter):
    """
    Measures the peak memory that PyTorch's caching allocator holds on a GPU, in excess of that at the start.

    Unused blocks of the allocator count.

    Args:
        cuda: `torch.cuda`, or an object with its memory functions.
        device: The GPU, as PyTorch names it.
    """

    grain = 20 * 2**20  # the allocator's unit for medium blocks
    scatter = 0.12  # an H200: densenet121 used 10.4 % more than predicted (benchmarks/results/h200-sxm)

    def __init__(self, cuda: Any, device: Any) -> None:
        self._cuda, self._device, self._start = cuda, device, 0

    def start(self) -> None:
        """Free unused blocks, and count from the memory that is held then."""
        gc.collect()
        with contextlib.suppress(Exception):  # after a GPU error every call fails, and the caller has that error
            self._cuda.empty_cache()
            self._cuda.reset_peak_memory_stats(self._device)
            self._start = int(self._cuda.memory_reserved(self._device))

    def peak(self) -> int | None:
        """Return the peak in bytes, in excess of those held at the start; at least 0, never None."""
        return max(0, int(self._cuda.max_memory_reserved(self._device)) - self._start)


class ProcessMeter(Meter):
    """
    Measures GPU memory of this process by NVML, for a library that neither reports memory nor frees any itself.

    Args:
        monitor: Monitor of the GPU; None without NVML: the peak is unknown then.
    """

    grain = 20 * 2**20  # as of AllocatorMeter: for code that libraries load late
    scatter = AllocatorMeter.scatter

    def __init__(self, monitor: Monitor | None) -> None:
        self._monitor = monitor
        self._start: int | None = None

    def start(self) -> None:
        """Count from the memory that this process holds now."""
        gc.collect()
        self._start = self._held()

    def peak(self) -> int | None:
        """Return the bytes now in excess of those at the start; None if NVML does not list it (containers)."""
        held = self._held()
        return None if held is None or self._start is None else max(0, held - self._start)

    def _held(self) -> int | None:
        return None if self._monitor is None else self._monitor.process_bytes(os.getpid())
