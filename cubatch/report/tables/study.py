"""Tables of `cubatch study`: the list of studies, and the answer and numbers of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.report.grid import Cell, Grid
from cubatch.report.tables.common import written
from cubatch.units import format_bytes, format_count, format_percent, format_seconds


def studies(listed: Sequence[Mapping[str, Any]]) -> Grid:
    """Return the table of all studies."""
    rows = [
        [s["name"], s["title"], s["model"], " and ".join(s["modes"]), format_seconds(s["budget_seconds"])]
        for s in listed
    ]
    notes = ["“measures for” is the default of --budget; --quick measures less. Run one: cubatch study waves"]
    columns = ["NAME", "question", "MODEL", "--mode", "measures for"]
    return Grid(title="Studies", columns=columns, rows=rows, notes=notes)


def grids(payload: Mapping[str, Any]) -> list[Grid]:
    """Return the tables of a study, the answer first."""
    head = Grid(
        title=f"{payload['title']} {payload['model']} on {payload['device'].get('name')}",
        notes=[payload["answer"], *([payload["points"]] if payload["points"] else [])],
    )
    return [head, *_TABLES[payload["study"]](payload)]


def signed(share: float) -> str:
    """
    Format a relative difference with its sign.

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
            c["reference"],
            c["verdict"],
            c["published"],
            signed(c["ratio"] - 1),
            f"{signed(c['interval'][0] - 1)} to {signed(c['interval'][1] - 1)}",
            format_count(rates[c["batch_size"]]),
            " and ".join(str(count) for count in c["trials"]),
        ]
        for c in payload["comparisons"]
    ]
    columns = ["batch", "reference", "verdict", "published", "difference", "90 % interval", "samples/s", "trials"]
    differing = [place for place, c in enumerate(payload["comparisons"]) if c["verdict"] in {"faster", "slower"}]
    return [Grid(title="Sizes compared with powers of two", columns=columns, rows=rows, marked=differing)]


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
    columns = ["batch", "a step", "relative to batch 1", "samples/s", "of the best"]
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
    measured: list[list[Cell]] = [
        [
            t["mode"],
            t["batch_size"],
            format_bytes(t["planned_bytes"]),
            written(format_bytes, t["measured_bytes"]),
            written(format_bytes, t["device_bytes"]),
            f"{t['planned_bytes'] / payload['file_bytes']:.3g} x" if payload["file_bytes"] else None,
        ]
        for t in payload["measured"]
    ]
    columns = ["mode", "batch", "plan", "measured", "by the driver", "relative to the file"]
    rules: list[list[Cell]] = [
        [rule["name"], rule["mode"], rule["batch_size"], format_bytes(rule["bytes"]), f"{rule['ratio']:.3g} x"]
        for rule in payload["rules"]
    ]
    size = format_bytes(payload["file_bytes"])
    return [
        Grid(title=f"Memory; the file of the weights has {size}", columns=columns, rows=measured),
        Grid(title="Rules of thumb", columns=["rule", "mode", "batch", "gives", "relative to measured"], rows=rules),
    ]


def _numpy_mnist(payload: Mapping[str, Any]) -> list[Grid]:
    causes = list(payload["epochs"][0]["shares"])
    rows: list[list[Cell]] = [
        [
            row["batch_size"],
            format_seconds(row["seconds"]),
            written(format_seconds, row["published_seconds"]),
            row["epochs_trained"] or None,
            *(format_percent(row["shares"][cause]) for cause in causes),
        ]
        for row in payload["epochs"]
    ]
    fastest = min(range(len(rows)), key=lambda place: payload["epochs"][place]["seconds"])
    columns = ["batch", "5 epochs", "published", "epochs trained", *causes]
    return [Grid(title="Seconds of training, and what they go to", columns=columns, rows=rows, marked=[fastest])]


def _waves(payload: Mapping[str, Any]) -> list[Grid]:
    distribution, first = payload["distribution"], payload["full_waves"][0]["batch_size"]
    rates = {row["batch_size"]: row["samples_per_second"] for row in payload["sizes"]}
    rows: list[list[Cell]] = [
        [
            row["batch_size"],
            written(format_count, row["samples_per_second"]),
            _share(row["samples_per_second"], rates[first]),
            _share(row["rule"], rates[first]),
            written(format_count, row["predicted"]),
            row["busiest"],
            ", ".join(row["marks"]) or None,
        ]
        for row in payload["sizes"]
    ]
    busiest = f"{distribution['items'].partition(' ')[0]} of busiest {distribution['unit']}"
    columns = ["batch", "samples/s", f"relative to {first}", "by the rule", "predicted", busiest, "suggested by"]
    marked = [place for place, row in enumerate(payload["sizes"]) if "full wave" in row["marks"]]
    return [Grid(title="Every batch around full waves", columns=columns, rows=rows, marked=marked)]


def _share(value: float | None, of: float | None) -> str | None:
    return None if value is None or not of else signed(value / of - 1)


def _generalisation(payload: Mapping[str, Any]) -> list[Grid]:
    rows: list[list[Cell]] = []
    for row in payload["rows"]:
        gap = row["gap"]
        rows.append(
            [
                row["batch_size"],
                row["policy"],
                f"{row['learning_rate']:g}",
                format_count(row["updates"]),
                f"{100 * row['test_accuracy']:.2f} %",
                None if gap is None else _points_of(gap),
                written("{:.3g}".format, row["training_loss"]),
                written("{:.3g}".format, row["sharpness"]),
                format_seconds(row["seconds"]),
                len(row["runs"]),
            ]
        )
    columns = [
        "batch", "rate", "learning rate", "updates", "test accuracy", "difference to 64, points",
        "training loss", "sharpness", "time", "runs",
    ]  # fmt: skip
    best = max(range(len(rows)), key=lambda place: payload["rows"][place]["test_accuracy"])
    return [Grid(title="Test accuracy", columns=columns, rows=rows, marked=[best])]


def _points_of(gap: Mapping[str, Any]) -> str:
    """Format a difference of accuracies with its interval, in points."""
    values = [gap["difference"], *(gap["interval"] or ())]
    texts = [f"{100 * value:+.2f}".replace("-", "−") for value in values]  # noqa: RUF001 - a minus sign
    return texts[0] if len(texts) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


_TABLES = {
    "powers-of-two": _powers_of_two,
    "waves": _waves,
    "small-batch-floor": _small_batch_floor,
    "hyperparameter": _hyperparameter,
    "memory-rules": _memory_rules,
    "numpy-mnist": _numpy_mnist,
    "generalisation": _generalisation,
}
