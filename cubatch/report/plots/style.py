"""
How every figure looks, and where it goes: palette, title, axes, file.

Matplotlib is an extra and slow to import, so it is imported when a figure is asked for, and its
global state (back end, pyplot) is not touched.
"""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cubatch.errors import InvalidArgument, MissingDependency
from cubatch.units import format_value, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's palette: distinguishable for color-blind readers and in grey.
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#d55e00", "#009e73", "#b22222", "#7a7a7a"
# For several curves, without its yellow, which is too pale for a line; then again in another dash.
COLORS = (BLUE, ORANGE, GREEN, "#cc79a7", "#56b4e9", "#000000", "#e69f00")
DASHES = ("-", "--", "-.")
_SUBTITLE, _RULE = "#444444", "#e4e4e4"
_LONGEST_LINE = 160  # letters of a title: no figure has room for more
_SUFFIXES = (".png", ".svg", ".pdf")


def check(path: str | Path) -> None:
    """
    Refuse a figure that could not be drawn, before anything is measured for it.

    Args:
        path: Where the figure would go.

    Raises:
        MissingDependency: If Matplotlib is not installed.
        InvalidArgument: If the ending is not one of a figure.
    """
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise InvalidArgument("plot file", str(path), "a path that ends in " + ", ".join(_SUFFIXES))
    try:
        import matplotlib.figure  # noqa: F401 - an extra; found, not used
    except ImportError as error:
        raise MissingDependency("matplotlib", "drawing a figure", "plot") from error


def sheet(width_inches: float, height_inches: float) -> tuple[Figure, Axes]:
    """Make an empty figure with one pair of axes, which have no box around them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def head(axes: Axes, title: str, subtitle: str, *, pad: float, size: float = 13, gap: float = 9) -> None:
    """
    Write a title, and beneath it what was drawn, in smaller print.

    Args:
        axes: Beneath both.
        title, subtitle: Lines of text.
        pad: Points between title and axes, which hold the subtitle.
        size: Of the title's letters.
        gap: Points between subtitle and axes.
    """
    axes.set_title(plain(title), loc="left", fontsize=size, fontweight="bold", pad=pad)
    axes.annotate(plain(subtitle), (0, 1), xycoords="axes fraction", xytext=(0, gap), textcoords="offset points",
                  fontsize=9, color=_SUBTITLE)  # fmt: skip


def plain(text: str) -> str:
    """Write a text from outside as Matplotlib draws it letter by letter: no formulas, and no line that has no end."""
    lines = (line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…" for line in text.split("\n"))
    return "\n".join(visible(line, keep="").replace("$", r"\$") for line in lines)


def rule(axes: Axes, axis: Literal["x", "y"] = "y") -> None:
    """Draw faint lines at the values ticked upwards, or to the right, beneath all else."""
    axes.grid(axis=axis, color=_RULE, linewidth=0.8)
    axes.set_axisbelow(True)


def batch_axis(axes: Axes, low: float, high: float, ticks: Sequence[int]) -> None:
    """Make the x axis one of batch sizes: logarithmic to base 2, with these numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.set_xlabel("batch size")


def value_axis(axes: Axes, objective: str, top: float | None, *, log: bool) -> None:
    """
    Make the y axis one of the objective's values.

    Args:
        axes: Whose.
        objective: It says how values are written.
        top: The end of an axis from 0; None leaves it open.
        log: Whether it is logarithmic instead, ticked at 1, 2 and 5 times powers of ten.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    elif top is not None:
        axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter(lambda value, _: format_value(value, objective))


def legend(
    figure: Figure,
    *,
    loc: Literal["outside lower center", "outside lower left"] = "outside lower center",
    ncols: int = 4,
) -> None:
    """Write what the marks mean beneath the axes."""
    figure.legend(loc=loc, ncols=ncols, fontsize=8.5, frameon=False)


def save(figure: Figure, path: str | Path) -> None:
    """
    Write a figure into a file, whose ending chooses the format.

    Raises:
        InvalidArgument: If it cannot be written.
    """
    try:
        figure.savefig(path, facecolor="white")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise InvalidArgument("plot file", str(path), "a file that can be written", f"{error}.") from error


def is_installed() -> bool:
    """Return whether Matplotlib can be imported."""
    return importlib.util.find_spec("matplotlib") is not None


def data_url(figure: Figure) -> str:
    """Return a figure as an SVG in a `data:` URL, for an <img> of a page: nothing in it can reach the page."""
    import matplotlib as mpl

    written = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "cubatch"}):  # equal figures are equal files
        figure.savefig(written, format="svg", facecolor="white", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode('ascii')}"
