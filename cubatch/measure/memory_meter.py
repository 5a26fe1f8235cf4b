"""What a process takes of memory, at most, from a moment on: of the host, or of a GPU."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cubatch.hardware import host
from cubatch.measure import heap

if TYPE_CHECKING:
    from cubatch.hardware.nvml import Monitor

RESIDENT_GRAIN = 16 * 2**20
"""What the resident set moves by for other reasons: code that is loaded, stacks, what the C library keeps."""

_SCATTER, _TIDY_SCATTER = 1.0, 0.2
"""In a heap that was left to itself a step used twice the predicted memory: benchmarks/results/amd-epyc-2-threads."""

_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5)


class Meter(Protocol):
    """
    Reads the high water of a device's memory.

    Attributes:
        grain: Bytes that a reading does not tell from what grows with no batch.
        scatter: Share by which readings of neighbouring sizes differ, one from the other.
    """

    grain: int

    @property
    def scatter(self) -> float:
        """As above."""
        ...

    def start(self) -> None:
        """Give back what nobody uses, and count from here."""
        ...

    def settle(self) -> None:
        """Be told that what follows is to be as in timed steps: libraries have what they keep, or nothing runs."""
        return  # an empty body would be abstract to a type checker

    def tidy(self) -> bool:
        """Have readings scatter less from now on; False where there is no way, or none is left."""
        return False

    def peak(self) -> int | None:
        """Bytes at the peak above those at the start; None where that is not told."""
        ...


class ResidentMeter(Meter):
    """
    The resident set of this process, other threads and what the C library keeps of freed memory included.

    `settle` and `tidy` call `mallopt`, and so do nothing in the user's process: see `heap.is_owned`.
    """

    grain = RESIDENT_GRAIN

    def __init__(self) -> None:
        self._start: int | None = None
        self._is_movable, self._is_tidy = heap.is_owned() and heap.is_movable(), False
        self._held: list[int] = []

    @property
    def scatter(self) -> float:
        """Share by which a size may take more than its neighbours say: as much again, unless the heap is in order."""
        return _TIDY_SCATTER if self._is_tidy or heap.is_apart() else _SCATTER

    def tidy(self) -> bool:
        """Keep the heap in order from now on; return False in the user's process or if it is in order already."""
        if self._is_tidy or not self._is_movable:
            return False
        self._is_tidy = True
        return True

    def start(self) -> None:
        """Have the C library return what it can, and count from here."""
        if self._is_tidy:
            self.settle()  # what an earlier start holds is to be given back, too
        gc.collect()
        heap.trim()
        if self._is_tidy:
            self._held = heap.apart()
        self._start = host.process_bytes("VmRSS")
        self.restart()

    def settle(self) -> None:
        """Have later blocks lie together, whatever was freed before: else a size would be slower for being first."""
        if self._is_movable:
            heap.together(self._held)
            self._held = []

    def restart(self) -> None:
        """Forget the peak so far, and go on counting from the same start."""
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError:  # a sandbox may not let it be reset, and nothing is told then
            self._start = None

    def peak(self) -> int | None:
        """Bytes at the peak above those at the start; None where /proc does not tell."""
        if self._start is None or (peak := host.process_bytes("VmHWM")) is None:
            return None
        return max(0, peak - self._start)


class AllocatorMeter(Meter):
    """
    What PyTorch's caching allocator holds of a GPU, its unused blocks included: other processes cannot have those.

    Args:
        cuda: `torch.cuda`, or a stand-in.
        device: PyTorch's device.
    """

    grain = 20 * 2**20  # it takes medium blocks from the GPU by so much
    scatter = 0.12  # an H200: densenet121 used 10.4 % more than predicted (benchmarks/results/h200-sxm)

    def __init__(self, cuda: Any, device: Any) -> None:
        self._cuda, self._device, self._start = cuda, device, 0

    def start(self) -> None:
        """Free unused blocks, and count from here."""
        gc.collect()
        with contextlib.suppress(Exception):  # after a failed GPU every call fails; whoever asked already knows
            self._cuda.empty_cache()
            self._cuda.reset_peak_memory_stats(self._device)
            self._start = int(self._cuda.memory_reserved(self._device))

    def peak(self) -> int | None:
        """Bytes at the peak above those at the start."""
        return max(0, int(self._cuda.max_memory_reserved(self._device)) - self._start)


class ProcessMeter(Meter):
    """
    What this process holds of a GPU, by NVML: for a library that does not tell, and gives back nothing on its own.

    Args:
        monitor: Of the GPU; None where NVML does not know it, and nothing is told then.
    """

    grain = 20 * 2**20  # as that of the allocator: what libraries load late
    scatter = AllocatorMeter.scatter

    def __init__(self, monitor: Monitor | None) -> None:
        self._monitor = monitor
        self._start: int | None = None

    def start(self) -> None:
        """Count from here."""
        gc.collect()
        self._start = self._held()

    def peak(self) -> int | None:
        """Bytes held above those at the start; None where NVML does not see into a container, for one."""
        held = self._held()
        return None if held is None or self._start is None else max(0, held - self._start)

    def _held(self) -> int | None:
        return None if self._monitor is None else self._monitor.process_bytes(os.getpid())
