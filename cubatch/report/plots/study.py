"""Figures of `cubatch study`: values by batch size, tuning curves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cubatch.report import plot
from cubatch.report.curve import Curve, ticks
from cubatch.report.lines import Lines
from cubatch.report.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SERIES = (style.BLUE, style.ORANGE, style.GREEN)
# Values that span less have few of 1, 2 and 5 times powers of ten between them; of those that span more these are many.
_NEAR, _FAR = 5.0, 1000.0


def figure_of(shown: Lines | Curve, head: tuple[str, str] | None = None) -> Figure:
    """Draw what a figure shows, beneath a title and a subtitle; a curve has its own; None: without them."""
    if isinstance(shown, Curve):
        return plot.figure_of(shown, "throughput", titled=head is not None)
    figure, axes = style.sheet(8.5, 4.4 + 0.24 * len(shown.marks))
    if head is not None:
        style.head(axes, *head, pad=24, size=11, gap=8)
    _lines(axes, shown)
    style.legend(figure)
    return figure


def _lines(axes: Axes, shown: Lines) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    for one, color in zip(shown.series, _SERIES, strict=False):
        sizes, values = [dot.batch_size for dot in one.dots], [dot.value for dot in one.dots]
        axes.plot(sizes, values, color=color, linewidth=1.4, linestyle=":" if one.is_computed else "-",
                  marker="" if one.is_computed else "o", markersize=4.5, label=one.label)  # fmt: skip
        if not one.is_computed:
            lows, highs = [dot.low for dot in one.dots], [dot.high for dot in one.dots]
            axes.vlines(sizes, lows, highs, color=color, linewidth=1.2)
    sizes = sorted({dot.batch_size for one in shown.series for dot in one.dots})
    if shown.log_x:
        low, high = sizes[0] / 1.2, sizes[-1] * 1.2
        style.batch_axis(axes, low, high, ticks(sizes, low, high))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("batch size")
    if shown.log_y:
        axes.set_yscale("log")
        values = [value for one in shown.series for dot in one.dots for value in (dot.low, dot.high) if value > 0]
        span = max(values, default=1.0) / min(values, default=1.0)
        steps = (1, 2, 5) if span < _FAR else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=steps) if span > _NEAR else MaxNLocator(6))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(shown.y_label)
    style.rule(axes)
    for place, (label, special) in enumerate(shown.marks):
        height = 0.03 + 0.055 * (len(shown.marks) - 1 - place)
        heights, at_foot = [height] * len(special), axes.get_xaxis_transform()
        axes.plot(special, heights, "|", transform=at_foot, color=style.GREY, markersize=8, mew=2)
        axes.annotate(label, (1, height), xycoords="axes fraction", xytext=(4, 0), textcoords="offset points",
                      va="center", fontsize=8, color="#444444")  # fmt: skip
