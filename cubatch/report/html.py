"""
Self-contained HTML: a page, or an output of a notebook.  No script, no external resource, every text escaped.

`page` and `study_page` select the content, `stylesheet` has the style.  A figure is an image in a `data:` URL; without
Matplotlib a line replaces it.
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
    """A figure of a page."""

    title: str  # its content in words, for readers who cannot see it
    url: str  # the image as a `data:` URL; empty if it could not be drawn


@attrs.frozen(kw_only=True)
class Section:
    """A section of a page; empty parts are left out."""

    heading: str  # its heading
    texts: Sequence[str] = ()  # paragraphs
    figure: Figure | None = None  # figure, table: below the paragraphs; None for none
    table: Grid | None = None
    commands: Sequence[str] = ()  # lines for a shell


@attrs.frozen(kw_only=True)
class Article:
    """The content of a page."""

    title: str  # title, subtitle: the heading, and the line beneath it
    subtitle: str
    reasons: Sequence[str]  # the recommendation, and further sentences
    sections: Sequence[Section]  # sections, top to bottom
    facts: Mapping[str, Mapping[str, object]]  # two-column tables by title
    predicted: bool = False  # whether to warn that nothing was measured


def escape(text: str) -> str:
    """Return a text with the markup of HTML and control characters escaped."""
    return html.escape(visible(text))


def document(article: Article) -> str:
    """Return an article as a whole HTML document, with its style sheet."""
    title = escape(article.title)
    sections = "\n".join(f"<h2>{escape(section.heading)}</h2>\n{_content(section)}" for section in article.sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body class="cubatch">
<h1>{title}</h1>
{_lead(article)}
{sections}
{_all_facts(article.facts, "h2")}
</body>
</html>
"""


def output(article: Article) -> str:
    """
    Return an article as HTML for an output cell of a notebook; the user can fold its tables.

    It has no headings, which would enter the notebook's table of contents, and no ids, so that a notebook may hold
    several outputs.
    """
    facts = ", ".join(name for name, rows in article.facts.items() if rows)
    sections = "\n".join(
        _content(section)
        if section.table is None
        else f"<details open><summary>{escape(section.heading)}</summary>\n{_content(section)}\n</details>"
        for section in article.sections
    )
    return _framed(f"""<p class="title">{escape(article.title)}</p>
{_lead(article)}
{sections}
<details><summary>{escape(facts)}</summary>
{_all_facts(article.facts, "p")}
</details>""")


def tables(grids: Iterable[Grid]) -> str:
    """Return tables as HTML for an output cell of a notebook."""
    return _framed("\n".join(f'<p class="title">{escape(grid.title)}</p>\n{_table(grid)}' for grid in grids))


def _framed(content: str) -> str:
    return f'<div class="cubatch"><style>{STYLE}</style>\n{content}\n</div>'


def _lead(article: Article) -> str:
    warning = '<p class="predicted">Predicted, not measured.</p>' if article.predicted else ""
    first, *rest = article.reasons or [""]
    items = "".join(f"<li>{escape(reason)}</li>" for reason in rest)
    return f"""<p class="soft">{escape(article.subtitle)}</p>
{warning}
<div class="answer"><p>{escape(first)}</p>{f"<ul>{items}</ul>" if items else ""}</div>"""


def _content(section: Section) -> str:
    parts = [f"<p>{escape(text)}</p>" for text in section.texts]
    parts += [_figure(section.figure)] if section.figure else []
    parts += [_table(section.table)] if section.table else []
    parts += [f"<pre>{escape(command)}</pre>" for command in section.commands]
    return "\n".join(parts)


def _figure(figure: Figure) -> str:
    if not figure.url:
        return '<p class="soft">Install Matplotlib to see the figure here: pip install matplotlib</p>'
    return f'<img class="figure" src="{figure.url}" alt="{escape(figure.title)}">'


def _table(grid: Grid) -> str:
    shape = grid.shown()
    aligned = ["n" if right else "" for right in shape.right]
    head = "".join(f'<th class="{c}">{escape(name)}</th>' for name, c in zip(shape.columns, aligned, strict=True))
    body = []
    for index, row in enumerate(shape.rows):
        cells = "".join(f'<td class="{c}">{escape(cell)}</td>' for cell, c in zip(row, aligned, strict=True))
        style = "mark" if index in grid.marked else ""
        body.append(f'<tr class="{style}">{cells}</tr>')
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    notes = "".join(map(_note, (*grid.beneath, *grid.notes_on(shape))))
    sticky = " sticky" if shape.columns[:1] == [""] else ""  # marks, and what they are about, stay on a narrow screen
    return f'<div class="wide{sticky}">{table}</div>\n{notes}'


def _note(note: str | Iterable[str]) -> str:
    if isinstance(note, str):
        return f'<p class="soft">{escape(note)}</p>'
    items = "".join(f"<li>{escape(item)}</li>" for item in note)
    return f'<ul class="soft">{items}</ul>'


def _all_facts(facts: Mapping[str, Mapping[str, object]], heading: str) -> str:
    tables = "".join(_facts(name, rows, heading) for name, rows in facts.items() if rows)
    return f'<div class="facts">{tables}</div>'


def _facts(name: str, rows: Mapping[str, object], heading: str) -> str:
    body = "".join(f"<tr><th>{escape(key)}</th><td>{escape(str(value))}</td></tr>" for key, value in rows.items())
    return f"<section><{heading}>{escape(name)}</{heading}><table><tbody>{body}</tbody></table></section>"
