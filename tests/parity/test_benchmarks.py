"""Benchmarks beside PyTorch whose figures are only measured now and then: what they run, and that it runs."""

from __future__ import annotations

import importlib
import json
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")
from benchmarks import bench_footprint, bench_loops  # noqa: E402
from benchmarks.pages import modules  # noqa: E402
from benchmarks.predictor import score_memory  # noqa: E402


def test_a_loop_is_run_without_cubatch_at_the_sizes_of_each_rule():
    row = bench_loops.run_plain("mlp", recommended=24, largest=9, budget=0.5, seconds=0.01, rounds=2)
    turns = {int(n): each for n, each in row["turns"].items()}
    assert set(turns) == {1, 2, 4, 8, 24, row["lightning"], row["timed_once"]}
    assert len(turns[24]) == 2
    assert all(samples % n == 0 < seconds for n, each in turns.items() for samples, seconds in each)


def test_a_loop_is_tuned_as_its_user_would():
    """On a busy machine there may be no recommendation within the budget, which is recorded."""
    row = bench_loops.tune("mlp", budget=3.0)
    assert row["wall_seconds"] > 0
    assert row["measured"]
    assert (row["recommended"] is None) == bool(row["error"])


def test_only_loops_that_failed_are_measured_again(tmp_path, monkeypatch):
    asked = []

    def ask(task, name, **_):
        asked.append((task, name))
        tuned = {"recommended": 8, "largest_measured": 8, "reported": 1.0, "wall_seconds": 1.0, "error": ""}
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


VRAMEXP = """model,batch,peak_allocated_MiB,reserved_MiB,nvml_device_used_after_MiB
ResNet-50 (10 classes),4,2100,2200,4300
UNETR (MONAI),4,100,200,4300
"""
GPUMEMNET = """model,batch,measured_max_gpu_mem_MiB,flag
vgg16,8,4425,
vgg16,16,5209,
vgg16_bn,128,39369,near a 40 GB ceiling
unknown,8,4425,
"""


def test_published_memory_is_of_known_models_without_flags(tmp_path, monkeypatch):
    """What tensors get is less than what is reserved, without the context; earlier models' tensors count in neither."""
    (tmp_path / "memory_vramexp_measured.csv").write_text(VRAMEXP)
    (tmp_path / "memory_gpumemnet_timm_measured.csv").write_text(GPUMEMNET)
    net = Mock(side_effect=lambda **_: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 224 * 224, 10)))
    monkeypatch.setattr(score_memory.zoo, "torchvision_package", lambda: Mock(models=Mock(resnet50=net, vgg16=net)))
    allocated, reserved, process = score_memory.rows(tmp_path)
    assert [each["counted"] for each in (allocated, reserved, process)] == ["allocated", "reserved", "process"]
    weights = 4 * (3 * 224 * 224 * 10 + 10) / 2**20  # of the 1141.6 MiB that were held before, the rest is of others
    assert [each["measured"] + 1141.6 - weights for each in (allocated, reserved)] == pytest.approx([2100.0, 2200.0])
    assert process["measured"] == 4425.0
    assert allocated["predicted"] < reserved["predicted"] < process["predicted"]
    assert net.call_args_list[0].kwargs == {"num_classes": 10}
    text = modules.published_memory({"date": "", "commit": "", "torch": "", "rows": [allocated, reserved, process]})
    assert f"{allocated['predicted'] / allocated['measured'] - 1:+.1%}".replace("%", " %") in text


def test_recorded_allocations_are_replayed():
    """A segment of 20 MiB holds two of 9 MiB; a freed one is used again; ends of what began before do not count."""
    record = [
        {"action": "free_completed", "addr": 1, "size": 4},
        *({"action": "alloc", "addr": address, "size": 9 * 2**20} for address in (2, 3)),
        {"action": "segment_alloc", "addr": 9, "size": 20 * 2**20},
        {"action": "free_requested", "addr": 2, "size": 9 * 2**20},
        {"action": "free_completed", "addr": 2, "size": 9 * 2**20},
        {"action": "alloc", "addr": 4, "size": 9 * 2**20},
    ]
    assert bench_footprint.replay(record) == 20 * 2**20
    assert bench_footprint.replay(record[:-2] + record[-1:]) == 40 * 2**20
