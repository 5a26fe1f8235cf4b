"""Tables of `cubatch fleet`."""

from __future__ import annotations

from collections.abc import Mapping

from cubatch.fleet.fleet_result import FleetResult
from cubatch.report.grid import Grid
from cubatch.report.tables.common import half_width, written
from cubatch.tuning.results import BUSY_MACHINE
from cubatch.units import format_bytes, format_count, format_metric


def compared(fleet: FleetResult) -> Grid:
    """Return the table of the results of a fleet, one row per distinct device."""
    columns = {
        "device": lambda d: d.name,
        "workers": lambda d: str(len(d.workers)) if d.workers else None,
        "batch": lambda d: written(str, d.batch_size),
        "samples/s": lambda d: written(format_count, d.samples_per_second),
        "±": lambda d: half_width(d.result),
        "memory": lambda d: written(format_bytes, d.peak_bytes),
        "per million samples": lambda d: written(format_metric, d.cost_per_million_samples),
        "status": lambda d: "failed" if d.error else "predicted" if d.forecast is not None else "measured",
    }
    devices = fleet.devices
    notes = [f"{device.name}: {device.error}" for device in devices if device.error]
    notes += [
        f"{device.name}: {BUSY_MACHINE}" for device in devices if device.result is not None and device.result.disturbed
    ]
    measured = [place for place, device in enumerate(devices) if device.samples_per_second]
    dispensable = ["memory", "workers"]
    return Grid.of(devices, columns, title="By device", marked=measured[:1], notes=notes, dispensable=dispensable)


def shared(shares: Mapping[str, int]) -> Grid:
    """Return the table of `shares`: the number of samples of a batch by the name of the worker."""
    columns = {"worker": lambda item: item[0], "samples": lambda item: str(item[1])}
    return Grid.of(shares.items(), columns, title="Shares of a batch")
