"""A figure of bench results: the share of the roofline that each case reaches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cubatch.bench.bench_results import Result
from cubatch.bench.contest import OURS
from cubatch.bench.rivals import VENDOR
from cubatch.errors import InvalidArgument
from cubatch.report.plots import style

_SIDES = ((OURS, style.BLUE, -0.2), (VENDOR, style.GREY, 0.2))  # name, color, shift of the bar within a case
_INCHES_PER_CASE, _HEIGHT = 0.34, 0.38  # of the row of a case, and of a bar as a share of it


def rates(results: Sequence[Result], path: str | Path, *, title: str) -> None:
    """
    Draw the share of the roofline that each case reaches: cubatch in blue, the vendor in grey.

    Raises:
        InvalidArgument: If no result has a share of the roofline, or the file has another ending or cannot be written.
    """
    style.check(path)
    drawn = [result for result in results if result.best is not None and result.best.roofline_fraction is not None]
    if not drawn:
        raise InvalidArgument(
            "plot file", str(path), "left out: no case has both a time and a known peak rate of the device"
        )
    figure, axes = style.sheet(9.0, 1.6 + _INCHES_PER_CASE * len(drawn))
    axes.set_title(style.plain(title), loc="left", fontsize=12, fontweight="bold")
    for name, color, shift in _SIDES:
        timed = [(row + shift, result.times[name]) for row, result in enumerate(drawn) if name in result.times]
        if timed:
            percents = [100 * (entry.roofline_fraction or 0.0) for _, entry in timed]
            axes.barh([row for row, _ in timed], percents, height=_HEIGHT, color=color, label=name)
    axes.set_yticks(range(len(drawn)), [style.plain(result.case.name) for result in drawn], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("percent of the roofline by the data sheet")
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    style.save(figure, path)
