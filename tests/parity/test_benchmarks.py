"""Benchmarks beside PyTorch whose figures are only measured now and then: what they run, and that it runs."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from benchmarks import bench_page_faults


def test_page_faults_of_a_module_are_read(monkeypatch):
    """A visit, though of no time at all, is some steps of a size."""
    monkeypatch.setattr(bench_page_faults, "SECONDS", 0.0)
    read = bench_page_faults.read_all("encoder", "inference", [1])
    assert [visit["batch_size"] for visit in read["visits"]] == [1]
    assert read["visits"][0]["seconds"] > 0
    assert read["peak_bytes"] > 0
