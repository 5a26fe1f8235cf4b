"""Each name of common/device.cuh on the CPU against what CUDA defines it to be."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from cubatch.kernels.variant import kernels_path
from tests.checks import assert_within
from tests.cpusim import building
from tests.cpusim.planting import twin
from tests.cpusim.simulator import SCHEDULES, Simulator

pytestmark = pytest.mark.skipif(bool(building.reason_to_skip()), reason=building.reason_to_skip())


HEADERS = {
    "device.cuh": ("cpusim.h", r"(?:#define|CB_DEVICE [\w<>, ]+?) (CB_\w+|cb_\w+|to_float|from_float)\b"),
    "device_mma.cuh": ("cpusim_mma.h", r"(?:#define|CB_DEVICE \w+) (cb_\w+)"),
    "device_hopper.cuh": (
        "cpusim_hopper.h", r"(?:#define|CB_DEVICE [\w<>, ]+?) (CB_TENSOR_MAP|CB_CLUSTER_KERNEL|cb_\w+)\b"
    ),
}  # fmt: skip


@pytest.mark.parametrize("header", HEADERS)
def test_every_name_of_the_gpu_branch_has_a_twin(header):
    """What a kernel may call exists in both branches, so that no kernel compiles for one alone."""
    twins, defined = HEADERS[header]
    text = (kernels_path() / "common" / header).read_text()
    gpu = text[text.index("#if defined(__CUDACC__)") : text.index("#else\n\n")]
    cpu = (Path(__file__).parent / twins).read_text()
    names = {name for source in (gpu, cpu) for name in re.findall(defined, source)} - {"CB_ARCH"}
    assert names
    assert {name for name in names if not (re.search(rf"\b{name}\b", gpu) and re.search(rf"\b{name}\b", cpu))} == set()


def test_mathematics_is_that_of_float64_up_to_rounding():
    """All functions that kernels may use are there, right to 2 units in the last place, which rsqrtf has in CUDA."""
    x, y = np.linspace(0.01, 5, 32).astype(np.float32), np.zeros((32, 10), np.float32)
    Simulator().launch(twin("mathematics", 32), (1, 1, 1), [x, y])
    for value, got in zip(x.astype(float), y, strict=True):
        want = [
            math.exp(value), math.log(value), math.sqrt(value), 1 / math.sqrt(value), value * value - value,
            max(value, 1), min(value, 1), math.erf(value), math.tanh(value), value,
        ]  # fmt: skip
        assert_within(got, np.array(want), 2 * 2.0**-23 * np.abs(want), axes="f")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_block_and_thread_knows_its_place(schedule):
    """Each runs once, with its own indices, whatever the order."""
    grid = (3, 4, 5)
    y = np.full((5, 4, 3, 64, 6), -1, np.int32)
    Simulator(schedule=schedule).launch(twin("places", 64), grid, [y])
    z, yy, x, thread = np.indices(y.shape[:-1])
    assert np.array_equal(y, np.stack([x, yy, z, thread, thread % 32, thread // 32], axis=-1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_schedule_is_the_order_of_blocks_and_threads(schedule):
    """Ascending, descending, or drawn anew for the blocks and behind each barrier; "warps" keeps a warp's lanes."""
    blocks, threads = np.zeros(1 + 20, np.int32), np.zeros(1 + 20 * 128, np.int32)
    Simulator(schedule=schedule).launch(twin("turns", 128), (20, 1, 1), [blocks, threads])
    block_order, by_turn = np.argsort(blocks[1:]), threads[1:].reshape(20, 128)
    orders = [np.argsort(by_turn[block]) for block in range(20)]
    if schedule in {"in_order", "reversed"}:
        step = 1 if schedule == "in_order" else -1
        assert np.array_equal(block_order, np.arange(20)[::step])
        assert all(np.array_equal(order, np.arange(128)[::step]) for order in orders)
        return
    assert not np.array_equal(block_order, np.sort(block_order))
    assert len({tuple(order) for order in orders}) > 10
    lanes = np.concatenate([order.reshape(4, 32) for order in orders])
    assert np.array_equal(lanes, lanes[:, :1] + np.arange(32)) == (schedule == "warps")


def test_shared_memory_is_nan_before_each_block():
    """Static and dynamic, also after a block wrote zeros; the dynamic part is aligned to 1024 bytes."""
    y = np.zeros((3, 32 + 77 + 1), np.uint32)
    Simulator().launch(twin("untouched", 32, 4 * 77), (3, 1, 1), [y, np.int32(77)])
    assert (y[:, :-1] == 0xFFFFFFFF).all()
    assert (y[:, -1] == 0).all()


@pytest.mark.parametrize("copies", ["late", "early"])
@pytest.mark.parametrize("valid", [0, 1, 4, 7, 16])
def test_copies_fill_with_zeros_and_arrive_when_they_may(valid, copies):
    """The rest of each copy is zeros; what is not waited for is there at once (early) or not at all (late)."""
    x, y = np.arange(1, 897).astype(np.uint8) | 1, np.zeros(928, np.uint8)
    Simulator(80, copies=copies).launch(twin("copies", 32), (1, 1, 1), [x, y, np.int32(valid)])
    for begin, end, size in ((0, 512, 16), (512, 768, 8), (768, 896, 4)):
        want = np.where(np.arange(end - begin) % size < valid, x[begin:end], 0)
        assert np.array_equal(y[begin:end], want)
    arrived = x[512:768:8] if valid else 0
    assert (y[896:] == (arrived if copies == "early" else 0xFF)).all()
