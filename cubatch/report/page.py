"""A tuning result as an HTML page or an output of a notebook: answer, reasons, curve, table, how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from cubatch.report.answer import answer, points
from cubatch.report.curve import curve_of
from cubatch.report.facts import TIMED, measurements_of
from cubatch.report.html import Parts, document, figures, legend_of, output
from cubatch.report.tables.common import shape, written
from cubatch.report.tables.result import legend, listed, parted, status, tuning_grid
from cubatch.units import format_bytes, format_seconds

_REASONS = 80  # characters for those of a size, in the table
_MAX_LINES = 12  # reasons beneath the table


def html(result: Mapping[str, Any]) -> str:
    """
    Write one self-contained HTML page: answer, reasons, curve, table, what it was measured with.

    Args:
        result: A tuning result or a prediction in the JSON form of schema 1.

    Returns:
        The document: no script, no external resource, light and dark, every text escaped.
    """
    return document(_parts(result))


def notebook(result: Mapping[str, Any]) -> str:
    """
    Write the same as an output of a notebook.

    Args:
        result: As for `html`.

    Returns:
        An element that brings its own style.
    """
    return output(_parts(result))


def _parts(result: Mapping[str, Any]) -> Parts:
    shown = curve_of(result)
    notes = [*([_explained(result)] if _explained(result) else []), *legend(result)]
    table = attrs.evolve(tuning_grid(result), title="Every batch size", notes=notes)
    return Parts(
        title=shown.title,
        subtitle=shown.subtitle,
        predicted=shown.predicted,
        answer=answer(result),
        reasons=points(result),
        figures=figures(shown, result.get("objective") or "throughput"),
        legend=legend_of(shown),
        table=table.shortened(_REASONS),
        facts=facts_of(result),
    )


def _explained(result: Mapping[str, Any]) -> list[str]:
    """Say why sizes that have a row gave no answer, those of one reason together; `dropped` says it all."""
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for m in parted(result)[0]:
        if m.get("status") not in (*TIMED, "predicted", None) and m.get("stop_reason"):
            alike.setdefault((status(m, result), str(m["stop_reason"])), []).append(m)
    lines = [f"{listed(those)}: {word}: {why}" for (word, why), those in alike.items()]
    rest = len(lines) - _MAX_LINES
    return lines if rest <= 1 else [*lines[:_MAX_LINES], f"{rest} more reasons are in the JSON."]


def facts_of(result: Mapping[str, Any]) -> dict[str, dict[str, object]]:
    """Gather the titled two-column tables of the page; what is unknown is left out."""
    limits, device = result.get("limits") or {}, dict(result.get("device") or {})
    for key, name in (("memory_bytes", "memory"), ("free_bytes", "free_memory")):
        device[name] = written(format_bytes, device.pop(key, None))
    if (capability := device.get("compute_capability")) is not None:
        device["compute_capability"] = ".".join(str(part) for part in capability)
    settings = {
        **{key: result.get(key) for key in ("mode", "dtype", "objective", "tolerance", "optimizer", "library")},
        "input_shape": shape(result.get("input_shape") or ()) or None,
        "recompute": result.get("recompute"),
        "max_batch_size": limits.get("max_batch_size"),
        "memory_limit": written(format_bytes, limits.get("memory_bytes")),
        "latency_limit": written(format_seconds, limits.get("latency_seconds")),
        "budget": written(format_seconds, result.get("budget_seconds")),
        "spent": written(format_seconds, result.get("seconds_spent")),
        "seed": result.get("seed"),
        "L2 cache": result.get("l2"),
        "decided_by": result.get("decided_by"),
        "created": result.get("created"),
    }
    environment = dict(result.get("environment") or {})
    if launch := environment.pop("launch", None):
        way = "in one CUDA graph" if launch["graph"] else f"one by one: {launch['refusal']}"
        environment["launches a step"] = f"{launch['launches'] or 'unknown'}, {way}"
    tables = {"Device": device, "While measured": vitals(result), "Settings": settings, "Environment": environment}
    return {
        name: {key.replace("_", " "): value for key, value in facts.items() if value not in (None, "")}
        for name, facts in tables.items()
    }


def vitals(result: Mapping[str, Any]) -> dict[str, object]:
    """
    Tell what the GPU was like while it was measured: where it was hottest and fullest, and how it did the answer.

    Example:
        >>> sizes = [{"batch_size": 8, "temperature_celsius": 61.0, "power_watts": 413.0, "used_bytes": None}]
        >>> vitals({"batch_size": 8, "measurements": sizes})
        {'hottest': '61 °C, at batch size 8', 'power at the answer': '413 W'}
    """
    told: dict[str, object] = {}
    most: dict[str, tuple[str, Callable[[float], str]]] = {
        "hottest": ("temperature_celsius", "{:.0f} °C".format),
        "fullest": ("used_bytes", lambda size: f"{format_bytes(int(size))} of the GPU's memory in use"),
    }
    for label, (name, write) in most.items():
        known = [(m[name], m["batch_size"]) for m in measurements_of(result) if m.get(name) is not None]
        if known:
            value, size = max(known)
            told[label] = f"{write(value)}, at batch size {size}"
    answer = next((m for m in measurements_of(result) if m["batch_size"] == result.get("batch_size")), {})
    told["power at the answer"] = written("{:.0f} W".format, answer.get("power_watts"))
    told["busy at the answer"] = written("{:.0f} % of the time".format, answer.get("utilization_percent"))
    return {label: text for label, text in told.items() if text is not None}
