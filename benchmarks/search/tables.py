"""The figures of the comparison as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.search.summary import ALL, LOST
from benchmarks.search.trials import OURS, Trial
from cubatch.report.grid import Grid

VERDICTS = ("better", "equal", "worse")
_MOST_SHOWN = 2
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


def against(rows: Rows) -> str:
    """Return a table of cubatch with the seconds of each rival, and the classes in which it is worse."""
    cells = []
    for rival in dict.fromkeys(row["rival"] for row in rows):
        own = [row for row in rows if row["rival"] == rival]
        counts = {verdict: [r for r in own if r["kind"] != ALL and r["verdict"] == verdict] for verdict in VERDICTS}
        worst = sorted(counts["worse"], key=lambda row: row["rival_regret"] - row["regret"])[:_MOST_SHOWN]
        total = next((row for row in own if row["kind"] == ALL), own[0])
        worse = "; ".join(f"{row['kind']} {percent(row['regret'])} > {percent(row['rival_regret'])}" for row in worst)
        cells.append([
            rival, figure(total["seconds"]), percent(total["rival_regret"]), percent(total["regret"]),
            *(str(len(counts[verdict])) for verdict in VERDICTS), worse,
        ])  # fmt: skip
    columns = ["rival", "seconds", "its regret", "cubatch", *VERDICTS, "worst"]
    return Grid(title="cubatch with the seconds of each rival", columns=columns, rows=cells).text()


def goals(rows: Rows) -> str:
    """Write which goals are met."""
    lines = []
    for row in rows:
        show = _shown(row["what"])
        span = f"{show(row['low'])} to {show(row['high'])}" if row["low"] else f"<= {show(row['high'])}"
        lines.append(f"{'met   ' if row['met'] else 'MISSED'}  {row['what']}: {show(row['value'])}, goal {span}")
    return "\n".join(lines)


def _shown(what: str) -> Callable[[float], str]:
    if what == LOST:
        return lambda value: f"{value:.0f}"
    return figure if what.startswith("mean seconds") else percent


def worst(trials: Sequence[Trial], count: int) -> str:
    """Return a table of the devices with the highest regret of cubatch, for each budget."""
    cells = []
    own = [trial for trial in trials if trial.finder == OURS and trial.against is None]
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
