"""
The style of all figures: palette, title, axes and files.

Matplotlib is optional and slow to import, so functions import it.  They do not change its global state.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import math
import os
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
_LONGEST_LINE = 160  # characters of a title; longer ones leave the figure
_MAX_TICKS = 12
_SUFFIXES = (".png", ".svg", ".pdf")


def check(path: str | Path) -> None:
    """
    Check that a figure can be written to a path.

    Raises:
        InvalidArgument: Unless the path ends in .png, .svg or .pdf, or if Matplotlib refuses the variable MPLBACKEND.
        MissingDependency: Without Matplotlib.
    """
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise InvalidArgument("plot file", str(path), "a path that ends in " + ", ".join(_SUFFIXES))
    try:
        import matplotlib.figure  # noqa: F401 - an optional package
    except ImportError as error:
        raise MissingDependency("matplotlib", "drawing a figure", "plot") from error
    except ValueError as error:
        backend, remedy = os.environ.get("MPLBACKEND"), "Unset it: figures are written to files."
        raise InvalidArgument("MPLBACKEND", backend, "a backend that Matplotlib has", remedy) from error


def sheet(width_inches: float, height_inches: float) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes, without a top and a right border."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def head(axes: Axes, title: str, subtitle: str, *, pad: float, size: float = 13, gap: float = 9) -> None:
    """Write title and subtitle `pad` and `gap` points above the axes and each other."""
    axes.set_title(plain(title), loc="left", fontsize=size, fontweight="bold", pad=pad)
    axes.annotate(plain(subtitle), (0, 1), xycoords="axes fraction", xytext=(0, gap), textcoords="offset points",
                  fontsize=9, color=_SUBTITLE)  # fmt: skip


def plain(text: str) -> str:
    """Return a text that Matplotlib draws literally: `$` and control characters escaped, long lines cut at 160."""
    lines = (line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…" for line in text.split("\n"))
    return "\n".join(visible(line, keep="").replace("$", r"\$") for line in lines)


def rule(axes: Axes, axis: Literal["x", "y"] = "y") -> None:
    """Draw faint grid lines at the ticks of the x or y axis, behind the curves."""
    axes.grid(axis=axis, color=_RULE, linewidth=0.8)
    axes.set_axisbelow(True)


def ticks(sizes: Sequence[int], x_low: float, x_high: float) -> tuple[int, ...]:
    """
    Return the batch sizes at the ticks of a log2 axis from `x_low` to `x_high`: powers of two, on a short axis `sizes`.

    Example:
        >>> ticks([1, 64], 0.7, 90), ticks([96, 100, 104, 112], 90, 120)
        ((1, 2, 4, 8, 16, 32, 64), (96, 100, 104, 112))
    """
    powers = [2**k for k in range(max(0, math.ceil(math.log2(x_low))), math.floor(math.log2(x_high)) + 1)]
    if len(powers) >= 4:  # noqa: PLR2004 - fewer ticks do not show a logarithmic axis
        step = math.ceil(len(powers) / _MAX_TICKS)
        return tuple(powers[::step])
    gap = math.log2(x_high / x_low) / _MAX_TICKS
    chosen: list[int] = []
    for size in sorted(set(sizes)):
        if not chosen or math.log2(size / chosen[-1]) >= gap:
            chosen.append(size)
    return tuple(chosen)


def batch_axis(axes: Axes, sizes: Sequence[int], low: float, high: float) -> None:
    """Make the x axis logarithmic to base 2 from `low` to `high`; `ticks` chooses its ticks from the batch sizes."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    places = ticks(sizes, low, high)
    axes.set_xticks(places, [str(size) for size in places])
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.set_xlabel("batch size")


def value_axis(axes: Axes, objective: str, top: float | None, *, log: bool) -> None:
    """
    Scale the y axis and format its ticks.

    Args:
        objective: "throughput", "latency" or "energy", which determines the unit of the ticks.
        top: Upper end of an axis that begins at 0; None: chosen by Matplotlib.
        log: Whether the axis is logarithmic, with ticks at 1, 2 and 5 times powers of ten; `top` is then not used.
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
    """Draw the legend of a figure below its axes, in `ncols` columns."""
    figure.legend(loc=loc, ncols=ncols, fontsize=8.5, frameon=False)


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure into a file, whose ending selects the format; raise InvalidArgument if it cannot be written."""
    try:
        figure.savefig(path, facecolor="white")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise InvalidArgument("plot file", str(path), "a file that can be written", f"{error}.") from error


def is_installed() -> bool:
    """Return whether Matplotlib can be imported."""
    return importlib.util.find_spec("matplotlib") is not None


def data_url(figure: Figure) -> str:
    """Return a figure as an SVG in a `data:` URL, for an <img> of a page."""
    import matplotlib as mpl

    written = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "cubatch"}):  # equal figures are equal files
        figure.savefig(written, format="svg", facecolor="white", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode('ascii')}"
