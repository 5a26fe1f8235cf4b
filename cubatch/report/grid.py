"""
Tables as text: one record, `Grid`, for every command, laid out by rich.

On a narrow terminal `fit` leaves columns out and shortens the lists in the last column.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

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
_ASCII = str.maketrans({
    "→": "->", "≈": "~", "±": "+-", "µ": "u", "×": "x", "–": "-", "—": "-", "…": "...", "·": "*", "≤": "<=", "≥": ">=",  # noqa: RUF001
    _NO_BREAK: " ", "\N{MINUS SIGN}": "-", "²": "2", "³": "3", "°": "deg ",
    **dict(zip("▁▂▃▄▅▆▇█", "12345678", strict=True)),
})  # fmt: skip


def to_ascii(text: str) -> str:
    """
    Replace the signs of a text by ASCII.

    Example:
        >>> to_ascii("→ 3 ± 1 µs")
        '-> 3 +- 1 us'
    """
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def _as_line(text: str) -> str:
    return visible(text.replace("\n", " "), keep="")


def _as_texts(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(_as_line, texts))


def _as_numbers(numbers: Iterable[int]) -> frozenset[int]:
    return frozenset(numbers)


@attrs.frozen
class Listed:
    """
    A cell with several texts, of which a narrow column shows the first ones.

    Example:
        >>> reasons = Listed(("power of two", "coulom n=2", "memory limit"))
        >>> str(reasons), reasons.within(20), reasons.within(10)
        ('power of two, coulom n=2, memory limit', 'power of two, +2', 'power…, +2')
    """

    texts: tuple[str, ...] = attrs.field(converter=_as_texts)

    def __str__(self) -> str:
        """Return all texts."""
        return ", ".join(self.texts)

    def within(self, width: int) -> str | None:
        """Return the texts that fit, and the number of the others; None without texts."""
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
    A table with a title and notes; control characters are escaped.

    `print` of a rich console shows it in color.

    Attributes:
        title: Above the table.
        columns: Headings.
        rows: Cells: text, numbers, `Listed` texts, or None for an unknown value, which prints as a dash.  A column
            without a known value is not shown.
        beneath: Texts right under the rows.
        notes: Paragraphs below; a sequence of texts is a bulleted list.
        marked: Indices of the rows to emphasize.

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
        """Return the grid without a column; an unknown name changes nothing."""
        places = [place for place, name in enumerate(self.columns) if name != column]
        rows = [[row[place] for place in places] for row in self.rows]
        return attrs.evolve(self, columns=[self.columns[place] for place in places], rows=rows)

    def replace_column(self, column: str, name: str, cells: Sequence[Cell]) -> Grid:
        """Return the grid with another name and other cells of a column."""
        place = self.columns.index(column)
        rows = [(*row[:place], cell, *row[place + 1 :]) for row, cell in zip(self.rows, cells, strict=True)]
        return attrs.evolve(self, columns=[*self.columns[:place], name, *self.columns[place + 1 :]], rows=rows)

    def fit(self, width: int, dispensable: Sequence[str] = ()) -> Grid:
        """
        Return the grid with one line per row.

        Args:
            width: Characters per line.
            dispensable: Columns to leave out, in this order, until the other columns fit.  Lists in the last column
                are shortened to the width that the other columns leave, at least 16 characters.
        """
        grid = self
        for name in dispensable:
            if _spare(grid, width) >= 0:
                break
            grid = grid.without(name)
        return grid.shortened(max(_spare(grid, width), 0) + _MIN_LAST)

    def shortened(self, width: int) -> Grid:
        """Return the grid with the lists in the last column shortened to a width."""
        rows = [
            [*row[:-1], last.within(width) if isinstance(last := row[-1], Listed) else last] if row else row
            for row in self.rows
        ]
        return attrs.evolve(self, rows=rows)

    def text(self, width: int | None = None, *, ascii_only: bool = False) -> str:
        """
        Return the table as plain text.

        Args:
            width: Characters per line of a terminal.  None is for a pipe or file: lines of 110 characters, and a longer
                line where a row needs it.
            ascii_only: Whether to replace signs by ASCII.

        Returns:
            The lines, without a final newline.
        """
        from rich.console import Console

        grid = self._in_ascii() if ascii_only else self
        width = max(WIDTH, grid.filled().narrowest) if width is None else width
        written = io.StringIO()
        Console(file=written, width=width, color_system=None, legacy_windows=False).print(grid, end="")
        text = "\n".join(line.rstrip(" ") for line in written.getvalue().removesuffix("\n").split("\n"))
        return to_ascii(text) if ascii_only else text

    def _in_ascii(self) -> Grid:
        return attrs.evolve(
            self,
            title=to_ascii(self.title),
            columns=map(to_ascii, self.columns),
            rows=[[cell if cell is None else to_ascii(str(cell)) for cell in row] for row in self.rows],
            beneath=map(to_ascii, self.beneath),
            notes=[to_ascii(note) if isinstance(note, str) else map(to_ascii, note) for note in self.notes],
        )

    def filled(self) -> Filled:
        """Return every cell as text, without the columns in which no value is known."""
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
        return Filled(tuple(self.columns[place] for place in places), rows, right)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text | Table]:
        """Yield title, table and notes: headings dim, marked rows and the first note beneath them emphasized."""
        from rich.text import Text

        width, shape = min(options.max_width, WIDTH), self.filled()

        def lines(text: str, style: str, width: int = width) -> Text:
            return Text("\n".join(_wrap(text, width)), style=style, no_wrap=True, overflow="ignore")

        if self.title:
            yield lines(self.title, "bold")
        if self.title and shape.columns:
            yield Text()
        if shape.columns:
            yield self._table(shape, width, is_narrow=shape.narrowest > options.max_width)
        for text in self.beneath:
            yield lines(text, "dim")
        for number, note in enumerate(self.notes):
            yield Text()
            if isinstance(note, str):
                yield lines(note, "bold" if number == 0 and self.marked else "")
            else:
                for item in note:
                    yield Text("- ") + Text("\n  ").join(lines(item, "", width - 2).split())

    def _table(self, shape: Filled, width: int, *, is_narrow: bool) -> Table:
        """Make a rich table that wraps its last column, or all columns if the terminal is very narrow."""
        from rich.table import Table
        from rich.text import Text

        *others, last = shape.widths
        last = min(last, max(width - sum(size + _GAP for size in others), _MIN_LAST))
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
        for name, right in zip(shape.columns, shape.right, strict=True):
            justify = "right" if right else "left"
            table.add_column(Text(name), justify=justify, no_wrap=not is_narrow, overflow="fold")  # type: ignore[arg-type]
        if not is_narrow:
            table.add_row(*("-" * size for size in (*others, last)), style="dim")
        for index, (*first, cell) in enumerate(shape.rows):
            cells = [*first, cell if is_narrow else "\n".join(_wrap(cell, last))]
            table.add_row(*map(Text, cells), style="bold green" if index in self.marked else None)
        return table


@attrs.frozen
class Filled:
    """
    The visible part of a grid as text.

    Attributes:
        columns: Headings.
        rows: Cells.
        right: Whether each column holds numbers and is aligned right.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[bool, ...]

    @property
    def widths(self) -> list[int]:
        """The characters of the widest cell of each column."""
        from rich.cells import cell_len

        return [max(map(cell_len, column)) for column in zip(self.columns, *self.rows, strict=True)]

    @property
    def narrowest(self) -> int:
        """The characters of a line if the last column is as narrow as possible; 0 without columns."""
        if not self.columns:
            return 0
        *others, last = self.widths
        return sum(size + _GAP for size in others) + min(last, _MIN_LAST)


def _spare(grid: Grid, width: int) -> int:
    """Return the characters that a line leaves free; negative if it is too narrow."""
    if not any(isinstance(row[-1], Listed) for row in grid.rows if row):
        return width + _GAP - sum(size + _GAP for size in grid.filled().widths)
    others = attrs.evolve(grid, columns=grid.columns[:-1], rows=[row[:-1] for row in grid.rows])
    return width - _MIN_LAST - sum(size + _GAP for size in others.filled().widths)


def _wrap(text: str, width: int) -> list[str]:
    """Break text into lines, but not inside a number with its groups, sign and percent: "27 462", "± 3 %"."""
    joined = _UNBROKEN.sub(_NO_BREAK, text)
    return [line.replace(_NO_BREAK, " ") for line in textwrap.wrap(joined, width, break_on_hyphens=False)]
