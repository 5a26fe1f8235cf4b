"""The figure of a tuning result or prediction: draws what `curve` selects."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from cubatch.report.curve import RULED_OUT, Curve
from cubatch.report.plots import lines, style
from cubatch.report.plots.lines import Dot, xy
from cubatch.report.settings import setting_of
from cubatch.tuning.extents_result import ExtentsResult
from cubatch.tuning.results import BatchSizeResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MARKS = {
    "out of memory": ("x", style.RED),
    "not run": ("|", style.GREY),
    "over the limit": ("v", style.GREY),
    RULED_OUT: (".", style.GREY),
}
_EDGE = 0.2  # a label closer to an end of the axis is aligned inwards


def tuning_curve(result: BatchSizeResult, path: str | Path) -> None:
    """
    Draw a tuning result or prediction into a .png, .svg or .pdf file: the objective against batch size.

    Every measured size has its interval.  Sizes without a timing are marks at the bottom.  The recommended size, the
    fastest size with its ties, the tolerance band and the largest batch that fits are marked.
    """
    style.check(path)
    style.save(figure_of(Curve(result)), path)


def by_extent(result: ExtentsResult, path: str | Path) -> None:
    """Draw a result for several extents into a file: tokens per second against batch size, a line per extent."""
    style.check(path)
    series = []
    for extent, tuned in result.results.items():
        dots = []
        for n, rate in sorted(tuned.loop_rates.items()):
            low, high = tuned.sizes[n].throughput_interval or (rate, rate)
            dots.append(lines.Dot(batch_size=n, value=extent * rate, low=extent * low, high=extent * high))
        if dots:
            series.append(lines.Series(label=f"{result.axis} {extent}", dots=dots))
    figure = lines.Lines(title=f"Tokens per second by {result.axis}", y_label="tokens/s", series=series, log_x=True)
    style.save(lines.figure_of(figure, (figure.title, "bars: 90 % interval")), path)


def figure_of(shown: Curve, *, titled: bool = True) -> Figure:
    """Return a Matplotlib figure of a curve, with its title and the conditions of the result if `titled`."""
    figure, axes = style.sheet(9.0, 5.2 if titled else 4.6)
    _draw(axes, shown, titled=titled)
    if axes.get_legend_handles_labels()[0]:
        style.legend(figure)
    return figure


def _draw(axes: Axes, shown: Curve, *, titled: bool) -> None:
    if titled:
        style.head(axes, shown.title, setting_of(shown.result), pad=24)
    style.batch_axis(axes, [*shown.result.sizes], *shown.x_range)
    axes.set_ylabel(shown.y_label)
    top = 1.16 * max(point.high for point in shown.points) if shown.points else None
    style.value_axis(axes, shown.result.objective, top, log=shown.log_y)
    style.rule(axes)
    _draw_references(axes, shown)
    _draw_points(axes, shown)
    _draw_recommendation(axes, shown)


def _draw_references(axes: Axes, shown: Curve) -> None:
    if shown.band is not None:
        label = f"within {100 * (shown.result.tolerance or 0):g} % of the best"
        axes.axhspan(*shown.band, color=style.GREEN, alpha=0.18, linewidth=0, label=label)
    if shown.limit is not None:
        axes.axvline(shown.limit[0], color=style.RED, linestyle="--", linewidth=1.2, label=shown.limit[1])


def _draw_points(axes: Axes, shown: Curve) -> None:
    valid, dropped = [p for p in shown.points if p.is_ok], [p for p in shown.points if not p.is_ok]
    word = "predicted" if shown.result.predicted else "expected, 90 % interval"
    if shown.points:
        dash = ":" if shown.result.predicted else "-"
        axes.plot(*xy(shown.points), color=style.BLUE, linewidth=1.4, alpha=0.65, linestyle=dash)
    if valid:
        axes.errorbar(*xy(valid), yerr=_errors(valid), fmt="o", markersize=4.5, color=style.BLUE, capsize=2.5,
                      elinewidth=1.2, label=word)  # fmt: skip
    if dropped:
        axes.errorbar(*xy(dropped), yerr=_errors(dropped), fmt="o", markersize=4, color=style.GREY, mfc="white",
                      capsize=2, elinewidth=1, label="dropped early or over a limit")  # fmt: skip
    if shown.tied:
        axes.plot(*xy(shown.tied), "o", markersize=9, mfc="none", color=style.BLUE, label="tied with the fastest")
    at_bottom = axes.get_xaxis_transform()
    for words in sorted({words for _, words in shown.absent}):
        sizes = [size for size, why in shown.absent if why == words]
        marker, color = _MARKS.get(words, ("D", style.RED))
        axes.plot(sizes, [0.03] * len(sizes), marker, transform=at_bottom, color=color, markersize=6, mew=1.6,
                  label=words, clip_on=False)  # fmt: skip


def _draw_recommendation(axes: Axes, shown: Curve) -> None:
    word = "predicted " if shown.result.predicted else ""
    if shown.fastest is not None and shown.fastest is not shown.answer:
        axes.plot(shown.fastest.batch_size, shown.fastest.value, "^", markersize=9, color=style.BLUE,
                  label=f"{word}fastest: {shown.fastest.batch_size}", zorder=4)  # fmt: skip
    if shown.answer is not None and (above := shown.label_above) is not None:
        n, (low, high) = shown.answer.batch_size, shown.x_range
        axes.plot(n, shown.answer.value, "*", markersize=17, color=style.ORANGE, mec="white",
                  label=f"recommended: {n}", zorder=5)  # fmt: skip
        at = math.log(n / low) / math.log(high / low)
        side = "left" if at < _EDGE else "right" if at > 1 - _EDGE else "center"
        text = word + lines.label(shown.answer, shown.result.objective)
        axes.annotate(text, (n, above), xytext=(0, 13), textcoords="offset points", ha=side, fontsize=10,
                      fontweight="bold", color=style.ORANGE, zorder=6)  # fmt: skip
    for point, reason in shown.labels:
        axes.annotate(style.plain(reason), (point.batch_size, point.low), xytext=(0, -24), textcoords="offset points",
                      ha="center", va="top", fontsize=8, color="#333333",
                      arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.8})  # fmt: skip


def _errors(points: list[Dot]) -> tuple[list[float], list[float]]:
    return [max(0.0, p.value - p.low) for p in points], [max(0.0, p.high - p.value) for p in points]
