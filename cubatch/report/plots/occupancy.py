"""Figures of `cubatch occupancy`: resident warps by a resource, and used SMs by batch size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cubatch.estimate.batch_sweep import BatchSweep
from cubatch.estimate.occupancy_sweep import Sweep
from cubatch.report.plots import style
from cubatch.report.tables.occupancy import UNITS, advice, batch_advice
from cubatch.units import format_count, format_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_LABELS = 12  # numbers at most, at the largest drops
_APART = 0.03  # least distance of two numbers, as a share of the axis


def staircase(swept: Sweep, path: str | Path, *, title: str, subject: str, warps: int) -> None:
    """
    Draw a sweep of threads, registers or shared memory into a file: its occupancy, drops and the present launch.

    Args:
        swept: Occupancy by the resource that changes.
        path: The file; its ending .png, .svg or .pdf selects the format.
        title: Title of the figure.
        subject: The launch as text, for the subtitle.
        warps: Warps that an SM can hold, for the axis on the right.
    """
    per, steps = "per thread" if swept.quantity == "registers" else "per block", swept.steps
    with _figure(path, title, f"{subject}\n{advice(swept)}", f"{UNITS[swept.quantity]} {per}") as axes:
        axes.set_ylabel("occupancy, percent")
        axes.set_xlim(0, steps[-1].last)
        axes.set_ylim(0, 108)
        for before, after in pairwise(steps):
            heights = [100 * before.occupancy, 100 * after.occupancy]
            axes.plot([before.last] * 2, heights, color=style.BLUE, linewidth=0.9, alpha=0.5)
        label = "occupancy"
        for step in steps:
            ends = [max(0, step.first - 1), step.last]
            axes.plot(ends, [100 * step.occupancy] * 2, color=style.BLUE, linewidth=2.2, solid_capstyle="butt",
                      label=label)  # fmt: skip
            label = "_"
        _mark_drops(axes, [(s.last, s.occupancy, t.occupancy) for s, t in pairwise(steps) if s.cliff])
        _mark(axes, swept.value, swept.at(swept.value).occupancy, f"now: {format_count(swept.value)}")
        if swept.better is not None:
            text = f"nearest better: {format_count(swept.better)}"
            _mark(axes, swept.better, swept.at(swept.better).occupancy, text, is_better=True)
        if swept.quantity != "shared":
            axes.set_xticks(range(0, steps[-1].last + 1, 128 if swept.quantity == "threads" else 32))
        to_warps = partial(np.multiply, warps / 100), partial(np.multiply, 100 / warps)
        right = axes.secondary_yaxis("right", functions=to_warps)
        right.set_ylabel("resident warps per SM")
        right.spines["right"].set_visible(False)


def saw(swept: BatchSweep, path: str | Path, *, title: str, subject: str) -> None:
    """
    Draw a sweep of batch sizes into a file: the share of SM time in use, its drops and the nearest better size.

    Args:
        swept: The distribution of blocks over the SMs by batch size.
        path: The file; its ending .png, .svg or .pdf selects the format.
        title: Title of the figure.
        subject: The launch as text, for the subtitle.
    """
    subtitle, steps = "\n".join(filter(None, (subject, batch_advice(swept)))), swept.steps
    with _figure(path, title, subtitle, "batch size") as axes:
        axes.set_ylabel("SM time in use, percent")
        axes.set_xlim(0, steps[-1].last.batch_size)
        axes.set_ylim(0, 112)
        ends = [grid for step in steps for grid in (step.first, step.last)]
        axes.plot([grid.batch_size for grid in ends], [100 * grid.fill for grid in ends], color=style.BLUE,
                  linewidth=1.8, label="share of SM time in use")  # fmt: skip
        drops = [(s.last.batch_size, s.last.fill, t.first.fill) for s, t in pairwise(steps) if s.cliff]
        _mark_drops(axes, drops)
        if (now := swept.grid) is not None:
            _mark(axes, now.batch_size, now.fill, f"now: {now.batch_size}")
        if (better := swept.better) is not None:
            text = f"nearest better: {better.batch_size}, {format_percent(better.fill)}"
            _mark(axes, better.batch_size, better.fill, text, is_better=True)


@contextlib.contextmanager
def _figure(path: str | Path, title: str, subtitle: str, x_label: str) -> Iterator[Axes]:
    """Yield the axes of a new figure; after the block, add the legend and write the figure to `path`."""
    style.check(path)
    figure, axes = style.sheet(9.0, 4.6)
    style.head(axes, title, subtitle, pad=34, size=12, gap=7)
    axes.set_xlabel(x_label)
    style.rule(axes)
    axes.xaxis.set_major_formatter(lambda value, _: format_count(value))
    yield axes
    style.legend(figure)
    style.save(figure, path)


def _mark_drops(axes: Axes, drops: Sequence[tuple[int, float, float]]) -> None:
    """
    Mark the drops of a curve, and label up to 12 of the largest with their x value.

    Args:
        drops: For each drop, the last x value before it, and the y values before and after it as shares from 0 to 1.
    """
    if drops:
        places, before, _ = zip(*drops, strict=True)
        heights = [100 * share for share in before]
        axes.plot(places, heights, "v", markersize=5, color=style.RED, label="drop: the next value is lower", zorder=3)
    gap = _APART * axes.get_xlim()[1]
    numbered: list[int] = []
    for place, share, _ in sorted(drops, key=lambda drop: drop[2] - drop[1]):
        if len(numbered) < _LABELS and all(abs(place - other) >= gap for other in numbered):
            numbered.append(place)
            axes.annotate(format_count(place), (place, 100 * share), xytext=(0, 6), textcoords="offset points",
                          ha="center", fontsize=8, color=style.RED)  # fmt: skip


def _mark(axes: Axes, x: float, share: float, label: str, *, is_better: bool = False) -> None:
    if is_better:
        axes.plot(x, 100 * share, "o", markersize=9, mfc="none", mec=style.GREEN, mew=2, label=label, zorder=4)
    else:
        axes.plot(x, 100 * share, "*", markersize=15, color=style.ORANGE, mec="white", label=label, zorder=5)
