"""
The figure of predictions: a curve for each GPU with its interval as a band, the answers, and what fits in memory.

It reads only the JSON form of a prediction, and says in title, axis and legend that nothing was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cubatch.errors import InvalidArgument
from cubatch.report import plot
from cubatch.report.curve import Curve, Point, curve_of, ticks
from cubatch.report.facts import setting
from cubatch.units import format_bytes, format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Okabe and Ito's palette without its yellow, which is too pale for a line; then again in another dash.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#000000", "#e69f00")
_DASHES = ("-", "--", "-.")
_LOG_SPAN = 8  # GPUs this far apart are drawn on a logarithmic axis
_INCHES, _INCHES_A_GPU = 5.0, 0.2  # height of the figure, and of a line of its legend
_MARKS = "band: predicted 90 % interval; star: predicted answer; dotted: largest batch that fits, by the memory plan"


def curves(forecasts: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """
    Draw predictions of one network: the objective against batch size, one curve for each GPU.

    Each curve has its 90 % interval as a band, a star at the answer, hollow points at sizes over the latency limit,
    and a dotted line at the largest batch that fits.  The batch axis is logarithmic to base 2.

    Args:
        forecasts: Predictions in the JSON form of schema 1 that differ in the GPU only, at least one.
        path: Where the figure goes: .png, .svg or .pdf.

    Raises:
        MissingDependency: If Matplotlib is not installed.
        InvalidArgument: If the ending is none of the three, or the file cannot be written.
    """
    plot.check(path)
    from matplotlib.figure import Figure

    shown, objective = [curve_of(forecast) for forecast in forecasts], forecasts[0]["objective"]
    figure = Figure(figsize=(9.0, _INCHES + _INCHES_A_GPU * len(shown)), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_title(shown[0].title, loc="left", fontsize=13, fontweight="bold", pad=38)
    where = setting({**forecasts[0], "device": None}) if len(shown) > 1 else shown[0].subtitle
    axes.annotate(f"{where}\n{_MARKS}", (0, 1), xycoords="axes fraction", xytext=(0, 9), textcoords="offset points",
                  fontsize=9, color="#444444")  # fmt: skip
    _scale(axes, shown, objective)
    axes.set_ylabel(shown[0].y_label)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    styles = itertools.cycle(itertools.product(_DASHES, _COLOURS))
    for forecast, curve, (dash, colour) in zip(forecasts, shown, styles, strict=False):
        _draw(axes, curve, dash, colour, _legend(forecast, curve))
    figure.legend(loc="outside lower left", ncols=1, fontsize=8.5, frameon=False)
    try:
        figure.savefig(path, facecolor="white")
    except OSError as error:
        raise InvalidArgument("plot file", str(path), "a file that can be written", str(error)) from error


def _scale(axes: Axes, shown: Sequence[Curve], objective: str) -> None:
    """Set both axes so that every curve is seen: from zero, or logarithmic where GPUs are far apart."""
    from matplotlib.ticker import LogLocator, NullLocator

    points = [point for curve in shown for point in curve.points]
    x_low, x_high = min(curve.x_low for curve in shown), max(curve.x_high for curve in shown)
    places = ticks([point.batch_size for point in points], x_low, x_high)
    axes.set_xscale("log", base=2)
    axes.set_xlim(x_low, x_high)
    axes.set_xticks(places, [str(size) for size in places])
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.set_xlabel("batch size")
    bests = [max(point.value for point in curve.points) for curve in shown]
    if any(curve.log_y for curve in shown) or max(bests) > _LOG_SPAN * min(bests):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, 1.08 * max(point.high for point in points))
    axes.yaxis.set_major_formatter(lambda value, _: format_value(value, objective))


def _draw(axes: Axes, curve: Curve, dash: str, colour: str, label: str) -> None:
    kept, over = [point for point in curve.points if point.kept], [point for point in curve.points if not point.kept]
    sizes, values = _xy(kept)
    axes.fill_between(sizes, [point.low for point in kept], [point.high for point in kept], color=colour, alpha=0.16,
                      linewidth=0)  # fmt: skip
    axes.plot(sizes, values, color=colour, linewidth=1.6, linestyle=dash, marker="o", markersize=3.5, label=label)
    axes.plot(*_xy(over), "o", markersize=4, color=colour, mfc="white")
    if curve.limit is not None:
        axes.axvline(curve.limit[0], color=colour, linestyle=":", linewidth=1.2)
    if curve.answer is not None:
        at = curve.answer.batch_size, curve.answer.value
        axes.plot(*at, "*", markersize=15, color=colour, mec="white", zorder=5)
        axes.annotate(str(at[0]), at, xytext=(0, 10), textcoords="offset points", ha="center", fontsize=9,
                      fontweight="bold", color=colour, zorder=6)  # fmt: skip


def _legend(forecast: Mapping[str, Any], curve: Curve) -> str:
    """Say the GPU, its answer and the largest batch that fits."""
    parts = [f"predicted answer {curve.answer.label}"] if curve.answer else []
    room, largest = forecast["limits"]["memory_bytes"], forecast["largest_batch_size"]
    return "; ".join([forecast["device"]["name"], *parts, f"up to {largest} fit in {format_bytes(room)}"])


def _xy(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    return [point.batch_size for point in points], [point.value for point in points]
