"""
Figures of results as files: what `curve` decided to show, drawn by Matplotlib.

Matplotlib is an extra and slow to import, so it is imported when a figure is asked for, and its
global state (back end, pyplot) is not touched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cubatch.errors import InvalidArgument, MissingDependency
from cubatch.report.curve import RULED_OUT, Curve, Point, curve_of
from cubatch.units import format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's palette: told apart by colour-blind readers and in grey.
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072b2", "#d55e00", "#009e73", "#b22222", "#7a7a7a"
_MARKS = {
    "out of memory": ("x", _RED), "not run": ("|", _GREY), "over the limit": ("v", _GREY), RULED_OUT: (".", _GREY),
}  # fmt: skip
_EDGE = 0.2  # a label this near to an end of the axis turns inwards
_SUFFIXES = (".png", ".svg", ".pdf")


def tuning_curve(
    result: Mapping[str, Any], path: str | Path, *, width_inches: float = 9.0, height_inches: float = 5.2
) -> None:
    """
    Draw a tuning result: the objective against batch size, with the answer and what decided it.

    The picture shows every measured size with its interval, sizes dropped early in grey, sizes
    that gave no timing as marks at the bottom, the answer, the fastest and its ties, the band
    within tolerance of the fastest, the largest batch that fits, and the few reasons that explain
    a step.  The batch axis is logarithmic to base 2.

    Args:
        result: A tuning result in the JSON form of schema 1.
        path: Where the figure goes; the ending chooses the format: .png, .svg or .pdf.
        width_inches: Width of the figure.
        height_inches: Height of the figure.

    Raises:
        MissingDependency: If Matplotlib is not installed.
        InvalidArgument: If the ending is none of the three, or the file cannot be written.
    """
    check(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), dpi=150, layout="constrained")
    _draw(figure, curve_of(result), result)
    try:
        figure.savefig(path, facecolor="white")
    except OSError as error:
        raise InvalidArgument("plot file", str(path), "a file that can be written", str(error)) from error


def check(path: str | Path) -> None:
    """
    Refuse a figure that could not be drawn, before anything is measured for it.

    Args:
        path: Where the figure would go.

    Raises:
        MissingDependency: If Matplotlib is not installed.
        InvalidArgument: If the ending is not one of a figure.
    """
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise InvalidArgument("plot file", str(path), "a path that ends in " + ", ".join(_SUFFIXES))
    try:
        import matplotlib.figure  # noqa: F401 - an extra; found, not used
    except ImportError as error:
        raise MissingDependency("matplotlib", "drawing a figure", "plot") from error


def _draw(figure: Figure, shown: Curve, result: Mapping[str, Any]) -> None:
    objective = result.get("objective") or "throughput"
    from matplotlib.ticker import LogLocator, NullLocator

    axes = figure.subplots()
    axes.set_title(shown.title, loc="left", fontsize=13, fontweight="bold", pad=24)
    axes.annotate(shown.subtitle, (0, 1), xycoords="axes fraction", xytext=(0, 9), textcoords="offset points",
                  fontsize=9, color="#444444")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xlim(shown.x_low, shown.x_high)
    axes.set_xticks(shown.ticks, [str(size) for size in shown.ticks])
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.set_xlabel("batch size")
    axes.set_ylabel(shown.y_label)
    if shown.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    elif shown.points:
        axes.set_ylim(0, 1.16 * max(point.high for point in shown.points))
    axes.yaxis.set_major_formatter(lambda value, _: format_value(value, objective))
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _draw_references(axes, shown)
    _draw_points(axes, shown)
    _draw_answer(axes, shown)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)


def _draw_references(axes: Axes, shown: Curve) -> None:
    if shown.band is not None:
        axes.axhspan(*shown.band, color=_GREEN, alpha=0.18, linewidth=0, label=shown.band_label)
    if shown.limit is not None:
        axes.axvline(shown.limit[0], color=_RED, linestyle="--", linewidth=1.2, label=shown.limit[1])


def _draw_points(axes: Axes, shown: Curve) -> None:
    kept, dropped = [p for p in shown.points if p.kept], [p for p in shown.points if not p.kept]
    word = "predicted" if shown.predicted else "median, 90 % interval"
    if shown.points:
        style = ":" if shown.predicted else "-"
        axes.plot(*_xy([*shown.points]), color=_BLUE, linewidth=1.4, alpha=0.65, linestyle=style)
    if kept:
        axes.errorbar(*_xy(kept), yerr=_errors(kept), fmt="o", markersize=4.5, color=_BLUE, capsize=2.5,
                      elinewidth=1.2, label=word)  # fmt: skip
    if dropped:
        axes.errorbar(*_xy(dropped), yerr=_errors(dropped), fmt="o", markersize=4, color=_GREY, mfc="white",
                      capsize=2, elinewidth=1, label="dropped early or over a limit")  # fmt: skip
    tied = [p for p in shown.points if p.tied and p is not shown.fastest]
    if tied:
        axes.plot(*_xy(tied), "o", markersize=9, mfc="none", color=_BLUE, label="tied with the fastest")
    at_bottom = axes.get_xaxis_transform()
    for words in sorted({words for _, words in shown.absent}):
        sizes = [size for size, why in shown.absent if why == words]
        marker, colour = _MARKS.get(words, ("D", _RED))
        axes.plot(sizes, [0.03] * len(sizes), marker, transform=at_bottom, color=colour, markersize=6, mew=1.6,
                  label=words, clip_on=False)  # fmt: skip


def _draw_answer(axes: Axes, shown: Curve) -> None:
    word = "predicted " if shown.predicted else ""
    if shown.fastest is not None and shown.fastest is not shown.answer:
        axes.plot(shown.fastest.batch_size, shown.fastest.value, "^", markersize=9, color=_BLUE,
                  label=f"{word}fastest: {shown.fastest.batch_size}", zorder=4)  # fmt: skip
    if shown.answer is not None and shown.label_above is not None:
        axes.plot(shown.answer.batch_size, shown.answer.value, "*", markersize=17, color=_ORANGE, mec="white",
                  label=f"{word}answer: {shown.answer.batch_size}", zorder=5)  # fmt: skip
        at = math.log(shown.answer.batch_size / shown.x_low) / math.log(shown.x_high / shown.x_low)
        side = "left" if at < _EDGE else "right" if at > 1 - _EDGE else "center"
        axes.annotate(
            f"{word}{shown.answer.label}",
            (shown.answer.batch_size, shown.label_above),
            xytext=(0, 13),
            textcoords="offset points",
            ha=side,
            fontsize=10,
            fontweight="bold",
            color=_ORANGE,
            zorder=6,
        )
    for point, reason in shown.labels:
        axes.annotate(reason, (point.batch_size, point.low), xytext=(0, -24), textcoords="offset points", ha="center",
                      va="top", fontsize=8, color="#333333",
                      arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.8})  # fmt: skip


def _xy(points: list[Point]) -> tuple[list[int], list[float]]:
    return [point.batch_size for point in points], [point.value for point in points]


def _errors(points: list[Point]) -> tuple[list[float], list[float]]:
    return [max(0.0, p.value - p.low) for p in points], [max(0.0, p.high - p.value) for p in points]
