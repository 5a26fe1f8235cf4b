"""Looking at all GPUs of this machine again and again: what each does now, and the most that was seen."""

from __future__ import annotations

from collections import deque
from typing import Any

import attrs

from cubatch.errors import CubatchError
from cubatch.hardware import nvml
from cubatch.hardware.nvml import Monitor
from cubatch.hardware.nvml_records import Listed, Process, Snapshot, named

KEPT_LOOKS = 20
"""Of which the memory is kept, for a picture of its course."""

_PEAKS = ("used_bytes", "power_watts", "temperature_celsius", "utilization_percent", "sm_clock_mhz")


@attrs.define(kw_only=True)
class Seen:
    """
    What was seen of a GPU, or of a slice of one.

    Attributes:
        gpu: Which.
        now: The last look; what the GPU does not tell is None.
        processes: Who held its memory then.
        peaks: The most of used_bytes, power_watts, temperature_celsius, utilization_percent and sm_clock_mhz.
        course: Shares of its memory that were in use at the last looks, the latest at the end.
        joules: What the board used since the first look; None where it has no counter.
        problem: Why the last look gave nothing; empty if it did.
    """

    gpu: Listed
    now: Snapshot = attrs.field(factory=Snapshot)
    processes: tuple[Process, ...] = ()
    peaks: dict[str, float] = attrs.field(factory=dict)
    course: deque[float] = attrs.field(factory=lambda: deque(maxlen=KEPT_LOOKS))
    joules: float | None = None
    problem: str = ""

    def to_mapping(self) -> dict[str, Any]:
        """Return it as a plain mapping, for JSON."""
        return attrs.asdict(self) | {"course": list(self.course), "holders": named(self.processes)}


class Watch:
    """
    All GPUs of this machine.

    Raises:
        DeviceNotAvailable: If NVML is not there, or lists no GPU.
        DeviceFailed: If NVML fails altogether.

    Example:
        >>> Watch().look()[0].now.free_bytes          # doctest: +SKIP
        150039822336
    """

    def __init__(self) -> None:
        self._seen = [Seen(gpu=gpu, problem=gpu.problem) for gpu in nvml.listed()]
        self._monitors: dict[str, Monitor] = {}
        self._first_joules: dict[str, float | None] = {}

    def look(self) -> list[Seen]:
        """Look at every GPU; one that fails says so, and hides none of the others."""
        for seen in self._seen:
            if seen.gpu.uuid is not None:
                self._look_at(seen, seen.gpu.uuid)
        return self._seen

    def _look_at(self, seen: Seen, uuid: str) -> None:
        try:
            monitor = self._monitors[uuid] = self._monitors.get(uuid) or Monitor(uuid)
            now = monitor.snapshot()
        except CubatchError as error:
            seen.now, seen.processes, seen.problem = Snapshot(), (), str(error)
            return
        seen.now, seen.processes, seen.problem = now, monitor.processes(), ""
        for name in _PEAKS:
            if (value := getattr(now, name)) is not None:
                seen.peaks[name] = max(value, seen.peaks.get(name, value))
        if now.used_bytes is not None and now.total_bytes:
            seen.course.append(now.used_bytes / now.total_bytes)
        joules = monitor.energy_joules()
        first = self._first_joules.setdefault(uuid, joules)
        seen.joules = None if joules is None or first is None else joules - first
