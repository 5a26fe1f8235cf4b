"""Grids: lines that line up, fit the width, and leave out what is not known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubatch.report import grid

CELLS = st.one_of(st.none(), st.integers(-(10**9), 10**9), st.text("abc xyz.,", max_size=30))


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=8)))
def test_every_column_starts_or_ends_at_the_same_place_in_every_line(rows):
    """The rule under the headings tells where each column lies; a cell never sticks out of its own to the left."""
    names = [f"c{index}" for index in range(len(rows[0]))]

    lines = grid.grid({"columns": names, "rows": rows}, width=10_000).split("\n")

    kept = [i for i in range(len(names)) if any(row[i] not in (None, "") for row in rows)]
    if not kept:
        assert lines == [""]
        return
    assert lines[0].split() == [names[index] for index in kept]
    spans = []
    start = 0
    for piece in lines[1].split("  "):
        spans.append((start, start + len(piece)))
        start += len(piece) + 2
    assert len(spans) == len(kept)
    for line, row in zip(lines[2:], rows, strict=True):
        cells = ["\N{EN DASH}" if row[index] is None else str(row[index]) for index in kept]
        for (first, last), cell in zip(spans, cells, strict=True):
            # The last column is wrapped, which joins blanks.
            assert line[first:last].split() == cell.split()


def test_a_column_in_which_nothing_is_known_is_left_out():
    """None and empty text are not knowledge; zero is."""
    text = grid.grid({"columns": ["a", "b", "c", "d"], "rows": [[1, None, "", 0], [2, None, "", 0]]})

    assert text.split("\n")[0].split() == ["a", "d"]


def test_long_text_wraps_in_the_last_column_and_stays_inside_the_width():
    """Only the last column gives way, at the width and no sooner; the continuation lines stand under it."""
    content = {"columns": ["n", "why"], "rows": [[1, "alpha beta gamma delta epsilon zeta"]]}

    assert grid.grid(content, width=25).split("\n")[2:] == ["1  alpha beta gamma delta", "   epsilon zeta"]
    assert grid.grid(content, width=24).split("\n")[2:] == ["1  alpha beta gamma", "   delta epsilon zeta"]


def test_the_last_column_keeps_16_characters_however_narrow_the_line():
    """Words one below the other would be no table."""
    lines = grid.grid({"columns": ["n", "why"], "rows": [[1, "alpha beta gamma delta"]]}, width=5).split("\n")

    assert lines[1:] == ["-  " + 16 * "-", "1  alpha beta gamma", "   delta"]


def test_a_title_without_a_table_has_no_line_beneath():
    """The empty line parts it from the columns; a note brings its own."""
    assert grid.grid({"title": "Nothing fits.", "notes": ["Use less."]}) == "Nothing fits.\n\nUse less."
    assert grid.grid({"title": "t", "columns": ["n"], "rows": [[1]]}) == "t\n\nn\n-\n1"


@pytest.mark.parametrize("width", range(10, 40))
def test_a_number_in_groups_is_never_broken(width):
    """27 462 at the end of a line must not become 27."""
    text = grid.grid({"notes": ["the best is 27 462 samples/s, or 1 234 567"]}, width=width)

    assert "27 462" in text
    assert "1 234 567" in text


def test_two_numbers_are_not_one_in_groups():
    """A group has three digits: 8 and 1000 may stand on two lines."""
    assert grid.grid({"notes": ["8 1000"]}, width=5) == "\n8\n1000"


def test_points_hang_under_their_dash():
    """A note that is a list is a list of points."""
    text = grid.grid({"notes": ["Use 8.", ["one two 3", "four"]]}, width=10)

    assert text == "\nUse 8.\n\n- one two\n  3\n- four"


def test_numbers_stand_right_and_words_left():
    """A column is of numbers if every known cell begins like one; what is not known stands with them."""
    rows = [[5, "aa"], [1000, "b"], [None, "c"]]
    lines = grid.grid({"columns": ["n", "word"], "rows": rows}).split("\n")

    assert lines[2:] == ["   5  aa", "1000  b", "   \N{EN DASH}  c"]


@pytest.mark.parametrize("cells", [("± 3 %", "± 12 %"), ("-3", "12"), ("+ 3 %", "7")])
def test_a_sign_before_a_number_leaves_it_one(cells):
    """Half widths and differences stand right too."""
    lines = grid.grid({"columns": ["a", "b"], "rows": [[cell, "x"] for cell in cells]}).split("\n")

    assert [line[:-3] for line in lines[2:]] == [cell.rjust(max(map(len, cells))) for cell in cells]


def test_a_table_without_rows_keeps_its_headings():
    """Nothing is known of no column, which says that there was nothing to tell."""
    assert grid.grid({"columns": ["n", "word"], "rows": []}) == "n  word\n-  ----"


def test_the_terminal_gets_the_same_lines_and_the_marked_row_stands_out():
    """Colour changes nothing of the text."""
    content = {"title": "t", "columns": ["n", "w"], "rows": [[1, "a"], [2, "b"]], "marked": [1], "notes": ["Use 2."]}

    text = grid.rich_grid(content)

    assert text.plain == grid.grid(content)
    bold = [text.plain[span.start : span.end] for span in text.spans if span.style == "bold green"]
    assert bold == ["2  b"]


def test_a_first_note_is_an_answer_only_where_a_row_is_marked():
    """Bold beneath a marked row; beneath others a note like any."""
    content = {"columns": ["n"], "rows": [[1]], "notes": ["Use 1.", "Or not."]}

    for marked, bold in (([0], ["Use 1."]), ([], [])):
        text = grid.rich_grid({**content, "marked": marked})
        assert [text.plain[span.start : span.end] for span in text.spans if span.style == "bold"] == bold


def test_what_has_no_row_stands_right_beneath_the_rows():
    """Notes are parted by an empty line, these are not; and they keep to the width."""
    text = grid.grid({"columns": ["n"], "rows": [[1]], "beneath": ["2 more: 3 and 4."], "notes": ["Use 1."]}, width=12)

    assert text == "n\n-\n1\n2 more: 3\nand 4.\n\nUse 1."


@pytest.mark.parametrize("width", range(10, 40))
def test_a_number_keeps_its_sign_and_its_percent(width):
    """± at the end of a line is nothing, and so is % at the start."""
    lines = grid.grid({"notes": ["the best is known to ± 53.8 % of it"]}, width=width).split("\n")

    assert any("± 53.8 %" in line for line in lines)
