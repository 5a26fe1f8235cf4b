"""All GPUs of this machine over time: the current figures of each, and their highest values."""

from __future__ import annotations

from typing import Any

import attrs

from cubatch.errors import CubatchError
from cubatch.hardware import nvml
from cubatch.hardware.nvml import Listed, Monitor, Process, Snapshot, name_processes

_PEAKS = ("used_bytes", "power_watts", "temperature_celsius", "utilization_percent", "sm_clock_mhz")


@attrs.define(kw_only=True)
class GpuRecord:
    """State of a GPU, or of a MIG slice, since the GpuHistory was created."""

    gpu: Listed  # the GPU, as NVML lists it
    now: Snapshot = attrs.field(factory=Snapshot)  # the latest state; values that the GPU does not report are None
    processes: tuple[Process, ...] = ()  # processes that hold its memory now
    # highest used_bytes, power_watts, temperature_celsius, utilization_percent and sm_clock_mhz
    peaks: dict[str, float] = attrs.field(factory=dict)
    joules: float | None = None  # energy of the board since the watch began; None where it has no counter
    problem: str = ""  # why the latest reading failed; empty if it did not

    def to_mapping(self) -> dict[str, Any]:
        """Return the attributes by name as a dict for JSON, and `processes` as a phrase under "holders"."""
        return attrs.asdict(self) | {"holders": name_processes(self.processes)}


class GpuHistory:
    """
    Reads the state of all GPUs of this machine at each call of `read`, and records the highest values.

    Raises:
        DeviceNotAvailable: If NVML is missing, or lists no GPU.
        DeviceFailed: If NVML cannot list the GPUs.
    """

    def __init__(self) -> None:
        self._records = [GpuRecord(gpu=gpu, problem=gpu.problem) for gpu in nvml.listed()]
        self._monitors: dict[str, Monitor] = {}
        self._first_joules: dict[str, float | None] = {}

    def read(self) -> list[GpuRecord]:
        """Read every GPU and return the records; the `problem` of a record is not empty if its GPU cannot be read."""
        for record in self._records:
            if record.gpu.uuid is not None:
                self._update(record, record.gpu.uuid)
        return self._records

    def _update(self, record: GpuRecord, uuid: str) -> None:
        try:
            monitor = self._monitors[uuid] = self._monitors.get(uuid) or Monitor(uuid)
            now = monitor.snapshot()
        except CubatchError as error:
            record.now, record.processes, record.problem = Snapshot(), (), str(error)
            return
        record.now, record.processes, record.problem = now, monitor.processes(), ""
        for name in _PEAKS:
            if (value := getattr(now, name)) is not None:
                record.peaks[name] = max(value, record.peaks.get(name, value))
        joules = monitor.energy_joules()
        first = self._first_joules.setdefault(uuid, joules)
        record.joules = None if joules is None or first is None else joules - first
