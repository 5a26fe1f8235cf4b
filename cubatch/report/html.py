"""
A self-contained HTML page, or an output of a notebook: an answer, a figure, tables.  No script, nothing fetched.

What a result puts on it is decided in `page`; here is how that is written, in `stylesheet` how it looks.

The figure is an SVG written here from a `Curve`, so that a page needs no plotting library and its
colours follow the reader's light or dark setting.  Every text from outside is escaped on its way in.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from cubatch.report.curve import RULED_OUT, Curve, Point
from cubatch.report.grid import Grid
from cubatch.report.stylesheet import STYLE
from cubatch.units import format_value, visible

_NARROW = 600  # a figure under this width is one for a phone
_LETTER = 7.5  # width of a digit in a figure
_GONE = {"out of memory": "×", "not run": "|", RULED_OUT: "·"}  # noqa: RUF001 - the sign, meant
_OTHER = "▾"


@attrs.frozen(kw_only=True)
class Parts:
    """
    What a result puts on a page.

    Attributes:
        title: The heading.
        subtitle: The line beneath it.
        predicted: Whether to say that nothing here was measured.
        answer: The answer in sentences.
        reasons: Further sentences, listed beneath it.
        figures: SVG elements, of which the width shows one; the only text that is not escaped.
        legend: What the marks in the figure mean.
        table: Its first two columns, marks and sizes, stay in sight where it is narrow.
        facts: Titled two-column tables of what was known and asked.
    """

    title: str
    subtitle: str
    predicted: bool
    answer: str
    reasons: Sequence[str]
    figures: str
    legend: Sequence[str]
    table: Grid
    facts: Mapping[str, Mapping[str, object]]


@attrs.frozen(kw_only=True)
class Section:
    """
    A part of an article, under a heading of its own; whatever is empty is not there.

    Attributes:
        heading: What it is called.
        texts: Paragraphs.
        figure: SVG elements, of which the width shows one; the only text that is not escaped.
        legend: What the marks in the figure mean.
        table: Beneath it.
        commands: Lines for a shell.
    """

    heading: str
    texts: Sequence[str] = ()
    figure: str = ""
    legend: Sequence[str] = ()
    table: Grid | None = None
    commands: Sequence[str] = ()


def escape(text: str) -> str:
    """Write a text from outside for a page: no markup, no control characters."""
    return html.escape(visible(text))


def document(parts: Parts) -> str:
    """Write a whole HTML document."""
    body = f"""{_lead(parts.subtitle, parts.answer, parts.reasons, predicted=parts.predicted)}
