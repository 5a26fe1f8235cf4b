"""
Ratios with their intervals, one below the other: what such a figure shows, and its SVG for a page.

The PNG of `plots.study` draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from cubatch.report.html import escape, nice_step

_ROW, _LETTER = 26, 7.0  # heights of a row, width of a letter
_NEAR = 2.0  # axes that span less than this factor are ticked in percent
_TICKS = 5
_FEW = 100.0  # and those that span more at powers of ten only


@attrs.frozen(kw_only=True)
class Row:
    """
    One ratio.

    Attributes:
        label: At its left.
        value: The ratio; 1 is "the same".
        low, high: Ends of its interval.
        stands_out: Whether it is drawn in the colour of what matters.
        text: All about it in one line.
    """

    label: str
    value: float
    low: float
    high: float
    stands_out: bool
    text: str


@attrs.frozen(kw_only=True)
class Intervals:
    """
    A figure of ratios.

    Attributes:
        title: What it shows.
        axis: What is drawn to the right.
        rows: Top to bottom.
        band: The ratios that count as the same.
        legend: What the marks mean.
    """

    title: str
    axis: str
    rows: Sequence[Row]
    band: tuple[float, float]
    legend: Sequence[str]

    @property
    def ends(self) -> tuple[float, float]:
        """Where the axis begins and ends."""
        values = [*self.band, *(value for row in self.rows for value in (row.low, row.high)), 1.0]
        pad = (max(values) / min(values)) ** 0.06
        return min(values) / pad, max(values) * pad

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """
        Ratios to write on the axis, with their text: in percent near 1, else as factors.

        Example:
            >>> rows = [Row(label="a", value=1.0, low=0.97, high=1.02, stands_out=False, text="")]
            >>> near = Intervals(title="", axis="", rows=rows, band=(0.99, 1.01), legend=())
            >>> [text for _, text in near.ticks]
            ['−2 %', '0 %', '+2 %']
            >>> rows = [Row(label="a", value=0.1, low=0.1, high=0.1, stands_out=False, text="")]
            >>> [text for _, text in attrs.evolve(near, rows=rows).ticks]
            ['0.1 x', '0.2 x', '0.5 x', '1 x']
        """  # noqa: RUF002 - a minus sign
        low, high = self.ends
        if high / low < _NEAR:
            step = nice_step((high - low) / _TICKS)
            marks = range(math.ceil((low - 1) / step), math.floor((high - 1) / step) + 1)
            return [(1 + k * step, f"{100 * k * step:+g} %".replace("-", "−") if k else "0 %") for k in marks]  # noqa: RUF001
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if high / low <= _FEW else (1,)
        return [
            (step * 10.0**d, f"{step * 10.0**d:g} x")
            for d in decades
            for step in steps
            if low <= step * 10.0**d <= high
        ]


def figures(shown: Intervals) -> str:
    """Draw it twice, for a desk and for a phone, of which the page shows the one that is legible there."""
    return f"{_svg(shown, 'wide-figure', 880)}\n{_svg(shown, 'narrow', 400)}"


def _svg(shown: Intervals, style: str, width: int) -> str:
    left = 16 + _LETTER * max(len(row.label) for row in shown.rows)
    right, top = width - 24, 12
    foot = top + _ROW * len(shown.rows)
    low, high = shown.ends

    def x_of(value: float) -> float:
        return left + (right - left) * math.log(value / low) / math.log(high / low)

    box = f'viewBox="0 0 {width} {foot + 46}"'
    parts = [f'<svg class="{style}" {box} role="img" aria-label="{escape(shown.title)}">']
    begin, end = x_of(shown.band[0]), x_of(shown.band[1])
    parts.append(
        f'<rect class="band" x="{begin:.1f}" y="{top}" width="{max(end - begin, 1):.1f}" height="{foot - top}"/>'
    )
    written = -math.inf
    for value, text in shown.ticks:
        x, half = x_of(value), _LETTER * len(text) / 2 + 3
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{foot}"/>')
        if x - half >= written:
            parts.append(f'<text class="soft" x="{x:.1f}" y="{foot + 17}" text-anchor="middle">{escape(text)}</text>')
            written = x + half
    parts.append(f'<line class="axis" x1="{x_of(1):.1f}" x2="{x_of(1):.1f}" y1="{top}" y2="{foot}"/>')
    for place, row in enumerate(shown.rows):
        y, mark = top + _ROW * (place + 0.5), "star" if row.stands_out else "dot"
        bar = f'<line class="bar" x1="{x_of(row.low):.1f}" x2="{x_of(row.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        dot = f'<circle class="{mark}" cx="{x_of(row.value):.1f}" cy="{y:.1f}" r="5"/>'
        parts.append(f'<text x="{left - 10:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(row.label)}</text>')
        parts.append(f"<g>{bar}{dot}<title>{escape(row.text)}</title></g>")
    middle = f'x="{width / 2:.1f}" y="{foot + 38}" text-anchor="middle"'
    parts.append(f'<text class="soft" {middle}>{escape(shown.axis)}</text>')
    return "\n".join([*parts, "</svg>"])
