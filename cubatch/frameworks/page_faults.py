"""
Measure page faults of memory that glibc returns to the system and the next step allocates again.

glibc maps each block above a threshold separately, and returns the top of its heap above another threshold.  A step
with blocks above the highest thresholds pays for both (benchmarks/results/amd-epyc-2-threads).
"""

from __future__ import annotations

import resource

from cubatch.frameworks import heap
from cubatch.measure.runner import Remark
from cubatch.units import format_count

_WORTH_NOTING = 0.05
"""Share of the CPU time; a step loses twice as much if one of two threads waits for the other."""

_SECONDS_EACH = 10e-6
"""Most seconds of a page fault, measured as 2 to 3 us: system time beyond that has another cause."""


class PageFaults:
    """Counts page faults of steps by batch size, and the share of CPU time that the system takes for them."""

    def __init__(self) -> None:
        self._begun: tuple[resource.struct_rusage, int] | None = None
        self._worst: dict[int, tuple[float, int]] = {}

    def begin(self, steps: int) -> None:
        """Start counting page faults and the CPU seconds of this process, after `steps` steps of a batch size."""
        self._begun = resource.getrusage(resource.RUSAGE_SELF), steps

    def end(self, batch_size: int, steps: int) -> None:
        """Stop counting after `steps` steps; keep a batch size's largest share of CPU time, and its faults per step."""
        if self._begun is None:
            return
        (begun, earlier), self._begun = self._begun, None
        now = resource.getrusage(resource.RUSAGE_SELF)
        system, faults = now.ru_stime - begun.ru_stime, now.ru_minflt - begun.ru_minflt
        if steps > earlier and 0 < system <= faults * _SECONDS_EACH:
            share = system / (system + now.ru_utime - begun.ru_utime)
            worst = share, round(faults / (steps - earlier))
            self._worst[batch_size] = max(self._worst.get(batch_size, (0.0, 0)), worst)

    @property
    def remarks(self) -> list[Remark]:
        """
        A list with a remark on the batch size whose page faults take the largest share of CPU time.

        It is empty if the share is below 5 %, or malloc is not glibc's with its default settings or cubatch's.
        """
        batch_size = max(self._worst, key=self._worst.__getitem__, default=None)
        if batch_size is None or self._worst[batch_size][0] < _WORTH_NOTING or not heap.is_movable():
            return []
        share, faults = self._worst[batch_size]
        values = {"batch_size": batch_size, "cpu_share": share, "faults": format_count(faults)}
        return [Remark(code="page_faults", values=values | {"variables": heap.format_variables(heap.KEPT)})]
