"""Searching curves that were measured: what is read of a result, and what an answer loses."""

from __future__ import annotations

import json

import pytest

from benchmarks.bench_measured_curves import Search, curves, lost

RATES = {1: 100.0, 8: 400.0, 16: 500.0, 32: 300.0}  # samples per second


@pytest.fixture
def result(tmp_path):
    """A result of `bench_module`, of one module."""
    path = tmp_path / "module.json"
    row = {"module": "m", "mode": "inference", "samples_per_second": {str(n): rate for n, rate in RATES.items()}}
    path.write_text(json.dumps({"rows": [row]}))
    return path


def test_a_curve_is_in_seconds_of_a_step(result):
    """Its 8 samples at 400 a second take 20 ms."""
    assert curves(result) == {"m inference": {1: 0.01, 8: 0.02, 16: 0.032, 32: pytest.approx(0.1067, rel=1e-3)}}


def test_what_an_answer_lost_is_against_the_best_of_all_sizes(result):
    """At 16 there is a peak: whoever finds it loses nothing; a budget of a step or two ends before it."""
    share, seconds = lost(Search(curves(result)["m inference"], "constant host", "0", 30.0))
    assert share <= 0.01
    assert 0 < seconds < 30
    hurried, _ = lost(Search(curves(result)["m inference"], "constant host", "0", 0.05))
    assert hurried > 0.1
