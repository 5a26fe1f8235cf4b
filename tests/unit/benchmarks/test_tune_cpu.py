"""The benchmark of answers beside exhaustive runs: what an exhaustive run is of."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks import bench_tune_cpu


def test_an_exhaustive_run_is_of_all_sizes_whose_step_is_not_too_long(monkeypatch):
    """However far from the answer: a best size 64 times as large is found, and what would take 2.56 s is left out."""
    sizes, rates = [2, 4, 8, 128, 256], dict.fromkeys([2, 4, 8, 128], 10.0) | {128: 100.0}
    measured = [SimpleNamespace(batch_size=size, samples_per_second=100.0, reasons=()) for size in sizes]
    answer = SimpleNamespace(batch_size=2, decided_by="measured", measurements=measured)
    monkeypatch.setattr(bench_tune_cpu.cb, "autotune", lambda *_, **__: answer)
    monkeypatch.setattr(bench_tune_cpu, "in_rounds", lambda case, sizes, rounds: {n: [rates[n]] for n in sizes})
    (tuned,) = bench_tune_cpu.compare("mnist-cnn training", budget=1.0, repeats=1, rounds=1)["tuned"]
    assert tuned["best_batch_size"] == 128
    assert tuned["lost"] == 0.9
    assert 256 not in tuned["samples_per_second"]
