"""Tables where few letters are known."""

from __future__ import annotations

from cubatch.report import letters
from cubatch.report.grid import Grid, Listed

GRID = Grid(
    title="2 × 2",  # noqa: RUF001
    columns=["", "batch", "±", "why"],
    rows=[["→", 8, "± 0.1 %", Listed(("a – b", "µs"))], ["≈", None, None, None]],  # noqa: RUF001
    beneath=["…"],
    notes=["→ answer.", ["≈ tied", "ß"]],
    marked=[0],
)


def test_a_table_in_ascii_has_the_same_cells_under_the_same_columns():
    """Signs become one or two letters before the columns are laid out; what has none is a question mark."""
    text = letters.spelled(letters.ascii_grid(GRID).text())
    assert text.isascii()
    head, _, first, second = text.splitlines()[2:6]
    assert first.index("8") + 1 == head.index("batch") + len("batch")
    assert first.startswith("-> ")
    assert second.startswith("~ ")
    assert "+- 0.1 %" in first
    assert "- ?" in text


def test_letters_that_an_encoding_has_stay():
    """UTF-8 has all of them, latin-1 some."""
    assert letters.can_write(GRID.text(), "utf-8")
    assert not letters.can_write(GRID.text(), "latin-1")
    assert letters.can_write("± µ", "latin-1")
    assert not letters.can_write("x", "no such encoding")


def test_a_line_too_narrow_for_the_columns_gets_a_row_at_a_time():
    """On 40 columns nothing is cut or wider than the line, and no cell with something in it is lost."""
    long = ["a column of some length", "another column of it", "last"]
    grid = Grid(title="t", columns=long, rows=[["one", 2, None], ["three", None, "four and so on, to the end"]])
    lines = grid.text(40).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[2:] == [
        "a column of some length: one", "  another column of it: 2", "a column of some length: three",
        "  last: four and so on, to the end",
    ]  # fmt: skip
    assert grid.text(80).splitlines()[2].startswith(long[0])
    assert Grid(columns=["a"], rows=[["b"]]).text(40) == "a\n-\nb"  # what fits stays a table
