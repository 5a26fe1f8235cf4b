"""The table of a fleet: a line a kind of device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cubatch.report.grid import WIDTH, Grid
from cubatch.units import format_bytes, format_count, format_metric


def compared(fleet: Mapping[str, Any], *, width: int = WIDTH) -> Grid:
    """
    Lay out the answers of a fleet.

    Args:
        fleet: A FleetResult in its JSON form.
        width: Characters per line.

    Returns:
        A grid.
    """
    devices = fleet["devices"]
    rows = [
        (
            device["name"],
            str(len(device["workers"])) if device["workers"] else None,
            _told(str, device["batch_size"]),
            _told(format_count, device["samples_per_second"]),
            _told(format_bytes, device["peak_bytes"]),
            _told(format_metric, device["cost_per_million_samples"]),
            "failed" if device["error"] else "predicted" if device["predicted"] else "measured",
        )
        for device in devices
    ]
    columns = ("device", "workers", "batch", "samples/s", "memory", "per million samples", "status")
    notes = [f"{device['name']}: {device['error']}" for device in devices if device["error"]]
    found = [place for place, device in enumerate(devices) if device["samples_per_second"]]
    grid = Grid(title="By kind of device", columns=columns, rows=rows, marked=found[:1], notes=notes)
    return grid.fit(width, ("memory", "workers"))


def shared(shares: Mapping[str, int]) -> Grid:
    """Lay out how a batch is shared by workers."""
    rows = [(address, str(share)) for address, share in shares.items()]
    return Grid(title="Shares of a batch", columns=("worker", "samples"), rows=rows)


def _told(form: Any, value: Any) -> str | None:
    return None if value is None else str(form(value))
