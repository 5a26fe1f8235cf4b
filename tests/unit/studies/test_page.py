"""The page and the figures of a study: whole, escaped, with every number that the JSON has."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from cubatch.choices import StudyName
from cubatch.report import letters, study
from cubatch.report.plots import study as plot
from cubatch.report.tables import study as table
from cubatch.studies.run import STUDIES
from tests.unit.studies import payloads

ALL = payloads.ALL


@pytest.mark.parametrize("name", ALL)
def test_a_page_fetches_nothing_and_escapes_everything(name):
    """No script, no resource; what looks like markup in a text is text."""
    text = study.page(ALL[name] | {"model": "<b>net</b>", "command": "cubatch study 'a&b'"})
    assert not re.findall(r"<script|<link|<img|src=|href=|@import|url\(", text)
    assert "<b>net" not in text
    assert "&lt;b&gt;net" in text
    assert "a&amp;b" in text
    assert len(re.findall(r"<svg", text)) == 2


@pytest.mark.parametrize("name", ["powers-of-two", "memory-rules", "numpy-mnist"])
def test_its_figure_holds_every_mark(name):
    """Each value lies between the ends of its interval, both within the axis, as do all ticks."""
    shown = study.figure(ALL[name])
    low, high = shown.ends
    assert shown.rows
    assert all(low < row.low <= row.value <= row.high < high for row in shown.rows)
    assert all(low <= value <= high for value, _ in shown.ticks)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_it_is_drawn(name, suffix, tmp_path):
    """As a picture that is no stub."""
    path = tmp_path / f"figure.{suffix}"
    plot.draw(ALL[name], path)
    assert path.stat().st_size > 5000


def test_what_differs_stands_out():
    """Faster and slower sizes are marked in the figure, the others are not."""
    shown = study.figure(payloads.of_powers())
    assert [row.stands_out for row in shown.rows] == [True, False, True, False]


def test_nothing_known_is_a_page_too():
    """Where the budget held too few visits there is no figure, and the page says so."""
    found = payloads.of_powers() | {"comparisons": [], "answer": "Not known."}
    assert "<svg" not in study.page(found)


def test_no_study_is_forgotten():
    """Each has a word for the command line, and a made-up payload for these tests."""
    assert set(STUDIES) == set(get_args(StudyName)) == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_its_table_can_be_written_in_ascii(name):
    """A terminal of few letters gets every number with its sign, and no question mark but those of the text."""
    text = "\n".join(grid.text() for grid in table.grids(ALL[name]))
    plain = "\n".join(letters.spelled(letters.ascii_grid(grid).text()) for grid in table.grids(ALL[name]))
    assert plain.isascii()
    assert plain.count("?") == text.count("?")
