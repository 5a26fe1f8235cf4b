"""Grids: lines that line up, fit the width, and leave out what is not known."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubatch.report.grid import Grid, Listed

CELLS = st.one_of(st.none(), st.integers(-(10**9), 10**9), st.text("abc xyz.,", max_size=30))


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=8)))
def test_every_column_starts_or_ends_at_the_same_place_in_every_line(rows):
    """The rule under the headings tells where each column lies; a cell never sticks out of its own to the left."""
    names = [f"c{index}" for index in range(len(rows[0]))]

    lines = Grid(columns=names, rows=rows).text(10_000).split("\n")

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
    text = Grid(columns=["a", "b", "c", "d"], rows=[[1, None, "", 0], [2, None, "", 0]]).text()

    assert text.split("\n")[0].split() == ["a", "d"]


def test_long_text_wraps_in_the_last_column_and_stays_inside_the_width():
    """Only the last column gives way, at the width and no sooner; the continuation lines stand under it."""
    content = Grid(columns=["n", "why"], rows=[[1, "alpha beta gamma delta epsilon zeta"]])

    assert content.text(25).split("\n")[2:] == ["1  alpha beta gamma delta", "   epsilon zeta"]
    assert content.text(24).split("\n")[2:] == ["1  alpha beta gamma", "   delta epsilon zeta"]


def test_the_last_column_keeps_16_characters_and_then_each_row_stands_alone():
    """Words one below the other would be no table."""
    grid = Grid(columns=["n", "why"], rows=[[1, "alpha beta gamma delta"]])

    assert grid.text(19).split("\n")[1:] == ["-  " + 16 * "-", "1  alpha beta gamma", "   delta"]
    assert grid.text(18).split("\n") == ["n: 1", "  why: alpha beta", "  gamma delta"]


def test_a_title_without_a_table_has_no_line_beneath():
    """The empty line parts it from the columns; a note brings its own."""
    assert Grid(title="Nothing fits.", notes=["Use less."]).text() == "Nothing fits.\n\nUse less."
    assert Grid(title="t", columns=["n"], rows=[[1]]).text() == "t\n\nn\n-\n1"


@pytest.mark.parametrize("width", range(10, 40))
def test_a_number_in_groups_is_never_broken(width):
    """27 462 at the end of a line must not become 27."""
    text = Grid(notes=["the best is 27 462 samples/s, or 1 234 567"]).text(width)

    assert "27 462" in text
    assert "1 234 567" in text


def test_two_numbers_are_not_one_in_groups():
    """A group has three digits: 8 and 1000 may stand on two lines."""
    assert Grid(notes=["8 1000"]).text(5) == "\n8\n1000"


def test_points_hang_under_their_dash():
    """A note that is a list is a list of points."""
    text = Grid(notes=["Use 8.", ["one two 3", "four"]]).text(10)

    assert text == "\nUse 8.\n\n- one two\n  3\n- four"


def test_numbers_stand_right_and_words_left():
    """A column is of numbers if every known cell begins like one; what is not known stands with them."""
    rows = [[5, "aa"], [1000, "b"], [None, "c"]]
    lines = Grid(columns=["n", "word"], rows=rows).text().split("\n")

    assert lines[2:] == ["   5  aa", "1000  b", "   \N{EN DASH}  c"]


@pytest.mark.parametrize("cells", [("± 3 %", "± 12 %"), ("-3", "12"), ("+ 3 %", "7")])
def test_a_sign_before_a_number_leaves_it_one(cells):
    """Half widths and differences stand right too."""
    lines = Grid(columns=["a", "b"], rows=[[cell, "x"] for cell in cells]).text().split("\n")

    assert [line[:-3] for line in lines[2:]] == [cell.rjust(max(map(len, cells))) for cell in cells]


def test_a_table_without_rows_keeps_its_headings():
    """Nothing is known of no column, which says that there was nothing to tell."""
    assert Grid(columns=["n", "word"], rows=[]).text() == "n  word\n-  ----"


def test_the_terminal_gets_the_same_lines_and_the_marked_row_stands_out():
    """Colour changes nothing of the text."""
    content = Grid(title="t", columns=["n", "w"], rows=[[1, "a"], [2, "b"]], marked=[1], notes=["Use 2."])

    text = content.rich()

    assert text.plain == content.text()
    bold = [text.plain[span.start : span.end] for span in text.spans if span.style == "bold green"]
    assert bold == ["2  b"]


def test_a_first_note_is_an_answer_only_where_a_row_is_marked():
    """Bold beneath a marked row; beneath others a note like any."""
    content = Grid(columns=["n"], rows=[[1]], notes=["Use 1.", "Or not."])

    for marked, bold in (([0], ["Use 1."]), ([], [])):
        text = attrs.evolve(content, marked=marked).rich()
        assert [text.plain[span.start : span.end] for span in text.spans if span.style == "bold"] == bold


def test_what_has_no_row_stands_right_beneath_the_rows():
    """Notes are parted by an empty line, these are not; and they keep to the width."""
    text = Grid(columns=["n"], rows=[[1]], beneath=["2 more: 3 and 4."], notes=["Use 1."]).text(12)

    assert text == "n\n-\n1\n2 more: 3\nand 4.\n\nUse 1."


@pytest.mark.parametrize("width", range(10, 40))
def test_a_number_keeps_its_sign_and_its_percent(width):
    """± at the end of a line is nothing, and so is % at the start."""
    lines = Grid(notes=["the best is known to ± 53.8 % of it"]).text(width).split("\n")

    assert any("± 53.8 %" in line for line in lines)


REASONS = ("power of two", "crest 1 of conv1", "asked for")
LONG = ", ".join(REASONS)
GRID = Grid(columns=["n", "memory", "rate", "why"], rows=[[1, "1 MiB", 10, "a"], [2, None, 20, "b"]], notes=["Use 2."])


def test_a_column_is_left_out_by_its_name():
    """Its cells go with it; a name that is not there changes nothing."""
    assert GRID.without("memory").rows == ((1, 10, "a"), (2, 20, "b"))
    assert GRID.without("memory").notes == GRID.notes
    assert GRID.without("speed") == GRID


def test_a_column_is_put_in_the_place_of_another():
    """The others stay where they are; the cells must be as many as the rows."""
    found = GRID.renamed("memory", "time", ["1 s", "2 s"])
    assert found.columns == ("n", "time", "rate", "why")
    assert found.rows == ((1, "1 s", 10, "a"), (2, "2 s", 20, "b"))
    with pytest.raises(ValueError, match="shorter"):
        GRID.renamed("memory", "time", ["1 s"])


def test_a_row_has_a_cell_for_every_column():
    """A row that is too short would shift what stands under a heading."""
    with pytest.raises(ValueError, match="2 columns and a row of 1"):
        Grid(columns=["a", "b"], rows=[[1]])


@pytest.mark.parametrize(
    ("width", "columns"),
    [(20, "n memory rate why"), (19, "n rate why"), (12, "n rate why"), (11, "n why"), (3, "n why")],
)
def test_columns_go_in_their_order_until_a_row_takes_one_line(width, columns):
    """At the width of the whole all stay; what is not called dispensable stays in any case."""
    assert " ".join(GRID.fit(width, ("memory", "rate")).columns) == columns


def test_a_column_that_is_not_shown_takes_no_room():
    """Nothing is known in it, so nothing is printed of it."""
    grid = Grid(columns=["n", "unknown to everybody", "why"], rows=[[1, None, "because"]])
    assert grid.fit(10, ("n",)) == grid


@pytest.mark.parametrize(
    ("width", "shown"), [(110, LONG), (30, "power of two, +2"), (23, "power of two, +2"), (5, "p")]
)
def test_what_the_last_column_lists_gets_what_the_others_leave(width, shown):
    """As many texts as there is room for, and how many more there are; 16 characters in any case."""
    grid = Grid(columns=["batch", "why"], rows=[[8, Listed(REASONS)], [16, Listed(())]]).fit(width)
    assert grid.rows[0][1].startswith(shown)
    assert grid.rows[1][1] is None
    assert len(grid.rows[0][1]) <= max(width - 7, 16)


def test_other_columns_go_before_a_list_is_shorter_than_16_characters():
    """5 and 6 characters, the gaps and 16 for the list are 31."""
    grid = Grid(columns=["batch", "memory", "why"], rows=[[8, "1 MiB", Listed(REASONS)]])
    assert grid.fit(31, ("memory",)).columns == ("batch", "memory", "why")
    assert grid.fit(30, ("memory",)).columns == ("batch", "why")


@given(st.lists(st.text("abc ", min_size=1, max_size=12), max_size=5), st.integers(1, 60))
def test_a_list_keeps_to_its_width_and_counts_what_it_leaves_out(texts, width):
    """Whole where it fits; else what is shown and the number that follows make up all of them."""
    shown = Listed(texts).within(width)
    if not texts:
        assert shown is None
        return
    assert len(shown) <= max(width, len("…, +4"))
    if len(", ".join(texts)) <= width:
        assert shown == ", ".join(texts)
    elif ", +" in shown:
        kept, _, more = shown.rpartition(", +")
        assert kept.endswith("…") or kept == ", ".join(texts[: len(texts) - int(more)])


def test_a_list_of_nothing_is_not_known():
    """A dash beside lists that hold something; no column where none does."""
    grid = Grid(columns=["n", "why"], rows=[[1, Listed(("a", "b"))], [2, Listed(())]])
    assert grid.text().split("\n")[2:] == ["1  a, b", "2  \N{EN DASH}"]
    assert Grid(columns=["n", "why"], rows=[[1, Listed(())]]).text() == "n\n-\n1"
