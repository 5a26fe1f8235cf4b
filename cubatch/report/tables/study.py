"""What `cubatch study` prints: the answer of each study, and the numbers that it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cubatch.report.grid import Cell, Grid
from cubatch.report.tables.common import written
from cubatch.units import format_bytes, format_count, format_percent, format_seconds


def grids(payload: Mapping[str, Any]) -> list[Grid]:
    """Lay out a study, whichever it is, the answer first."""
    head = Grid(
        title=f"{payload['title']} {payload['model']} on {payload['device'].get('name')}",
        notes=[payload["answer"], *([payload["points"]] if payload["points"] else [])],
    )
    return [head, *_TABLES[payload["study"]](payload)]


def signed(share: float) -> str:
    """
    Write by what share something is more or less.

    Example:
        >>> signed(0.0123), signed(-0.5), signed(0.0)
        ('+1.2 %', '−50.0 %', '+0.0 %')
    """  # noqa: RUF002 - a minus sign
    return f"{100 * share:+.1f} %".replace("-", "−")  # noqa: RUF001


def _powers_of_two(payload: Mapping[str, Any]) -> list[Grid]:
    rates = {m["batch_size"]: m["samples_per_second"] for m in payload["result"]["measurements"]}
    rows: list[list[Cell]] = [
        [
            c["batch_size"],
            c["power"],
            c["verdict"],
            c.get("published"),
            signed(c["ratio"] - 1),
            f"{signed(c['interval'][0] - 1)} to {signed(c['interval'][1] - 1)}",
            format_count(rates[c["batch_size"]]),
            " and ".join(str(count) for count in c["visits"]),
        ]
        for c in payload["comparisons"]
    ]
    columns = ["batch", "beside", "verdict", "published", "difference", "90 % interval", "samples/s", "visits"]
    differing = [place for place, c in enumerate(payload["comparisons"]) if c["verdict"] in {"faster", "slower"}]
    return [Grid(title="Each size beside a power of two", columns=columns, rows=rows, marked=differing)]


def _small_batch_floor(payload: Mapping[str, Any]) -> list[Grid]:
    measured = [m for m in payload["result"]["measurements"] if m["latency_seconds"] is not None]
    first, best = measured[0]["latency_seconds"], max(m["samples_per_second"] for m in measured)
    rows = [
        [
            m["batch_size"],
            format_seconds(m["latency_seconds"]),
            f"{m['latency_seconds'] / first:.2f} x",
            format_count(m["samples_per_second"]),
            format_percent(m["samples_per_second"] / best),
        ]
        for m in measured
    ]
    columns = ["batch", "a step", "beside batch 1", "samples/s", "of the best"]
    marked = [place for place, m in enumerate(measured) if m["batch_size"] == payload["floor"]]
    return [Grid(title="Time of a step", columns=columns, rows=rows, marked=marked)]


def _hyperparameter(payload: Mapping[str, Any]) -> list[Grid]:
    rows = [
        [
            choice["batch_size"],
            format_count(choice["samples_per_second"]),
            format_percent(choice["cost"]),
            written(format_bytes, choice["predicted_peak_bytes"]),
        ]
        for choice in payload["choices"]
    ]
    columns = ["batch", "samples/s", "costs", "memory by the plan"]
    return [Grid(title="Sizes worth trying", columns=columns, rows=rows)]


def _memory_rules(payload: Mapping[str, Any]) -> list[Grid]:
    taken: list[list[Cell]] = [
        [
            t["mode"],
            t["batch_size"],
            format_bytes(t["planned_bytes"]),
            written(format_bytes, t["measured_bytes"]),
            written(format_bytes, t["device_bytes"]),
            f"{t['planned_bytes'] / payload['file_bytes']:.3g} x" if payload["file_bytes"] else None,
        ]
        for t in payload["taken"]
    ]
    columns = ["mode", "batch", "plan", "measured", "by the driver", "beside the file"]
    rules: list[list[Cell]] = [
        [rule["name"], rule["mode"], rule["batch_size"], format_bytes(rule["bytes"]), f"{rule['ratio']:.3g} x"]
        for rule in payload["rules"]
    ]
    size = format_bytes(payload["file_bytes"])
    return [
        Grid(title=f"What it takes; the file of the weights has {size}", columns=columns, rows=taken),
        Grid(title="Rules of thumb", columns=["rule", "mode", "batch", "gives", "beside measured"], rows=rules),
    ]


def _numpy_mnist(payload: Mapping[str, Any]) -> list[Grid]:
    causes = list(payload["epochs"][0]["shares"])
    rows: list[list[Cell]] = [
        [
            one["batch_size"],
            format_seconds(one["seconds"]),
            written(format_seconds, one["published_seconds"]),
            *(format_percent(one["shares"][cause]) for cause in causes),
        ]
        for one in payload["epochs"]
    ]
    fastest = min(range(len(rows)), key=lambda place: payload["epochs"][place]["seconds"])
    columns = ["batch", "5 epochs", "published", *causes]
    return [Grid(title="Seconds of training, and what they go to", columns=columns, rows=rows, marked=[fastest])]


_TABLES = {
    "powers-of-two": _powers_of_two,
    "small-batch-floor": _small_batch_floor,
    "hyperparameter": _hyperparameter,
    "memory-rules": _memory_rules,
    "numpy-mnist": _numpy_mnist,
}
