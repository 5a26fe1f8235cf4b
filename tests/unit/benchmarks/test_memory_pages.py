"""The benchmark of memory beside what was said of it, where a machine does not tell."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from benchmarks import bench_memory
from benchmarks.pages import memory


@pytest.fixture
def row(monkeypatch):
    """A size that a worker ran without being told what its process took."""
    monkeypatch.setattr(bench_memory, "RemoteRunner", lambda _: Mock(peak_bytes=2**20, peak_device_bytes=None))
    work = bench_memory.workload("mlp", "inference", "cpu", "auto", "sgd")
    return {"model": "mlp", "mode": "inference", **bench_memory.taken(work, 4)}


def test_a_size_whose_process_tells_nothing_has_failed_and_says_why(row):
    """No number is made up, and the other sizes go on."""
    assert "took" not in row
    assert bench_memory._line(row).endswith("FAILED: what the process takes cannot be read on this machine")


def test_a_network_whose_sizes_all_failed_is_counted_in_the_caption_alone(row):
    """There is nothing to show of it."""
    about = {"device": "Test CPU", "threads": 2, "date": "2000-01-01", "commit": "0", "optimizer": "sgd"}
    text = memory.memory({**about, "environment": {"blas": "none"}, "rows": [row]})
    assert "0 of 0 sizes within" in text
    assert "1 failed." in text
    assert "mlp" not in text
