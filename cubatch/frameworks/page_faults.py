"""
Measure page faults of memory that glibc returns to the system and the next step allocates again.

glibc maps each block above a threshold separately, and returns the top of its heap above another threshold.  A step
with blocks above the highest thresholds pays for both (benchmarks/results/amd-epyc-2-threads).
"""

from __future__ import annotations

import resource
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cubatch.frameworks import heap
from cubatch.units import format_count, format_whole_percent

_WORTH_NOTING = 0.05
"""Share of the CPU time; a step loses twice as much if one of two threads waits for the other."""

_SECONDS_EACH = 10e-6
"""Most seconds of a page fault, measured as 2 to 3 us: system time beyond that has another cause."""


class PageFaults:
    """Counts page faults of steps by batch size, and the share of CPU time that the system takes for them."""

    def __init__(self) -> None:
        self._begun: resource.struct_rusage | None = None
        self._worst: dict[int, tuple[float, int]] = {}

    def begin(self) -> None:
        """Start counting page faults and the CPU seconds of this process."""
        self._begun = resource.getrusage(resource.RUSAGE_SELF)

    def end(self, batch_size: int, steps: int) -> None:
        """Stop counting after `steps` steps; keep a batch size's largest share of CPU time, and its faults per step."""
        begun, self._begun = self._begun, None
        if begun is None or not steps:
            return
        now = resource.getrusage(resource.RUSAGE_SELF)
        system, faults = now.ru_stime - begun.ru_stime, now.ru_minflt - begun.ru_minflt
        if 0 < system <= faults * _SECONDS_EACH:
            share = system / (system + now.ru_utime - begun.ru_utime)
            self._worst[batch_size] = max(self._worst.get(batch_size, (0.0, 0)), (share, round(faults / steps)))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """For each `batch_size` its largest `share` of CPU time (at most 1), and page faults per step as `faults`."""
        return [{"batch_size": n, "share": share, "faults": faults} for n, (share, faults) in self._worst.items()]


def describe(rows: Sequence[Mapping[str, Any]], sizes: Collection[int]) -> list[str]:
    """
    Return a list with a note on the batch size whose page faults take the largest share of CPU time.

    It is empty if the share is below 5 %, or malloc is not glibc's with its default settings or cubatch's.

    Args:
        rows: Mappings from `PageFaults.rows`.
        sizes: Batch sizes of the result; other sizes ran only to measure memory.
    """
    worst = max((row for row in rows if row["batch_size"] in sizes), key=lambda row: row["share"], default=None)
    if worst is None or worst["share"] < _WORTH_NOTING or not heap.is_movable():
        return []
    share = format_whole_percent(worst["share"])
    lead = f"At batch size {worst['batch_size']} the system took {share} of the CPU time"
    cause = f"{format_count(worst['faults'])} page faults a step: glibc returns freed memory and requests it again."
    variables = f"{heap.format_variables(heap.KEPT)}, and no other variables of malloc"
    return [f"{lead} for {cause} To avoid that at the cost of more memory, set {variables}, here and where you train."]
