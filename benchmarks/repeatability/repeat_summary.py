"""Spread, loss, rate error and seconds of a finder over its runs, against the goals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

QUIET_GOALS = {"spread": 2.0, "loss": 0.03, "rate_error": 0.07, "seconds": 15.0, "mean_seconds": 10.0}
BUSY_GOALS = {"spread": 3.0, "loss": 0.05, "rate_error": None, "seconds": 25.0, "mean_seconds": None}


def summarize(case: Mapping[str, Any], finder: str, goals: Mapping[str, float | None]) -> dict[str, Any]:
    """
    Return the figures of a finder on a workload, and which goals it meets.

    A run without a batch size that the judge could run has lost all.
    """
    runs = [run for run in case["runs"] if run["finder"] == finder]
    sizes = {row["batch_size"]: row for row in case["sizes"]}
    answers = [run["batch_size"] for run in runs]
    losses = [sizes[n]["loss"] if n in sizes else 1.0 for n in answers]
    intervals = [sizes[n]["loss_interval"] for n in answers if n in sizes and sizes[n]["loss_interval"]]
    errors = [error for run in runs if (error := _rate_error(run, sizes)) is not None]
    normalized = [error for run in runs if (error := _rate_error(run, sizes, is_normalized=True)) is not None]
    rate_errors = normalized if len(normalized) == len(errors) else errors
    spent = [run["seconds_spent"] for run in runs]
    figures = {
        "spread": max(answers) / min(answers) if all(answers) else None,
        "loss": max(losses),
        "rate_error": max(map(abs, rate_errors), default=None),
        "seconds": max(spent),
        "mean_seconds": statistics.fmean(spent),
    }
    return {
        "finder": finder, "runs": len(runs), "batch_sizes": answers, **figures, "mean_loss": statistics.fmean(losses),
        "worst_loss_interval": max(intervals, key=lambda interval: interval[1], default=None),
        "losses": losses, "rate_errors": errors, "rate_errors_normalized": normalized,
        "wall_seconds": max(run["wall_seconds"] for run in runs),
        "met": {
            name: (value := figures[name]) is not None and value <= goal
            for name, goal in goals.items()
            if goal is not None
        },
    }  # fmt: skip


def _rate_error(
    run: Mapping[str, Any], sizes: Mapping[int, Mapping[str, Any]], *, is_normalized: bool = False
) -> float | None:
    """Return the reported rate relative to the judged one, less 1; None without both rates, or without a reference."""
    row, reported, reference = sizes.get(run["batch_size"]), run["samples_per_second"], run.get("reference")
    if row is None or not reported:
        return None
    if not is_normalized:
        return reported / row["samples_per_second"] - 1
    if not reference or reference["batch_size"] not in sizes:
        return None
    judged_seconds = reference["batch_size"] / sizes[reference["batch_size"]]["samples_per_second"]
    return reported * reference["seconds"] / (row["samples_per_second"] * judged_seconds) - 1
