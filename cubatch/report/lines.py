"""
Values by batch size, as lines with intervals, and beneath them which sizes are special: a figure, and its SVG.

The PNG of `plots.study` draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

import attrs

from cubatch.report.curve import ticks
from cubatch.report.html import nice_step

_LETTER = 7.0  # width of one
_ROW = 17  # height of a row of marks
_TICKS = 6
_STYLES = ("", "second", "third")


@attrs.frozen(kw_only=True)
class Dot:
    """
    A value.

    Attributes:
        batch_size: Samples.
        value: What is drawn upwards.
        low, high: Ends of its interval; equal to the value where none is known.
        text: All about it in one line.
    """

    batch_size: int
    value: float
    low: float
    high: float
    text: str


@attrs.frozen(kw_only=True)
class Series:
    """
    Values that a line joins.

    Attributes:
        label: What they are.
        dots: Ascending.
        is_computed: Whether nothing was measured: a dotted line without dots.
    """

    label: str
    dots: Sequence[Dot]
    is_computed: bool = False


@attrs.frozen(kw_only=True)
class Lines:
    """
    A figure of values by batch size.

    Attributes:
        title: What it shows.
        y_label: The quantity and its unit.
        series: At most three.
        marks: Rows beneath the axis: what is special, and the sizes that are.
        log_x, log_y: Whether an axis is logarithmic; upwards it then begins near the lowest value, else at 0.
    """

    title: str
    y_label: str
    series: Sequence[Series]
    marks: Sequence[tuple[str, Sequence[int]]] = ()
    log_x: bool = False
    log_y: bool = False

    @property
    def sizes(self) -> list[int]:
        """All batch sizes, ascending."""
        return sorted({dot.batch_size for one in self.series for dot in one.dots})

    @property
    def x_ends(self) -> tuple[float, float]:
        """Where the axis of batch sizes begins and ends."""
        low, high = self.sizes[0], self.sizes[-1]
        if self.log_x:
            pad = (high / low) ** 0.05 if high > low else 1.5
            return low / pad, high * pad
        pad = max(0.04 * (high - low), 0.6)
        return low - pad, high + pad

    @property
    def x_ticks(self) -> tuple[int, ...]:
        """
        Batch sizes to write on that axis.

        Example:
            >>> dots = [Dot(batch_size=n, value=1.0, low=1.0, high=1.0, text="") for n in (20, 36)]
            >>> shown = Lines(title="", y_label="", series=[Series(label="", dots=dots)])
            >>> shown.x_ticks, attrs.evolve(shown, log_x=True).x_ticks
            ((20, 24, 28, 32, 36), (20, 36))
        """
        low, high = self.x_ends
        if self.log_x:
            return ticks(self.sizes, low, high)
        step = next(step for k in range(32) for step in (2**k,) if (high - low) / step <= _TICKS)
        return tuple(range(math.ceil(low / step) * step, math.floor(high) + 1, step))

    @property
    def y_ends(self) -> tuple[float, float]:
        """Where the axis upwards begins and ends."""
        values = [value for one in self.series for dot in one.dots for value in (dot.low, dot.high)]
        if self.log_y:
            positive = [value for value in values if value > 0] or [1.0]
            pad = max((max(positive) / min(positive)) ** 0.1, 1.01)
            return min(positive) / pad, max(positive) * pad
        return 0.0, 1.1 * max(values, default=1.0) or 1.0

    @property
    def y_ticks(self) -> list[float]:
        """Values to write on it."""
        low, high = self.y_ends
        if self.log_y:
            decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            steps = (1, 2, 5) if high / low < 1000 else (1,)  # noqa: PLR2004 - three decades
            found = [step * 10.0**d for d in decades for step in steps if low <= step * 10.0**d <= high]
            if len(found) > 1:  # fewer lie between values that are close
                return found
        step = nice_step((high - low) / _TICKS)
        return [step * k for k in range(math.ceil(low / step), int(high / step) + 1)]

    @property
    def legend(self) -> list[str]:
        """What the marks in the figure mean."""
        return [
            f"{'┄' if one.is_computed else '●'} {_COLOURS[place]}: {one.label}" for place, one in enumerate(self.series)
        ]


_COLOURS = ("blue", "orange", "green")


def figures(shown: Lines) -> str:
    """Draw it twice, for a desk and for a phone, of which the page shows the one that is legible there."""
    return f"{_svg(shown, 'wide-figure', 880, 360)}\n{_svg(shown, 'narrow', 400, 300)}"


def _svg(shown: Lines, style: str, width: int, height: int) -> str:
    names = [label for label, _ in shown.marks]
    written = [f"{value:g}" for value in shown.y_ticks]
    left = 14 + _LETTER * max(len(text) for text in [*names, *written, "batch size"])
    right, top = width - 16, 34
    foot = height - 48
    x_of, y_of = (
        _scale(shown.x_ends, (left, right), log=shown.log_x),
        _scale(shown.y_ends, (foot, top), log=shown.log_y),
    )
    box = f'viewBox="0 0 {width} {height + _ROW * len(names)}"'
    parts = [
        f'<svg class="{style}" {box} role="img" aria-label="{escape(shown.title)}">',
        f'<text class="soft" x="8" y="18">{escape(shown.y_label)}</text>',
    ]
    for value, text in zip(shown.y_ticks, written, strict=True):
        y = y_of(value)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - 8, y + 4, text))
    parts.append(f'<line class="axis" x1="{left:.1f}" x2="{right}" y1="{foot}" y2="{foot}"/>')
    parts.append(_text(left - 8, foot + 19, "batch size", style="soft"))
    end = -math.inf
    for size in shown.x_ticks:
        x, half = x_of(size), _LETTER * len(str(size)) / 2 + 6
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{foot}" y2="{foot + 5}"/>')
        if x - half >= end:
            parts.append(_text(x, foot + 19, str(size), anchor="middle"))
            end = x + half
    for place, one in enumerate(shown.series):
        parts += _drawn(one, _STYLES[place], x_of, y_of)
    for place, (label, sizes) in enumerate(shown.marks):
        y = foot + 26 + _ROW * (place + 0.5)
        parts.append(_text(left - 8, y + 4, label, style="soft"))
        for size in sizes:
            title = f"<title>{escape(f'batch {size}: {label}')}</title>"
            parts.append(
                f'<rect class="dot" x="{x_of(size) - 3:.1f}" y="{y - 4:.1f}" width="6" height="8">{title}</rect>'
            )
    return "\n".join([*parts, "</svg>"])


def _drawn(one: Series, style: str, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> list[str]:
    path = " ".join(f"{x_of(dot.batch_size):.1f},{y_of(dot.value):.1f}" for dot in one.dots)
    parts = [f'<polyline class="line {style}{" dotted" if one.is_computed else ""}" points="{path}"/>']
    for dot in () if one.is_computed else one.dots:
        x = f"{x_of(dot.batch_size):.1f}"
        bar = f'<line class="bar {style}" x1="{x}" x2="{x}" y1="{y_of(dot.low):.1f}" y2="{y_of(dot.high):.1f}"/>'
        parts.append(
            f'<g>{bar}<circle class="dot {style}" cx="{x}" cy="{y_of(dot.value):.1f}" r="4"/>'
            f"<title>{escape(dot.text)}</title></g>"
        )
    return parts


def _scale(ends: tuple[float, float], place: tuple[float, float], *, log: bool) -> Callable[[float], float]:
    """Give where a value lies between two places."""
    low, high = map(math.log, ends) if log else ends

    def at(value: float) -> float:
        found = math.log(max(value, ends[0])) if log else value
        return place[0] + (place[1] - place[0]) * (found - low) / (high - low)

    return at


def _text(x: float, y: float, text: str, *, anchor: str = "end", style: str = "") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