<h2>The curve</h2>
{_curve(parts.figures, parts.legend)}
<h2>{escape(parts.table.title)}</h2>
{_sizes(parts)}
{_all_facts(parts.facts, "h2")}"""
    return _page(parts.title, body)


def article(
    *,
    title: str,
    subtitle: str,
    answer: str,
    points: Sequence[str],
    sections: Iterable[Section],
    facts: Mapping[str, Mapping[str, object]],
) -> str:
    """
    Write a whole HTML document that leads a reader from a question to its answer and what it rests on.

    Args:
        title, subtitle: The heading, and the line beneath it.
        answer, points: The answer in a sentence, and further ones.
        sections: Top to bottom.
        facts: Titled two-column tables of what was known and asked.
    """
    told = "\n".join(_section(section) for section in sections)
    body = f"{_lead(subtitle, answer, points, predicted=False)}\n{told}\n{_all_facts(facts, 'h2')}"
    return _page(title, body)


def _page(title: str, body: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body class="cubatch">
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.heading)}</h2>", *(f"<p>{escape(text)}</p>" for text in section.texts)]
    parts += [_curve(section.figure, section.legend)] if section.figure else []
    parts += [f'<div class="wide">{_table(section.table)}</div>{_notes(section.table)}'] if section.table else []
    parts += [f"<pre>{escape(command)}</pre>" for command in section.commands]
    return "\n".join(parts)


def output(parts: Parts) -> str:
    """
    Write the same as an output of a notebook: what lies deeper is folded, and nothing is a heading.

    No element has an id, so that a notebook may hold any number of them; headings would be in its table of contents.
    """
    return framed(f"""<p class="title">{escape(parts.title)}</p>
{_lead(parts.subtitle, parts.answer, parts.reasons, predicted=parts.predicted)}
{_curve(parts.figures, parts.legend)}
<details open><summary>{escape(parts.table.title)}</summary>
{_sizes(parts)}
</details>
<details><summary>{escape(", ".join(name for name, rows in parts.facts.items() if rows))}</summary>
{_all_facts(parts.facts, "p")}
</details>""")


def tables(grids: Iterable[Grid]) -> str:
    """Write tables, one below the other, as an output of a notebook."""
    return framed(
        "\n".join(
            f'<p class="title">{escape(grid.title)}</p>\n<div class="wide">{_table(grid)}</div>{_notes(grid)}'
            for grid in grids
        )
    )


def progress(done: float, total: float, text: str) -> str:
    """Write a bar and what is being done as an output of a notebook."""
    return framed(f'<progress value="{done:.3f}" max="{total:.3f}"></progress>{escape(text)}')


def framed(content: str) -> str:
    """Give an output of a notebook the style that it needs, which holds for nothing else."""
    return f'<div class="cubatch"><style>{STYLE}</style>\n{content}\n</div>'


def _lead(subtitle: str, answer: str, reasons: Iterable[str], *, predicted: bool) -> str:
    warning = '<p class="predicted">Predicted, not measured.</p>' if predicted else ""
    listed = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f"""<p class="soft">{escape(subtitle)}</p>
{warning}
<div class="answer"><p>{escape(answer)}</p>{f"<ul>{listed}</ul>" if listed else ""}</div>"""


def _curve(figures: str, legend: Iterable[str]) -> str:
    return f"""{figures}
