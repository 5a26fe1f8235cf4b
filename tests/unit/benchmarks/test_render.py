"""Sections of the READMEs are what the results say, whichever files they are made of."""

from __future__ import annotations

import pytest

from benchmarks import render


@pytest.mark.parametrize("name", render.PAGES)
def test_pages_are_what_the_results_say(name):
    """As `--check` sees it."""
    page = (render.ROOT / name).read_text(encoding="utf-8")
    assert render.rendered(page) == page


def test_a_section_may_be_made_of_several_files(monkeypatch):
    """They are handed over in order, and only what is between the markers changes."""
    monkeypatch.setitem(render.KINDS, "both", lambda *results: " and ".join(one["name"] for one in results))
    monkeypatch.setattr(render, "_kept", lambda path: {"name": path})
    marker = "<!-- results: both a.json b.json -->\n"
    assert render.rendered(f"x\n{marker}old\n<!-- end -->\ny") == f"x\n{marker}\na.json and b.json\n\n<!-- end -->\ny"


def test_answers_are_listed_beside_what_was_best():
    """Run by run, a loss as a percentage of the best."""
    runs = [{"batch_size": 48, "best_batch_size": 96, "lost": 0.0213, "seconds": 30.6},
            {"batch_size": 8, "best_batch_size": 8, "lost": -0.01, "seconds": 5.0}]  # fmt: skip
    about = {"device": "a CPU", "threads": 2, "date": "2026-01-01", "commit": "c0ffee", "environment": {"blas": "b"}}
    text = render.answers({**about, "budget_seconds": 30.0, "rows": [{"case": "net", "tuned": runs}]})
    assert text.splitlines()[-1] == "| net | 48, 8 | 96, 8 | 2.1 %, -1.0 % | 31, 5 |"
