"""
Detect a clearly lowered SM clock, under which timings are not representative.

A GPU at its power limit lowers its clock while it works.  On a healthy device, products on tensor cores run at 0.65 to
0.75 of the clock of copies.  So a clock is compared with earlier clocks of the same work.  It is compared with clocks
of other work only where a power limit cannot explain the difference.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

LOWERED = 0.6
"""Share of the highest clock of the same work, whose first timings may precede the power limit."""

HALVED = 0.5
"""Share of the highest clock of all: a hardware slowdown halves it at least (nvml.h), a power limit does not."""


class HighestClocks:
    """
    Hold the highest SM clocks, of each kind of work and of all work.

    Args:
        seen_mhz: Clocks of earlier runs, of any work.

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
        """Record an SM clock in MHz at which a kind of work ran; None is ignored."""
        if mhz is not None:
            self._of_all = max(self._of_all, mhz)
            self._by_work[work] = max(self._by_work.get(work, 0.0), mhz)

    def is_lowered(self, work: Hashable, mhz: float | None) -> bool:
        """
        Return whether `mhz` is clearly below the highest clock of this kind of work, or at most half that of any.

        None, an unknown clock, is not.
        """
        if mhz is None:
            return False
        return mhz < LOWERED * self._by_work.get(work, 0.0) or mhz <= HALVED * self._of_all
