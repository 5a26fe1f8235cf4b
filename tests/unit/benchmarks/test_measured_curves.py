"""Searching curves that were measured: what is read of a result, and what an answer loses."""

from __future__ import annotations

import json
import math
import statistics

import pytest

from benchmarks.bench_measured_curves import HOSTS, Search, curves, lost
from benchmarks.search.sessions import Scatters

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
    share, seconds = lost(Search(curves(result)["m inference"], "a host that stays", "0", 30.0))
    assert share <= 0.01
    assert 0 < seconds < 30
    hurried, _ = lost(Search(curves(result)["m inference"], "a host that stays", "0", 0.05))
    assert hurried > 0.1


def test_a_host_that_moves_misleads_some_searches_and_fewer_where_a_reference_tells(result):
    """Twelve searches lose more on a host that is 17 % slower now and then than on one that stays, or tells."""
    curve = curves(result)["m inference"]
    hosts = list(HOSTS)[:3]
    stays, moves, tells = (sum(lost(Search(curve, host, str(n), 30.0))[0] for n in range(12)) for host in hosts)
    assert stays < moves
    assert tells < moves


def test_visits_differ_and_steps_of_one_do_not():
    """Logarithms of 2000 visits have the spread asked for, within four standard errors; no step changes them."""
    scatters, met = Scatters(0.02, seed=0), []
    for _ in range(2000):
        scatters.prepare(8)
        met.append(math.log(scatters.factor()))
        scatters.spend(1.0, busy=True)
        scatters.step(8)
        assert math.log(scatters.factor()) == met[-1]
    assert statistics.stdev(met) == pytest.approx(0.02, abs=4 * 0.02 / math.sqrt(2 * len(met)))
    assert statistics.fmean(met) == pytest.approx(0.0, abs=4 * 0.02 / math.sqrt(len(met)))
