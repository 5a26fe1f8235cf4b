"""Figures of `cubatch occupancy`: resident warps by a resource, and used SMs by batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cubatch.report.plots import style
from cubatch.report.tables.occupancy import UNITS, advice, batch_advice
from cubatch.units import format_count, format_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cubatch.estimate.batch_sweep import BatchSweep
    from cubatch.estimate.occupancy_sweep import Sweep


_LABELS = 12  # numbers at most, at the largest drops
_APART = 0.03  # least distance of two numbers, as a share of the axis


def staircase(swept: Sweep, path: str | Path, *, title: str, subject: str, warps: int) -> None:
    """
    Draw occupancy against threads, registers or shared memory, with its drops and the present launch.

    Args:
        swept: The sweep.
        path: A .png, .svg or .pdf file.
        title: Title of the figure.
        subject: The launch, for the subtitle.
        warps: Warps that an SM can hold, for the axis on the right.
    """
    per = "per thread" if swept.quantity == "registers" else "per block"
    axes, save = _axes(path, title, f"{subject}\n{advice(swept)}", f"{UNITS[swept.quantity]} {per}")
    axes.set_xlim(0, swept.steps[-1].last)
    steps = swept.steps
    for before, after in pairwise(steps):
        heights = [100 * before.occupancy, 100 * after.occupancy]
        axes.plot([before.last] * 2, heights, color=style.BLUE, linewidth=0.9, alpha=0.5)
    label = "occupancy"
    for step in steps:
        ends = [max(0, step.first - 1), step.last]
        axes.plot(ends, [100 * step.occupancy] * 2, color=style.BLUE, linewidth=2.2, solid_capstyle="butt", label=label)
        label = "_"
    drops = [
        (before.last, 100 * before.occupancy, 100 * after.occupancy)
        for before, after in pairwise(steps)
        if before.cliff
    ]
    _mark(axes, drops, swept.value, 100 * swept.at(swept.value).occupancy, f"now: {format_count(swept.value)}")
    if swept.better is not None:
        height = 100 * swept.at(swept.better).occupancy
        text = f"nearest better: {format_count(swept.better)}"
        axes.plot(swept.better, height, "o", markersize=9, mfc="none", mec=style.GREEN, mew=2, label=text, zorder=4)
    if swept.quantity != "shared":
        axes.set_xticks(range(0, steps[-1].last + 1, 128 if swept.quantity == "threads" else 32))
    right = axes.secondary_yaxis(
        "right", functions=(partial(np.multiply, warps / 100), partial(np.multiply, 100 / warps))
    )
    right.set_ylabel("resident warps per SM")
    right.spines["right"].set_visible(False)
    axes.set_ylim(0, 108)
    axes.set_ylabel("occupancy, percent")
    save()


def saw(swept: BatchSweep, path: str | Path, *, title: str, subject: str) -> None:
    """
    Draw the share of used SMs against batch size, with its drops and the nearest better size.

    Args:
        swept: The sweep.
        path: A .png, .svg or .pdf file.
        title: Title of the figure.
        subject: The launch, for the subtitle.
    """
    axes, save = _axes(path, title, "\n".join(filter(None, (subject, batch_advice(swept)))), "batch size")
    axes.set_xlim(0, swept.steps[-1].last.batch_size)
    sizes = [grid.batch_size for step in swept.steps for grid in (step.first, step.last)]
    axes.plot(sizes, [100 * grid.fill for step in swept.steps for grid in (step.first, step.last)], color=style.BLUE,
              linewidth=1.8, label="share of SM time in use")  # fmt: skip
    drops = [
        (before.last.batch_size, 100 * before.last.fill, 100 * after.first.fill)
        for before, after in pairwise(swept.steps)
        if before.cliff
    ]
    if swept.grid is None:
        _mark(axes, drops)
    else:
        _mark(axes, drops, swept.grid.batch_size, 100 * swept.grid.fill, f"now: {swept.grid.batch_size}")
    if swept.better is not None:
        text = f"nearest better: {swept.better.batch_size}, {format_percent(swept.better.fill)}"
        at = swept.better.batch_size, 100 * swept.better.fill
        axes.plot(*at, "o", markersize=9, mfc="none", mec=style.GREEN, mew=2, label=text, zorder=4)
    axes.set_ylim(0, 112)
    axes.set_ylabel("SM time in use, percent")
    save()


def _axes(path: str | Path, title: str, subtitle: str, x_label: str) -> tuple[Axes, Callable[[], None]]:
    """Return the axes of a new figure, and a function that saves it."""
    style.check(path)
    figure, axes = style.sheet(9.0, 4.6)
    style.head(axes, title, subtitle, pad=34, size=12, gap=7)
    axes.set_xlabel(x_label)
    style.rule(axes)
    axes.xaxis.set_major_formatter(lambda value, _: format_count(value))

    def save() -> None:
        style.legend(figure)
        style.save(figure, path)

    return axes, save


def _mark(
    axes: Axes,
    drops: Sequence[tuple[int, float, float]],
    x: float | None = None,
    y: float = 0.0,
    label: str = "",
) -> None:
    """
    Mark the drops, the largest ones with their number, and the present launch.

    Args:
        axes: Axes whose limits are set.
        drops: The last value before each drop, and the heights before and after.
        x, y, label: Position and label of the present launch; None if there is none.
    """
    if drops:
        places, heights, _ = zip(*drops, strict=True)
        axes.plot(places, heights, "v", markersize=5, color=style.RED, label="drop: the next value is lower", zorder=3)
    gap = _APART * axes.get_xlim()[1]
    numbered: list[int] = []
    for place, before, _ in sorted(drops, key=lambda drop: drop[2] - drop[1]):
        if len(numbered) < _LABELS and all(abs(place - other) >= gap for other in numbered):
            numbered.append(place)
            axes.annotate(format_count(place), (place, before), xytext=(0, 6), textcoords="offset points", ha="center",
                          fontsize=8, color=style.RED)  # fmt: skip
    if x is not None:
        axes.plot(x, y, "*", markersize=15, color=style.ORANGE, mec="white", label=label, zorder=5)
