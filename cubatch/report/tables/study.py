"""Tables of `cubatch study`: the list of studies, and the answer and numbers of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cubatch.report.grid import Grid
from cubatch.report.tables.common import written
from cubatch.units import format_bytes, format_count, format_percent, format_seconds


def studies(listed: Sequence[Mapping[str, Any]]) -> Grid:
    """Return the table of studies, from the result of `studies.run.describe`."""
    columns = {
        "NAME": lambda study: study["name"],
        "question": lambda study: study["title"],
        "MODEL": lambda study: study["model"],
        "--mode": lambda study: " and ".join(study["modes"]),
        "measures for": lambda study: format_seconds(study["budget_seconds"]),
    }
    notes = ["“measures for” is the default of --budget; --quick measures less. Run one: cubatch study waves"]
    return Grid.of(listed, columns, title="Studies", notes=notes)


def grids(payload: Mapping[str, Any]) -> list[Grid]:
    """Return the tables of a study in JSON form; the first has no rows, but the answer and further sentences."""
    head = Grid(
        title=f"{payload['title']} {payload['model']} on {payload['device'].get('name')}",
        notes=[payload["answer"], *([payload["points"]] if payload["points"] else [])],
    )
    return [head, *_TABLES[payload["study"]](payload)]


def signed(share: float) -> str:
    """
    Format a relative difference, such as a ratio - 1, as a percentage with its sign.

    Example:
        >>> signed(0.0123), signed(-0.5), signed(0.0)
        ('+1.2 %', '−50.0 %', '+0.0 %')
    """  # noqa: RUF002 - a minus sign
    return f"{100 * share:+.1f} %".replace("-", "−")  # noqa: RUF001


def _powers_of_two(payload: Mapping[str, Any]) -> list[Grid]:
    rates = {m["batch_size"]: m["samples_per_second"] for m in payload["result"]["measurements"]}
    columns = {
        "batch": lambda c: c["batch_size"],
        "reference": lambda c: c["reference"],
        "verdict": lambda c: c["verdict"],
        "published": lambda c: c["published"],
        "difference": lambda c: signed(c["ratio"] - 1),
        "90 % interval": lambda c: f"{signed(c['interval'][0] - 1)} to {signed(c['interval'][1] - 1)}",
        "trials": lambda c: " and ".join(str(count) for count in c["trials"]),
        "samples/s": lambda c: format_count(rates[c["batch_size"]]),
        "of reference": lambda c: format_count(rates[c["reference"]]),
    }
    explained = {
        "difference": "compares the trials of the two sizes alone",
        "samples/s": "is fitted to the timings of all sizes",
    }
    compared = payload["comparisons"]
    differing = [place for place, c in enumerate(compared) if c["verdict"] in {"faster", "slower"}]
    return [
        Grid.of(compared, columns, title="Sizes compared with powers of two", marked=differing, explained=explained)
    ]


def _small_batch_floor(payload: Mapping[str, Any]) -> list[Grid]:
    measured = [m for m in payload["result"]["measurements"] if m["latency_seconds"] is not None]
    first, best = measured[0]["latency_seconds"], max(m["samples_per_second"] for m in measured)
    columns = {
        "batch": lambda m: m["batch_size"],
        "a step": lambda m: format_seconds(m["latency_seconds"]),
        "90 % interval": lambda m: " to ".join(map(format_seconds, m["latency_interval"] or ())) or None,
        "relative to batch 1": lambda m: f"{m['latency_seconds'] / first:.2f} x",
        "samples/s": lambda m: format_count(m["samples_per_second"]),
        "of the best": lambda m: format_percent(m["samples_per_second"] / best),
    }
    marked = [place for place, m in enumerate(measured) if m["batch_size"] == payload["floor"]]
    return [Grid.of(measured, columns, title="Time of a step", marked=marked)]


def _hyperparameter(payload: Mapping[str, Any]) -> list[Grid]:
    columns = {
        "batch": lambda choice: choice["batch_size"],
        "samples/s": lambda choice: format_count(choice["samples_per_second"]),
        "costs": lambda choice: format_percent(choice["cost"]),
        "memory by the plan": lambda choice: written(format_bytes, choice["predicted_peak_bytes"]),
    }
    return [Grid.of(payload["choices"], columns, title="Sizes worth trying")]


def _memory_rules(payload: Mapping[str, Any]) -> list[Grid]:
    file_bytes = payload["file_bytes"]
    measured = {
        "mode": lambda row: row["mode"],
        "batch": lambda row: row["batch_size"],
        "plan": lambda row: format_bytes(row["planned_bytes"]),
        "measured": lambda row: written(format_bytes, row["measured_bytes"]),
        "by the driver": lambda row: written(format_bytes, row["device_bytes"]),
        "relative to the file": lambda row: f"{row['planned_bytes'] / file_bytes:.3g} x" if file_bytes else None,
    }
    rules = {
        "rule": lambda rule: rule["name"],
        "mode": lambda rule: rule["mode"],
        "batch": lambda rule: rule["batch_size"],
        "gives": lambda rule: format_bytes(rule["bytes"]),
        "relative to measured": lambda rule: f"{rule['ratio']:.3g} x",
    }
    title = f"Memory; the file of the weights has {format_bytes(file_bytes)}"
    return [Grid.of(payload["measured"], measured, title=title),
            Grid.of(payload["rules"], rules, title="Rules of thumb")]  # fmt: skip


def _numpy_mnist(payload: Mapping[str, Any]) -> list[Grid]:
    def share_of(cause: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: format_percent(row["shares"][cause])

    epochs = payload["epochs"]
    columns = {
        "batch": lambda row: row["batch_size"],
        "5 epochs": lambda row: format_seconds(row["seconds"]),
        "published": lambda row: written(format_seconds, row["published_seconds"]),
        "epochs trained": lambda row: row["epochs_trained"] or None,
        **{cause: share_of(cause) for cause in epochs[0]["shares"]},
    }
    fastest = min(range(len(epochs)), key=lambda place: epochs[place]["seconds"])
    return [Grid.of(epochs, columns, title="Seconds of training, and what they go to", marked=[fastest])]


def _waves(payload: Mapping[str, Any]) -> list[Grid]:
    distribution, first = payload["distribution"], payload["full_waves"][0]["batch_size"]
    rates = {row["batch_size"]: row["samples_per_second"] for row in payload["sizes"]}
    busiest = f"{distribution['items'].partition(' ')[0]} of busiest {distribution['unit']}"
    columns = {
        "batch": lambda row: row["batch_size"],
        "samples/s": lambda row: written(format_count, row["samples_per_second"]),
        f"relative to {first}": lambda row: _share(row["samples_per_second"], rates[first]),
        "by the rule": lambda row: _share(row["rule"], rates[first]),
        "predicted": lambda row: written(format_count, row["predicted"]),
        busiest: lambda row: row["busiest"],
        "suggested by": lambda row: ", ".join(row["marks"]) or None,
    }
    marked = [place for place, row in enumerate(payload["sizes"]) if "full wave" in row["marks"]]
    return [Grid.of(payload["sizes"], columns, title="Every batch around full waves", marked=marked)]


def _share(value: float | None, of: float | None) -> str | None:
    return None if value is None or not of else signed(value / of - 1)


def _generalisation(payload: Mapping[str, Any]) -> list[Grid]:
    columns = {
        "batch": lambda row: row["batch_size"],
        "rate": lambda row: row["policy"],
        "learning rate": lambda row: f"{row['learning_rate']:g}",
        "updates": lambda row: format_count(row["updates"]),
        "test accuracy": lambda row: f"{100 * row['test_accuracy']:.2f} %",
        "difference to 64, points": lambda row: None if row["gap"] is None else _points_of(row["gap"]),
        "training loss": lambda row: written("{:.3g}".format, row["training_loss"]),
        "sharpness": lambda row: written("{:.3g}".format, row["sharpness"]),
        "time": lambda row: format_seconds(row["seconds"]),
        "runs": lambda row: len(row["runs"]),
    }
    rows = payload["rows"]
    best = max(range(len(rows)), key=lambda place: rows[place]["test_accuracy"])
    return [Grid.of(rows, columns, title="Test accuracy", marked=[best])]


def _points_of(gap: Mapping[str, Any]) -> str:
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
