"""Results that somebody else wrote, or damaged: refused with the field named, or shown without harm."""

from __future__ import annotations

import copy
import json
import re

import pytest

from cubatch.errors import CubatchError, InvalidData
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
    "giant integer": (with_first(peak_bytes=GIANT), "measurements[0].peak_bytes must be of at most 64 bits"),
    "giant status": (with_first(status=GIANT), "measurements[0]."),
    "long status": (with_first(status="x" * 10**6), "measurements[0]."),
    "negative size": (with_first(batch_size=-5), "measurements[0].batch_size must be from 1"),
    "size 0": (with_first(batch_size=0), "measurements[0].batch_size must be from 1"),
    "size beyond all": (with_first(batch_size=2**31), "measurements[0].batch_size must be from 1"),
    "negative seconds": (with_first(latency_seconds=-1.0), "measurements[0].latency_seconds must be from 1e-30"),
    "no seconds at all": (with_first(timings_seconds=[0.0]), "measurements[0].timings_seconds must be from"),
    "endless rate": (with_first(samples_per_second=1e308), "measurements[0].samples_per_second must be from"),
    "interval backwards": (with_first(latency_interval=[2.0, 1.0]), "measurements[0].latency_interval"),
    "negative bytes": (with_first(peak_bytes=-1), "measurements[0].peak_bytes must be at least 0"),
    "negative joules": (with_first(joules_per_sample=-1.0), "measurements[0].joules_per_sample"),
    "layers too deep": (with_first(layers=[nested(40)]), "measurements[0].layers is nested more than 32 deep"),
    "spec too deep": (tuned(spec=nested(40)), "spec is nested more than 32 deep"),
    "spec far too deep": (tuned(spec=nested(400)), "spec is nested more than 32 deep"),
    "answer of 0": (tuned(batch_size=0), "batch_size must be from 1"),
    "fastest of -1": (tuned(fastest_batch_size=-1), "fastest_batch_size must be from 1"),
    "largest of 0": (tuned(largest_batch_size=0), "largest_batch_size must be from 1"),
    "tied with 0": (tuned(tied_with=[0]), "tied_with must be from 1"),
    "tolerance of all": (tuned(tolerance=1e308), "tolerance must be at least 0 and below 1"),
    "negative budget": (tuned(budget_seconds=-1e9), "budget_seconds must be from"),
    "limits in words": (tuned(limits={"memory_bytes": "a lot"}), "limits memory_bytes must be an integer"),
    "latency in words": (tuned(limits={"latency_seconds": "x"}), "limits latency_seconds must be a number"),
    "memory in words": (tuned(device={"memory_bytes": "big"}), "device memory_bytes must be an integer"),
    "capability in words": (tuned(device={"compute_capability": 7}), "device compute_capability must be a list"),
    "name of numbers": (tuned(device={"name": [1]}), "device name must be text"),
    "half a launch": (tuned(environment={"launch": {"graph": True}}), "environment launch lacks launches, refusal"),
    "sizes twice": (tuned(measurements=[measurement(8, 1.0)] * 2), "measurements must be of one batch size each"),
    "very many": (
        tuned(measurements=[measurement(n, n / 1000) for n in range(1, MOST_MEASUREMENTS + 2)]),
        "measurements must be at most 2000, got 2001",
    ),
    "seed beyond all": (tuned(seed=GIANT), "seed must be of at most 64 bits"),
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


@pytest.mark.thorough
def test_two_thousand_sizes_are_shown(tmp_path):
    """As many as are read are also drawn."""
    result = TuningResult.from_json(json.dumps(tuned(
        measurements=[measurement(n, n / 1000) for n in range(1, MOST_MEASUREMENTS + 1)]
    )))  # fmt: skip
    result.report(tmp_path / "page.html")
    result.plot(tmp_path / "curve.png")
    assert result.table().count("\n") > MOST_MEASUREMENTS


@pytest.mark.parametrize("path", ["x" * 5000 + ".html", "a\0.html", "/nothing/a.html"], ids=["long", "zero", "none"])
def test_a_page_or_picture_that_cannot_be_written_is_an_error_of_ours(path):
    """Whatever the file system says of its name."""
    result = TuningResult.from_json(json.dumps(tuned()))
    for write in (result.report, lambda to: result.plot(to.replace(".html", ".png"))):
        with pytest.raises(CubatchError) as caught:
            write(path)
        assert len(str(caught.value)) < 6000
