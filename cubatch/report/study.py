"""A study as an HTML page: question, answer, figure, numbers, how it was measured and how to repeat it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cubatch.report import html, intervals
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
    drawn, legend = _drawn(figure(payload))
    measured = [html.Section(heading=grid.title, table=grid) for grid in tables]
    sections = [
        html.Section(heading="The question", texts=payload["question"]),
        *([html.Section(heading="The figure", figure=drawn, legend=legend)] if drawn else []),
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


def figure(payload: Mapping[str, Any]) -> intervals.Intervals | Curve:
    """Decide what the figure of a study shows."""
    return _FIGURES[payload["study"]](payload)


def _drawn(shown: intervals.Intervals | Curve) -> tuple[str, Sequence[str]]:
    """Give the figure, empty where there is nothing to show, and what its marks mean."""
    if isinstance(shown, Curve):
        return html.figures(shown, "throughput"), html.legend_of(shown)
    return intervals.figures(shown) if shown.rows else "", shown.legend


def _powers_of_two(payload: Mapping[str, Any]) -> intervals.Intervals:
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
    return intervals.Intervals(
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


def _memory_rules(payload: Mapping[str, Any]) -> intervals.Intervals:
    rows = [
        _exact(f"batch {rule['batch_size']}: {rule['name']}", rule["ratio"])
        for rule in payload["rules"]
        if rule["mode"] == "training"
    ]
    title, axis = "Rules of thumb beside what was measured", "what the rule gives, beside what training took"
    return intervals.Intervals(title=title, axis=axis, rows=rows, band=(0.9, 1.1), legend=["● rule", "▬ within 10 %"])


def _numpy_mnist(payload: Mapping[str, Any]) -> intervals.Intervals:
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
    return intervals.Intervals(title="Seconds by batch size", axis=axis, rows=rows, band=(0.9, 1.1), legend=legend)


def _exact(label: str, ratio: float, *, stands_out: bool = False) -> intervals.Row:
    text = f"{label}: {ratio:.3g} x"
    return intervals.Row(label=label, value=ratio, low=ratio, high=ratio, stands_out=stands_out, text=text)


def _curve(payload: Mapping[str, Any]) -> Curve:
    return curve_of(payload["result"])


_FIGURES: dict[str, Callable[[Mapping[str, Any]], intervals.Intervals | Curve]] = {
    "powers-of-two": _powers_of_two,
    "small-batch-floor": _curve,
    "hyperparameter": _curve,
    "memory-rules": _memory_rules,
    "numpy-mnist": _numpy_mnist,
}
