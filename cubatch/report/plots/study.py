"""Figures of `cubatch study` by Matplotlib: values by batch size, tuning curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cubatch.report import plot, study
from cubatch.report.facts import setting
from cubatch.report.lines import Lines
from cubatch.report.plots import style

_SERIES = (style.BLUE, style.ORANGE, style.GREEN)


def draw(payload: Mapping[str, Any], path: str | Path, number: int = 0) -> None:
    """
    Draw a figure of a study.

    Args:
        payload: A study in the JSON form of schema 1.
        path: Where it goes: .png, .svg or .pdf.
        number: Which of `study.figures`.

    Raises:
        MissingDependency: If Matplotlib is not installed.
        InvalidArgument: If the ending is none of the three, or the file cannot be written.
    """
    style.check(path)
    shown = study.figures(payload)[number]
    if isinstance(shown, Lines):
        _lines(payload, shown, path)
    else:
        plot.tuning_curve(payload["result"], path)


def _lines(payload: Mapping[str, Any], shown: Lines, path: str | Path) -> None:
    sheet, axes = style.sheet(8.5, 4.4 + 0.24 * len(shown.marks))
    style.head(axes, f"{payload['title']} {payload['model']}", setting(payload), pad=24, size=11, gap=8)
    if shown.log_x:
        axes.set_xscale("log", base=2)
    if shown.log_y:
        axes.set_yscale("log")
    axes.set_xlim(*shown.x_ends)
    axes.set_ylim(*shown.y_ends)
    axes.set_xticks(shown.x_ticks, [str(size) for size in shown.x_ticks])
    axes.set_yticks(shown.y_ticks, [f"{value:g}" for value in shown.y_ticks])
    axes.tick_params(axis="both", which="minor", bottom=False, left=False, labelleft=False)
    axes.set_xlabel("batch size")
    axes.set_ylabel(shown.y_label)
    style.rule(axes)
    for one, colour in zip(shown.series, _SERIES, strict=False):
        sizes, values = [dot.batch_size for dot in one.dots], [dot.value for dot in one.dots]
        axes.plot(sizes, values, color=colour, linewidth=1.4, linestyle=":" if one.is_computed else "-",
                  marker="" if one.is_computed else "o", markersize=4.5, label=one.label)  # fmt: skip
        if not one.is_computed:
            axes.vlines(
                sizes, [dot.low for dot in one.dots], [dot.high for dot in one.dots], color=colour, linewidth=1.2
            )
    for place, (label, special) in enumerate(shown.marks):
        height = 0.03 + 0.055 * (len(shown.marks) - 1 - place)
        heights, at_foot = [height] * len(special), axes.get_xaxis_transform()
        axes.plot(special, heights, "|", transform=at_foot, color=style.GREY, markersize=8, mew=2)
        axes.annotate(label, (1, height), xycoords="axes fraction", xytext=(4, 0), textcoords="offset points",
                      va="center", fontsize=8, color="#444444")  # fmt: skip
    style.legend(sheet)
    style.save(sheet, path)
