"""Regret against seconds as a picture: one line a finder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.search.summary import ALL
from benchmarks.search.trials import OURS

LEAST = 1e-4  # a regret of nothing, on a logarithmic axis
LEAST_SECONDS = 0.01


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the means over all devices: cubatch as a line over its budgets, each rival as a mark."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    whole = [row for row in rows if row["kind"] == ALL]
    marks = "osD^v<>pPX*hd"
    place = 0
    for finder in dict.fromkeys(row["finder"] for row in whole):
        chosen = [row for row in whole if row["finder"] == finder]
        seconds = [max(LEAST_SECONDS, row["seconds"]["mean"]) for row in chosen]
        regret = [max(LEAST, row["regret"]["mean"]) for row in chosen]
        if finder == OURS:
            axes.plot(seconds, regret, color="#0072b2", marker="o", linewidth=2.0, label=finder, zorder=3)
            for row, x, y in zip(chosen, seconds, regret, strict=True):
                axes.annotate(f"{row['budget']:g} s", (x, y), (4, 4), textcoords="offset points", color="#0072b2")
        else:
            colour = f"C{1 + place % 9}"
            name = finder if chosen[0]["seconds"]["mean"] else f"{finder} (measures nothing)"
            axes.plot(seconds, regret, color=colour, marker=marks[place % len(marks)], linestyle="none", label=name)
            place += 1
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("seconds of searching, mean")
    axes.set_ylabel("regret beyond the tolerance, mean")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, facecolor="white")
