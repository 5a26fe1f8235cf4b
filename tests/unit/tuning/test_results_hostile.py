"""Results that somebody else wrote, or damaged: refused with the field named, or shown without harm."""

from __future__ import annotations

import copy
import json
import re

import pytest

from cubatch.errors import InvalidData
from cubatch.tuning.results import MOST_MEASUREMENTS, TuningResult
from tests.unit.tuned import measurement, tuned

GIANT = 10**400


def with_first(**facts):
    """Give a result whose first measurement says something else."""
    result = tuned()
    return result | {"measurements": [result["measurements"][0] | facts, *result["measurements"][1:]]}


def nested(depth):
    found = {}
    for _ in range(depth):
        found = {"a": [found]}
    return found


WRONG = {
    "giant number": (with_first(latency_seconds=GIANT), "measurements[0].latency_seconds must be finite"),
    "negative size": (with_first(batch_size=-5), "measurements[0].batch_size must be from 1"),
    "negative seconds": (with_first(latency_seconds=-1.0), "measurements[0].latency_seconds must be from 1e-30"),
    "interval backwards": (with_first(latency_interval=[2.0, 1.0]), "measurements[0].latency_interval"),
    "spec too deep": (tuned(spec=nested(40)), "spec is nested more than 32 deep"),
    "tolerance of all": (tuned(tolerance=1e308), "tolerance must be at least 0 and below 1"),
    "limits in words": (tuned(limits={"memory_bytes": "a lot"}), "limits memory_bytes must be an integer"),
    "capability in words": (tuned(device={"compute_capability": 7}), "device compute_capability must be a list"),
    "name of numbers": (tuned(device={"name": [1]}), "device name must be text"),
    "half a launch": (tuned(environment={"launch": {"graph": True}}), "environment launch lacks launches, refusal"),
    "sizes twice": (tuned(measurements=[measurement(8, 1.0)] * 2), "measurements must be of one batch size each"),
    "very many": (
        tuned(measurements=[measurement(n, n / 1000) for n in range(1, MOST_MEASUREMENTS + 2)]),
        "measurements must be at most 2000, got 2001",
    ),
}


@pytest.mark.parametrize(("result", "says"), WRONG.values(), ids=WRONG)
def test_what_no_run_can_have_measured_is_refused(result, says):
    """M8: 836 of 59 933 damaged results were taken, and failed where they were shown; others were shown as if true."""
    with pytest.raises(InvalidData, match=re.escape(says)) as caught:
        TuningResult.from_json(json.dumps(result), source="x.json")
    assert len(str(caught.value)) < 1000


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
    """M10: escape sequences, changes of direction, markup and formulas of a result's own are written out."""
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
