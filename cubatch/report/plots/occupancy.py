"""Figures of `cubatch occupancy`: the staircase of resident warps, and the saw of SMs at work against batch size."""

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


_LABELS = 12  # of the highest cliffs, so many have their number
_APART = 0.03  # and so much of the axis between two


def staircase(found: Sweep, path: str | Path, *, title: str, subject: str, warps: int) -> None:
    """
    Draw occupancy against threads, registers or shared memory, with its cliffs and where the launch stands.

    Args:
        found: The sweep.
        path: Where the figure goes: .png, .svg or .pdf.
        title: Above it.
        subject: The launch, in smaller print.
        warps: The most that an SM holds, for the axis on the right.

    Raises:
        MissingDependency: If Matplotlib is not installed.
        InvalidArgument: If the ending is none of the three, or the file cannot be written.
    """
    per = "per thread" if found.quantity == "registers" else "per block"
    axes, save = _axes(path, title, f"{subject}\n{advice(found)}", f"{UNITS[found.quantity]} {per}")
    axes.set_xlim(0, found.steps[-1].last)
    steps = found.steps
    for before, after in pairwise(steps):
        heights = [100 * before.occupancy, 100 * after.occupancy]
        axes.plot([before.last] * 2, heights, color=style.BLUE, linewidth=0.9, alpha=0.5)
    label = "occupancy"
    for step in steps:
        ends = [max(0, step.first - 1), step.last]
        axes.plot(ends, [100 * step.occupancy] * 2, color=style.BLUE, linewidth=2.2, solid_capstyle="butt", label=label)
        label = "_"
    cliffs = [
        (before.last, 100 * before.occupancy, 100 * after.occupancy)
        for before, after in pairwise(steps)
        if before.cliff
    ]
    _mark(axes, cliffs, found.value, 100 * found.at(found.value).occupancy, f"now: {format_count(found.value)}")
    if found.better is not None:
        height = 100 * found.at(found.better).occupancy
        text = f"nearest better: {format_count(found.better)}"
        axes.plot(found.better, height, "o", markersize=9, mfc="none", mec=style.GREEN, mew=2, label=text, zorder=4)
    if found.quantity != "shared":
        axes.set_xticks(range(0, steps[-1].last + 1, 128 if found.quantity == "threads" else 32))
    right = axes.secondary_yaxis(
        "right", functions=(partial(np.multiply, warps / 100), partial(np.multiply, 100 / warps))
    )
    right.set_ylabel("resident warps per SM")
    right.spines["right"].set_visible(False)
    axes.set_ylim(0, 108)
    axes.set_ylabel("occupancy, percent")
    save()


def saw(found: BatchSweep, path: str | Path, *, title: str, subject: str) -> None:
    """
    Draw the share of the SMs at work against batch size, with its cliffs and the crest next to the present size.

    Args:
        found: The sweep.
        path: Where the figure goes: .png, .svg or .pdf.
        title: Above it.
        subject: The launch, in smaller print.

    Raises:
        MissingDependency: If Matplotlib is not installed.
        InvalidArgument: If the ending is none of the three, or the file cannot be written.
    """
    axes, save = _axes(path, title, "\n".join(filter(None, (subject, batch_advice(found)))), "batch size")
    axes.set_xlim(0, found.steps[-1].last.batch_size)
    sizes = [grid.batch_size for step in found.steps for grid in (step.first, step.last)]
    axes.plot(sizes, [100 * grid.fill for step in found.steps for grid in (step.first, step.last)], color=style.BLUE,
              linewidth=1.8, label="share of SM time at work")  # fmt: skip
    cliffs = [
        (before.last.batch_size, 100 * before.last.fill, 100 * after.first.fill)
        for before, after in pairwise(found.steps)
        if before.cliff
    ]
    if found.grid is None:
        _mark(axes, cliffs)
    else:
        _mark(axes, cliffs, found.grid.batch_size, 100 * found.grid.fill, f"now: {found.grid.batch_size}")
    if found.better is not None:
        text = f"nearest better: {found.better.batch_size}, {format_percent(found.better.fill)}"
        at = found.better.batch_size, 100 * found.better.fill
        axes.plot(*at, "o", markersize=9, mfc="none", mec=style.GREEN, mew=2, label=text, zorder=4)
    axes.set_ylim(0, 112)
    axes.set_ylabel("SMs at work, percent")
    save()


def _axes(path: str | Path, title: str, subtitle: str, x_label: str) -> tuple[Axes, Callable[[], None]]:
    """Make the axes of a figure, and what saves it."""
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
    cliffs: Sequence[tuple[int, float, float]],
    x: float | None = None,
    y: float = 0.0,
    label: str = "",
) -> None:
    """
    Mark the values beyond which it falls, the highest cliffs with their number, and where the launch stands.

    Args:
        axes: With their limits.
        cliffs: The last value before each, and the heights before and after.
        x, y, label: Where the launch stands, if anywhere.
    """
    if cliffs:
        places, heights, _ = zip(*cliffs, strict=True)
        axes.plot(places, heights, "v", markersize=5, color=style.RED, label="cliff: the next one is lower", zorder=3)
    gap = _APART * axes.get_xlim()[1]
    numbered: list[int] = []
    for place, before, _ in sorted(cliffs, key=lambda cliff: cliff[2] - cliff[1]):
        if len(numbered) < _LABELS and all(abs(place - other) >= gap for other in numbered):
            numbered.append(place)
            axes.annotate(format_count(place), (place, before), xytext=(0, 6), textcoords="offset points", ha="center",
                          fontsize=8, color=style.RED)  # fmt: skip
    if x is not None:
        axes.plot(x, y, "*", markersize=15, color=style.ORANGE, mec="white", label=label, zorder=5)
