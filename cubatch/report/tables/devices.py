"""Table of `cubatch devices`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cubatch.report.grid import Grid
from cubatch.report.tables.common import written
from cubatch.units import format_bytes, format_metric

if TYPE_CHECKING:
    from cubatch.hardware.facts import Device


def devices(listed: Sequence[Device], *, title: str) -> Grid:
    """Return the table of some devices."""
    rows = [
        [
            _option(device),
            None if device.compute_capability is None else ".".join(map(str, device.compute_capability)),
            device.num_sms,
            device.threads,
            written(format_bytes, device.memory_bytes),
            written(lambda rate: format_metric(rate, "B/s"), device.peak_bytes_per_second),
            written(lambda rate: format_metric(rate, "FLOP/s"), device.peak_flops_per_second.get("float32")),
            device.name,
        ]
        for device in listed
    ]
    columns = ["--device", "capability", "SMs", "threads", "memory", "bandwidth", "float32", "name"]
    return Grid(title=title, columns=columns, rows=rows)


def _option(device: Device) -> str:
    """Return the value of `--device` for a device."""
    return f"cuda:{device.index or 0}" if device.live and device.kind == "cuda" else device.slug or device.kind