<p class="legend">{"".join(f"<span>{escape(entry)}</span>" for entry in legend)}</p>"""


def _sizes(parts: Parts) -> str:
    return f'<div class="wide sticky">{_table(parts.table)}</div>\n{_notes(parts.table)}'


def _all_facts(facts: Mapping[str, Mapping[str, object]], heading: str) -> str:
    tables = "".join(_facts(name, rows, heading) for name, rows in facts.items() if rows)
    return f'<div class="facts">{tables}</div>'


def figures(shown: Curve, objective: str) -> str:
    """
    Draw a curve twice, for a desk and for a phone, of which the page shows the one that is legible there.

    Args:
        shown: What to draw.
        objective: The result's objective, which says how values are written.

    Returns:
        Two SVG elements, whose colours come from the page's style; each mark carries its full text as a tooltip.
    """
    desk = _Frame(style="wide-figure", width=880, height=420, left=84, right=24, top=40, bottom=52)
    phone = _Frame(style="narrow", width=400, height=340, left=66, right=14, top=62, bottom=52)
    return f"{_svg(shown, objective, desk)}\n{_svg(shown, objective, phone)}"


@attrs.frozen(kw_only=True)
class _Frame:
    """The extents of a figure, and of its margins, in units of its own."""

    style: str
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    @property
    def end(self) -> int:
        return self.width - self.right

    @property
    def foot(self) -> int:
        return self.height - self.bottom

    @property
    def is_narrow(self) -> bool:
        return self.width < _NARROW


def _svg(shown: Curve, objective: str, frame: _Frame) -> str:
    x_of, y_of, y_ticks = _scales(shown, frame)
    left, end, foot = frame.left, frame.end, frame.foot
    box = f'viewBox="0 0 {frame.width} {frame.height}"'
    parts = [
        f'<svg class="{frame.style}" {box} role="img" aria-label="{escape(shown.title)}">',
        f'<text class="soft" x="8" y="18">{escape(shown.y_label)}</text>',
        f'<text class="soft" x="{(left + end) / 2}" y="{frame.height - 8}" text-anchor="middle">batch size</text>',
    ]
    if shown.band is not None:
        top, bottom = y_of(shown.band[1]), y_of(shown.band[0])
        parts.append(
            f'<rect class="band" x="{left}" y="{top:.1f}" width="{end - left}" '
            f'height="{max(bottom - top, 1):.1f}"><title>{escape(shown.band_label)}</title></rect>'
        )
    for value in y_ticks:
        parts.append(f'<line class="grid" x1="{left}" x2="{end}" y1="{y_of(value):.1f}" y2="{y_of(value):.1f}"/>')
        parts.append(_text(left - 8, y_of(value) + 4, format_value(value, objective), anchor="end"))
    parts.append(f'<line class="axis" x1="{left}" x2="{end}" y1="{foot}" y2="{foot}"/>')
    written = -math.inf
    for size in shown.ticks:
        x, half = x_of(size), _LETTER * len(str(size)) / 2 + 2
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{foot}" y2="{foot + 5}"/>')
        if x - half >= written:
            parts.append(_text(x, foot + 19, str(size)))
            written = x + half
    if shown.limit is not None:
        x = x_of(shown.limit[0])
        parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.top - 14}" y2="{foot}"/>')
        anchor = "end" if x > frame.width / 2 else "start"
        parts.append(_text(x, frame.top - 18, shown.limit[1], anchor=anchor, style="limit-label"))
    path = " ".join(f"{x_of(p.batch_size):.1f},{y_of(p.value):.1f}" for p in shown.points)
    parts.append(f'<polyline class="line{" dotted" if shown.predicted else ""}" points="{path}"/>')
    parts += [_point(point, x_of, y_of) for point in shown.points]
    parts += [_gone(x_of(size), foot, size, words) for size, words in shown.absent]
    for point, reason in () if frame.is_narrow else shown.labels:  # on a phone they would lie on each other
        x, y = x_of(point.batch_size), y_of(point.low)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 6:.1f}" y2="{y + 26:.1f}"/>')
        parts.append(_text(x, y + 40, reason, style="soft"))
    parts += _leaders(shown, x_of, y_of, frame)
    return "\n".join([*parts, "</svg>"])


def _scales(shown: Curve, frame: _Frame) -> tuple[Callable[[float], float], Callable[[float], float], list[float]]:
    """Give the two scales and the values ticked upwards."""
    values = [value for point in shown.points for value in (point.low, point.high) if value > 0] or [1.0]
    width, height = frame.end - frame.left, frame.foot - frame.top
    span = math.log(shown.x_high / shown.x_low)

    def x_of(size: float) -> float:
        return frame.left + width * math.log(size / shown.x_low) / span

    if shown.log_y:
        low, high = min(values) / 1.6, max(values) * 1.6
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
        ticked = [value for value in marks if low <= value <= high]
        return x_of, lambda value: frame.top + height * math.log(high / max(value, low)) / math.log(high / low), ticked
    high = 1.16 * max(values)
    step = nice_step(high / 6)
    ticked = [step * k for k in range(int(high / step) + 1)]
    return x_of, lambda value: frame.top + height * (1 - value / high), ticked


def nice_step(step: float) -> float:
    """Round a step up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step)


