"""Tables of `cubatch fleet`."""

from __future__ import annotations

from collections.abc import Mapping

from cubatch.fleet.fleet_result import FleetDevice, FleetResult
from cubatch.report.grid import Grid
from cubatch.report.tables.common import written
from cubatch.units import format_bytes, format_count, format_metric


def compared(fleet: FleetResult) -> Grid:
    """Return the table of a fleet, one line per distinct device."""
    devices = fleet.devices
    rows = [
        (
            device.name,
            str(len(device.workers)) if device.workers else None,
            written(str, device.batch_size),
            written(format_count, device.samples_per_second),
            written(format_bytes, device.peak_bytes),
            written(format_metric, device.cost_per_million_samples),
            _status(device),
        )
        for device in devices
    ]
    columns = ("device", "workers", "batch", "samples/s", "memory", "per million samples", "status")
    notes = [f"{device.name}: {device.error}" for device in devices if device.error]
    measured = [place for place, device in enumerate(devices) if device.samples_per_second]
    return Grid(title="By device", columns=columns, rows=rows, marked=measured[:1], notes=notes,
                dispensable=["memory", "workers"])  # fmt: skip


def shared(shares: Mapping[str, int]) -> Grid:
    """Return the table of the samples of each worker."""
    rows = [(address, str(share)) for address, share in shares.items()]
    return Grid(title="Shares of a batch", columns=("worker", "samples"), rows=rows)


def _status(device: FleetDevice) -> str:
    return "failed" if device.error else "predicted" if device.forecast is not None else "measured"
