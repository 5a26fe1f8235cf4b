"""A figure of bench results: the share of the roofline that each case reaches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from cubatch.bench.bench_results import Result, names_of
from cubatch.bench.contest import OURS
from cubatch.errors import InvalidArgument
from cubatch.report.plots import style

_COLOURS = (style.BLUE, style.GREY, style.ORANGE, style.GREEN, "#cc79a7")
_INCHES_PER_CASE = 0.34
_HEIGHT, _GAP = 0.8, 0.05  # of the bars of a case; between two bars, as a share of one


def rates(results: Sequence[Result], path: str | Path, *, title: str) -> None:
    """
    Draw the share of the roofline that each case reaches: cubatch in blue, the vendor in grey, then other rivals.

    Args:
        results: Those with times are drawn.
        path: Path of the figure: .png, .svg or .pdf.
        title: Title above it.
    """
    style.check(path)
    drawn = [result for result in results if result.best is not None and result.best.roofline_fraction is not None]
    if not drawn:
        raise InvalidArgument(
            "plot file", str(path), "left out: no case has both a time and a known peak rate of the device"
        )
    figure, axes = style.sheet(9.0, 1.6 + _INCHES_PER_CASE * len(drawn))
    axes.set_title(style.plain(title), loc="left", fontsize=12, fontweight="bold")
    bars = shares(drawn)
    height = _HEIGHT / max(2, len(bars))
    for index, ((name, reached), colour) in enumerate(zip(bars.items(), itertools.cycle(_COLOURS), strict=False)):
        shift = (index - (max(2, len(bars)) - 1) / 2) * height
        rows, percents = [row + shift for row in reached], [100 * share for share in reached.values()]
        axes.barh(rows, percents, height=(1 - _GAP) * height, color=colour, label=name)
    axes.set_yticks(range(len(drawn)), [style.plain(result.case.name) for result in drawn], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("percent of the roofline by the data sheet")
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    style.save(figure, path)


def shares(results: Sequence[Result]) -> dict[str, dict[int, float]]:
    """Return the shares of the roofline by the name of the side and the number of the case."""
    by_side: dict[str, dict[int, float]] = {}
    for name in (OURS, *names_of(results)):
        timed = {row: result.times[name] for row, result in enumerate(results) if name in result.times}
        if timed:
            by_side[name] = {row: entry.roofline_fraction or 0.0 for row, entry in timed.items()}
    return by_side
