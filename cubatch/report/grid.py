"""
Tables of anything as text: one shape, the grid, for every command.

A grid is a mapping `{"title": ..., "columns": [...], "rows": [[...]], "notes": [...], "marked": [...]}`,
with cells of text, numbers or None.  None is what is not known and prints as a dash; a column in
which nothing is known is left out.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text


WIDTH = 110
_UNKNOWN = "–"  # noqa: RUF001 - a dash for a cell with nothing in it
_NUMBER = re.compile(r"[-+±]?\s*\d")
_UNBROKEN = re.compile(r"(?<=\d) (?=\d{3}(?!\d))|(?<=±) (?=\d)|(?<=\d) (?=%)")
_NO_BREAK = "\N{NO-BREAK SPACE}"
_MIN_LAST = 16
_STYLES = {"title": "bold", "head": "dim", "row": "", "marked": "bold green", "answer": "bold", "note": ""}


def grid(content: Mapping[str, Any], *, width: int = WIDTH) -> str:
    """
    Write a grid as plain text: no colour, no box, fit for a pipe.

    Columns of numbers are flush right.  Columns in which every cell is None or empty are left out.  Where
    the lines would be wider than `width`, the last column is wrapped.

    Args:
        content: "columns": names; "rows": lists of text, numbers or None; optional "title", "notes"
            (below: texts, or lists of texts for points), "beneath" (texts right under the rows: what has no row)
            and "marked" (row numbers that matter most).
        width: Characters per line.

    Returns:
        The lines, without a final newline.

    Example:
        >>> print(grid({"columns": ["batch", "unknown", "why"], "rows": [[8, None, "memory"], [16, None, None]]}))
        batch  why
        -----  ------
            8  memory
           16  –
    """  # noqa: RUF002 - the dash of an empty cell
    return "\n".join(text for text, _ in _lines(content, width))


def rich_grid(content: Mapping[str, Any], *, width: int = WIDTH) -> Text:
    """
    Give the same lines for a colour terminal: headings dim, marked rows and their note stand out.

    Args:
        content: As `grid` takes it.
        width: Characters per line.

    Returns:
        Text that rich prints.
    """
    from rich.text import Text

    return Text("\n").join(Text(text, style=_STYLES[role], no_wrap=True) for text, role in _lines(content, width))


def _lines(content: Mapping[str, Any], width: int) -> Iterator[tuple[str, str]]:
    """Give each line with its role: title, head, row, marked, answer (the first note, where a row is marked), note."""
    shape = filled(content)
    columns, rows, right = shape["columns"], shape["rows"], shape["right"]
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    if widths:
        widths[-1] = min(widths[-1], max(width - sum(widths[:-1]) - 2 * (len(widths) - 1), _MIN_LAST))
    if shape["title"]:
        yield from ((line, "title") for line in _wrap(str(shape["title"]), width))
    if shape["title"] and columns:
        yield "", "title"
    table = [(columns, "head"), (["-" * size for size in widths], "head")]
    table += [(row, "marked" if index in shape["marked"] else "row") for index, row in enumerate(rows)]
    for row, role in table if columns else []:
        for number, last in enumerate(_wrap(row[-1], widths[-1]) or [""]):
            cells = [*row[:-1], last] if number == 0 else [*[""] * (len(row) - 1), last]
            padded = (
                cell.rjust(size) if flush else cell.ljust(size)
                for cell, size, flush in zip(cells, widths, right, strict=True)
            )
            yield "  ".join(padded).rstrip(), role
    for text in shape["beneath"]:
        yield from ((line, "head") for line in _wrap(str(text), width))
    for number, note in enumerate(shape["notes"]):
        yield "", "note"
        role = "answer" if number == 0 and shape["marked"] else "note"
        if isinstance(note, str):
            yield from ((line, role) for line in _wrap(note, width))
        else:
            for item in note:
                wrapped = _wrap(str(item), width - 2)
                yield from ((f"{'  ' if index else '- '}{line}", "note") for index, line in enumerate(wrapped))


def _wrap(text: str, width: int) -> list[str]:
    """Break text into lines, but not inside a number, be it written in groups or with its sign: "27 462", "± 3 %"."""
    whole = _UNBROKEN.sub(_NO_BREAK, text)
    return [line.replace(_NO_BREAK, " ") for line in textwrap.wrap(whole, width)]


def filled(content: Mapping[str, Any]) -> dict[str, Any]:
    """
    Fill a grid in: every cell as text, columns in which nothing is known left out.

    Args:
        content: As `grid` takes it.

    Returns:
        The same keys, all present, and "right": which columns hold numbers and stand flush right.
    """
    rows = [list(row) for row in content.get("rows") or ()]
    names = [str(name) for name in content.get("columns") or ()]
    kept = [index for index in range(len(names)) if not rows or any(row[index] not in (None, "") for row in rows)]
    cells = [[_UNKNOWN if row[index] is None else str(row[index]) for index in kept] for row in rows]
    right = [
        all(cell == _UNKNOWN or _NUMBER.match(cell) for cell in column)
        for column in ([row[position] for row in cells] for position in range(len(kept)))
    ]
    return {
        "title": content.get("title") or "",
        "columns": [names[index] for index in kept],
        "rows": cells,
        "right": right,
        "beneath": list(content.get("beneath") or ()),
        "notes": list(content.get("notes") or ()),
        "marked": set(content.get("marked") or ()),
    }
