"""Table of `cubatch watch`: one line per GPU, and the processes that hold its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cubatch.report.grid import Grid
from cubatch.report.tables.common import written
from cubatch.units import format_bytes

_DISPENSABLE = ("energy", "clock", "most °C", "most W", "most load", "course of memory")
_BARS = "▁▂▃▄▅▆▇█"


def watched(gpus: Sequence[Mapping[str, Any]], *, title: str) -> Grid:
    """
    Return the table of the GPUs.

    Args:
        gpus: Records of `hardware.gpu_history.GpuRecord`, in JSON form.
        title: Title of the table.
    """
    rows = [_row(gpu, gpu["now"], gpu["peaks"]) for gpu in gpus]
    columns = [
        "GPU", "memory", "most", "of", "course of memory", "load", "most load", "clock", "power", "most W", "°C",
        "most °C", "energy", "slowed by", "name",
    ]  # fmt: skip
    notes = [line for gpu in gpus for line in _lines(gpu)]
    return Grid(title=title, columns=columns, rows=rows, notes=[notes] if notes else [], dispensable=_DISPENSABLE)


def sparkline(shares: Iterable[float]) -> str:
    """
    Return numbers from 0 to 1 as a row of bars.

    Example:
        >>> sparkline([0.0, 0.5, 1.0])
        '▁▅█'
    """
    return "".join(_BARS[min(len(_BARS) - 1, int(max(0.0, share) * len(_BARS)))] for share in shares)


def _row(gpu: Mapping[str, Any], now: Mapping[str, Any], peaks: Mapping[str, float]) -> list[str | None]:
    return [
        str(gpu["gpu"]["index"]),
        written(format_bytes, now["used_bytes"]),
        written(format_bytes, peaks.get("used_bytes")),
        written(format_bytes, now["total_bytes"]),
        sparkline(gpu["course"]) or None,
        written("{:.0f} %".format, now["utilization_percent"]),
        written("{:.0f} %".format, peaks.get("utilization_percent")),
        written("{:.0f} MHz".format, now["sm_clock_mhz"]),
        _power(now),
        written("{:.0f}".format, peaks.get("power_watts")),
        written("{:.0f}".format, now["temperature_celsius"]),
        written("{:.0f}".format, peaks.get("temperature_celsius")),
        written("{:.0f} J".format, gpu["joules"]),
        ", ".join(now["throttle_reasons"] or ()) or None,
        str(gpu["gpu"]["name"]),
    ]


def _lines(gpu: Mapping[str, Any]) -> list[str]:
    """Return why a GPU could not be read, or the processes that hold its memory."""
    name = f"GPU {gpu['gpu']['index']}{' (a slice)' if str(gpu['gpu']['uuid']).startswith('MIG-') else ''}"
    if gpu["problem"]:
        return [f"{name}: {gpu['problem']}"]
    return [f"{name}: {gpu['holders']}."] if gpu["holders"] else []


def _power(now: Mapping[str, Any]) -> str | None:
    drawn, limit = now["power_watts"], now["power_limit_watts"]
    return None if drawn is None else f"{drawn:.0f} W" if limit is None else f"{drawn:.0f} of {limit:.0f} W"
