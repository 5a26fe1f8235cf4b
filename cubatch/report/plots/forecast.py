"""
The figure of predictions: a curve per GPU with its interval, the recommended size, and the largest that fits.

Title and axis say that nothing was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cubatch.report.curve import Curve, Point, curve_of, ticks
from cubatch.report.plots import style
from cubatch.report.settings import setting_of
from cubatch.tuning.forecast_record import Forecast
from cubatch.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_LOG_SPAN = 8  # GPUs this far apart are drawn on a logarithmic axis
_INCHES, _INCHES_A_GPU = 5.0, 0.2  # height of the figure, and of a line of its legend
_MARKS = "band: predicted 90 % interval; star: recommended; dotted: largest batch that fits, by the memory plan"


def curves(forecasts: Sequence[Forecast], path: str | Path) -> None:
    """
    Draw predictions of one network: the objective against batch size, one curve for each GPU.

    Each curve has its 90 % interval as a band, a star at the recommended size, hollow points at sizes over the
    latency limit, and a dotted line at the largest batch that fits.  The batch axis is logarithmic to base 2.

    Args:
        forecasts: Predictions that differ in the GPU only, at least one.
        path: Where the figure goes: .png, .svg or .pdf.

    Raises:
        MissingDependency: If Matplotlib is not installed.
        InvalidArgument: If the ending is none of the three, or the file cannot be written.
    """
    style.check(path)
    shown, objective = [curve_of(forecast) for forecast in forecasts], forecasts[0].objective
    figure, axes = style.sheet(9.0, _INCHES + _INCHES_A_GPU * len(shown))
    where = setting_of(forecasts[0], with_device=False) if len(shown) > 1 else shown[0].subtitle
    style.head(axes, shown[0].title, f"{where}\n{_MARKS}", pad=38)
    _scale(axes, shown, objective)
    axes.set_ylabel(shown[0].y_label)
    style.rule(axes)
    looks = itertools.cycle(itertools.product(style.DASHES, style.COLORS))
    for forecast, curve, (dash, color) in zip(forecasts, shown, looks, strict=False):
        _draw(axes, curve, dash, color, _legend(forecast, curve))
    style.legend(figure, loc="outside lower left", ncols=1)
    style.save(figure, path)


def _scale(axes: Axes, shown: Sequence[Curve], objective: str) -> None:
    """Set both axes so that every curve is seen: from zero, or logarithmic where GPUs are far apart."""
    points = [point for curve in shown for point in curve.points]
    x_low, x_high = min(curve.x_low for curve in shown), max(curve.x_high for curve in shown)
    style.batch_axis(axes, x_low, x_high, ticks([point.batch_size for point in points], x_low, x_high))
    bests = [max(point.value for point in curve.points) for curve in shown]
    is_wide = any(curve.log_y for curve in shown) or max(bests) > _LOG_SPAN * min(bests)
    style.value_axis(axes, objective, 1.08 * max(point.high for point in points), log=is_wide)


def _draw(axes: Axes, curve: Curve, dash: str, color: str, label: str) -> None:
    kept, over = [point for point in curve.points if point.kept], [point for point in curve.points if not point.kept]
    sizes, values = _xy(kept)
    axes.fill_between(sizes, [point.low for point in kept], [point.high for point in kept], color=color, alpha=0.16,
                      linewidth=0)  # fmt: skip
    axes.plot(sizes, values, color=color, linewidth=1.6, linestyle=dash, marker="o", markersize=3.5, label=label)
    axes.plot(*_xy(over), "o", markersize=4, color=color, mfc="white")
    if curve.limit is not None:
        axes.axvline(curve.limit[0], color=color, linestyle=":", linewidth=1.2)
    if curve.answer is not None:
        at = curve.answer.batch_size, curve.answer.value
        axes.plot(*at, "*", markersize=15, color=color, mec="white", zorder=5)
        axes.annotate(str(at[0]), at, xytext=(0, 10), textcoords="offset points", ha="center", fontsize=9,
                      fontweight="bold", color=color, zorder=6)  # fmt: skip


def _legend(forecast: Forecast, curve: Curve) -> str:
    """Return the GPU, its recommended size and the largest batch that fits."""
    parts = [f"recommended: {curve.answer.label}"] if curve.answer else []
    room, largest = forecast.limits["memory_bytes"], forecast.largest_batch_size
    return "; ".join([style.plain(forecast.device.name), *parts, f"up to {largest} fit in {format_bytes(room)}"])


def _xy(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    return [point.batch_size for point in points], [point.value for point in points]
