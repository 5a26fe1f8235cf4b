"""From trials to figures: by class, finder and budget, and over all classes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from benchmarks.search.trials import OURS, Trial

ALL = "all classes"
Row = dict[str, Any]


def summarise(trials: Sequence[Trial], kinds: Iterable[str]) -> list[Row]:
    """Summarise by class, finder and budget, in the order of the trials; ALL holds every fake device."""
    rows = []
    ways = list(dict.fromkeys((trial.finder, trial.budget) for trial in trials))
    ways.sort(key=lambda way: (way[0] != OURS, way[1] or 0.0))
    for kind in (ALL, *kinds):
        for finder, budget in ways:
            chosen = [
                trial
                for trial in trials
                if (trial.finder, trial.budget) == (finder, budget) and kind in (ALL, trial.kind)
            ]
            if chosen:
                rows.append({"kind": kind, "finder": finder, "budget": budget} | figures(chosen))
    return rows


def figures(trials: Sequence[Trial]) -> Row:
    """Summarise trials of one finder."""
    count = len(trials)
    sizes = [trial.batch_size / trial.knee for trial in trials if trial.batch_size is not None and trial.usable]
    gaps = [trial.gap for trial in trials if trial.gap is not None]
    beyond = [trial.beyond for trial in trials if trial.beyond is not None]
    return {
        "devices": count,
        "regret": {
            "mean": statistics.fmean(trial.regret for trial in trials),
            "median": statistics.median(trial.regret for trial in trials),
            "p95": float(np.quantile([trial.regret for trial in trials], 0.95, method="inverted_cdf")),
        },
        "seconds": {
            "mean": statistics.fmean(trial.seconds for trial in trials),
            "median": statistics.median(trial.seconds for trial in trials),
        },
        "no_answer": sum(trial.batch_size is None for trial in trials),
        "unusable": sum(not trial.usable for trial in trials),
        "over_maximum": sum(trial.over_maximum for trial in trials),
        "never_ran": sum(trial.never_ran for trial in trials),
        "size": statistics.median(sizes) if sizes else None,
        "trials": statistics.fmean(trial.trials for trial in trials),
        "gap": (
            {"mean": statistics.fmean(gaps), "beyond": statistics.fmean(beyond), "devices": len(gaps)} if gaps else None
        ),
        "coverage": {
            "stationary": _coverage([trial for trial in trials if trial.stationary]),
            "every": _coverage(trials),
        },
    }


def _coverage(trials: Sequence[Trial]) -> dict[str, dict[str, float] | None]:
    """Return the share of stated intervals that hold the true median, and their number."""
    pairs = {
        "intervals": (sum(trial.held for trial in trials), sum(trial.intervals for trial in trials)),
        "answer": _counted(trial.answer_held for trial in trials),
        "fastest": _counted(trial.fastest_held for trial in trials),
    }
    return {what: {"share": held / count, "of": count} if count else None for what, (held, count) in pairs.items()}


def _counted(held: Iterable[bool | None]) -> tuple[int, int]:
    known = [value for value in held if value is not None]
    return sum(known), len(known)


@attrs.frozen(kw_only=True)
class Target:
    """
    A figure of our search and where it must lie.

    Attributes:
        what: In words.
        kind, budget: Of which row.
        path: Of which figure in it.
        low, high: Where it must lie, both included.
    """

    what: str
    kind: str = ALL
    budget: float
    path: tuple[str, ...]
    low: float = 0.0
    high: float

    def value(self, rows: Sequence[Mapping[str, Any]]) -> float | None:
        """Look the figure up; None where it was not measured."""
        value: Any = next(
            (row for row in rows if (row["kind"], row["finder"], row["budget"]) == (self.kind, OURS, self.budget)), None
        )
        for name in self.path:
            value = value and value[name]
        return None if value is None else float(value)


_MEAN_REGRET, _MEAN_SECONDS = ("regret", "mean"), ("seconds", "mean")
GOALS = (
    *(
        Target(what=f"mean regret, {budget:.0f} s", budget=budget, path=_MEAN_REGRET, high=high)
        for budget, high in ((60.0, 0.01), (10.0, 0.015), (5.0, 0.03), (2.0, 0.08))
    ),
    Target(what="mean seconds, 60 s", budget=60.0, path=_MEAN_SECONDS, high=10.0),
    Target(what="mean seconds on a plateau, 60 s", kind="plateau", budget=60.0, path=_MEAN_SECONDS, high=5.0),
    Target(what="mean gap to a limit beyond the tolerance, 60 s", budget=60.0, path=("gap", "beyond"), high=0.02),
    *(
        Target(
            what=f"90 % intervals that hold ({which}), 60 s",
            budget=60.0,
            path=("coverage", "stationary", which, "share"),
            low=0.87,
            high=0.93,
        )
        for which in ("intervals", "answer", "fastest")
    ),
)


def judge(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return for each measured goal whether it is met."""
    figures = [(target.what, target.value(rows), target.low, target.high) for target in GOALS]
    return [
        {"what": what, "value": value, "low": low, "high": high, "met": low <= value <= high}
        for what, value, low, high in figures
        if value is not None
    ]
