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
from tests.kernels.cases import decoded, encoded

pytestmark = pytest.mark.skipif(bool(building.reason_to_skip()), reason=building.reason_to_skip())


def test_every_name_of_the_gpu_branch_has_a_twin():
    """What a kernel may call exists in both branches, so that no kernel compiles for one alone."""
    text = (kernels_path() / "common" / "device.cuh").read_text()
    gpu = text[text.index("#if defined(__CUDACC__)") : text.index("#else\n\n// The CPU")]
    cpu = (Path(__file__).parent / "cpusim.h").read_text()
    names = {
        name
        for source in (gpu, cpu)
        for name in re.findall(r"(?:#define|CB_DEVICE [\w<>, ]+?) (CB_\w+|cb_\w+|to_float|from_float)\b", source)
    } - {"CB_ARCH"}
    assert len(names) > 25
    assert {name for name in names if not (re.search(rf"\b{name}\b", gpu) and re.search(rf"\b{name}\b", cpu))} == set()


def hard_floats():
    """Floats that are hard to round: ties and their neighbours, denormals, the ends of all ranges, random bits."""
    random = np.random.default_rng(0)
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    bfloats = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        ties = np.concatenate([(a[:-1].astype(float) + a[1:]) / 2 for a in (halves, bfloats)]).astype(np.float32)
        near = np.concatenate([np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    anything = random.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    return np.concatenate([halves, bfloats, ties, near, anything])


def test_rounding_to_16_bits_is_to_nearest_even():
    """NumPy's float16 and the definition of bfloat16, for every tie and its neighbours; NaN is the canonical one."""
    x = hard_floats()
    halves, bfloats, floats = np.empty(x.size, np.uint16), np.empty(x.size, np.uint16), np.empty(x.size, np.float32)
    grid = (-(-x.size // 128), 1, 1)
    Simulator().launch(twin("round_trip", 128), grid, [x, halves, bfloats, floats, np.int32(x.size)])

    with np.errstate(all="ignore"):
        want = np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))
    assert np.array_equal(halves, want)
    assert np.array_equal(bfloats, encoded(x, "bfloat16"))
    assert np.array_equal(floats.view(np.uint32), x.view(np.uint32))


def test_widening_is_exact_for_all_65536_values():
    """A 16-bit number is a float; NaN stays NaN."""
    bits = np.arange(2**16, dtype=np.uint16)
    y, z = np.empty(2**16, np.float32), np.empty(2**16, np.float32)
    Simulator(52).launch(twin("widen", 128), (512, 1, 1), [bits.view(np.float16), bits, y, z, np.int32(2**16)])
    with np.errstate(invalid="ignore"):
        assert np.array_equal(y.astype(float), decoded(bits.view(np.float16)), equal_nan=True)
        assert np.array_equal(z.astype(float), decoded(bits), equal_nan=True)


def test_mul_high_gives_the_upper_half():
    """Python's integers have all 64 bits of the product."""
    random = np.random.default_rng(1)
    a, b = random.integers(0, 2**32, (2, 128), dtype=np.uint32)
    a[:2], b[0] = 2**32 - 1, 2**32 - 1
    y = np.zeros_like(a)
    Simulator().launch(twin("products", 128), (1, 1, 1), [a, b, y])
    assert y.tolist() == [int(i) * int(j) >> 32 for i, j in zip(a, b, strict=True)]


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


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("by", [0, 1, 5, 16, 31])
def test_shuffles_exchange_within_a_warp(schedule, by):
    """Lane ^ by, and lane + by or itself; of 4 and 8 bytes, also one after the other."""
    random = np.random.default_rng(2)
    x, wide = random.standard_normal(64).astype(np.float32), random.standard_normal(64)
    numbers = random.integers(-99, 99, 64).astype(np.int32)
    y, z, i = np.empty_like(x), np.empty_like(wide), np.empty_like(numbers)
    Simulator(schedule=schedule).launch(twin("shuffles", 64), (1, 1, 1), [x, wide, numbers, y, z, i, np.int32(by)])
    lane, first = np.arange(64) % 32, np.arange(64) // 32 * 32
    down = first + np.where(lane + by < 32, lane + by, lane)
    assert np.array_equal(y, x[first + (lane ^ by)])
    assert np.array_equal(z, wide[down])
    assert np.array_equal(i, numbers[first + (lane ^ by)][down])


def test_vectors_move_all_their_elements():
    """Every width of load and store, between global and shared memory."""
    narrow, wide = np.arange(1000, dtype=np.uint16), np.arange(448, dtype=np.float32)
    y, z = np.zeros(832, np.uint16), np.zeros_like(wide)
    Simulator().launch(twin("vectors", 64), (1, 1, 1), [narrow, y, wide, z])
    assert np.array_equal(y, narrow[:832])
    assert np.array_equal(z, wide)


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
