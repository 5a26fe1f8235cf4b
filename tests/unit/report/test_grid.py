"""Tables as text: aligned columns, lines within the width, unknown columns left out."""

from __future__ import annotations

import io

import attrs
import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from cubatch.report.grid import Grid, _shortened
from cubatch.report.html import tables

CELLS = st.one_of(st.none(), st.integers(-(10**9), 10**9), st.text("abc xyz.,", max_size=15))


@settings(max_examples=40)
@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=8)))
def test_columns_are_aligned_in_every_line(rows):
    """The rule under the headings shows where each column is; no cell leaves its column."""
    names = [f"c{index}" for index in range(len(rows[0]))]

    lines = Grid(columns=names, rows=rows).text().split("\n")

    shown = [i for i in range(len(names)) if any(row[i] not in (None, "") for row in rows)]
    if not shown:
        assert lines == [""]
        return
    assert lines[0].split() == [names[index] for index in shown]
    spans = []
    start = 0
    for piece in lines[1].split("  "):
        spans.append((start, start + len(piece)))
        start += len(piece) + 2
    assert len(spans) == len(shown)
    for line, row in zip(lines[2:], rows, strict=True):
        cells = ["\N{EN DASH}" if row[index] is None else str(row[index]) for index in shown]
        for (first, last), cell in zip(spans, cells, strict=True):
            assert line[first:last].split() == cell.split()


def test_a_column_without_a_known_value_is_left_out():
    """None, empty text and empty lists are unknown; zero is not."""
    grid = Grid(columns=["a", "b", "c", "d", "e"], rows=[[1, None, "", 0, ()], [2, None, "", 0, ()]])
    assert grid.text().split("\n")[0].split() == ["a", "d"]
    assert Grid(columns=["n", "word"], rows=[]).text() == "n  word\n-  ----"  # no rows: all headings


def test_only_the_last_column_wraps_where_the_terminal_is_wide_enough():
    """It keeps at least 16 characters; a pipe has lines as long as the other columns need."""
    grid = Grid(columns=["n", "why"], rows=[[1, "alpha beta gamma delta epsilon zeta"]])
    assert grid.text(25).split("\n")[2:] == ["1  alpha beta gamma delta", "   epsilon zeta"]
    assert grid.text(24).split("\n")[2:] == ["1  alpha beta gamma", "   delta epsilon zeta"]
    wide = Grid(columns=["first", "why"], rows=[["x" * 105, "alpha beta gamma delta"]])
    assert wide.text().split("\n")[2:] == ["x" * 105 + "  alpha beta gamma", " " * 107 + "delta"]


@pytest.mark.parametrize("width", [24, 30, 40])
def test_a_narrow_terminal_shows_every_cell_within_its_width(width):
    """All columns wrap there."""
    rows = [["one", 2, None], ["three", None, "four and so on, to the end"]]
    lines = Grid(title="t", columns=["a column of some length", "another column of it", "last"], rows=rows).text(width)
    assert max(map(len, lines.split("\n"))) <= width
    letters = "".join(lines.split())
    assert all(letters.count(cell) for cell in ("one", "three", "2"))
    assert sorted(word for word in ("four", "end") if word in letters) == ["end", "four"]


def test_a_title_and_notes_are_separated_by_empty_lines():
    """Texts beneath are not."""
    assert Grid(title="Nothing fits.", notes=["Use less."]).text() == "Nothing fits.\n\nUse less."
    assert Grid(title="t", columns=["n"], rows=[[1]]).text() == "t\n\nn\n-\n1"
    grid = Grid(columns=["n"], rows=[[1]], beneath=["2 more: 3 and 4."], notes=["Use 1."])
    assert grid.text(12) == "n\n-\n1\n2 more: 3\nand 4.\n\nUse 1."


@pytest.mark.parametrize(
    ("note", "whole"),
    [("the best is 27 462 samples/s, or 1 234 567", ["27 462", "1 234 567"]), ("known to ± 53.8 %", ["± 53.8 %"])],
)
def test_a_number_is_not_broken(note, whole):
    """Its groups, sign and percent stay on one line; two numbers may be on two lines."""
    for width in range(10, 40):
        lines = Grid(notes=[note]).text(width).split("\n")
        assert all(any(number in line for line in lines) for number in whole)
    assert Grid(notes=["8 1000"]).text(5) == "\n8\n1000"


def test_a_list_of_notes_has_bullets():
    """Continuation lines are indented."""
    assert Grid(notes=["Use 8.", ["one two 3", "four"]]).text(10) == "\nUse 8.\n\n- one two\n  3\n- four"


