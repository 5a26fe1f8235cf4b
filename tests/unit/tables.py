"""Reading a grid in a test: its rows by the names of its columns."""

from __future__ import annotations

from cubatch.report.grid import Cell, Grid


def rows_of(grid: Grid) -> list[dict[str, Cell]]:
    """Every row, its cells by the name of their column; of a list its texts with commas."""
    shown = [[", ".join(cell) if isinstance(cell, tuple) else cell for cell in row] for row in grid.rows]
    return [dict(zip(grid.columns, row, strict=True)) for row in shown]


def row_of(grid: Grid, key: Cell, column: str = "batch") -> dict[str, Cell]:
    """The row that has something in a column."""
    (row,) = (row for row in rows_of(grid) if str(row[column]) == str(key))
    return row
