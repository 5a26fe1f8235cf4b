"""autotune_threads(): instances bound to CPUs, of an ONNX file and of a named module."""

from __future__ import annotations

import json
import os

import pytest

torch = pytest.importorskip("torch")

import cubatch as cb  # noqa: E402
from cubatch.hardware import host  # noqa: E402
from tests.parity import named_modules  # noqa: E402
from tests.parity.onnx_files import SHAPE, Small, export  # noqa: E402
from tests.unit.commands import in_process  # noqa: E402

CPUS = host.cpu_threads()
ASKED = {"batch_sizes": [1, 4], "budget": 4.0 * CPUS, "store": False}


def test_an_onnx_file_runs_in_as_many_instances_as_the_cpus_allow(tmp_path, monkeypatch, capfd):
    """Also by the command, which chooses the library by the model, with the same numbers of threads and instances."""
    pytest.importorskip("onnxruntime")
    path = str(export(Small(), tmp_path / "small.onnx", torch.randn(2, *SHAPE)))
    result = cb.autotune_threads(path, sorted({1, CPUS}), **ASKED)
    assert result.failed == {}
    assert result.instances == {1: CPUS, CPUS: 1}
    for threads, tuned in result.results.items():
        assert tuned.device["threads"] == threads
        assert result.samples_per_second[threads] == result.instances[threads] * tuned.samples_per_second
    tune = in_process(monkeypatch, capfd, "tune", path, "--threads", "1", "--no-store")
    code, out, _ = tune("--batch-sizes", "1,4", "--budget", "4", "--json", "-")
    assert code == 0
    assert json.loads(out)["instances"] == {"1": CPUS}
    code, _, err = tune("--plot", "curve.png")
    assert code == 2
    assert "--plot" in err
    code, _, err = tune("--objective", "latency")
    assert code == 2
    assert "--objective" in err
    module = in_process(monkeypatch, capfd, "tune", "tests.parity.named_modules:bound", "--threads", "1")
    code, _, err = module("--recompute")
    assert code == 2
    assert "--library torch" in err


def test_instances_of_a_module_step_in_processes_of_their_own(tmp_path, monkeypatch):
    """Each has its CPUs to itself and as many threads, and all step the same sizes."""
    monkeypatch.setenv(named_modules.PLACE, str(tmp_path))
    result = cb.autotune_threads("tests.parity.named_modules:bound", (1,), batches=(3, 8, 8), **ASKED)
    assert result.failed == {}
    facts = [json.loads(line) for line in (tmp_path / "bound").read_text().splitlines()]
    assert sorted(each["cpus"] for each in facts) == [[cpu] for cpu in sorted(os.sched_getaffinity(0))[:CPUS]]
    assert {each["threads"] for each in facts} == {1}
    stepped = {tuple(map(int, line.split())) for line in (tmp_path / "calls").read_text().splitlines()}
    measured = [n for n, m in result.results[1].sizes.items() if m.is_measured]
    assert measured  # a busy host may leave time for one size
    assert {(each["pid"], n) for each in facts for n in measured} <= stepped


@pytest.mark.parametrize(
    ("module", "threads", "given", "field"),
    [
        (Small(), (1,), {}, "module"),
        ("mlp", (1,), {}, "module"),
        ("tests.parity.named_modules:small", (CPUS + 1,), {"batches": SHAPE}, "threads"),
        ("tests.parity.named_modules:small", (), {"batches": SHAPE}, "threads"),
        ("tests.parity.named_modules:small", 1, {"batches": SHAPE}, "threads"),
        ("model.onnx", (1,), {"batches": SHAPE}, "batches"),
        ("model.onnx", (1,), {"library": "torch"}, "library"),
        ("model.onnx", (CPUS + 1,), {"library": "onnxruntime"}, "threads"),
        ("tests.parity.named_modules:small", (CPUS + 1,), {"batches": SHAPE, "library": "torch"}, "threads"),
        ("model.onnx", (1,), {"objective": "latency"}, "objective"),
        ("tests.parity.named_modules:small", (1,), {"batches": SHAPE, "objective": "energy"}, "objective"),
    ],
)
def test_an_argument_out_of_range_is_named(module, threads, given, field):
    """The error comes before anything is built."""
    with pytest.raises(cb.InvalidArgument) as refused:
        cb.autotune_threads(module, threads, **given)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("tune", "name", "near"),
    [
        (lambda **more: cb.autotune_threads("model.onnx", (1,), **more), "max_batch", "max_batch_size"),
        (lambda **more: cb.autotune_threads("m:build", (1,), batches=SHAPE, **more), "sequence", "arguments"),
        (lambda **more: cb.autotune_extents("model.onnx", {"sequence": (8,)}, **more), "max_batch", "max_batch_size"),
        (lambda **more: cb.compare("mlp", ["t4"], **more), "tolerence", "tolerance"),
    ],
)
def test_an_unknown_option_is_named_with_near_ones(tune, name, near):
    """Instead of a TypeError that names a function which the user did not call."""
    with pytest.raises(cb.UnknownName, match=name) as refused:
        tune(**{name: 1})
    assert refused.value.value == name
    assert near == "arguments" or near in refused.value.near


def test_threads_are_for_what_runs_in_processes_of_its_own():
    """A module of this process and cubatch's own engine refuse them."""
    with pytest.raises(cb.InvalidArgument) as refused:
        cb.autotune_module(Small(), SHAPE, threads=1)
    assert refused.value.field == "module"
    with pytest.raises(cb.InvalidArgument) as refused:
        cb.autotune("mlp", device="cpu", threads=1)
    assert refused.value.field == "threads"
    assert "onnxruntime" in refused.value.remedy