def _text(x: float, y: float, text: str, *, anchor: str = "middle", style: str = "") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _point(point: Point, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    x, y = x_of(point.batch_size), y_of(point.value)
    bar = f'<line class="bar" x1="{x:.1f}" x2="{x:.1f}" y1="{y_of(point.low):.1f}" y2="{y_of(point.high):.1f}"/>'
    ring = f'<circle class="tie" cx="{x:.1f}" cy="{y:.1f}" r="7"/>' if point.tied else ""
    dot = f'<circle class="{"dot" if point.kept else "out"}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    return f"<g>{bar}{ring}{dot}<title>{escape(point.text)}</title></g>"


def _gone(x: float, bottom: float, size: int, words: str) -> str:
    title = f"<title>{escape(f'batch {size}: {words}')}</title>"
    return (
        f'<text class="gone" x="{x:.1f}" y="{bottom - 5}" text-anchor="middle">{_GONE.get(words, _OTHER)}{title}</text>'
    )


def _leaders(shown: Curve, x_of: Callable[[float], float], y_of: Callable[[float], float], frame: _Frame) -> list[str]:
    parts = []
    word = "predicted " if shown.predicted else ""
    if shown.fastest is not None and shown.fastest is not shown.answer:
        x, y = x_of(shown.fastest.batch_size), y_of(shown.fastest.value)
        title = f"<title>{escape(f'{word}fastest: {shown.fastest.text}')}</title>"
        parts.append(f'<path class="dot" d="M{x:.1f} {y - 7:.1f} l6.5 11.5 h-13 z">{title}</path>')
    if shown.answer is not None and shown.label_above is not None:
        x, y = x_of(shown.answer.batch_size), y_of(shown.answer.value)
        turns = (math.pi * k / 5 for k in range(10))
        radii = (10.5 if k % 2 == 0 else 4.2 for k in range(10))
        star = " ".join(
            f"{x + r * math.sin(a):.1f},{y - r * math.cos(a):.1f}" for a, r in zip(turns, radii, strict=True)
        )
        title = f"<title>{escape(f'{word}answer: {shown.answer.text}')}</title>"
        parts.append(f'<polygon class="star" points="{star}">{title}</polygon>')
        at, edge = (x - frame.left) / (frame.end - frame.left), 0.4 if frame.is_narrow else 0.2
        anchor = "start" if at < edge else "end" if at > 1 - edge else "middle"  # turn inwards at the ends
        above = y_of(shown.label_above) - 14
        parts.append(_text(x, above, f"{word}{shown.answer.label}", anchor=anchor, style="lead"))
    return parts


def _table(grid: Grid) -> str:
    shape = grid.filled()
    aligned = ["n" if right else "" for right in shape.right]
    head = "".join(f'<th class="{c}">{escape(name)}</th>' for name, c in zip(shape.columns, aligned, strict=True))
    body = []
    for index, row in enumerate(shape.rows):
        cells = "".join(f'<td class="{c}">{escape(cell)}</td>' for cell, c in zip(row, aligned, strict=True))
        style = "mark" if index in grid.marked else ""
        body.append(f'<tr class="{style}">{cells}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _notes(grid: Grid) -> str:
    return "".join(_note(note) for note in (*grid.beneath, *grid.notes))


def _note(note: str | Iterable[str]) -> str:
    """Write a text as a paragraph, several as a list."""
    if isinstance(note, str):
        return f'<p class="soft">{escape(note)}</p>'
    items = "".join(f"<li>{escape(item)}</li>" for item in note)
    return f'<ul class="soft">{items}</ul>'


def _facts(name: str, rows: Mapping[str, object], heading: str) -> str:
    body = "".join(f"<tr><th>{escape(key)}</th><td>{escape(str(value))}</td></tr>" for key, value in rows.items())
    return f"<section><{heading}>{escape(name)}</{heading}><table><tbody>{body}</tbody></table></section>"


def legend_of(shown: Curve) -> Sequence[str]:
    """Say what the marks of the figure mean; only those that occur."""
    word = "predicted " if shown.predicted else ""
    entries = [f"● {'predicted' if shown.predicted else 'expected, 90 % interval'}"]
    if shown.answer is not None:
        entries.append(f"★ {word}answer: {shown.answer.batch_size}")
    if shown.fastest is not None and shown.fastest is not shown.answer:
        entries.append(f"▲ {word}fastest: {shown.fastest.batch_size}")
    if any(point.tied for point in shown.points):
        entries.append("◯ tied with the fastest")
    if any(not point.kept for point in shown.points):
        entries.append("○ dropped early or over a limit")
    if shown.band is not None:
        entries.append(f"▬ {shown.band_label}")
    absent = {words for _, words in shown.absent}
    return [*entries, *(f"{_GONE.get(words, _OTHER)} {words}" for words in sorted(absent))]
