"""The meter of this process's peak memory on the host."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

from cubatch.hardware import host

_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5)


class ResidentMeter:
    """The resident set of this process, including memory that the C library has freed and kept."""

    def __init__(self) -> None:
        self._start: int | None = None

    def trim(self) -> None:
        """Return freed memory to the system."""
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)

    def start(self) -> None:
        """Return freed memory to the system and count from here."""
        self.trim()
        self._start = host.process_bytes("VmRSS")
        self.restart()

    def restart(self) -> None:
        """Reset the peak, without a new start."""
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError:  # not allowed in some sandboxes: the peak is unknown
            self._start = None

    def peak(self) -> int | None:
        """Return the peak bytes above those at the start; None if /proc does not have them."""
        if self._start is None or (peak := host.process_bytes("VmHWM")) is None:
            return None
        return max(0, peak - self._start)
