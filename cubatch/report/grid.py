"""
Tables as text: one record, `Grid`, for every command, laid out by rich.

A narrow terminal shows fewer columns, and the first texts of a list in the last column.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from cubatch.units import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text


WIDTH = 110
"""Characters per line of text, and of a table that fits into them."""
NARROWEST = 24
_UNKNOWN = "–"  # noqa: RUF001 - a dash for an empty cell
_NUMBER = re.compile(r"[-+±−]{0,2}\s*\d")  # noqa: RUF001 - a minus sign
_UNBROKEN = re.compile(r"(?<=\d) (?=\d{3}(?!\d))|(?<=±) (?=\d)|(?<=\d) (?=%)")
_NO_BREAK = "\N{NO-BREAK SPACE}"
_GAP = 2  # blanks between columns
_MIN_LAST = 16  # least width of a last column that is wrapped or shortened

Cell = str | float | tuple[str, ...] | None


def _as_line(text: str) -> str:
    return visible(text.replace("\n", " "), keep="")


def _as_texts(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(_as_line, texts))


def _as_cell(cell: Cell) -> Cell:
    return _as_line(cell) if isinstance(cell, str) else _as_texts(cell) if isinstance(cell, tuple) else cell


def _as_rows(rows: Iterable[Iterable[Cell]]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(tuple(map(_as_cell, row)) for row in rows)


def _as_notes(notes: Iterable[str | Iterable[str]]) -> tuple[str | tuple[str, ...], ...]:
    return tuple(_as_line(note) if isinstance(note, str) else _as_texts(note) for note in notes)


def _as_numbers(numbers: Iterable[int]) -> frozenset[int]:
    return frozenset(numbers)


@attrs.frozen(kw_only=True)
class Grid:
    """
    A table with a title and notes; control characters are escaped.

    `print` of a rich console shows it in color.
    """

    title: str = attrs.field(default="", converter=_as_line)  # above the table
    columns: tuple[str, ...] = attrs.field(default=(), converter=_as_texts)  # headings
    # cells: text, numbers, tuples of texts, or None for an unknown value, which prints as a dash. A column without a
    # known value is not shown
    rows: tuple[tuple[Cell, ...], ...] = attrs.field(default=(), converter=_as_rows)
    beneath: tuple[str, ...] = attrs.field(default=(), converter=_as_texts)  # texts right under the rows
    # paragraphs below; a sequence of texts is a bulleted list
    notes: tuple[str | tuple[str, ...], ...] = attrs.field(default=(), converter=_as_notes)
    marked: frozenset[int] = attrs.field(default=frozenset(), converter=_as_numbers)  # indices of the rows to emphasize
    # columns that a narrow terminal leaves out, in this order
    dispensable: tuple[str, ...] = attrs.field(default=(), converter=_as_texts)
    # what a column is, by its heading: a last note for the columns that are shown
    explained: Mapping[str, str] = attrs.field(factory=dict, hash=False)

    @classmethod
    def of(cls, records: Iterable[Any], columns: Mapping[str, Callable[[Any], Cell]], **parts: Any) -> Grid:
        """
        Return a grid with a row for each record.

        Args:
            records: Any objects.
            columns: By heading, a function from a record to its cell in this column.
            parts: Other attributes of the grid, such as `title`.

        Example:
            >>> print(Grid.of([3, 40], {"n": int, "square": lambda n: n * n}).text())
             n  square
            --  ------
             3       9
            40    1600
        """
        return cls(columns=columns, rows=[[cell(each) for cell in columns.values()] for each in records], **parts)

    @rows.validator
    def _check_rows(self, _: object, rows: Sequence[Sequence[Cell]]) -> None:
        for row in rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(self.columns)} columns and a row of {len(row)} cells: {row}")

    def text(self, width: int | None = None) -> str:
        """
        Return the table as plain text, without a final newline, for a terminal of `width` characters.

        None is for a pipe or file: lines of 110 characters, and a longer line where a row needs it.
        """
        from rich.console import Console

        width = max(WIDTH, self.shown(WIDTH).narrowest) if width is None else width
        written = io.StringIO()
        Console(file=written, width=width, color_system=None, legacy_windows=False).print(self, end="")
        return "\n".join(line.rstrip(" ") for line in written.getvalue().removesuffix("\n").split("\n"))

    def shown(self, width: int | None = None) -> Shown:
        """
        Return the columns that have a known value, with all cells as text.

        Args:
            width: Characters per line: dispensable columns are left out until the others fit, and lists in the last
                column are shortened.  None: nothing is left out or shortened.
        """
        cells = [[", ".join(cell) or None if isinstance(cell, tuple) else cell for cell in row] for row in self.rows]
        places = [
            place
            for place in range(len(self.columns))
            if not cells or any(row[place] not in (None, "") for row in cells)
        ]
        for name in self.dispensable:
            if width is None or self._at(places, cells).narrowest <= width:
                break
            places = [place for place in places if self.columns[place] != name]
        if width is not None and places:
            left = max(width - self._at(places, cells).others, _MIN_LAST)
            for row, texts in zip(self.rows, cells, strict=True):
                if isinstance(last := row[places[-1]], tuple):
                    texts[places[-1]] = _shortened(last, left)
        return self._at(places, cells)

    def notes_on(self, shown: Shown) -> tuple[str | tuple[str, ...], ...]:
        """Return `notes`, followed by a note with the explanations of columns in `shown`, if there are any."""
        texts = [f"“{name}” {text}" for name, text in self.explained.items() if name in shown.columns]
        return (*self.notes, *([f"{', '.join(texts)}."] if texts else []))

    def _at(self, places: Sequence[int], cells: Sequence[Sequence[str | float | None]]) -> Shown:
        rows = [[_UNKNOWN if row[place] is None else str(row[place]) for place in places] for row in cells]
        return Shown([self.columns[place] for place in places], rows)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text | Table]:
        """Yield title, table and notes: headings dim, marked rows and the first note beneath them emphasized."""
        from rich.text import Text

        width = min(options.max_width, WIDTH)
        shown = self.shown(width)

        def lines(text: str, style: str, width: int = width) -> Text:
            return Text("\n".join(_wrap(text, width)), style=style, no_wrap=True, overflow="ignore")

        if self.title:
            yield lines(self.title, "bold")
        if self.title and shown.columns:
            yield Text()
        if shown.columns:
            yield self._table(shown, width, is_narrow=shown.narrowest > options.max_width)
        for text in self.beneath:
            yield lines(text, "dim")
        for number, note in enumerate(self.notes_on(shown)):
            yield Text()
            if isinstance(note, str):
                yield lines(note, "bold" if number == 0 and self.marked else "")
            else:
                for item in note:
                    yield Text("- ") + Text("\n  ").join(lines(item, "", width - 2).split())

    def _table(self, shown: Shown, width: int, *, is_narrow: bool) -> Table:
        """Return a rich table of at most `width` characters; it wraps its last column, or all if it is narrow."""
        from rich.table import Table
        from rich.text import Text

        last = min(shown.widths[-1], max(width - shown.others, _MIN_LAST))
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
        for name, right in zip(shown.columns, shown.right, strict=True):
            justify = "right" if right else "left"
            table.add_column(Text(name), justify=justify, no_wrap=not is_narrow, overflow="fold")  # type: ignore[arg-type]
        if not is_narrow:
            table.add_row(*("-" * size for size in (*shown.widths[:-1], last)), style="dim")
        for index, (*first, cell) in enumerate(shown.rows):
            cells = [*first, cell if is_narrow else "\n".join(_wrap(cell, last))]
            table.add_row(*map(Text, cells), style="bold green" if index in self.marked else None)
        return table


@attrs.frozen
class Shown:
    """The visible headings and cells of a grid."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def right(self) -> list[bool]:
        """For each column, whether all its cells are numbers or unknown, so that it is aligned right."""
        return [
            all(row[place] == _UNKNOWN or _NUMBER.match(row[place]) for row in self.rows)
            for place in range(len(self.columns))
        ]

    @property
    def widths(self) -> list[int]:
        """Number of characters of the widest cell or heading of each column."""
        from rich.cells import cell_len

        return [max(map(cell_len, column)) for column in zip(self.columns, *self.rows, strict=True)]

    @property
    def others(self) -> int:
        """Number of characters of all columns but the last, with the gaps after them."""
        return sum(size + _GAP for size in self.widths[:-1])

    @property
    def narrowest(self) -> int:
        """Number of characters of a line if the last column is as narrow as it may become; 0 without columns."""
        return self.others + min(self.widths[-1], _MIN_LAST) if self.columns else 0


def _shortened(texts: Sequence[str], width: int) -> str | None:
    """
    Return the first texts that fit into `width` characters, and the number of the others; None without texts.

    Example:
        >>> reasons = ("power of two", "coulom n=2", "memory limit")
        >>> _shortened(reasons, 50), _shortened(reasons, 20), _shortened(reasons, 10)
        ('power of two, coulom n=2, memory limit', 'power of two, +2', 'power…, +2')
    """
    for count in range(len(texts), 0, -1):
        more = f", +{len(texts) - count}" if count < len(texts) else ""
        text = ", ".join(texts[:count])
        if len(text + more) <= width:
            return text + more
    return f"{texts[0][: max(0, width - len(more) - 1)]}…{more}" if texts else None


def _wrap(text: str, width: int) -> list[str]:
    """Return a text in lines of at most `width` characters, not broken inside numbers such as "27 462" or "± 3 %"."""
    joined = _UNBROKEN.sub(_NO_BREAK, text)
    return [line.replace(_NO_BREAK, " ") for line in textwrap.wrap(joined, width, break_on_hyphens=False)]
