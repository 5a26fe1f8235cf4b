"""
Detect a clearly lowered SM clock, under which timings are not representative.

A GPU at its power limit lowers its clock while it works.  On a healthy device, products on tensor cores run at 0.65 to
0.75 of the clock of copies.  So a clock is compared with earlier clocks of the same steps.  It is compared with clocks
of other steps only where a power limit cannot explain the difference.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

LOWERED = 0.6
"""Share of the highest clock of the same work, whose first timings may precede the power limit."""

HALVED = 0.5
"""Share of the highest clock of all: a hardware slowdown halves it at least (nvml.h), a power limit does not."""


class HighestClocks:
    """
    Hold the highest SM clocks in MHz: of each workload, such as a batch size, and of all workloads.

    Args:
        seen_mhz: Clocks of earlier runs in MHz, of any workload.

    Example:
        >>> clocks = HighestClocks()
        >>> clocks.see("copy", 1980.0)
        >>> clocks.see("product", 1480.0)
        >>> clocks.is_lowered("product", 1400.0), clocks.is_lowered("copy", 1100.0)
        (False, True)
    """

    def __init__(self, seen_mhz: Iterable[float] = ()) -> None:
        self._of_all = max(seen_mhz, default=0.0)
        self._by_work: dict[Hashable, float] = {}

    def see(self, work: Hashable, mhz: float | None) -> None:
        """Record an SM clock in MHz at which the workload with the key `work` ran; None is ignored."""
        if mhz is not None:
            self._of_all = max(self._of_all, mhz)
            self._by_work[work] = max(self._by_work.get(work, 0.0), mhz)

    def is_lowered(self, work: Hashable, mhz: float | None) -> bool:
        """
        Return whether `mhz` is below 0.6 of the highest clock of workload `work`, or at most half of any workload's.

        For an unknown clock (None) the result is False.
        """
        if mhz is None:
            return False
        return mhz < LOWERED * self._by_work.get(work, 0.0) or mhz <= HALVED * self._of_all