@pytest.mark.parametrize("cells", [("5", "1000", None), ("± 3 %", "± 12 %"), ("-3", "12"), ("+- 3 %", "7")])
def test_numbers_are_aligned_right_and_words_left(cells):
    """Signs and unknown values do not change that."""
    lines = Grid(columns=["a", "b"], rows=[[cell, "x"] for cell in cells]).text().split("\n")
    texts = [cell or "\N{EN DASH}" for cell in cells]
    assert lines[2:] == [f"{text.rjust(max(map(len, texts)))}  x" for text in texts]


@pytest.mark.parametrize(("marked", "emphasized"), [([1], {"2", "b", "Use 2."}), ([], set())])
def test_a_color_terminal_emphasizes_marked_rows_and_the_first_note(marked, emphasized):
    """The text is the same as without color."""
    grid = Grid(columns=["n", "w"], rows=[[1, "a"], [2, "b"]], marked=marked, notes=["Use 2.", "Or not."])
    console = Console(file=io.StringIO(), width=80, color_system="standard", force_terminal=True)
    segments = [segment for line in console.render_lines(grid, pad=False) for segment in line]
    bold = {segment.text.strip() for segment in segments if segment.style and segment.style.bold}
    assert bold - {""} == emphasized
    assert [line.rstrip() for line in "".join(s.text for s in console.render(grid)).rstrip("\n").split("\n")] == (
        grid.text().split("\n")
    )


REASONS = ("power of two", "crest 1 of conv1", "memory limit")
LONG = ", ".join(REASONS)
GRID = Grid(columns=["n", "memory", "rate", "why"], rows=[[1, "1 MiB", 10, "a"], [2, None, 20, "b"]], notes=["Use 2."])


def test_a_row_has_a_cell_for_each_column():
    """A row that is too short is a mistake of ours."""
    with pytest.raises(ValueError, match="2 columns and a row of 1"):
        Grid(columns=["a", "b"], rows=[[1]])


@pytest.mark.parametrize(
    ("width", "columns"),
    [(None, "n memory rate why"), (20, "n memory rate why"), (19, "n rate why"), (12, "n rate why"), (11, "n why"),
     (3, "n why")],
)  # fmt: skip
def test_dispensable_columns_are_left_out_in_order_until_a_row_fits(width, columns):
    """Other columns stay in any case; a column without known values needs no width."""
    grid = attrs.evolve(GRID, dispensable=["memory", "rate"])
    assert " ".join(grid.shown(width).columns) == columns
    unknown = Grid(columns=["n", "unknown everywhere", "why"], rows=[[1, None, "because"]], dispensable=["n"])
    assert unknown.shown(10).columns == ["n", "why"]


def test_only_columns_that_are_shown_are_explained():
    """In the last note, as text of any width and as HTML, which has all columns."""
    grid = Grid(
        columns=["batch", "memory", "unknown", "why"], rows=[[8, "1 MiB", None, "because"]], dispensable=["memory"],
        notes=["A note."], explained={"memory": "is the plan", "unknown": "is nowhere", "why": "is a reason"},
    )  # fmt: skip
    assert grid.text().splitlines()[-1] == "“memory” is the plan, “why” is a reason."
    assert grid.text(20).splitlines()[-1] == "“why” is a reason."
    assert "“memory” is the plan, “why” is a reason." in tables([grid])
    assert attrs.evolve(grid, explained={"unknown": "is nowhere"}).text().splitlines()[-1] == "A note."


@pytest.mark.parametrize(
    ("width", "shown"), [(110, LONG), (30, "power of two, +2"), (23, "power of two, +2"), (5, "power of two, +2")]
)
def test_a_list_in_the_last_column_gets_the_width_that_is_left(width, shown):
    """At least 16 characters, for which other columns are left out."""
    grid = Grid(columns=["batch", "why"], rows=[[8, REASONS], [16, ()]]).shown(width)
    assert [row[1] for row in grid.rows] == [shown, "–"]  # noqa: RUF001
    grid = Grid(columns=["batch", "memory", "why"], rows=[[8, "1 MiB", REASONS]], dispensable=["memory"])
    assert grid.shown(31).columns == ["batch", "memory", "why"]
    assert grid.shown(30).columns == ["batch", "why"]


@settings(max_examples=50)
@given(st.lists(st.text("abc ", min_size=1, max_size=12), max_size=5), st.integers(1, 60))
def test_a_list_keeps_its_width_and_counts_the_texts_left_out(texts, width):
    """The texts shown and the number after them are all texts."""
    shown = _shortened(texts, width)
    if not texts:
        assert shown is None
        return
    assert len(shown) <= max(width, len("…, +4"))
    if len(", ".join(texts)) <= width:
        assert shown == ", ".join(texts)
    elif ", +" in shown:
        head, _, more = shown.rpartition(", +")
        assert head.endswith("…") or head == ", ".join(texts[: len(texts) - int(more)])
