"""
A self-contained HTML page, or an output of a notebook: reasons, a figure, tables.  No script, nothing fetched.

What a result puts on it is decided in `page`; here is how that is written, in `stylesheet` how it looks.

A figure is an image in a `data:` URL; where Matplotlib is not installed, a line says so in its place.  Every text
from outside is escaped on its way in.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

import attrs

from cubatch.report.grid import Grid
from cubatch.report.stylesheet import STYLE
from cubatch.units import visible


@attrs.frozen
class Figure:
    """
    A figure of a page.

    Attributes:
        title: What it shows, for readers who cannot see it.
        url: The image in a `data:` URL; empty where it could not be drawn.
    """

    title: str
    url: str


@attrs.frozen(kw_only=True)
class Parts:
    """
    What a result puts on a page.

    Attributes:
        title: The heading.
        subtitle: The line beneath it.
        predicted: Whether to say that nothing here was measured.
        reasons: Sentences, of which the first is the recommendation.
        figure: The curve.
        table: Its first two columns, marks and sizes, stay in sight where it is narrow.
        facts: Titled two-column tables of what was known and asked.
    """

    title: str
    subtitle: str
    predicted: bool
    reasons: Sequence[str]
    figure: Figure
    table: Grid
    facts: Mapping[str, Mapping[str, object]]


@attrs.frozen(kw_only=True)
class Section:
    """
    A part of an article, under a heading of its own; empty parts are left out.

    Attributes:
        heading: What it is called.
        texts: Paragraphs.
        figure: Beneath them.
        table: Beneath it.
        commands: Lines for a shell.
    """

    heading: str
    texts: Sequence[str] = ()
    figure: Figure | None = None
    table: Grid | None = None
    commands: Sequence[str] = ()


def escape(text: str) -> str:
    """Write a text from outside for a page: no markup, no control characters."""
    return html.escape(visible(text))


def document(parts: Parts) -> str:
    """Write a whole HTML document."""
    body = f"""{_lead(parts.subtitle, parts.reasons, predicted=parts.predicted)}
<h2>The curve</h2>
{_figure(parts.figure)}
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
    parts = "\n".join(_section(section) for section in sections)
    body = f"{_lead(subtitle, [answer, *points], predicted=False)}\n{parts}\n{_all_facts(facts, 'h2')}"
    return _page(title, body)


def _page(title: str, body: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
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
    parts += [_figure(section.figure)] if section.figure else []
    parts += [f'<div class="wide">{_table(section.table)}</div>{_notes(section.table)}'] if section.table else []
    parts += [f"<pre>{escape(command)}</pre>" for command in section.commands]
    return "\n".join(parts)


def output(parts: Parts) -> str:
    """
    Write the same as an output of a notebook: what lies deeper is folded, and nothing is a heading.

    No element has an id, so that a notebook may hold any number of them; headings would be in its table of contents.
    """
    return framed(f"""<p class="title">{escape(parts.title)}</p>
{_lead(parts.subtitle, parts.reasons, predicted=parts.predicted)}
{_figure(parts.figure)}
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


def framed(content: str) -> str:
    """Wrap an output of a notebook with its style, which holds for nothing else."""
    return f'<div class="cubatch"><style>{STYLE}</style>\n{content}\n</div>'


def _lead(subtitle: str, reasons: Sequence[str], *, predicted: bool) -> str:
    warning = '<p class="predicted">Predicted, not measured.</p>' if predicted else ""
    first, *rest = reasons or [""]
    listed = "".join(f"<li>{escape(reason)}</li>" for reason in rest)
    return f"""<p class="soft">{escape(subtitle)}</p>
{warning}
<div class="answer"><p>{escape(first)}</p>{f"<ul>{listed}</ul>" if listed else ""}</div>"""


def _sizes(parts: Parts) -> str:
    return f'<div class="wide sticky">{_table(parts.table)}</div>\n{_notes(parts.table)}'


def _all_facts(facts: Mapping[str, Mapping[str, object]], heading: str) -> str:
    tables = "".join(_facts(name, rows, heading) for name, rows in facts.items() if rows)
    return f'<div class="facts">{tables}</div>'


def _figure(figure: Figure | None) -> str:
    if figure is None:
        return ""
    if not figure.url:
        return '<p class="soft">Install Matplotlib to see the figure here: pip install matplotlib</p>'
    return f'<img class="figure" src="{figure.url}" alt="{escape(figure.title)}">'


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
