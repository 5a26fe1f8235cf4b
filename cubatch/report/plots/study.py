"""Figure of `cubatch study`: ratios with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cubatch.report import plot, study
from cubatch.report.facts import setting
from cubatch.report.intervals import Intervals
from cubatch.report.plots import style


def draw(payload: Mapping[str, Any], path: str | Path) -> None:
    """
    Draw the figure of a study.

    Args:
        payload: A study in the JSON form of schema 1.
        path: Where it goes: .png, .svg or .pdf.

    Raises:
        MissingDependency: If Matplotlib is not installed.
        InvalidArgument: If the ending is none of the three, or the file cannot be written.
    """
    style.check(path)
    shown = study.figure(payload)
    if not isinstance(shown, Intervals):
        plot.tuning_curve(payload["result"], path)
        return
    sheet, axes = style.sheet(8.5, 1.9 + 0.3 * len(shown.rows))
    style.head(axes, f"{payload['title']} {payload['model']}", setting(payload), pad=24, size=11, gap=8)
    axes.set_xscale("log")
    axes.axvspan(*shown.band, color=style.GREEN, alpha=0.18, linewidth=0)
    axes.axvline(1.0, color=style.GREY, linewidth=0.9)
    for place, row in enumerate(shown.rows):
        colour = style.ORANGE if row.stands_out else style.BLUE
        axes.plot([row.low, row.high], [place, place], color=colour, linewidth=1.6)
        axes.plot([row.value], [place], "o", color=colour, markersize=6)
    axes.set_yticks(range(len(shown.rows)), [style.plain(row.label) for row in shown.rows], fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(*shown.ends)
    axes.set_xticks([value for value, _ in shown.ticks], [text for _, text in shown.ticks])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.set_xlabel(shown.axis)
    style.rule(axes, "x")
    style.save(sheet, path)
