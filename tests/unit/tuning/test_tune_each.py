"""Tuning for each of several values: shares of the budget, errors, and what an interruption leaves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import cubatch as cb
from cubatch.tuning import tune_each
from tests.unit.tuned import about


def one(rates, *, instances, **more):
    """Return the result of one instance with these samples per second, of several that ran."""
    return cb.TuningResult.from_mapping(about(rates, environment={"instances": instances}, **more))


def test_an_interruption_leaves_the_common_result_so_far(monkeypatch):
    """The number of threads that was tuned, and the one that was interrupted, with what was timed."""
    monkeypatch.setattr(tune_each.host, "cpu_threads", lambda: 4)
    stop = KeyboardInterrupt()
    stop.partial = one({8: 150.0}, instances=2, batch_size=None)

    def tune_with(*, threads, budget):
        assert budget == (20.0 if threads == 1 else 23.75)  # the first spent 12.5 s
        if threads == 2:
            raise stop
        return one({1: 100.0}, instances=4)

    with pytest.raises(KeyboardInterrupt) as caught:
        tune_each.over_threads(tune_with, (1, 2, 4), budget=60.0)
    assert isinstance(caught.value.partial, cb.ThreadsResult)
    assert caught.value.partial.samples_per_second == {1: pytest.approx(400.0)}
    assert list(caught.value.partial.results) == [1, 2]
    assert str(caught.value.partial)


def test_an_error_of_one_value_is_kept_and_of_all_is_raised():
    """The first error is raised if no value has a result."""

    def tune_one(value, _seconds):
        if value > 1:
            raise cb.NothingMeasured(str(value), "Retry.")
        return one({1: 100.0}, instances=1)

    results, failed = tune_each.tune_each([1, 2], tune_one, lambda *both: both, budget=1.0)
    assert (list(results), list(failed)) == ([1], [2])
    with pytest.raises(cb.NothingMeasured, match="2"):
        tune_each.tune_each([2, 3], tune_one, lambda *both: both, budget=1.0)


def test_what_one_value_leaves_of_the_budget_is_for_the_later_ones(monkeypatch):
    """
    Of 60 s the first uses 5 of its 15, so that 55 are left for three; the second fails after 1 s of its 18.3.

    The third fails after longer than its 27 s, and the last has what is left.
    """
    shares, failing, clock = [], {2: 1.0, 3: 40.0}, [0.0]
    monkeypatch.setattr(tune_each, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def tune_one(value, seconds):
        shares.append(seconds)
        if value in failing:
            clock[0] += failing[value]
            raise cb.NothingMeasured(str(value), "Retry.")
        return one({1: 100.0}, instances=1, seconds_spent=5.0)

    tune_each.tune_each([1, 2, 3, 4], tune_one, lambda *both: both, budget=60.0)
    assert shares == pytest.approx([15.0, 55 / 3, 54 / 2, 54 / 2])


def test_what_the_largest_extent_leaves_is_for_the_smaller_ones(monkeypatch):
    """The largest is tuned first and does not fit: both others have half of the budget, in ascending order."""
    shares = {}

    def autotune(_path, *, budget, library, dims):
        assert library == "onnxruntime"
        shares[dims["sequence"]] = budget
        if dims["sequence"] == 512:
            raise cb.DoesNotFit("model.onnx", "cpu", 2**31, 2**30, "inference")
        return one({1: 100.0}, instances=1, seconds_spent=budget)

    monkeypatch.setattr(tune_each, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(tune_each.tune, "autotune", autotune)
    result = tune_each.autotune_extents("model.onnx", {"sequence": (32, 512, 128)}, budget=60.0)
    assert (list(result.results), list(result.failed)) == ([32, 128], [512])
    assert shares == {512: 20.0, 128: 30.0, 32: 30.0}
