"""`cubatch serving`."""

from __future__ import annotations

import functools
import json

import pytest

import cubatch as cb
from cubatch.serving import serving_plan
from tests.unit.tuned import measurement, tuned


@pytest.fixture
def result(tmp_path):
    """Return the path of a tuning result of inference."""
    path = tmp_path / "result.json"
    sizes = [measurement(n, 0.004 + 0.0005 * n) for n in (1, 4, 16)]
    path.write_text(json.dumps(tuned(mode="inference", measurements=sizes)), encoding="utf-8")
    return str(path)


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


def test_a_limit_that_no_request_keeps_is_refused(run, result):
    """The message names the option and the time of a step."""
    code, _, err = run("serving", result, "--arrival-rate", "300", "--p99", "0.001")
    assert code == 2
    assert "--p99" in err
    assert "4.50 ms" in err
