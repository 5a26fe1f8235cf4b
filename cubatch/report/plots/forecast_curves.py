"""The figure of `cubatch predict`: a curve per GPU, with its interval and the recommended batch size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cubatch.report.curve import Curve
from cubatch.report.plots import lines, style
from cubatch.report.plots.lines import Dot
from cubatch.report.settings import setting_of
from cubatch.tuning.forecast_record import Forecast
from cubatch.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_LOG_SPAN = 8  # ratio of the best rates of two GPUs above which the axis is logarithmic
_INCHES, _INCHES_PER_GPU = 5.0, 0.2  # height of the figure, and of a line of its legend
_MARKS = "band: predicted 90 % interval; star: recommended; dotted: largest batch that fits, by the memory plan"


def curves(forecasts: Sequence[Forecast], path: str | Path) -> None:
    """
    Draw predictions that differ in the GPU only into a file: the objective against batch size, one curve for each.

    Each curve has a band for its 90 % interval, and a star at the recommended size.  Points over the latency limit are
    hollow.  A dotted line marks the largest batch that fits.
    """
    style.check(path)
    shown, objective = [Curve(forecast) for forecast in forecasts], forecasts[0].objective
    figure, axes = style.sheet(9.0, _INCHES + _INCHES_PER_GPU * len(shown))
    where = setting_of(forecasts[0], with_device=len(shown) == 1)
    style.head(axes, shown[0].title, f"{where}\n{_MARKS}", pad=38)
    _scale(axes, shown, objective)
    axes.set_ylabel(shown[0].y_label)
    style.rule(axes)
    looks = itertools.cycle(itertools.product(style.DASHES, style.COLORS))
    for forecast, curve, (dash, color) in zip(forecasts, shown, looks, strict=False):
        _draw(axes, curve, dash, color, _legend(forecast, curve.answer))
    style.legend(figure, loc="outside lower left", ncols=1)
    style.save(figure, path)


def _scale(axes: Axes, shown: Sequence[Curve], objective: str) -> None:
    """Scale the x axis to base 2, and the y axis from 0; make that logarithmic if the GPUs differ over 8-fold."""
    points = [point for curve in shown for point in curve.points]
    lows, highs = zip(*(curve.x_range for curve in shown), strict=True)
    style.batch_axis(axes, [point.batch_size for point in points], min(lows), max(highs))
    bests = [max(point.value for point in curve.points) for curve in shown]
    is_wide = any(curve.log_y for curve in shown) or max(bests) > _LOG_SPAN * min(bests)
    style.value_axis(axes, objective, 1.08 * max(point.high for point in points), log=is_wide)


def _draw(axes: Axes, curve: Curve, dash: str, color: str, label: str) -> None:
    valid = [point for point in curve.points if point.is_ok]
    over = [point for point in curve.points if not point.is_ok]
    sizes, values = lines.xy(valid)
    axes.fill_between(sizes, [point.low for point in valid], [point.high for point in valid], color=color, alpha=0.16,
                      linewidth=0)  # fmt: skip
    axes.plot(sizes, values, color=color, linewidth=1.6, linestyle=dash, marker="o", markersize=3.5, label=label)
    axes.plot(*lines.xy(over), "o", markersize=4, color=color, mfc="white")
    if curve.limit is not None:
        axes.axvline(curve.limit[0], color=color, linestyle=":", linewidth=1.2)
    if curve.answer is not None:
        at = curve.answer.batch_size, curve.answer.value
        axes.plot(*at, "*", markersize=15, color=color, mec="white", zorder=5)
        axes.annotate(str(at[0]), at, xytext=(0, 10), textcoords="offset points", ha="center", fontsize=9,
                      fontweight="bold", color=color, zorder=6)  # fmt: skip


def _legend(forecast: Forecast, answer: Dot | None) -> str:
    parts = [f"recommended: {lines.label(answer, forecast.objective)}"] if answer else []
    memory, largest = forecast.limits["memory_bytes"], forecast.largest_batch_size
    return "; ".join([style.plain(forecast.device.name), *parts, f"up to {largest} fit in {format_bytes(memory)}"])
