"""A figure of bench results: how near each case comes to the roofline, cubatch and each rival."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from cubatch.bench.records import OURS, Result, names_of
from cubatch.errors import InvalidArgument
from cubatch.report.plots import style

_COLOURS = (style.BLUE, style.GREY, style.ORANGE, style.GREEN, "#cc79a7")
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
    style.check(path)
    drawn = [result for result in results if result.best is not None and result.best.roofline_fraction is not None]
    if not drawn:
        raise InvalidArgument("plot file", str(path), "asked for where times were taken on a device of known peaks")
    figure, axes = style.sheet(9.0, 1.6 + _INCHES_A_CASE * len(drawn))
    axes.set_title(style.plain(title), loc="left", fontsize=12, fontweight="bold")
    bars = shares(drawn)
    height = _HEIGHT / max(2, len(bars))
    for index, ((name, found), colour) in enumerate(zip(bars.items(), itertools.cycle(_COLOURS), strict=False)):
        shift = (index - (max(2, len(bars)) - 1) / 2) * height
        rows, percents = [row + shift for row in found], [100 * share for share in found.values()]
        axes.barh(rows, percents, height=(1 - _GAP) * height, color=colour, label=name)
    axes.set_yticks(range(len(drawn)), [style.plain(result.case.name) for result in drawn], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("percent of the roofline by the data sheet")
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    style.save(figure, path)


def shares(results: Sequence[Result]) -> dict[str, dict[int, float]]:
    """Return the share of the roofline that ours and each rival reach, by name and by the number of the case."""
    found: dict[str, dict[int, float]] = {}
    for name in (OURS, *names_of(results)):
        timed = {row: result.times[name] for row, result in enumerate(results) if name in result.times}
        reached = {row: entry.roofline_fraction or 0.0 for row, entry in timed.items()}
        if reached:
            found[name] = reached
    return found
