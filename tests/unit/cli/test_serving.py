"""`cubatch serving`."""

from __future__ import annotations

import functools
import json

import pytest

import cubatch as cb
from cubatch.serving import serving_plan
from tests.unit.tuned import about, measurement, tuned


@pytest.fixture
def few_requests(monkeypatch):
    """A tenth of the requests: a command's plan needs not be exact, but that of Python."""
    monkeypatch.setattr(serving_plan, "_REQUESTS", 2000)


@pytest.fixture
def result(tmp_path):
    """Return the path of a tuning result of inference."""
    path = tmp_path / "result.json"
    sizes = [measurement(n, 0.004 + 0.0005 * n) for n in (1, 4, 16)]
    path.write_text(json.dumps(tuned(mode="inference", measurements=sizes)), encoding="utf-8")
    return str(path)


@pytest.mark.usefixtures("few_requests")
def test_table_json_and_settings_have_the_same_plan(run, result, monkeypatch, tmp_path):
    """Each maximum batch size has a line, the first sentence the planned one; of a server stdout has its settings."""
    monkeypatch.setattr(serving_plan, "serving_plan", functools.cache(serving_plan.serving_plan))
    options = ["serving", result, "--arrival-rate", "300", "--p99", "0.05", "--price", "2"]
    code, out, _ = run(*options)
    plan = json.loads(run(*options, "--json", "-")[1])
    assert code == 0
    assert [option["max_batch_size"] for option in plan["options"]] == [1, 4, 16]
    assert f"batches of at most {plan['max_batch_size']}" in out
    assert plan["cost_per_million_requests"] == pytest.approx(2 * plan["instances"] / 3600 / 300 * 1e6)
    for server in ("triton", "ray-serve", "bentoml", "torchserve"):
        path = tmp_path / f"{server}.json"
        code, out, _ = run(*options, "--server", server, "--json", str(path))
        plan = json.loads(path.read_text())
        assert code == 0
        assert str(plan["max_batch_size"]) in out
        assert plan["closes_while_busy"] == (server == "ray-serve")
        assert "p95" not in out
    code, out, _ = run(*options, "--server", "triton", "--json", "-")
    assert (code, json.loads(out)["arrival_rate"]) == (0, 300.0)


@pytest.mark.usefixtures("few_requests")
def test_a_prediction_is_the_latency_curve_of_a_plan(run, tmp_path):
    """Its times are those of the plan in Python, which is marked as predicted; several devices are refused."""
    single, several = str(tmp_path / "t4.json"), str(tmp_path / "several.json")
    model = ["predict", "resnet18", "--batch-sizes", "1,2,4"]
    assert run(*model, "--device", "t4", "--json", single)[0] == 0
    assert run(*model, "--devices", "t4,a10", "--json", several)[0] == 0
    limits = ["--arrival-rate", "20", "--p99", "1.0"]
    code, out, _ = run("serving", single, *limits, "--json", "-")
    in_python = cb.serving_plan(cb.predict("resnet18", device="t4", batch_sizes=[1, 2, 4]), arrival_rate=20.0, p99=1.0)
    assert code == 0
    assert json.loads(out) == in_python.to_mapping()
    assert in_python.predicted
    code, _, err = run("serving", several, *limits)
    assert code == 1
    assert "--device" in err


def test_of_several_numbers_of_threads_the_best_is_planned_with(run, tmp_path):
    """The plan has its instances, and says that so many were timed; more of them need another machine."""
    path = tmp_path / "threads.json"
    each = {
        threads: cb.TuningResult.from_mapping(
            about(rates, mode="inference", environment={"instances": 2 // threads, "threads": threads})
        )
        for threads, rates in ((1, {1: 100.0, 8: 160.0}), (2, {1: 110.0, 8: 170.0}))
    }
    path.write_text(json.dumps(cb.ThreadsResult(results=each, failed={}).to_mapping()), encoding="utf-8")
    code, out, _ = run("serving", str(path), "--arrival-rate", "100", "--p99", "0.5", "--json", "-")
    plan = json.loads(out)
    assert code == 0
    assert (plan["instances"], plan["threads"], plan["timed_instances"]) == (2, 1, 2)
    assert plan["reasons"][0].startswith("2 instances of 1 thread with batches of at most 8")
    assert [option["max_batch_size"] for option in plan["options"]] == [1, 8]
    assert plan == cb.serving_plan(cb.ThreadsResult(results=each, failed={}), arrival_rate=100, p99=0.5).to_mapping()
    code, _, err = run("serving", str(path), "--arrival-rate", "1000", "--p99", "0.5")
    assert code == 2
    assert "machines" in err
    more = cb.serving_plan(str(path), arrival_rate=300, p99=0.5, instances=3)
    assert any("2 such instances at the same time: more need another machine" in each for each in more.reasons)


def test_threads_without_a_recommendation_are_refused(run, tmp_path):
    """There is no best number of threads, in the file and in the result."""
    path = tmp_path / "threads.json"
    empty = cb.TuningResult.from_mapping(
        about(
            {8: 100.0}, environment={"instances": 1}, measurements=[measurement(8, status="not_run")], batch_size=None
        )
    )
    result = cb.ThreadsResult(results={1: empty}, failed={})
    path.write_text(json.dumps(result.to_mapping()), encoding="utf-8")
    code, _, err = run("serving", str(path), "--arrival-rate", "1", "--p99", "0.5")
    assert code == 1
    assert "larger budget" in err
    with pytest.raises(cb.InvalidArgument, match="larger budget"):
        cb.serving_plan(result, arrival_rate=1, p99=0.5)


def test_a_result_at_several_extents_is_refused(run, tmp_path):
    """A plan is for one extent; the message names the option of the command that wrote the file."""
    path, tuned_once = tmp_path / "extents.json", cb.TuningResult.from_mapping(about({8: 100.0}, mode="inference"))
    result = cb.ExtentsResult(axis="sequence", results={64: tuned_once}, failed={})
    path.write_text(json.dumps(result.to_mapping()), encoding="utf-8")
    code, _, err = run("serving", str(path), "--arrival-rate", "1", "--p99", "0.5")
    assert code == 1
    assert "--dim" in err


def test_a_limit_that_no_request_keeps_is_refused(run, result):
    """The message names the option and the time of a step."""
    code, _, err = run("serving", result, "--arrival-rate", "300", "--p99", "0.001")
    assert code == 2
    assert "--p99" in err
    assert "4.50 ms" in err
