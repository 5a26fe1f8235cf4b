"""The page and the figures of a study: whole, escaped, with every number that the JSON has."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from hypothesis import given, settings, strategies as st

from cubatch.choices import StudyName
from cubatch.report import study_page as study
from cubatch.report.plots import lines
from cubatch.studies.run import STUDIES
from tests.unit.studies import payloads

ALL = payloads.ALL


@pytest.mark.parametrize("name", ALL)
def test_a_page_fetches_nothing_and_escapes_everything(name):
    """No script, no resource; what looks like markup in a text is text."""
    text = study.page(ALL[name] | {"model": "<b>net</b>", "command": "cubatch study 'a&b'"})
    assert not re.findall(r"<script|<link|href=|@import|url\(", text)
    assert "<b>net" not in text
    assert "&lt;b&gt;net" in text
    assert "a&amp;b" in text
    assert len(re.findall(r"<img", text)) == len(study.figures(ALL[name]))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_it_is_drawn(name, suffix, tmp_path):
    """As pictures that are no stubs."""
    path = tmp_path / f"figure.{suffix}"
    for number in range(len(study.figures(ALL[name]))):
        study.draw(ALL[name], path, number)
        assert path.stat().st_size > 5000


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-6, 1e9)), min_size=1, max_size=30),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_any_values_can_be_drawn(values, log_x, log_y):
    """Whatever they are, also one alone: every dot lies within the axes, which have numbers."""
    dots = [lines.Dot(batch_size=n, value=v, low=v / 1.2, high=v * 1.2) for n, v in sorted(dict(values).items())]
    series = [lines.Series(label="a", dots=dots), lines.Series(label="b", dots=dots, is_computed=True)]
    shown = lines.Lines(
        title="", y_label="", series=series, marks=[("all", [dots[0].batch_size])], log_x=log_x, log_y=log_y
    )
    (axes,) = lines.figure_of(shown).axes
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert all(left < dot.batch_size < right and low < dot.low <= dot.high < high for dot in dots)
    assert [tick for tick in axes.get_yticks() if low <= tick <= high]


def test_what_was_not_measured_is_no_dot():
    """Batch 30 has no rate: the rule has four sizes as the measured ones have."""
    (shown,) = study.figures(payloads.of_waves())
    assert [[dot.batch_size for dot in one.dots] for one in shown.series] == [[24, 28, 29, 32]] * 3
    assert dict(shown.marks) == {"full wave": [28], "Coulom": [28], "power of two": [32], "multiple of 8": [24]}


def test_nothing_known_is_a_page_too():
    """Where the budget held too few visits there is no figure, and the page says so."""
    found = payloads.of_powers() | {"comparisons": [], "answer": "Not known."}
    assert "<img" not in study.page(found)


def test_no_study_is_missing():
    """Each has a name on the command line and a payload here."""
    assert set(STUDIES) == set(get_args(StudyName)) == set(ALL)
