"""Records check themselves, and a tuning result survives its JSON unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from cubatch.errors import InvalidArgument, InvalidData
from cubatch.measure.goal import OBJECTIVES, Goal
from cubatch.measure.records import (
    STATUSES,
    Keeper,
    Measured,
    Outcome,
    Recorder,
    Timing,
)
from cubatch.tuning.results import DECIDED_BY, Measurement, TuningResult

positive = st.floats(min_value=1e-12, max_value=1e12)
maybe = st.none() | positive
whole, sizes = st.integers(1, 2**50), st.integers(1, 2**31 - 1)
mappings = st.dictionaries(
    st.text(max_size=5), st.none() | positive | whole | st.text(max_size=5) | st.lists(whole, max_size=2), max_size=3
)
intervals = st.none() | st.tuples(positive, positive).map(sorted).map(tuple)
measurements = st.builds(
    Measurement,
    batch_size=sizes,
    status=st.sampled_from(STATUSES),
    reasons=st.lists(st.text(max_size=8), max_size=2),
    latency_seconds=maybe,
    latency_interval=intervals,
    samples_per_second=maybe,
    throughput_interval=intervals,
    timings_seconds=st.lists(positive, max_size=3),
    timings_rounds=st.none() | st.lists(st.integers(0, 99), max_size=3),
    stop_reason=st.text(max_size=8),
    throttled=st.integers(0, 9),
    joules_per_sample=maybe,
    peak_bytes=st.none() | whole,
    layers=st.lists(mappings, max_size=2),
)
results = st.builds(
    TuningResult,
    created=st.none() | st.text(max_size=5),
    spec=st.none() | mappings,
    input_shape=st.none() | st.lists(whole, max_size=3),
    objective=st.sampled_from(OBJECTIVES),
    tolerance=st.floats(0, 0.99),
    recompute=st.none() | st.booleans(),
    limits=mappings,
    seed=st.none() | st.integers(0, 2**64 - 1),
    l2=st.sampled_from(("cold", "warm", None)),
    device=mappings,
    environment=mappings,
    batch_size=st.none() | sizes,
    fastest_batch_size=st.none() | sizes,
    largest_batch_size=st.none() | sizes,
    largest_measured=st.none() | sizes,
    tied_with=st.lists(sizes, max_size=3),
    decided_by=st.sampled_from((*DECIDED_BY, None)),
    reasons=st.lists(st.text(max_size=8), max_size=2),
    measurements=st.lists(measurements, max_size=2, unique_by=lambda one: one.batch_size),
)


def a_result(**changes: Any) -> TuningResult:
    """Give a small result."""
    facts: dict[str, Any] = {
        "objective": "throughput", "tolerance": 0.01, "limits": {}, "device": {"name": "a GPU"}, "environment": {},
        "batch_size": 32, "fastest_batch_size": 64, "largest_batch_size": 64, "largest_measured": 64, "tied_with": [],
        "decided_by": "plateau", "reasons": ["why"],
        "measurements": [Measurement(batch_size=32, status="ok", latency_seconds=0.5, samples_per_second=64.0)],
    }  # fmt: skip
    return TuningResult(**facts | changes)


@given(results)
def test_a_result_survives_its_json_unchanged(result: TuningResult) -> None:
    """Every field, number and nested mapping comes back equal, and no NaN is ever written."""
    text = result.to_json()
    assert TuningResult.from_json(text) == result
    assert TuningResult.from_json(text).to_json() == text
    assert json.loads(text, parse_constant=pytest.fail) == result.to_mapping()


def test_unknown_keys_are_passed_over() -> None:
    """Adding a key keeps the schema, so a result of a later version reads here."""
    data = a_result().to_mapping() | {"added_later": 1}
    data["measurements"][0]["added_later"] = 2
    assert TuningResult.from_json(json.dumps(data)) == a_result()


def test_results_of_before_keys_were_added_still_load() -> None:
    """A file of the same schema without what an older version did not write reads as if that were unknown."""
    data = {key: value for key, value in a_result().to_mapping().items() if value is not None}
    data["measurements"] = [{key: value for key, value in each.items() if value} for each in data["measurements"]]
    assert TuningResult.from_json(json.dumps(data)) == a_result()


def rated(rates: dict[int, float], answer: int | None, **statuses: str) -> TuningResult:
    found = [
        Measurement(batch_size=n, status=statuses.get(f"of_{n}", "ok"), samples_per_second=rate)
        for n, rate in rates.items()
    ]
    return a_result(batch_size=answer, measurements=found)


def test_choices_are_apart_cost_little_and_hold_the_answer() -> None:
    """Of a plateau from 64 on: the answer, the fastest, others between; 60 and 500 are like neighbours, 8 is slow."""
    rates = {8: 400.0, 60: 960.0, 64: 970.0, 128: 980.0, 500: 990.0, 512: 1000.0, 1024: 960.0}
    result = rated(rates, 64)
    assert result.choices() == pytest.approx({64: 0.03, 128: 0.02, 512: 0.0, 1024: 0.04})
    assert list(result.choices(within=0.025)) == [64, 128, 512], "64 costs 3 %, and is the answer"
    assert result.choices(within=0.7)[8] == pytest.approx(0.6)


def test_the_answer_is_a_choice_whatever_it_costs() -> None:
    """By latency 1 sample in 1 ms is the answer, 64 in 10 ms the fastest: 1000 of 6400 samples/s, so 27/32 are lost."""
    result = rated({1: 1000.0, 64: 6400.0}, 1)
    assert result.choices() == pytest.approx({1: 27 / 32, 64: 0.0})


def test_what_broke_a_limit_or_never_ran_is_no_choice() -> None:
    """Its rate, or the lack of one, counts for nothing."""
    result = rated({32: 900.0, 64: 1000.0, 128: 2000.0}, 64, of_128="over_limit")
    assert result.choices(within=0.2) == pytest.approx({32: 0.1, 64: 0.0})
    assert a_result(batch_size=None, measurements=[Measurement(batch_size=8, status="interrupted")]).choices() == {}
    assert rated({1: 2.0}, None).choices() == {}, "compared with no other size"


@pytest.mark.parametrize("within", [-0.1, 1, 1.0, True, "0.05", None, float("nan")])
def test_a_share_that_makes_no_sense_is_refused(within: Any) -> None:
    """Named with its value."""
    with pytest.raises(InvalidArgument, match="within"):
        a_result().choices(within=within)


def changed(**changes: Any) -> str:
    """Return the JSON of a result with other values."""
    return json.dumps(a_result().to_mapping() | changes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *((text, None) for text in ("{", "[]", b"\xff\xfe", "[" * 100_000, "{}", None)),
        *((changed(schema=schema), f"schema must be 1, got {schema!r}") for schema in (0, 2, "1", None)),
        (a_result().to_json().replace('"latency_seconds": 0.5', '"latency_seconds": NaN'), "NaN is no JSON number"),
        (changed(batch_size=32.5), "batch_size"), (changed(tolerance="small"), "tolerance"),
        (changed(objective="speed"), "objective"), (changed(recompute=1), "recompute"),
        (changed(limits=None), "limits"), (changed(tied_with=3), "tied_with"), (changed(reasons="why"), "reasons"),
        (changed(measurements={}), "measurements"), (changed(measurements=[1]), "measurements"),
        (changed(created=5), "created"),
        (changed(limits={"memory_bytes": "a lot"}), "limits holds memory_bytes, which must be a number"),
        (changed(limits={"latency_seconds": []}), "latency_seconds"), (changed(limits={"max_batch_size": 0}), "limits"),
        (changed(device={"memory_bytes": {}}), "memory_bytes"), (changed(device={"free_bytes": [1]}), "free_bytes"),
        (changed(device={"compute_capability": 9}), "device holds compute_capability, which must be a list"),
        (changed(environment={"launch": "graph"}), "environment holds launch, which must be a mapping"),
        (changed(environment={"launch": {"graph": True}}), "launch, which lacks launches, refusal"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_is_no_result_is_invalid_data(text: str | bytes, reason: str | None) -> None:
    """Broken JSON, another schema, NaN and values that a field must not hold: the file and the field are named."""
    with pytest.raises(InvalidData, match=reason) as caught:
        TuningResult.from_json(text, source="old.json")
    assert caught.value.path == "old.json"


@pytest.mark.parametrize("kind", [TuningResult, Measurement])
def test_a_missing_key_is_named_with_its_place(kind: type) -> None:
    """Of a result or one of its measurements, whichever was cut short; keys that have a default are not needed."""
    place = "measurements[0]." if kind is Measurement else ""
    for attribute in attrs.fields(kind):  # type: ignore[arg-type]
        if attribute.default is attrs.NOTHING:
            data = a_result().to_mapping()
            del (data["measurements"][0] if place else data)[attribute.name]
            with pytest.raises(InvalidData, match=re.escape(f"{place}{attribute.name} is missing")):
                TuningResult.from_json(json.dumps(data))


def test_a_record_refuses_nan_when_it_is_made() -> None:
    """So that writing a result never fails."""
    with pytest.raises(ValueError, match="must be finite"):
        a_result(measurements=[Measurement(batch_size=1, status="ok", latency_seconds=float("nan"))])


def test_costs_are_less_for_better() -> None:
    """0.5 s and 4 J for 32 samples: seconds per sample, seconds, joules per sample; no joules, no cost."""
    costs = [Goal(objective=objective).cost(32, seconds=0.5, joules=4.0) for objective in OBJECTIVES]
    assert costs == [0.5 / 32, 0.5, 4.0 / 32]
    assert Goal(objective="energy").cost(32, seconds=0.5, joules=None) is None


def test_an_allowed_cost_is_the_tolerance_of_the_contract() -> None:
    """Throughput may fall to 80 %, so a sample may cost 1 / 0.8; latency may rise to 120 %."""
    assert Goal(tolerance=0.2).allowed(1.0) == pytest.approx(1.25)
    assert Goal(objective="latency", tolerance=0.2).allowed(1.0) == pytest.approx(1.2)


def test_a_recorder_remembers_and_passes_on() -> None:
    """What was known, what is added and what replaces an outcome are all in `measured`; the next keeper hears all."""
    heard: list[object] = []

    @attrs.define
    class Listener:
        def timing(self, timing: Timing) -> None:
            heard.append(timing)

        def outcome(self, outcome: Outcome) -> None:
            heard.append(outcome)

        def spent(self, seconds: float) -> None:
            heard.append(seconds)

    listener: Keeper = Listener()
    first, second = Timing(batch_size=8, round=1, seconds=1.0), Timing(batch_size=8, round=0, seconds=2.0)
    recorder = Recorder(Measured(timings=(first,), outcomes=(Outcome(8, "interrupted"),), seconds_spent=3.0), listener)
    recorder.timing(second)
    recorder.outcome(Outcome(8, "ok"))
    recorder.spent(4.0)
    assert recorder.measured == Measured(timings=(first, second), outcomes=(Outcome(8, "ok"),), seconds_spent=4.0)
    assert recorder.measured.of(8) == (second, first)
    assert heard == [second, Outcome(8, "ok"), 4.0]


def test_a_result_can_be_a_key() -> None:
    """Equal results have equal hashes, whatever mappings they hold."""
    result = a_result()
    assert {result: "kept"}[TuningResult.from_json(result.to_json())] == "kept"
    assert len({*result.measurements, *result.measurements}) == len(result.measurements)


def test_a_report_that_cannot_be_written_names_its_path(tmp_path: Path) -> None:
    """A folder that is not there is no page's place, and none is made."""
    path = tmp_path / "gone" / "page.html"
    with pytest.raises(InvalidArgument, match=r"page.html.*No such file"):
        a_result().report(path)
    assert not path.parent.exists()


@pytest.mark.parametrize("path", [None, b"page.html"], ids=repr)
def test_a_place_that_is_no_path_is_an_invalid_argument(path: Any) -> None:
    """Of a figure and of a page."""
    for write in (a_result().plot, a_result().report):
        with pytest.raises(InvalidArgument, match="path"):
            write(path)
