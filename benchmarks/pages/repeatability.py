"""Repeatability of the recommendation as Markdown: a row for each workload, finder and number of busy processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.pages.tables import origin, page, percent, table

HEAD = [
    "workload", "busy", "finder", "recommended", "spread", "loss, mean", "loss, worst (90 % interval)",
    "rate error, worst", "seconds, mean", "seconds, most", "goals",
]  # fmt: skip
NAMES = {"rate_error": "rate", "seconds": "seconds", "mean_seconds": "mean seconds"}
NONE = "-"


def repeatability(*results: dict[str, Any]) -> str:
    """Return the table of one or several results, such as quiet and with a busy process."""
    first = results[0]
    torch = f", PyTorch {first['environment']['torch']}" if "torch" in first["environment"] else ""
    runs = max(row["runs"] for result in results for case in result["workloads"] for row in case["summary"])
    goals = ". Goals: ".join(
        dict.fromkeys(f"{_goals(result['goals'])} with {_busy(result['busy'])}" for result in results)
    )
    origins = ". ".join(dict.fromkeys(map(origin, results)))
    caption = (
        f"{origins}{torch}. Up to {runs} runs, each in a fresh process without cached timings, budget "
        f"{first['budget_seconds']:.0f} s. Loss is the throughput lost against the best size that a paired judge "
        "measured after the runs. Rate error is the reported rate against the judged one, normalized by the reference "
        f"step of the result; * marks results without one. Goals: {goals}"
    )
    return page(caption, table(HEAD, lines(results)))


def lines(results: Sequence[dict[str, Any]], only: str | None = None) -> list[list[str]]:
    """Return the cells of the table without its head; `only` names one workload; None: all."""
    return [
        _cells(case["workload"], result["busy"], row)
        for result in results
        for case in result["workloads"]
        if only in (None, case["workload"])
        for row in case["summary"]
    ]


def _cells(workload: str, busy: int, row: dict[str, Any]) -> list[str]:
    counts = Counter(row["batch_sizes"])
    sizes = sorted(counts, key=lambda n: n or 0)
    mark = "**" if row["finder"] == "cubatch" else ""
    interval = row["worst_loss_interval"]
    between = f" ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})" if interval else ""
    direct = "" if len(row["rate_errors_normalized"]) == len(row["rate_errors"]) else " *"
    failed = [NAMES.get(name, name) for name, is_met in row["met"].items() if not is_met]
    return [
        f"`{workload}`", str(busy), f"{mark}{row['finder']}{mark}",
        ", ".join(f"{n or 'none'}" + (f" x{counts[n]}" if counts[n] > 1 else "") for n in sizes),
        NONE if row["spread"] is None else f"{row['spread']:.2f}", percent(row["mean_loss"]),
        f"{percent(row['loss'])}{between}",
        NONE if row["rate_error"] is None else f"{percent(row['rate_error'])}{direct}",
        f"{row['mean_seconds']:.1f}", f"{row['seconds']:.1f}", f"not met: {', '.join(failed)}" if failed else "met",
    ]  # fmt: skip


def _goals(goals: dict[str, float | None]) -> str:
    error, mean = goals["rate_error"], goals["mean_seconds"]
    parts = [f"spread at most {goals['spread']:g}", f"each loss {100 * (goals['loss'] or 0):g} %"]
    parts += [] if error is None else [f"rate error {100 * error:g} %"]
    parts += [f"{goals['seconds']:g} s each"] + ([] if mean is None else [f"{mean:g} s on average"])
    return ", ".join(parts)


def _busy(count: int) -> str:
    return "no busy process" if not count else f"{count} busy process{'es' if count > 1 else ''}"
