"""
Which clocks are clearly lowered, so that a timing taken under one says more about heat than about the work.

A GPU at its power limit lowers its clock for as long as it works, the further the more the work draws: of one device
that is as it should be, products on tensor cores run at 0.65 to 0.75 of the clock that copies run at.  So a clock is
compared with what the same work ran at before, and with that of other work only where no power limit explains it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

LOWERED = 0.6
"""Share of the highest clock of the same work: its first readings may be taken before the limit bites."""

HALVED = 0.5
"""Share of the highest clock of all: a hardware slowdown halves it at least (nvml.h), a power limit does not."""


class HighestClocks:
    """
    The highest SM clocks that were seen, of each kind of work and of all.

    Args:
        seen_mhz: Clocks read before, of whatever work.

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
        """Take a reading in; None is no reading."""
        if mhz is not None:
            self._of_all = max(self._of_all, mhz)
            self._by_work[work] = max(self._by_work.get(work, 0.0), mhz)

    def is_lowered(self, work: Hashable, mhz: float | None) -> bool:
        """Return whether a clock is clearly lower than it was for the same work, or half of what any work had."""
        if mhz is None:
            return False
        return mhz < LOWERED * self._by_work.get(work, 0.0) or mhz <= HALVED * self._of_all
