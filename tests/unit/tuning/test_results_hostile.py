"""Results that somebody else wrote are shown without harm."""

from __future__ import annotations

import copy
import json

from cubatch.tuning.results import TuningResult
from tests.unit.tuned import measurement, tuned

HOSTILE = "\x1b]0;mine\x07\x1b[2J\u202e\ud800\r\n$x^{2$ <script>"


def hostile():
    """Give a result that says something wherever it may say what it likes."""
    result = copy.deepcopy(tuned())
    result["spec"]["name"] = result["device"]["name"] = result["created"] = result["mode"] = HOSTILE
    result["device"][HOSTILE] = result["environment"][HOSTILE] = HOSTILE
    result["library"] = result["dtype"] = result["optimizer"] = HOSTILE
    result["reasons"] = [HOSTILE] * 3
    result["environment"]["launch"] = {"graph": False, "launches": 3, "refusal": HOSTILE}
    for one in result["measurements"]:
        one["reasons"] = [f"crest {HOSTILE}", HOSTILE]
        one["stop_reason"] = HOSTILE
    result["measurements"] += [measurement(512, status="error", stop_reason=HOSTILE)]
    return TuningResult.from_json(json.dumps(result))


def obeyed(text):
    """List what a terminal would obey, but for ends of lines."""
    return [sign for sign in text if not sign.isprintable() and sign not in "\n "]


def test_what_a_result_says_reaches_no_terminal_page_or_picture_as_it_is(tmp_path):
    """Escape sequences, changes of direction, markup and formulas of a result's own are written out."""
    result = hostile()
    assert obeyed(result.table()) == []
    assert obeyed(result._repr_html_()) == []
    result.report(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert obeyed(page) == []
    assert "<script" not in page
    result.plot(tmp_path / "curve.svg")
    assert obeyed((tmp_path / "curve.svg").read_text(encoding="utf-8")) == []
    assert r"\x1b]0;mine" in result.table()
    assert r"\x1b]0;mine" in page


def test_its_json_survives_as_it_was():
    """Cleaning is for those who look at it: the record keeps what it was given."""
    result = hostile()
    assert TuningResult.from_json(result.to_json()) == result
    assert result.device["name"] == HOSTILE
