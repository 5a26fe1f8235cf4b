"""What a process takes beside the plan: counted by rules, held against what the engine records and a process takes."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from cubatch.engine.backend import Replay
from cubatch.engine.network import Model
from cubatch.hardware import catalogue, probe
from cubatch.measure.remote import RemoteRunner
from cubatch.measure.runner import FactoryRef
from cubatch.memory import process_overhead
from cubatch.memory.blocks import Flat, Norm, Scores
from cubatch.memory.conv_blocks import wgrad_tiles
from cubatch.memory.plan import plan
from cubatch.network import models
from cubatch.network.passes import Gemm
from cubatch.network.windows import conv_shape
from cubatch.workload import Workload

MIB = 2**20
NEEDS = (
    Flat(itemsize=64),
    Norm(itemsize=4, channels=7),
    Scores(itemsize=4, channels=10),
    wgrad_tiles(conv_shape((9, 9, 3), (8, 3, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1)), 4),
)


@given(st.sampled_from(NEEDS), st.integers(0, 300), st.integers(0, 100_000))
def test_blocks_are_counted_as_they_are_cut(need, samples, more):
    """Without making them: a plan of a large batch has thousands."""
    room = need.least + more
    cut = need.cut_on_host if hasattr(need, "cut_on_host") else need.cut
    assert need.num_blocks(samples, room) == len(cut(samples, room))


@pytest.mark.parametrize(
    ("product", "packed"),
    [
        (Gemm(5000, 64, 384), 64 * 384 * 4),  # the columns alone: the rows take turns in what stays in the cache
        (Gemm(2000, 512, 4608), (448 + 2000) * 448 * 4),  # 4.1 MiB of a process's memory
        (Gemm(2000, 2048, 512), (448 + 2000) * 256 * 4),  # 512 in two even pieces: 2.6 MiB
        (Gemm(100_000, 600, 40), (448 + 16_000) * 40 * 4),
    ],
)  # fmt: skip
def test_a_product_is_packed_in_panels(product, packed):
    """By the sizes of OpenBLAS's AVX-512 kernels; the second and third are of measured processes."""
    assert process_overhead._packed_bytes(product) == packed


@pytest.mark.parametrize(
    ("name", "mode", "size"), [("lenet5", "training", 300), ("resnet18", "inference", 4), ("mnist-cnn", "training", 64)]
)
def test_recorded_calls_are_about_as_many_as_are_counted(name, mode, size):
    """A few calls a block more or less for what an operation ends with: within half of them."""
    work = Workload.of(name, "cpu", mode=mode, dtype="float32")
    with Model(models.build(name), device=work.device, mode=mode) as model:
        model.prepare(size)
        recorded = sum(len(call) for call in model._program.works[0][0] if isinstance(call, Replay))
        steps = [op for op in model.plan.schedule.ops if op.node is not None and op.kind in process_overhead.PASSES_OF]
        counted = sum(process_overhead._calls_and_packed_bytes(op, op.node.layer, model.plan, work)[0] for op in steps)
    assert 0.67 * recorded <= counted <= 1.5 * recorded + 100


@pytest.mark.parametrize(
    ("name", "mode", "size"),
    [
        ("lenet5", "training", 1000),
        ("mnist-cnn", "training", 200),
        pytest.param("resnet18", "training", 2, marks=pytest.mark.thorough),
    ],
)
def test_a_process_takes_what_was_said(name, mode, size):
    """Within 2 % or 4 MiB, and 1 MiB more for each thread beyond the two of the machine where rules were measured."""
    work = Workload.of(name, "cpu", mode=mode, dtype="float32", optimizer="adam")
    arguments = {"spec": work.spec.to_mapping(), "device": "cpu", **work.settings, "seed": 0}
    runner = RemoteRunner(FactoryRef("cubatch.measure.network_runner:network_runner", arguments))
    try:
        runner.prepare(size)
        runner.time(3)
        took = runner.peak_device_bytes
    finally:
        runner.close()
    if took is None:
        pytest.skip("this kernel does not let the peak be reset")
    said = process_overhead.device_bytes(work, size, 0)
    assert took > plan(work, size).total
    assert said == pytest.approx(took, abs=max(0.02 * took, 4 * MIB + max(0, work.device.threads - 2) * MIB))


def test_on_a_gpu_it_is_what_was_kept_back():
    """The context and libraries, whatever the batch."""
    work = Workload.of("mlp", catalogue.find("titan-x-pascal"), mode="training", dtype="float32")
    assert process_overhead.device_bytes(work, 8, 300 * MIB) == plan(work, 8).total + 300 * MIB


def test_a_layer_on_its_own_has_as_many_recordings_as_buffer_sets():
    """It rotates over several, so that it finds its input out of the cache."""
    here = probe.device("cpu")
    work = Workload.of({"type": "linear", "c": 16, "k": 16}, here, mode="inference", dtype="float32")
    assert process_overhead.device_bytes(work, 1, 0) > plan(work, 1).total
