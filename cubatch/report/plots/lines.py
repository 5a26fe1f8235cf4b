"""Figures of values by batch size, as lines with intervals: what they show, and how they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from cubatch.report.plots import style
from cubatch.units import format_count, format_objective

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A shorter axis has too few of 1, 2 and 5 times powers of ten, a longer one too many.
_SHORT, _LONG = 5.0, 1000.0


@attrs.frozen(kw_only=True)
class Dot:
    """A point of a line in a figure: a value with its interval, at a batch size."""

    batch_size: int  # samples per step
    value: float  # the value on the y axis
    low: float  # low, high: ends of its interval; equal to the value if unknown
    high: float
    is_ok: bool = True  # whether the size can be recommended


@attrs.frozen(kw_only=True)
class Series:
    """The points of one line in a figure, and its label."""

    label: str  # entry of the legend
    dots: Sequence[Dot]  # values, by ascending batch size
    is_computed: bool = False  # whether the values were not measured: the line is dotted and has no dots


@attrs.frozen(kw_only=True)
class Lines:
    """The content of a figure of values by batch size: lines, axes and marks."""

    title: str  # its content in words
    y_label: str  # quantity and unit
    series: Sequence[Series]  # at most seven lines
    marks: Sequence[tuple[str, Sequence[int]]] = ()  # rows of marks below the lines: their label, and batch sizes
    log_x: bool = False  # log_x, log_y: whether an axis is logarithmic
    log_y: bool = False


def xy(points: Sequence[Dot]) -> tuple[list[int], list[float]]:
    """Return the batch sizes of points, and their values, as two lists."""
    return [point.batch_size for point in points], [point.value for point in points]


def label(point: Dot, objective: str) -> str:
    """Return batch size and value of a point as text, in the unit of `objective`: "batch 64: 27 462 samples/s"."""
    return f"batch {point.batch_size}: {format_objective(point.value, objective)}"


def figure_of(lines: Lines, head: tuple[str, str] | None = None) -> Figure:
    """Return a Matplotlib figure of the lines; `head` is its title and subtitle, None for neither."""
    figure, axes = style.sheet(8.5, 4.4 + 0.24 * len(lines.marks))
    if head is not None:
        style.head(axes, *head, pad=24, size=11, gap=8)
    _draw(axes, lines)
    style.legend(figure)
    return figure


def _draw(axes: Axes, lines: Lines) -> None:
    from matplotlib.ticker import MaxNLocator

    for series, color in zip(lines.series, style.COLORS, strict=False):
        sizes, values = xy(series.dots)
        if series.is_computed:
            axes.plot(sizes, values, ":", color=color, linewidth=1.4, label=series.label)
        else:
            axes.plot(sizes, values, "o-", color=color, linewidth=1.4, markersize=4.5, label=series.label)
            lows, highs = [dot.low for dot in series.dots], [dot.high for dot in series.dots]
            axes.vlines(sizes, lows, highs, color=color, linewidth=1.2)
    sizes = sorted({dot.batch_size for series in lines.series for dot in series.dots})
    if lines.log_x:
        style.batch_axis(axes, sizes, sizes[0] / 1.2, sizes[-1] * 1.2)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("batch size")
    if lines.log_y:
        _log_axis(axes, [value for series in lines.series for dot in series.dots for value in (dot.low, dot.high)])
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: format_count(value))
    axes.set_ylabel(lines.y_label)
    style.rule(axes)
    for place, (label, marked) in enumerate(lines.marks):
        height = 0.03 + 0.055 * (len(lines.marks) - 1 - place)
        heights, at_foot = [height] * len(marked), axes.get_xaxis_transform()
        axes.plot(marked, heights, "|", transform=at_foot, color=style.GREY, markersize=8, mew=2)
        axes.annotate(label, (1, height), xycoords="axes fraction", xytext=(4, 0), textcoords="offset points",
                      va="center", fontsize=8, color="#444444")  # fmt: skip


def _log_axis(axes: Axes, values: Sequence[float]) -> None:
    """Make the y axis logarithmic, with ticks that suit the span of the positive `values`."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_yscale("log")
    positive = [value for value in values if value > 0]
    span = max(positive, default=1.0) / min(positive, default=1.0)
    subs = (1, 2, 5) if span < _LONG else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs) if span > _SHORT else MaxNLocator(6))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
