"""Table of `cubatch watch`: one line per GPU, and the processes that hold its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cubatch.report.grid import Grid
from cubatch.report.tables.common import written
from cubatch.units import format_bytes

_DISPENSABLE = ("energy", "clock", "most °C", "most W", "most load")


def watched(gpus: Sequence[Mapping[str, Any]], *, title: str) -> Grid:
    """Return the table of memory, load, clock, power and temperature of GPUs, now and at most, a row per GPU."""
    notes = [line for gpu in gpus for line in _lines(gpu)]
    return Grid.of(gpus, _COLUMNS, title=title, notes=[notes] if notes else [], dispensable=_DISPENSABLE)


def _lines(gpu: Mapping[str, Any]) -> list[str]:
    """Return one line with the problem of a GPU, else with the processes that hold its memory; empty without either."""
    name = f"GPU {gpu['gpu']['index']}{' (a slice)' if str(gpu['gpu']['uuid']).startswith('MIG-') else ''}"
    if gpu["problem"]:
        return [f"{name}: {gpu['problem']}"]
    return [f"{name}: {gpu['holders']}."] if gpu["holders"] else []


def _power(now: Mapping[str, Any]) -> str | None:
    drawn, limit = now["power_watts"], now["power_limit_watts"]
    return None if drawn is None else f"{drawn:.0f} W" if limit is None else f"{drawn:.0f} of {limit:.0f} W"


def _now(name: str, form: str) -> Callable[[Mapping[str, Any]], str | None]:
    return lambda gpu: written(form.format, gpu["now"][name])


def _most(name: str, form: str) -> Callable[[Mapping[str, Any]], str | None]:
    return lambda gpu: written(form.format, gpu["peaks"].get(name))


_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "GPU": lambda gpu: str(gpu["gpu"]["index"]),
    "memory": lambda gpu: written(format_bytes, gpu["now"]["used_bytes"]),
    "most": lambda gpu: written(format_bytes, gpu["peaks"].get("used_bytes")),
    "of": lambda gpu: written(format_bytes, gpu["now"]["total_bytes"]),
    "load": _now("utilization_percent", "{:.0f} %"),
    "most load": _most("utilization_percent", "{:.0f} %"),
    "clock": _now("sm_clock_mhz", "{:.0f} MHz"),
    "power": lambda gpu: _power(gpu["now"]),
    "most W": _most("power_watts", "{:.0f}"),
    "°C": _now("temperature_celsius", "{:.0f}"),
    "most °C": _most("temperature_celsius", "{:.0f}"),
    "energy": lambda gpu: written("{:.0f} J".format, gpu["joules"]),
    "slowed by": lambda gpu: ", ".join(gpu["now"]["throttle_reasons"] or ()) or None,
    "name": lambda gpu: str(gpu["gpu"]["name"]),
}
