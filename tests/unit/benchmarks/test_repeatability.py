"""The benchmark of repeatability: the JSON of a small workload, its continuation, and figures of planted numbers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks import bench_repeatability as bench
from benchmarks.repeatability import paired_judge, workloads
from benchmarks.repeatability.finder_runs import LIGHTNING, OURS, POWERS


class VirtualHost:
    """A workload on a virtual clock, on a host that becomes slower: a step of n samples takes (4 + n) milliseconds."""

    def __init__(self):
        self.seconds, self.tuned = 0.0, 0

    def now(self):
        return self.seconds

    def tune(self, budget):
        """Recommend 32, then 48, then 32, each at its true rate."""
        self.tuned += 1
        size = 48 if self.tuned == 2 else 32
        measured = SimpleNamespace(batch_size=size, samples_per_second=size / (4e-3 + 1e-3 * size))
        return SimpleNamespace(
            batch_size=size, measurements=[measured], seconds_spent=4.0, decided_by="peak", disturbed=False,
            limits={"max_batch_size": 64}, largest_batch_size=None,
        )  # fmt: skip

    def build(self):
        def step():
            self.seconds += 1e-3 * (4 + stepper.size) * (1 + 1e-3 * self.seconds)

        stepper = SimpleNamespace(step=step, prepare=lambda n: setattr(stepper, "size", n))
        return stepper


@pytest.fixture
def host(monkeypatch):
    host = VirtualHost()
    work = workloads.Workload(mode="inference", tune=host.tune, build=host.build, max_batch_size=64)
    monkeypatch.setitem(workloads.WORKLOADS, "virtual", work)
    monkeypatch.setattr(workloads, "now", host.now)
    monkeypatch.setattr(workloads, "bound_memory", lambda: None)
    monkeypatch.setattr(bench, "in_fresh_process", lambda *task: json.loads(json.dumps(bench._do(*task))))
    return host


def run_benchmark(path, runs):
    bench.main(["--json", str(path), "--workloads", "virtual", "--runs", str(runs), "--judge-seconds", "1"])
    return json.loads(path.read_text(encoding="utf-8"))


def test_json_has_runs_samples_and_summary(host, tmp_path):
    """Both finders run in turns, and the judge times the sizes that they recommended."""
    content = run_benchmark(tmp_path / "file.json", 2)
    assert {"benchmark", "date", "commit", "device", "environment", "source", "busy", "goals"} <= content.keys()
    (case,) = content["workloads"]
    assert [(run["finder"], run["run"]) for run in case["runs"]] == [
        (OURS, 0), (POWERS, 0), (LIGHTNING, 0), (POWERS, 1), (OURS, 1),
    ]  # fmt: skip
    assert [run["batch_size"] for run in case["runs"]] == [32, 64, 64, 64, 48]
    assert [row["batch_size"] for row in case["sizes"]] == [16, 24, 32, 48, 64]
    assert case["judge"]["rounds"] >= paired_judge.JUDGES * paired_judge.MIN_ROUNDS
    assert all(len(taken) == case["judge"]["rounds"] for taken in case["judge"]["samples"].values())
    ours = case["summary"][0]
    assert ours["batch_sizes"] == [32, 48]
    assert ours["losses"] == pytest.approx([1 - (32 / 36) / (64 / 68), 1 - (48 / 52) / (64 / 68)], abs=2e-3)


def test_a_second_call_adds_only_missing_runs(host, tmp_path):
    """The judge measures again only if there are new runs."""
    first = run_benchmark(tmp_path / "file.json", 2)
    again = run_benchmark(tmp_path / "file.json", 2)
    assert again == first
    assert host.tuned == 2
    more = run_benchmark(tmp_path / "file.json", 3)
    assert host.tuned == 3
    assert more["workloads"][0]["runs"][:5] == first["workloads"][0]["runs"]


def test_a_file_of_another_budget_is_refused(host, tmp_path):
    """Runs under different conditions are not mixed."""
    run_benchmark(tmp_path / "file.json", 1)
    with pytest.raises(SystemExit, match="differs in budget_seconds"):
        bench.main(["--json", str(tmp_path / "file.json"), "--workloads", "virtual", "--budget", "5"])
