"""The figures of the comparison as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.search.summary import ALL
from benchmarks.search.trials import OURS, Trial
from cubatch.report.grid import Grid

Rows = Sequence[Mapping[str, Any]]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def name_of(row: Mapping[str, Any]) -> str:
    return row["finder"] if row["budget"] is None else f"{row['finder']}, {row['budget']:g} s"


def by_class(rows: Rows) -> str:
    """Write a table for each class."""
    parts = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        chosen = [row for row in rows if row["kind"] == kind]
        cells = [
            [
                name_of(row), percent(row["regret"]["mean"]), percent(row["regret"]["p95"]),
                figure(row["seconds"]["mean"]), figure(row["seconds"]["median"]),
                *(str(row[count]) for count in ("no_answer", "unusable", "over_maximum", "never_ran")),
                "-" if row["size"] is None else f"{row['size']:.2f}x", figure(row["trials"]),
                *(["-", "-"] if row["gap"] is None else [percent(row["gap"][which]) for which in ("mean", "beyond")]),
                str(row["devices"]),
            ]
            for row in chosen
        ]  # fmt: skip
        columns = [
            "finder", "regret", "95th", "seconds", "median", "no answer", "unusable", "over max", "never ran",
            "size", "trials", "gap", "beyond", "devices",
        ]  # fmt: skip
        parts.append(Grid(title=kind, columns=columns, rows=cells).text())
    return "\n\n".join(parts)


def coverage(rows: Rows) -> str:
    """Write which share of our 90 % intervals hold the true median."""
    cells = []
    for row in rows:
        if row["kind"] != ALL or row["finder"] != OURS:
            continue
        for which in ("stationary", "every"):
            coverage = row["coverage"][which]
            cells.append([
                name_of(row),
                which,
                *(
                    "-" if coverage[what] is None else f"{percent(coverage[what]['share'])} of {coverage[what]['of']}"
                    for what in ("intervals", "answer", "fastest")
                ),
            ])  # fmt: skip
    columns = ["finder", "classes", "intervals", "the answer's", "the fastest's"]
    return Grid(title="90 % intervals that hold the true median", columns=columns, rows=cells).text()


def goals(rows: Rows) -> str:
    """Write which goals are met."""
    lines = []
    for row in rows:
        show = figure if row["what"].startswith("mean seconds") else percent
        span = f"{show(row['low'])} to {show(row['high'])}" if row["low"] else f"<= {show(row['high'])}"
        lines.append(f"{'met   ' if row['met'] else 'MISSED'}  {row['what']}: {show(row['value'])}, goal {span}")
    return "\n".join(lines)


def worst(trials: Sequence[Trial], count: int) -> str:
    """Return a table of the devices with the highest regret of cubatch, for each budget."""
    cells = []
    own = [trial for trial in trials if trial.finder == OURS]
    for budget in sorted({trial.budget or 0.0 for trial in own}):
        chosen = sorted((t for t in own if t.budget == budget and t.regret > 0), key=lambda trial: -trial.regret)
        cells += [
            [
                f"{budget:g} s", trial.kind, str(trial.device), percent(trial.regret),
                *(str(size) for size in (trial.batch_size, trial.knee, trial.best_batch_size, trial.largest)),
                str(trial.trials), figure(trial.seconds),
            ]
            for trial in chosen[:count]
        ]  # fmt: skip
    columns = ["budget", "class", "device", "regret", "answer", "ideal", "best", "largest", "trials", "seconds"]
    return Grid(title="highest regret of cubatch", columns=columns, rows=cells).text()
