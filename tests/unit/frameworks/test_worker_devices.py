"""Which GPU a worker of another framework runs on: the one that was asked for, whatever its number is there."""

from __future__ import annotations

import attrs
import pytest

from cubatch.errors import DeviceNotAvailable
from cubatch.frameworks import module_worker, onnxruntime_runner
from cubatch.hardware import driver, probe
from cubatch.hardware.memory_limit import MemoryLimit
from cubatch.tuning.subjects import bounded_subject
from cubatch.tuning.subjects.module_subject import NamedModuleSubject
from tests.unit.hardware.gpus import SLICE, T4, V100


def shown(monkeypatch, *gpus):
    """Have CUDA show these GPUs in this order, without NVML."""
    numbered = tuple(attrs.evolve(gpu, index=index) for index, gpu in enumerate(gpus))
    monkeypatch.setattr(driver, "visible_gpus", lambda: numbered)

    def refuse(uuid):
        raise DeviceNotAvailable(uuid, "no NVML")

    monkeypatch.setattr(probe.nvml, "Monitor", refuse)


@pytest.mark.parametrize(
    ("gpus", "wanted", "place"),
    [
        ((V100, T4), V100, "cuda:0"),
        ((T4, V100), V100, "cuda:1"),  # CUDA_VISIBLE_DEVICES=1,0, or CUDA_DEVICE_ORDER=PCI_BUS_ID
        ((T4,), T4, "cuda:0"),  # CUDA_VISIBLE_DEVICES=1
        ((T4, SLICE), SLICE, "cuda:1"),
    ],
)
def test_a_gpu_is_found_by_its_uuid_whatever_its_number(monkeypatch, gpus, wanted, place):
    """PyTorch knows GPUs by their numbers in its own process only."""
    shown(monkeypatch, *gpus)
    assert module_worker.place_of(wanted.uuid) == place


def test_a_gpu_that_the_worker_does_not_see_is_refused(monkeypatch):
    """Another one in its place would be measured in silence."""
    shown(monkeypatch, T4)
    with pytest.raises(DeviceNotAvailable, match=V100.uuid):
        module_worker.place_of(V100.uuid)


def test_the_worker_of_a_module_is_told_the_uuid(monkeypatch):
    """What goes over the pipe names the GPU, not a number."""
    shown(monkeypatch, T4, V100)
    sent = []
    monkeypatch.setattr(bounded_subject, "RemoteBoundedRunner", lambda factory, **_: sent.append(factory))
    subject = NamedModuleSubject(
        name="package.module:build", library="torch", device=probe.device("cuda:1"), mode="inference", seed=0,
        memory=MemoryLimit(2**30, 2**30, ""), inputs=[3], kind={}, sources=(),
    )  # fmt: skip
    subject.make_runner()
    assert sent[0].arguments["device"] == V100.uuid


def test_onnx_runtime_is_given_the_number_in_its_own_process(monkeypatch, tmp_path):
    """Its provider takes numbers too."""
    shown(monkeypatch, T4, V100)
    made = []
    monkeypatch.setattr(onnxruntime_runner, "OnnxRuntimeRunner", lambda *given, **_: made.append(given))
    path = tmp_path / "net.onnx"
    onnxruntime_runner.runner(path=str(path), device=V100.uuid, threads=None, memory_limit=2**30, seed=0)
    assert made == [(path, "cuda", 1)]
