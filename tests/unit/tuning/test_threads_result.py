"""The result for several numbers of threads: the best of them, and whether to batch."""

from __future__ import annotations

import json

import pytest

import cubatch as cb
from tests.unit.tuned import about, measurement


def one(rates, *, instances, **more):
    """Return the result of one instance with these samples per second, of several that ran."""
    return cb.TuningResult.from_mapping(about(rates, environment={"instances": instances}, mode="inference", **more))


def test_rates_are_those_of_all_instances():
    """Four instances of 100 samples/s are faster than two of 150 and one of 350."""
    rates = {1: {1: 60.0, 8: 100.0}, 2: {1: 100.0, 8: 150.0}, 4: {1: 200.0, 8: 350.0}}
    result = cb.ThreadsResult(
        results={threads: one(each, instances=4 // threads) for threads, each in rates.items()}, failed={}
    )
    assert result.samples_per_second == pytest.approx({1: 400.0, 2: 300.0, 4: 350.0})
    assert result.single_samples_per_second == pytest.approx({1: 240.0, 2: 200.0, 4: 200.0})
    assert (result.threads, result.batch_size) == (1, 8)
    first, *others, gain = result.reasons
    assert first == "4 instances of 1 thread with batches of 8 reach 400 samples/s, the highest rate."
    assert "66.7 %" in gain
    assert others == [
        "That is 1.33 times the rate of 2 instances of 2 threads.",
        "That is 1.14 times the rate of 1 instance of 4 threads.",
    ]


def test_single_samples_are_recommended_where_a_batch_gains_nothing():
    """The batch size of the best number of threads is 1, also if another number has a larger one."""
    results = {1: one({1: 101.0, 8: 100.0}, instances=2), 2: one({1: 80.0, 8: 150.0}, instances=1)}
    result = cb.ThreadsResult(results=results, failed={})
    assert (result.threads, result.batch_size) == (1, 1)
    assert result.reasons[0].startswith("Do not batch: 2 instances of 1 thread reach 202 samples/s")
    written = json.loads(json.dumps(result.to_mapping()))
    assert (written["threads"], written["batch_size"], written["instances"]) == (1, 1, {"1": 2, "2": 1})


def test_a_number_without_a_recommendation_is_named_as_not_compared():
    """The rate of the other is then the highest of those that were compared, and of one instance it is singular."""
    open_ = one({8: 100.0}, instances=2, measurements=[measurement(8, status="not_run")], batch_size=None)
    first, second = cb.ThreadsResult(results={1: open_, 2: one({1: 80.0}, instances=1)}, failed={}).reasons[:2]
    assert first.startswith("Do not batch: 1 instance of 2 threads reaches 80 samples/s")
    assert first.endswith("the highest of the compared rates.")
    assert "2 instances of 1 thread" in second


def test_without_a_recommendation_there_is_no_best_number():
    """A budget that times nothing leaves no rate to compare."""
    empty = one({8: 100.0}, instances=1, measurements=[measurement(8, status="not_run")], batch_size=None)
    result = cb.ThreadsResult(results={1: empty}, failed={})
    assert (result.threads, result.batch_size) == (None, None)
    assert "budget" in result.reasons[0]
