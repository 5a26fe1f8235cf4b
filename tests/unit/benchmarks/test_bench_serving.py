"""The benchmark of serving plans separates the speed of the host from the error of the queue model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.bench_serving import at_own_speed
from benchmarks.pages.serving import serving
from benchmarks.render import ROOT
from cubatch.tuning.results import TuningResult
from tests.unit.tuned import measurement, tuned


def test_a_replay_with_the_steps_of_the_server_has_its_speed():
    """Of lone requests the latency is a step of one: 10 ms were planned; the server took 15 ms before, 25 ms after."""
    result = TuningResult.from_mapping(tuned(measurements=[measurement(n, 0.01 * n) for n in (1, 2)]))
    timed = [[[seconds * n] * 3 for n in (1, 2)] for seconds in (0.015, 0.025)]
    config = {"max_batch_size": 2, "batch_wait_timeout_s": 0.0}
    own = at_own_speed(result, config, np.arange(1.0, 1001.0), timed)
    assert own["own_speed_p99"] == pytest.approx(0.025)  # half of the steps take that long
    assert (own["steps_before"], own["steps_after"]) == (pytest.approx(1.5), pytest.approx(2.5))


def test_the_page_has_both_differences():
    """Measured 30 ms are 50 % more than 20 ms at the server's speed, and 20 % more than the 25 ms of the plan."""
    result = json.loads((ROOT / "benchmarks/results/intel-xeon-2-threads/serving.json").read_text(encoding="utf-8"))
    for row in result["plans"]:
        for option in row["plan"]["options"]:
            option["load"] = {"p99": 0.025}
        row["measured"] |= {"p99": 0.03, "own_speed_p99": 0.02}
    *_, row = (line for line in serving(result).splitlines() if line.startswith("|"))
    assert [cell.strip() for cell in row.split("|") if "%" in cell] == ["+20.0 %", "+50.0 %"]
