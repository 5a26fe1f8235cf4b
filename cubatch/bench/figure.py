"""A figure of bench results: how far each case comes, ours beside the vendor's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cubatch.bench.records import Entry, Result
from cubatch.errors import InvalidArgument
from cubatch.report.plots import style

_INCHES_A_CASE = 0.34


def rates(results: Sequence[Result], path: str | Path, *, title: str) -> None:
    """
    Draw the share of the roofline that each case reaches: ours in blue, the vendor's in grey.

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
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    for side, shift, colour in (("ours", -0.2, style.BLUE), ("vendor", 0.2, style.GREY)):
        shown = [(row, _of(result, side)) for row, result in enumerate(drawn)]
        places = [(row + shift, entry.roofline_fraction or 0.0) for row, entry in shown if entry is not None]
        if places:
            rows, shares = zip(*places, strict=True)
            axes.barh(rows, [100 * share for share in shares], height=0.38, color=colour, label=side)
    axes.set_yticks(range(len(drawn)), [result.case.name for result in drawn], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("percent of the roofline by the data sheet")
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    style.save(figure, path)


def _of(result: Result, side: str) -> Entry | None:
    return result.best if side == "ours" else result.vendor
