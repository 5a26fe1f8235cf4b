"""
What it costs that freed memory is given back to the system and fetched anew by the next step, page by page.

glibc has each block above a threshold as a mapping of its own, and gives back the top of its heap above another.  Also
where both are as high as it raises them a step with larger blocks pays for that
(benchmarks/results/amd-epyc-2-threads).
"""

from __future__ import annotations

import resource
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cubatch.measure import heap
from cubatch.units import format_count, format_whole_percent

_WORTH_SAYING = 0.05
"""Share of the CPU time: where one thread fetches memory while another waits, a step takes twice as much longer."""

_SECONDS_EACH = 10e-6
"""Where the system took longer for each page fault it did something else: 2 to 3 were met."""


class PageFaults:
    """Those of steps, by batch size, and the share of the CPU time that they took."""

    def __init__(self) -> None:
        self._begun: resource.struct_rusage | None = None
        self._worst: dict[int, tuple[float, int]] = {}

    def begin(self) -> None:
        """Count from here."""
        self._begun = resource.getrusage(resource.RUSAGE_SELF)

    def end(self, batch_size: int, steps: int) -> None:
        """Count up to here, for so many steps of a batch size; nothing where none was begun."""
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
        """Of each `batch_size` the largest `share` of the CPU time that they took, and `faults` a step then."""
        return [{"batch_size": n, "share": share, "faults": faults} for n, (share, faults) in self._worst.items()]


def told(rows: Sequence[Mapping[str, Any]], sizes: Collection[int]) -> list[str]:
    """
    Say where they took most, and what helps; nothing where that is little, or the user has seen to it.

    Args:
        rows: As of `PageFaults`.
        sizes: Which may be named: others, stepped to learn of memory, are nowhere else in a result.
    """
    worst = max((row for row in rows if row["batch_size"] in sizes), key=lambda row: row["share"], default=None)
    if worst is None or worst["share"] < _WORTH_SAYING or not heap.is_movable():
        return []
    met = f"At batch size {worst['batch_size']} the system took {format_whole_percent(worst['share'])} of the CPU time"
    cause = f"{format_count(worst['faults'])} page faults a step: glibc gives freed memory back and fetches it anew."
    variables = f"{heap.spelt(heap.KEPT)}, and no others of malloc"
    return [f"{met} for {cause} Set {variables}, for this and where you run it to have it kept, for more memory."]
