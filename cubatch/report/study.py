"""A study as an HTML page: question, answer, figure, numbers, how it was measured and how to repeat it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cubatch.report import html, intervals, lines
from cubatch.report.curve import Curve, curve_of
from cubatch.report.facts import setting
from cubatch.report.page import facts_of
from cubatch.report.tables.study import grids, signed


def page(payload: Mapping[str, Any]) -> str:
    """
    Write one self-contained HTML page.

    Args:
        payload: A study in the JSON form of schema 1.

    Returns:
        The document: no script, no external resource, light and dark, every text escaped.
    """
    _, *tables = grids(payload)
    drawn = [html.Section(heading=shown.title, figure=svg, legend=legend) for shown, svg, legend in _drawn(payload)]
    measured = [html.Section(heading=grid.title, table=grid) for grid in tables]
    sections = [
        html.Section(heading="The question", texts=payload["question"]),
        *drawn,
        *measured,
        html.Section(heading="How it was measured", texts=payload["method"]),
        html.Section(heading="How to repeat it", commands=[payload["command"]]),
    ]
    return html.article(
        title=payload["title"],
        subtitle=f"{payload['model']}: {setting(payload)}",
        answer=payload["answer"],
        points=payload["points"],
        sections=sections,
        facts=facts_of(payload),
    )


Figure = intervals.Intervals | lines.Lines | Curve


def figures(payload: Mapping[str, Any]) -> Sequence[Figure]:
    """Decide what the figures of a study show; none where there is nothing to show."""
    shown = _FIGURES[payload["study"]](payload)
    return [one for one in shown if not isinstance(one, intervals.Intervals) or one.rows]


def _drawn(payload: Mapping[str, Any]) -> Iterator[tuple[Figure, str, Sequence[str]]]:
    """Give each figure, how it is drawn, and what its marks mean."""
    for shown in figures(payload):
        if isinstance(shown, Curve):
            yield shown, html.figures(shown, "throughput"), html.legend_of(shown)
        elif isinstance(shown, lines.Lines):
            yield shown, lines.figures(shown), shown.legend
        else:
            yield shown, intervals.figures(shown), shown.legend


def _powers_of_two(payload: Mapping[str, Any]) -> Sequence[Figure]:
    rows = [
        intervals.Row(
            label=f"{c['batch_size']} beside {c['power']}",
            value=c["ratio"],
            low=c["interval"][0],
            high=c["interval"][1],
            stands_out=c["verdict"] in {"faster", "slower"},
            text=f"batch {c['batch_size']} beside {c['power']}: {signed(c['ratio'] - 1)}, {c['verdict']}",
        )
        for c in payload["comparisons"]
    ]
    tolerance = payload["tolerance"]
    shown = intervals.Intervals(
        title="Samples per second beside a power of two",
        axis="samples per second, beside those of the power of two",
        rows=rows,
        band=(1 - tolerance, 1 + tolerance),
        legend=[
            "● median of the sweeps, 90 % interval",
            *(["orange: faster or slower"] if any(row.stands_out for row in rows) else []),
            f"▬ within {100 * tolerance:g} %",
        ],
    )
    return [shown]


def _memory_rules(payload: Mapping[str, Any]) -> Sequence[Figure]:
    mode = payload["taken"][-1]["mode"]
    rows = [
        _exact(f"batch {rule['batch_size']}: {rule['name']}", rule["ratio"])
        for rule in payload["rules"]
        if rule["mode"] == mode and rule["ratio"] > 0  # as of the file of a network without parameters
    ]
    title, axis = "Rules of thumb beside what was measured", f"what the rule gives, beside what {mode} took"
    legend = ["● rule", "▬ within 10 %"]
    return [intervals.Intervals(title=title, axis=axis, rows=rows, band=(0.9, 1.1), legend=legend)]


def _numpy_mnist(payload: Mapping[str, Any]) -> Sequence[Figure]:
    epochs = payload["epochs"]
    rows = [_exact(f"batch {one['batch_size']}", one["seconds"] / epochs[-1]["seconds"]) for one in epochs]
    last = epochs[-1]["published_seconds"]
    rows += [
        _exact(f"published, batch {one['batch_size']}", one["published_seconds"] / last, stands_out=True)
        for one in epochs
        if last and one["published_seconds"]
    ]
    legend = ["● here", *(["orange: published"] if last else []), "▬ within 10 %"]
    axis = f"time of the epochs, beside that of batch {epochs[-1]['batch_size']}"
    return [intervals.Intervals(title="Seconds by batch size", axis=axis, rows=rows, band=(0.9, 1.1), legend=legend)]


def _exact(label: str, ratio: float, *, stands_out: bool = False) -> intervals.Row:
    text = f"{label}: {ratio:.3g} x"
    return intervals.Row(label=label, value=ratio, low=ratio, high=ratio, stands_out=stands_out, text=text)


def _curve(payload: Mapping[str, Any]) -> Sequence[Figure]:
    return [curve_of(payload["result"])]


def _waves(payload: Mapping[str, Any]) -> Sequence[Figure]:
    rows = [row for row in payload["sizes"] if row["samples_per_second"] is not None]
    if not rows:
        return []
    measured = [
        lines.Dot(
            batch_size=row["batch_size"], value=row["samples_per_second"],
            low=(row["interval"] or [row["samples_per_second"]])[0],
            high=(row["interval"] or [row["samples_per_second"]])[-1],
            text=f"batch {row['batch_size']}: {row['samples_per_second']:.4g} samples/s; {', '.join(row['marks'])}",
        )
        for row in rows
    ]  # fmt: skip
    series = [lines.Series(label="measured, 90 % interval", dots=measured)]
    for key, label in (("rule", "the rule, through the first crest"), ("predicted", "predicted by the model of time")):
        if rows[0][key] is not None:
            dots = [_computed(row["batch_size"], row[key]) for row in rows]
            series.append(lines.Series(label=label, dots=dots, is_computed=True))
    kinds = ("crest", "Coulom", "power of two", "multiple of 8")
    marked = {kind: [row["batch_size"] for row in rows if _is_marked(row, kind)] for kind in kinds}
    return [
        lines.Lines(
            title="Samples per second around the crests",
            y_label="samples/s",
            series=series,
            marks=[(kind, sizes) for kind, sizes in marked.items() if sizes],
        )
    ]


def _is_marked(row: Mapping[str, Any], kind: str) -> bool:
    return any(mark == kind or mark.startswith(f"{kind} n=") for mark in row["marks"])


def _computed(batch_size: int, value: float) -> lines.Dot:
    return lines.Dot(batch_size=batch_size, value=value, low=value, high=value, text="")


def _generalisation(payload: Mapping[str, Any]) -> Sequence[Figure]:
    return [
        lines.Lines(title=title, y_label=label, series=series, log_x=True, log_y=True)
        for title, label, value_of in (
            ("Test error by batch size", "test images that are wrong, %", _error),
            ("Sharpness by batch size", "largest eigenvalue of the Hessian", _eigenvalue),
        )
        if (series := [one for policy in ("fixed", "scaled") if (one := _of_policy(payload, policy, value_of)).dots])
    ]


def _error(run: Mapping[str, Any]) -> float | None:
    return 100 * (1 - float(run["test_accuracy"]))


def _eigenvalue(run: Mapping[str, Any]) -> float | None:
    sharp = run["sharpness"]
    return float(sharp["eigenvalue"]) if sharp and sharp["settled"] else None


def _of_policy(
    payload: Mapping[str, Any], policy: str, value_of: Callable[[Mapping[str, Any]], float | None]
) -> lines.Series:
    """Join the means over the seeds, with bars from the lowest to the highest; what has no logarithm is left out."""
    dots = []
    for row in payload["rows"]:
        values = [value for run in row["runs"] if (value := value_of(run)) is not None and value > 0]
        if row["policy"] == policy and values:
            mean = sum(values) / len(values)
            text = f"batch {row['batch_size']}, learning rate {row['learning_rate']:g}: {mean:.3g}"
            dots.append(
                lines.Dot(batch_size=row["batch_size"], value=mean, low=min(values), high=max(values), text=text)
            )
    return lines.Series(label=f"learning rate {policy}", dots=dots)


_FIGURES: dict[str, Callable[[Mapping[str, Any]], Sequence[Figure]]] = {
    "powers-of-two": _powers_of_two,
    "waves": _waves,
    "small-batch-floor": _curve,
    "hyperparameter": _curve,
    "memory-rules": _memory_rules,
    "numpy-mnist": _numpy_mnist,
    "generalisation": _generalisation,
}
