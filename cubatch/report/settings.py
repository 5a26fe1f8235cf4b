"""The conditions of a result: one line for a title, and two-column tables for a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cubatch.report.tables.common import shape, written
from cubatch.tuning.results import BatchSizeResult
from cubatch.units import format_bytes, format_seconds, visible


def setting(known: Mapping[str, Any], device: str | None) -> str:
    """
    Return device, mode, dtype, library, recomputation and date in one line, without unknown values.

    `known` has the fields of a TuningResult by name. `device` is the device's name; None leaves it out.
    """
    library, created = known.get("library"), str(known.get("created") or "")
    parts = [
        device,
        known.get("mode"),
        known.get("dtype"),
        f"library {library}" if library else None,
        "activations recomputed" if known.get("recompute") else None,
        created[: len("2026-11-20")],
    ]
    return visible(", ".join(str(part) for part in parts if part), keep="")


def setting_of(result: BatchSizeResult, *, with_device: bool = True) -> str:
    """Return device (unless `with_device` is False), mode, dtype, library and date of a result in one line."""
    return setting(_facts(result), result.device_facts.get("name") if with_device else None)


def tables_of(result: BatchSizeResult) -> dict[str, dict[str, object]]:
    """Return tables of device, GPU state, settings and environment of a result: by title, values by label."""
    return tables(_facts(result), vitals(result))


def tables(known: Mapping[str, Any], measured: Mapping[str, object] | None = None) -> dict[str, dict[str, object]]:
    """
    Return tables of device, GPU state, settings and environment: by title, known values by label.

    Args:
        known: Fields of a TuningResult.
        measured: Rows on the state of the GPU while it was measured, as from `vitals`; None: unknown.
    """
    limits, device = known.get("limits") or {}, dict(known.get("device") or {})
    for key, name in (("memory_bytes", "memory"), ("free_bytes", "free_memory")):
        device[name] = written(format_bytes, device.pop(key, None))
    if (capability := device.get("compute_capability")) is not None:
        device["compute_capability"] = ".".join(str(part) for part in capability)
    settings = {
        **{key: known.get(key) for key in ("mode", "dtype", "objective", "tolerance", "optimizer", "library")},
        "input_shape": shape(known.get("input_shape") or ()) or None,
        "recompute": known.get("recompute"),
        "accumulate": None if known.get("accumulate") == 1 else known.get("accumulate"),
        "max_batch_size": limits.get("max_batch_size"),
        "memory_limit": written(format_bytes, limits.get("memory_bytes")),
        "latency_limit": written(format_seconds, limits.get("latency_seconds")),
        "budget": written(format_seconds, known.get("budget_seconds")),
        "spent": written(format_seconds, known.get("seconds_spent")),
        "seed": known.get("seed"),
        "L2 cache": known.get("l2"),
        "decided_by": known.get("decided_by"),
        "created": known.get("created"),
    }
    environment = dict(known.get("environment") or {})
    if launch := environment.pop("launch", None):
        way = "in one CUDA graph" if launch["graph"] else f"one by one: {launch['refusal']}"
        environment["launches per step"] = f"{launch['launches'] or 'unknown'}, {way}"
    titled = {"Device": device, "While measured": measured or {}, "Settings": settings, "Environment": environment}
    return {
        name: {key.replace("_", " "): value for key, value in facts.items() if value not in (None, "")}
        for name, facts in titled.items()
    }


def vitals(result: BatchSizeResult) -> dict[str, object]:
    """
    Return the rows of a table of the GPU, text with unit by label; None where a value was not read.

    "highest temperature" (°C) and "highest memory use" (bytes) are those of all batch sizes, each with its size.
    "power at the recommended size" is in W, "busy at the recommended size" in % of the time.
    """
    sizes = result.sizes.values()
    chosen = result.sizes.get(result.batch_size or 0)
    power, busy = (None, None) if chosen is None else (chosen.power_watts, chosen.utilization_percent)

    def most(values: Iterable[tuple[float | None, int]], write: Callable[[float], str]) -> str | None:
        highest = max(((value, n) for value, n in values if value is not None), default=None)
        return None if highest is None else f"{write(highest[0])}, at batch size {highest[1]}"

    return {
        "highest temperature": most(((m.temperature_celsius, m.batch_size) for m in sizes), "{:.0f} °C".format),
        "highest memory use": most(((m.used_bytes, m.batch_size) for m in sizes), format_bytes),
        "power at the recommended size": written("{:.0f} W".format, power),
        "busy at the recommended size": written("{:.0f} % of the time".format, busy),
    }


_FIELDS = (
    "mode", "dtype", "objective", "tolerance", "optimizer", "library", "input_shape", "recompute", "accumulate",
    "limits", "budget_seconds", "seconds_spent", "seed", "l2", "decided_by", "created", "environment",
)  # fmt: skip


def _facts(result: BatchSizeResult) -> dict[str, Any]:
    return {name: getattr(result, name, None) for name in _FIELDS} | {"device": dict(result.device_facts)}
