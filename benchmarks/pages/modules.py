"""PyTorch modules: answers beside those of other finders, and memory as it was said and taken."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.pages.tables import table
from cubatch.units import format_bytes

WITHIN = 0.1  # of memory
CLOSE = 0.03  # of throughput


def memory(result: dict[str, Any]) -> str:
    """The largest size of each module that was thought to fit: said, taken, and the most that any size took."""
    rows = []
    for row in result["rows"]:
        last = next(size for size in row["sizes"] if size["batch_size"] == row["batch_size"])
        rows.append(
            [
                f"`{row['module']}`",
                row["mode"],
                str(row["batch_size"]),
                format_bytes(last["said"]),
                format_bytes(last["took"]),
                f"{100 * row['error']:+.1f} %",
                f"{100 * row['walked_error']:+.1f} %",
                f"{100 * row['most']:.0f} %",
            ]
        )
    near = sum(abs(row["error"]) <= WITHIN for row in result["rows"])
    over = sum(row["most"] > 1 for row in result["rows"])
    threads = "" if result["threads"] is None else f", {result['threads']} threads"  # of a GPU there are none to tell
    caption = (
        f"{result['device']}{threads}, {result['date']}, commit {result['commit']}, inputs of "
        f"{'x'.join(map(str, result['image']))}; {near} of {len(rows)} within {100 * WITHIN:.0f} %, {over} with a size "
        "that took more than the limit."
    )
    head = ["module", "mode", "largest batch", "said", "took", "error", "of the walk alone", "most of the limit"]
    return f"{caption}\n\n{table(head, rows)}"


def answers(result: dict[str, Any]) -> str:
    """Each finder over all modules and modes: what its answers lost, its seconds, its failures."""
    cases = [case["finders"] for case in result["rows"]]
    rows = []
    for name in [row["finder"] for row in cases[0]]:
        of = [row for case in cases for row in case if row["finder"] == name]
        lost = [row["lost"] for row in of]
        mark = "**" if name == "cubatch" else ""
        rows.append(
            [
                f"{mark}{name}{mark}",
                f"{100 * statistics.fmean(lost):.1f} %",
                f"{100 * max(lost):.1f} %",
                f"{sum(share <= CLOSE for share in lost)} of {len(lost)}",
                f"{statistics.fmean(row['seconds'] for row in of):.1f}",
                str(sum(row["failures"] for row in of)),
            ]
        )
    modules = dict.fromkeys(f"`{case['module']}`" for case in result["rows"])
    modes = " and ".join(dict.fromkeys(case["mode"] for case in result["rows"]))
    caption = (
        f"{result['device']}, {result['threads']} threads, {result['date']}, commit {result['commit']}, PyTorch "
        f"{result['environment']['torch']}; {modes} of {', '.join(modules)}; sizes up to {result['max_batch_size']}, "
        f"ours with a budget of {result['budget_seconds']:.0f} s. Lost against the best of an exhaustive sweep, in "
        "turns with it; an answer that does not run within the limit has lost all."
    )
    head = ["finder", "lost, mean", "worst", f"within {100 * CLOSE:.0f} %", "seconds, mean", "out of memory"]
    return f"{caption}\n\n{table(head, rows)}"
