"""The meter of this process's peak memory on the host."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

from cubatch.hardware import host

_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5)


class ResidentMeter:
    """Measure how much the resident memory of this process grows, with memory that the C library has not returned."""

    def __init__(self) -> None:
        self._start: int | None = None

    def trim(self) -> None:
        """Make the C library give freed memory back to the system."""
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)

    def start(self) -> None:
        """Make the C library give freed memory back, and measure growth from here on."""
        self.trim()
        self._start = host.process_bytes("VmRSS")
        self.restart()

    def restart(self) -> None:
        """Forget the peak so far; growth is still measured from the last `start`."""
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError:  # not allowed in some sandboxes: the peak is unknown
            self._start = None

    def peak(self) -> int | None:
        """Return the largest growth since `start` (peaks before `restart` are left out) in bytes; None if unknown."""
        if self._start is None or (peak := host.process_bytes("VmHWM")) is None:
            return None
        return max(0, peak - self._start)
