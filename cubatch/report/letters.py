"""Tables for a terminal or a pipe that knows few letters."""

from __future__ import annotations

import attrs

from cubatch.report.grid import Cell, Grid, Listed

_SIGNS = str.maketrans({
    "→": "->", "≈": "~", "±": "+-", "µ": "u", "×": "x", "–": "-", "—": "-", "…": "...", "·": "*", "≤": "<=", "≥": ">=",  # noqa: RUF001
    "\N{NO-BREAK SPACE}": " ", "\N{MINUS SIGN}": "-", "²": "2", "³": "3", "°": "deg ",
    **dict(zip("▁▂▃▄▅▆▇█", "12345678", strict=True)),
})  # fmt: skip


def can_write(text: str, encoding: str | None) -> bool:
    """
    Return whether an encoding has all letters of a text.

    Example:
        >>> can_write("± 1 %", "utf-8"), can_write("± 1 %", "ascii"), can_write("1 %", None)
        (True, False, True)
    """
    try:
        text.encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def spelled(text: str) -> str:
    """
    Write signs with letters that every terminal has.

    Example:
        >>> spelled("→ 3 ± 1 µs")
        '-> 3 +- 1 us'
    """
    return text.translate(_SIGNS).encode("ascii", "replace").decode("ascii")


def ascii_grid(grid: Grid) -> Grid:
    """Write a grid with such letters, before it is laid out: columns stay under their names."""
    return attrs.evolve(
        grid,
        title=spelled(grid.title),
        columns=map(spelled, grid.columns),
        rows=[[_cell(cell) for cell in row] for row in grid.rows],
        beneath=map(spelled, grid.beneath),
        notes=[spelled(note) if isinstance(note, str) else [spelled(item) for item in note] for note in grid.notes],
    )


def _cell(cell: Cell) -> Cell:
    if isinstance(cell, Listed):
        return Listed(map(spelled, cell.texts))
    return spelled(cell) if isinstance(cell, str) else cell
