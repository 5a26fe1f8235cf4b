"""Benchmarks beside PyTorch whose figures are only measured now and then: what they run, and that it runs."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from cubatch.network import models

pytest.importorskip("torch")
from benchmarks import bench_engine_cpu, bench_module_memory, bench_page_faults


def test_page_faults_of_a_module_are_read(monkeypatch):
    """A visit, though of no time at all, is some steps of a size."""
    monkeypatch.setattr(bench_page_faults, "SECONDS", 0.0)
    read = bench_page_faults.read_all("encoder", "inference", [1])
    assert [visit["batch_size"] for visit in read["visits"]] == [1]
    assert read["visits"][0]["seconds"] > 0
    assert read["peak_bytes"] > 0


def test_training_that_is_timed_learns_nothing_on_either_side():
    """The rate is 0 as PyTorch's is: on random data the loss would run away, and with it how long a step takes."""
    step = bench_engine_cpu.contender("cubatch", models.build("mnist-cnn"), "training", 4, 1)
    model = step.__self__
    before = {name: dict(arrays) for name, arrays in model.trained().weights.items()}
    for _ in range(3):
        step()
    for layer, arrays in model.trained().weights.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, before[layer][name], err_msg=f"{layer}.{name}")


def test_a_module_whose_memory_no_machine_tells_has_no_score_but_a_reason(monkeypatch):
    """Its steps ran, and none of them has said what it took."""
    told = {"look": {"first": 2**20, "largest": 8, "why_not": None}, "history": []}
    runner = Mock(call=lambda name, **_: told[name])
    monkeypatch.setattr(bench_module_memory, "opened", lambda *_: runner)
    row = bench_module_memory.score("encoder", "inference", "cpu", 2**20)
    runner.prepare.assert_called_once_with(8)
    assert row["why_not"] == "what its steps take cannot be read on this machine"
    bench_module_memory.main(["--modules", "encoder"])
