"""A study as an HTML page and as figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cubatch.report import html, plot
from cubatch.report.curve import Curve
from cubatch.report.plots import lines, style
from cubatch.report.plots.lines import Dot, Lines, Series
from cubatch.report.settings import setting, tables
from cubatch.report.tables.study import grids
from cubatch.tuning.results import TuningResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKS = ("full wave", "Coulom", "power of two", "multiple of 8")


def page(payload: Mapping[str, Any]) -> str:
    """Return a self-contained HTML page for a study in the JSON form that `studies.run.run` returns."""
    _, *measured = grids(payload)
    article = html.Article(
        title=payload["title"],
        subtitle=f"{payload['model']}: {setting_of(payload)}",
        reasons=[payload["answer"], *payload["points"]],
        sections=[
            html.Section(heading="The question", texts=payload["question"]),
            *(html.Section(heading=each.title, figure=_for_page(each)) for each in figures(payload)),
            *(html.Section(heading=grid.title, table=grid) for grid in measured),
            html.Section(heading="How it was measured", texts=payload["method"]),
            html.Section(heading="How to repeat it", commands=[payload["command"]]),
        ],
        facts=tables(payload),
    )
    return html.document(article)


def draw(payload: Mapping[str, Any], path: str | Path, number: int = 0) -> None:
    """Draw the figure `number` of a study in the JSON form of schema 1 into a .png, .svg or .pdf file."""
    style.check(path)
    head = f"{payload['title']} {payload['model']}", setting_of(payload)
    style.save(_drawn(figures(payload)[number], head), path)


def setting_of(payload: Mapping[str, Any]) -> str:
    """Return device, settings and date of a study (in its JSON form) in one line."""
    return setting(payload, payload["device"].get("name"))


def _for_page(figure: Lines | Curve) -> html.Figure:
    return html.Figure(figure.title, style.data_url(_drawn(figure)) if style.is_installed() else "")


def _drawn(figure: Lines | Curve, head: tuple[str, str] | None = None) -> Figure:
    if isinstance(figure, Curve):
        return plot.figure_of(figure, titled=head is not None)
    return lines.figure_of(figure, head)


def figures(payload: Mapping[str, Any]) -> Sequence[Lines | Curve]:
    """Return the figures of a study in the JSON form of schema 1, without those for which nothing was measured."""
    if payload["study"] in {"small-batch-floor", "hyperparameter"}:
        return [Curve(TuningResult.from_mapping(payload["result"]))]
    return [figure for figure in _FIGURES[payload["study"]](payload) if figure.series]


def _series(label: str, points: Iterable[Sequence[Any]], *, is_computed: bool = False) -> list[Series]:
    """Return a list with one series of `points`, (batch size, value, interval or None); empty if none has a value."""
    dots = [
        Dot(batch_size=n, value=value, low=(interval or [value])[0], high=(interval or [value])[-1])
        for n, value, interval in points
        if value is not None
    ]
    return [Series(label=label, dots=dots, is_computed=is_computed)] if dots else []


def _powers_of_two(payload: Mapping[str, Any]) -> list[Lines]:
    compared = sorted(payload["comparisons"], key=lambda c: c["batch_size"])
    series = _series("ratio, 90 % interval", ((c["batch_size"], c["ratio"], c["interval"]) for c in compared))
    series += _series("equal", ((c["batch_size"], 1.0, None) for c in compared), is_computed=True)
    title = "Samples per second relative to the nearest power of two"
    return [Lines(title=title, y_label="ratio of samples/s", series=series, log_x=True, log_y=True)]


def _memory_rules(payload: Mapping[str, Any]) -> list[Lines]:
    mode = payload["measured"][-1]["mode"]
    measured = [r for r in payload["measured"] if r["mode"] == mode]
    series = _series("measured", ((r["batch_size"], r["measured_bytes"], None) for r in measured))
    for name in ("textbook count", "4.5x the file"):
        of_rule = (r for r in payload["rules"] if (r["mode"], r["name"]) == (mode, name) and r["bytes"])
        series += _series(name, ((r["batch_size"], r["bytes"], None) for r in of_rule), is_computed=True)
    title = f"Memory of {mode}: rules of thumb and measured bytes"
    return [Lines(title=title, y_label="bytes", series=series, log_x=True, log_y=True)]


def _numpy_mnist(payload: Mapping[str, Any]) -> list[Lines]:
    series = _series("here", ((e["batch_size"], e["seconds"], None) for e in payload["epochs"]))
    series += _series("published", ((e["batch_size"], e["published_seconds"], None) for e in payload["epochs"]))
    return [Lines(title="Seconds by batch size", y_label="seconds", series=series, log_x=True, log_y=True)]


def _waves(payload: Mapping[str, Any]) -> list[Lines]:
    rows = [row for row in payload["sizes"] if row["samples_per_second"] is not None]
    measured = [(row["batch_size"], row["samples_per_second"], row["interval"]) for row in rows]
    series = _series("measured, 90 % interval", measured)
    for key, label in (("rule", "the rule, through the first full wave"), ("predicted", "predicted by the time model")):
        series += _series(label, ((row["batch_size"], row[key], None) for row in rows), is_computed=True)
    marks = [
        (kind, [row["batch_size"] for row in rows if any(mark.partition(" n=")[0] == kind for mark in row["marks"])])
        for kind in _MARKS
    ]
    title = "Samples per second around full waves"
    return [Lines(title=title, y_label="samples/s", series=series, marks=[mark for mark in marks if mark[1]])]


def _generalisation(payload: Mapping[str, Any]) -> list[Lines]:
    values: tuple[tuple[str, str, Callable[[Mapping[str, Any]], float | None]], ...] = (
        ("Test error by batch size", "wrong test images, %", lambda run: 100 * (1 - float(run["test_accuracy"]))),
        ("Sharpness by batch size", "largest eigenvalue of the Hessian", _eigenvalue),
    )
    return [
        Lines(
            title=title,
            y_label=label,
            series=[
                series
                for policy in ("fixed", "scaled")
                for series in _series(f"learning rate {policy}", _seeds(payload["rows"], policy, value_of))
            ],
            log_x=True,
            log_y=True,
        )
        for title, label, value_of in values
    ]


def _eigenvalue(run: Mapping[str, Any]) -> float | None:
    return float(run["sharpness"]["eigenvalue"]) if run["sharpness"] and run["sharpness"]["settled"] else None


def _seeds(
    rows: Iterable[Mapping[str, Any]], policy: str, value_of: Callable[[Mapping[str, Any]], float | None]
) -> Iterable[Sequence[Any]]:
    """
    Yield (batch size, mean, (lowest, highest)) of a value over the seeds, for each row of a policy.

    `rows` are those of the study `generalisation`. `value_of` returns the value of a run; values that are None or not
    positive are left out.
    """
    for row in rows:
        values = [value for run in row["runs"] if (value := value_of(run)) is not None and value > 0]
        if row["policy"] == policy and values:
            yield row["batch_size"], sum(values) / len(values), (min(values), max(values))


_FIGURES: dict[str, Callable[[Mapping[str, Any]], list[Lines]]] = {
    "powers-of-two": _powers_of_two,
    "waves": _waves,
    "memory-rules": _memory_rules,
    "numpy-mnist": _numpy_mnist,
    "generalisation": _generalisation,
}
