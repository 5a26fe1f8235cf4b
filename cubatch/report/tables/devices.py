"""Table of `cubatch devices`."""

from __future__ import annotations

from collections.abc import Sequence

from cubatch.hardware.facts import Device
from cubatch.report.grid import Grid
from cubatch.report.tables.common import written
from cubatch.units import format_bytes, format_metric


def devices(listed: Sequence[Device], *, title: str) -> Grid:
    """Return the table of devices, a row per device: its --device value, SMs, memory, bandwidth and float32 FLOP/s."""
    columns = {
        "--device": _option,
        "capability": lambda d: None if d.compute_capability is None else ".".join(map(str, d.compute_capability)),
        "SMs": lambda d: d.num_sms,
        "threads": lambda d: d.threads,
        "memory": lambda d: written(format_bytes, d.memory_bytes),
        "bandwidth": lambda d: written(lambda rate: format_metric(rate, "B/s"), d.peak_bytes_per_second),
        "float32": lambda d: written(
            lambda rate: format_metric(rate, "FLOP/s"), d.peak_flops_per_second.get("float32")
        ),
        "name": lambda d: d.name,
    }
    return Grid.of(listed, columns, title=title)


def _option(device: Device) -> str:
    return f"cuda:{device.index or 0}" if device.live and device.kind == "cuda" else device.slug or device.kind
