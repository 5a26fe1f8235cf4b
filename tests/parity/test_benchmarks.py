"""Benchmarks beside PyTorch whose figures are only measured now and then: what they run, and that it runs."""

from __future__ import annotations

import importlib
import json

import pytest

torch = pytest.importorskip("torch")
from benchmarks import bench_loops  # noqa: E402


def test_a_loop_is_run_without_cubatch_at_the_sizes_of_each_rule():
    row = bench_loops.run_plain("mlp", recommended=24, largest=9, budget=0.5, seconds=0.01, rounds=2)
    turns = {int(n): each for n, each in row["turns"].items()}
    assert set(turns) == {1, 2, 4, 8, 24, row["lightning"], row["timed_once"]}
    assert len(turns[24]) == 2
    assert all(samples % n == 0 < seconds for n, each in turns.items() for samples, seconds in each)


def test_a_loop_is_tuned_as_its_user_would():
    """On a busy machine there may be no recommendation within the budget, which is recorded."""
    row = bench_loops.tune("mlp", budget=3.0, seconds=0.01, rounds=2)
    assert row["wall_seconds"] > 0
    assert row["measured"]
    assert (row["recommended"] is None) == bool(row["error"])
    assert len(row["turns_after"]) == (0 if row["error"] else 2)


def test_only_loops_that_failed_are_measured_again(tmp_path, monkeypatch):
    asked = []

    def ask(task, name, **_):
        asked.append((task, name))
        tuned = {"recommended": 8, "largest_measured": 8, "reported": 1.0, "wall_seconds": 1.0, "error": ""}
        tuned["turns_after"] = [[8, 1.0]]
        run = {"lightning": 8, "timed_once": 8, "turns": {"8": [[8, 1.0]]}}
        return {"error": "tune: KeyError"} if name == "gan" else tuned if task == "tune" else run

    file = tmp_path / "loops.json"
    monkeypatch.setattr(bench_loops, "in_fresh_process", ask)
    for _ in range(2):
        bench_loops.main(["--loop", "gan", "mlp", "--out", str(file)])
    assert asked == [("tune", "gan"), ("tune", "mlp"), ("plain", "mlp"), ("tune", "gan")]
    rows = json.loads(file.read_text())["loops"]
    assert [(row["loop"], row["error"]) for row in rows] == [("mlp", ""), ("gan", "tune: KeyError")]


def test_every_loop_of_the_list_exists():
    for name, module in bench_loops.LOOPS.items():
        if module != "trainer_loops":  # Lightning and Transformers need not be installed
            assert callable(getattr(importlib.import_module(f"benchmarks.loops.{module}"), name))
