"""A figure of bench results: how far each case comes, ours beside each rival."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from cubatch.bench.records import OURS, Result, names_of
from cubatch.errors import InvalidArgument
from cubatch.report import plot

_COLOURS = ("#0072b2", "#7a7a7a", "#e69f00", "#009e73", "#cc79a7")
_INCHES_A_CASE = 0.34
_HEIGHT, _GAP = 0.8, 0.05  # of a case's bars; between two of them, as a share of one


def rates(results: Sequence[Result], path: str | Path, *, title: str) -> None:
    """
    Draw the share of the roofline that each case reaches: ours in blue, the vendor in grey, others behind.

    Args:
        results: Those with times are drawn.
        path: Where the figure goes: .png, .svg or .pdf.
        title: Above it.

    Raises:
        MissingDependency: If Matplotlib is not installed.
        InvalidArgument: If there is nothing to draw, the ending is none of the three, or the file cannot be written.
    """
    plot.check(path)
    drawn = [result for result in results if result.best is not None and result.best.roofline_fraction is not None]
    if not drawn:
        raise InvalidArgument("plot file", str(path), "asked for where times were taken on a device of known peaks")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 1.6 + _INCHES_A_CASE * len(drawn)), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    bars = shares(drawn)
    height = _HEIGHT / max(2, len(bars))
    for index, ((name, found), colour) in enumerate(zip(bars.items(), itertools.cycle(_COLOURS), strict=False)):
        shift = (index - (max(2, len(bars)) - 1) / 2) * height
        rows, percents = [row + shift for row in found], [100 * share for share in found.values()]
        axes.barh(rows, percents, height=(1 - _GAP) * height, color=colour, label=name)
    axes.set_yticks(range(len(drawn)), [result.case.name for result in drawn], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("percent of the roofline by the data sheet")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    try:
        figure.savefig(path, facecolor="white")
    except OSError as error:
        raise InvalidArgument("plot file", str(path), "a file that can be written", str(error)) from error


def shares(results: Sequence[Result]) -> dict[str, dict[int, float]]:
    """Give the share of the roofline that ours and each rival reach, by name and by the number of the case."""
    found: dict[str, dict[int, float]] = {}
    for name in (OURS, *names_of(results)):
        timed = {row: result.times[name] for row, result in enumerate(results) if name in result.times}
        reached = {row: entry.roofline_fraction or 0.0 for row, entry in timed.items()}
        if reached:
            found[name] = reached
    return found
