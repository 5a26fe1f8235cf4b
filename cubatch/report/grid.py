"""
Tables of anything as text: one shape, the grid, for every command.

Where a line is too narrow, `fit` leaves columns out, and shortens lists in the last one: the only
place that decides what a narrow terminal does not show.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from cubatch.units import visible

if TYPE_CHECKING:
    from rich.text import Text


WIDTH = 110
NARROWEST = 24
_UNKNOWN = "–"  # noqa: RUF001 - a dash for a cell with nothing in it
_NUMBER = re.compile(r"[-+±−]?\s*\d")  # noqa: RUF001 - a minus sign
_UNBROKEN = re.compile(r"(?<=\d) (?=\d{3}(?!\d))|(?<=±) (?=\d)|(?<=\d) (?=%)")
_NO_BREAK = "\N{NO-BREAK SPACE}"
_GAP = 2  # blanks between columns
_MIN_LAST = 16  # characters of a last column that is wrapped or shortened
_STYLES = {"title": "bold", "head": "dim", "row": "", "marked": "bold green", "answer": "bold", "note": ""}


def _as_line(text: str) -> str:
    return visible(text.replace("\n", " "), keep="")


def _as_texts(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(_as_line, texts))


def _as_numbers(numbers: Iterable[int]) -> frozenset[int]:
    return frozenset(numbers)


@attrs.frozen
class Listed:
    """
    A cell of several texts, of which a narrow one shows as many as there is room for.

    Example:
        >>> found = Listed(("power of two", "crest 1 of conv1", "asked for"))
        >>> str(found), found.within(20), found.within(10)
        ('power of two, crest 1 of conv1, asked for', 'power of two, +2', 'power…, +2')
    """

    texts: tuple[str, ...] = attrs.field(converter=_as_texts)

    def __str__(self) -> str:
        """Return all texts."""
        return ", ".join(self.texts)

    def within(self, width: int) -> str | None:
        """Join the texts; where they do not fit, as many as do and how many more there are; None of none."""
        if not self.texts or len(str(self)) <= width:
            return str(self) or None
        for count in range(len(self.texts) - 1, 0, -1):
            text = f"{', '.join(self.texts[:count])}, +{len(self.texts) - count}"
            if len(text) <= width:
                return text
        more = f", +{len(self.texts) - 1}" if len(self.texts) > 1 else ""
        return f"{self.texts[0][: max(0, width - len(more) - 1)]}…{more}"


Cell = str | float | Listed | None
Row = tuple[Cell, ...]


def _as_rows(rows: Iterable[Iterable[Cell]]) -> tuple[Row, ...]:
    return tuple(tuple(_as_line(cell) if isinstance(cell, str) else cell for cell in row) for row in rows)


def _as_notes(notes: Iterable[str | Iterable[str]]) -> tuple[str | tuple[str, ...], ...]:
    return tuple(_as_line(note) if isinstance(note, str) else _as_texts(note) for note in notes)


@attrs.frozen(kw_only=True)
class Grid:
    """
    A table, with what stands above and beneath it; control characters in it are written out.

    Attributes:
        title: Above the table.
        columns: Their names.
        rows: Of each a cell a column: text, a number, `Listed` texts, or None for what is not known, which prints
            as a dash.  A column in which nothing is known is not shown.
        beneath: Texts right under the rows: what has no row.
        notes: Texts below, or several together for points.
        marked: Numbers of the rows that matter most.

    Example:
        >>> grid = Grid(columns=["batch", "unknown", "why"], rows=[[8, None, "memory"], [16, None, None]])
        >>> print(grid.text())
        batch  why
        -----  ------
            8  memory
           16  –
        >>> grid.without("why").columns
        ('batch', 'unknown')
    """  # noqa: RUF002 - the dash of an empty cell

    title: str = attrs.field(default="", converter=_as_line)
    columns: tuple[str, ...] = attrs.field(default=(), converter=_as_texts)
    rows: tuple[Row, ...] = attrs.field(default=(), converter=_as_rows)
    beneath: tuple[str, ...] = attrs.field(default=(), converter=_as_texts)
    notes: tuple[str | tuple[str, ...], ...] = attrs.field(default=(), converter=_as_notes)
    marked: frozenset[int] = attrs.field(default=frozenset(), converter=_as_numbers)

    @rows.validator
    def _check_rows(self, _: object, rows: tuple[Row, ...]) -> None:
        for row in rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(self.columns)} columns and a row of {len(row)} cells: {row}")

    def without(self, column: str) -> Grid:
        """Leave a column out; a name that is not there leaves the grid as it is."""
        kept = [place for place, name in enumerate(self.columns) if name != column]
        rows = [[row[place] for place in kept] for row in self.rows]
        return attrs.evolve(self, columns=[self.columns[place] for place in kept], rows=rows)

    def renamed(self, column: str, new: str, cells: Sequence[Cell]) -> Grid:
        """
        Put another column in the place of one.

        Args:
            column: Its name.
            new: What it is called then.
            cells: What it holds, a cell a row.
        """
        place = self.columns.index(column)
        rows = [
            (*row[:place], cell, *row[place + 1 :]) for row, cell in zip(self.rows, cells, strict=True)
        ]  # fmt: skip
        return attrs.evolve(self, columns=[*self.columns[:place], new, *self.columns[place + 1 :]], rows=rows)

    def fit(self, width: int, dispensable: Sequence[str] = ()) -> Grid:
        """
        Give each row one line at any width.

        Args:
            width: Characters per line.
            dispensable: Columns that can be done without, in the order in which they go until the rest fits.
                Where the last column lists texts, it needs little, and gets all that the others leave.
        """
        grid = self
        for name in dispensable:
            if _spare(grid, width) >= 0:
                break
            grid = grid.without(name)
        return grid.shortened(max(_spare(grid, width), 0) + _MIN_LAST)

    def shortened(self, width: int) -> Grid:
        """Shorten what the last column lists to so many characters."""
        rows = [
            [*row[:-1], last.within(width) if isinstance(last := row[-1], Listed) else last] if row else row
            for row in self.rows
        ]
        return attrs.evolve(self, rows=rows)

    def text(self, width: int = WIDTH, room: float = math.inf) -> str:
        """
        Write the grid as plain text: no color, no box, fit for a pipe.

        Columns of numbers are flush right.  Where the lines would be wider, the last column is wrapped, and where they
        still are, each row is written by itself; not at the width of a pipe, whose reader has no end of a line.

        Args:
            width: Characters per line.
            room: Of a terminal's lines, where they are longer: a table may be as wide.

        Returns:
            The lines, without a final newline.
        """
        return "\n".join(text for text, _ in self._lines(width, width if width < WIDTH else room))

    def rich(self, width: int = WIDTH, room: int = 0) -> Text:
        """
        Return the lines of a table for a color terminal: headings dim, marked rows and their note stand out.

        Args:
            width: Characters per line.
            room: Of the terminal's lines, where they are longer: a table may be as wide.

        Returns:
            Text that rich prints.
        """
        from rich.text import Text

        lines = self._lines(width, max(width, room))
        return Text("\n").join(Text(text, style=_STYLES[role], no_wrap=True) for text, role in lines)

    def filled(self) -> Filled:
        """Write every cell as text, and leave out the columns in which nothing is known."""
        cells = [[str(cell) or None if isinstance(cell, Listed) else cell for cell in row] for row in self.rows]
        places = [
            place
            for place in range(len(self.columns))
            if not cells or any(row[place] not in (None, "") for row in cells)
        ]
        rows = tuple(tuple(_UNKNOWN if row[place] is None else str(row[place]) for place in places) for row in cells)
        right = tuple(
            all(row[number] == _UNKNOWN or _NUMBER.match(row[number]) for row in rows) for number in range(len(places))
        )
        return Filled(tuple(places), tuple(self.columns[place] for place in places), rows, right)

    def _lines(self, width: int, room: float) -> Iterator[tuple[str, str]]:
        """Yield lines with their roles: title, head, row, marked, answer (the first note if a row is marked), note."""
        shape = self.filled()
        if self.title:
            yield from ((line, "title") for line in _wrap(self.title, width))
        if self.title and shape.columns:
            yield "", "title"
        if shape.columns and shape.narrowest > room:
            yield from self._cards(shape, width)
        elif shape.columns:
            yield from self._table(shape, width)
        for text in self.beneath:
            yield from ((line, "head") for line in _wrap(text, width))
        for number, note in enumerate(self.notes):
            yield "", "note"
            role = "answer" if number == 0 and self.marked else "note"
            if isinstance(note, str):
                yield from ((line, role) for line in _wrap(note, width))
            else:
                for item in note:
                    wrapped = _wrap(item, width - 2)
                    yield from ((f"{'  ' if index else '- '}{line}", "note") for index, line in enumerate(wrapped))

    def _table(self, shape: Filled, width: int) -> Iterator[tuple[str, str]]:
        sizes = shape.widths
        sizes[-1] = min(sizes[-1], max(width - sum(size + _GAP for size in sizes[:-1]), _MIN_LAST))
        table: list[tuple[Sequence[str], str]] = [(shape.columns, "head"), (["-" * size for size in sizes], "head")]
        table += [(row, "marked" if index in self.marked else "row") for index, row in enumerate(shape.rows)]
        for row, role in table:
            for number, last in enumerate(_wrap(row[-1], sizes[-1]) or [""]):
                cells = [*row[:-1], last] if number == 0 else [*[""] * (len(row) - 1), last]
                padded = (
                    cell.rjust(size) if flush else cell.ljust(size)
                    for cell, size, flush in zip(cells, sizes, shape.right, strict=True)
                )
                yield (" " * _GAP).join(padded).rstrip(), role

    def _cards(self, shape: Filled, width: int) -> Iterator[tuple[str, str]]:
        """Write each row as lines of "column: cell", without those that hold nothing."""
        for index, row in enumerate(shape.rows):
            role = "marked" if index in self.marked else "row"
            known = [(name, cell) for name, cell in zip(shape.columns, row, strict=True) if cell not in {"", _UNKNOWN}]
            for number, (name, cell) in enumerate(known):
                lines = _wrap(f"{name}: {cell}" if name else cell, width - 2)
                yield from ((f"{'  ' if number or place else ''}{line}", role) for place, line in enumerate(lines))


@attrs.frozen
class Filled:
    """
    What of a grid is shown, all of it text.

    Attributes:
        places: Which columns of the grid.
        columns: Their names.
        rows: Their cells.
        right: Which of them hold numbers and stand flush right.
    """

    places: tuple[int, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[bool, ...]

    @property
    def widths(self) -> list[int]:
        """The characters of the widest cell of each column."""
        return [max(len(cell) for cell in column) for column in zip(self.columns, *self.rows, strict=True)]

    @property
    def narrowest(self) -> int:
        """The characters of a line where the last column is wrapped as far as it goes."""
        *others, last = self.widths
        return sum(size + _GAP for size in others) + min(last, _MIN_LAST)


def _spare(grid: Grid, width: int) -> int:
    """Count the characters that a line has left; negative where it is too narrow."""
    shape, last = grid.filled(), len(grid.columns) - 1
    if any(isinstance(row[-1], Listed) for row in grid.rows if row):
        others = [size for place, size in zip(shape.places, shape.widths, strict=True) if place != last]
        return width - sum(size + _GAP for size in others) - _MIN_LAST
    return width - sum(size + _GAP for size in shape.widths) + _GAP


def _wrap(text: str, width: int) -> list[str]:
    """Break text into lines, but not inside a number, be it written in groups or with its sign: "27 462", "± 3 %"."""
    whole = _UNBROKEN.sub(_NO_BREAK, text)
    return [line.replace(_NO_BREAK, " ") for line in textwrap.wrap(whole, width)]
