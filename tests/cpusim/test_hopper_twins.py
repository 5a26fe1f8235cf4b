"""
Each name of common/device_hopper.cuh against models in NumPy of what CUDA's documents define it to be.

On the CPU that is a test of the twins; where there is a Hopper GPU, of the instructions: a twin and a kernel share one
reading of the documents, and here the GPU is asked.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.errors import InvalidArgument
from cubatch.kernels.launch import CudaLauncher
from cubatch.kernels.tensor_map import TensorMap, Window
from cubatch.kernels.variant import kernels_path
from tests.checks import assert_within
from tests.cpusim import building
from tests.cpusim.planting import twin
from tests.cpusim.simulator import SCHEDULES, SimulationError, Simulator
from tests.gpu.here import first_gpu
from tests.kernels.cases import bound, decoded, encoded

pytestmark = pytest.mark.skipif(bool(building.reason_to_skip()), reason=building.reason_to_skip())

MODES = list(itertools.product(SCHEDULES, ("late", "early")))
FEW = settings(max_examples=25, deadline=None)


def simulate(kernel, arguments, **options):
    Simulator(90, **options).launch(kernel, (1, 1, 1), arguments)


def placed(module, array):
    """Copy an array to where it is aligned as before: a copy of the module's own begins at a multiple of 16."""
    start = array.ctypes.data % 16
    copy = module.empty(array.nbytes + start, np.uint8)[start:].view(array.dtype).reshape(array.shape)
    module.copyto(copy, module.asarray(array))
    return copy


def test_a_copy_is_aligned_as_its_array_is():
    """What the driver refuses on the host's addresses it is to refuse on the GPU's."""
    for start in (0, 1, 3):
        array = np.arange(64 + start, dtype=np.float16)[start:].reshape(8, 8)
        copy = placed(np, array)
        assert (copy.ctypes.data - array.ctypes.data) % 16 == 0
        np.testing.assert_array_equal(copy, array)


def on_gpu(gpu):
    """Give what launches on a GPU copies of all arrays, and brings them back."""
    import cupy

    launcher = CudaLauncher(gpu)

    def run(kernel, arguments, **_):
        arrays = [x.array if isinstance(x, TensorMap) else x for x in arguments]
        copies = [placed(cupy, x) if isinstance(x, np.ndarray) else x for x in arrays]
        given = [
            attrs.evolve(x, array=copy) if isinstance(x, TensorMap) else copy
            for x, copy in zip(arguments, copies, strict=True)
        ]
        launcher.bind(kernel, (1, 1, 1), given)()
        for array, copy in zip(arrays, copies, strict=True):
            if isinstance(array, np.ndarray):
                array[...] = copy.get()

    return run


@pytest.fixture(scope="session", params=["cpusim", pytest.param("cuda", marks=pytest.mark.gpu)])
def launch(request):
    """Give what runs an entry of hopper_twins.cu in one block, on the CPU and on a Hopper GPU."""
    if request.param == "cpusim":
        run = simulate
    else:
        gpu = first_gpu()
        if gpu is None or gpu.compute_capability != (9, 0):
            pytest.skip("no Hopper GPU in this machine")
        run = on_gpu(gpu)

    def one(entry, arguments, *, shared=65536 + 64, threads=128, **options):
        source, family = str(Path(__file__).parent / "hopper_twins.cu"), "hopper"  # for sm_90a
        run(attrs.evolve(twin(entry, threads, shared), source=source, family=family), arguments, **options)

    return one


def test_every_name_of_the_gpu_branch_has_a_twin():
    """What a kernel may call exists in both branches, so that no kernel compiles for one alone."""
    text = (kernels_path() / "common" / "device_hopper.cuh").read_text()
    gpu = text[text.index("#if defined(__CUDACC__)") : text.index("#else\n\n// The CPU")]
    cpu = (Path(__file__).parent / "cpusim_hopper.h").read_text()
    names = {
        name
        for source in (gpu, cpu)
        for name in re.findall(r"(?:#define|CB_DEVICE [\w<>, ]+?) (CB_TENSOR_MAP|CB_CLUSTER_KERNEL|cb_\w+)\b", source)
    }
    assert len(names) > 25
    assert {name for name in names if not (re.search(rf"\b{name}\b", gpu) and re.search(rf"\b{name}\b", cpu))} == set()


def swizzled(rows):
    """Give rows of 128 bytes as they lie in shared memory: 16-byte pieces of row r in the order i ^ r % 8."""
    pieces = rows.reshape(-1, 8, 16)
    order = np.arange(8) ^ (np.arange(len(pieces)) % 8)[:, None]
    out = np.empty_like(pieces)
    np.put_along_axis(out, order[..., None], pieces, axis=1)
    return out.reshape(-1)


def elements(random, *shape):
    """Draw 16-bit elements that are all different from zero."""
    return random.integers(1, 2**15, shape).astype(np.uint16)


@given(st.integers(1, 9), st.integers(1, 90), st.integers(-3, 80), st.integers(-9, 11), st.integers(1, 40))
@FEW
def test_tiles_are_swizzled_and_zero_outside(launch, units, height, c0, unit, rows):
    """A box at any row and any multiple of 16 bytes of a matrix, partly or wholly outside of it."""
    c1 = 8 * unit
    x = elements(np.random.default_rng(0), height, 8 * units)
    y = np.zeros(rows * 128, np.uint8)
    described = TensorMap(x, "bfloat16", (8 * units, height), (64, rows))
    launch("load_2d", [described, y, np.int32(rows), np.int32(c1), np.int32(c0)], copies="early")
    padded = np.pad(x, ((100, 200), (100, 200)))
    want = padded[100 + c0 : 100 + c0 + rows, 100 + c1 : 100 + c1 + 64]
    assert np.array_equal(y, swizzled(np.ascontiguousarray(want).view(np.uint8)))


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_boxes_of_three_axes_go_row_by_row(launch, mode):
    """Box (64, 2, 5) of (c, taps, k): the middle axis inside the last, as a filter's tap of several filters."""
    x = elements(np.random.default_rng(1), 7, 3, 72)
    y = np.zeros(10 * 128, np.uint8)
    described = TensorMap(x, "float16", (72, 3, 7), (64, 2, 5))
    arguments = [described, y, np.int32(10), np.int32(16), np.int32(1), np.int32(4)]
    launch("load_3d", arguments, schedule=mode[0], copies=mode[1])
    want = np.pad(x, ((0, 9), (0, 9), (0, 99)))[4:9, 1:3, 16:80]
    assert np.array_equal(y, swizzled(np.ascontiguousarray(want).view(np.uint8)))


def test_floats_are_rounded_to_tf32_on_their_way(launch):
    """To the nearest of 10 bits after the point; 32 floats are a row."""
    x = np.random.default_rng(2).standard_normal((8, 32)).astype(np.float32)
    y = np.zeros(1024, np.uint8)
    launch("load_2d", [TensorMap(x, "tf32", (32, 8), (32, 8)), y, np.int32(8), np.int32(0), np.int32(0)])
    got = swizzled(y).view(np.float32).reshape(8, 32)  # the swizzle is its own inverse
    assert (got.view(np.uint32) & 0x1FFF == 0).all()
    assert_within(got, x.astype(np.float64), 2.0**-11 * abs(x))


@given(st.data())
@FEW
def test_im2col_walks_over_pixels_and_moves_them_by_the_tap(launch, data):
    """Row i of the tile is the i-th output pixel's input under one tap: zero in the padding and beyond the last."""
    draw = data.draw
    n, h, w, c = (draw(st.integers(1, most)) for most in (3, 6, 7, 10))
    taps, strides, dilations, lows, highs = (tuple(draw(st.integers(low, 3)) for _ in "hw") for low in (1, 1, 1, 0, 0))
    outs = tuple(
        (size + low + high - (tap - 1) * dilation - 1) // stride + 1
        for size, low, high, tap, dilation, stride in zip((h, w), lows, highs, taps, dilations, strides, strict=True)
    )
    if min(outs) < 1:
        return
    x = elements(np.random.default_rng(3), n, h, w, 8 * c)
    window = Window.along((w, h), outs[::-1], strides[::-1], (-lows[1], -lows[0]))
    rows, channel = draw(st.integers(1, 64)), 8 * draw(st.integers(0, c))
    first, tap = draw(st.integers(0, n * outs[0] * outs[1] + 5)), [draw(st.integers(0, count - 1)) for count in taps]
    image, line, column = first // (outs[0] * outs[1]), first // outs[1] % outs[0], first % outs[1]
    corner = np.array(
        (channel, column * strides[1] - lows[1], line * strides[0] - lows[0], image, tap[1] * dilations[1],
         tap[0] * dilations[0]),
        dtype=np.dtype([(name, np.int32) for name in ("c", "w", "h", "n", "offset_w", "offset_h")]),
    )[()]  # fmt: skip
    y = np.zeros(rows * 128, np.uint8)
    described = TensorMap(x, "float16", (8 * c, w, h, n), (64, rows), window)
    launch("load_im2col", [described, y, np.int32(rows), corner])

    padded = np.pad(x, ((0, 0), (lows[0], 9), (lows[1], 9), (0, 64)))
    want = np.zeros((rows, 64), np.uint16)
    for row, number in enumerate(range(first, first + rows)):
        image, line, column = number // (outs[0] * outs[1]), number // outs[1] % outs[0], number % outs[1]
        if image < n:
            at = line * strides[0] + tap[0] * dilations[0], column * strides[1] + tap[1] * dilations[1]
            want[row] = padded[image, at[0], at[1], channel : channel + 64]
    assert np.array_equal(y, swizzled(want.view(np.uint8)))


@pytest.mark.parametrize(("first", "tap"), [(0, 0), (17, 1), (45, 1)])
def test_im2col_copies_of_pixels_that_overlap(launch, first, tap):
    """Strides of a tensor map may be shorter than its pixels: each row begins 16 elements after the one before."""
    x = elements(np.random.default_rng(5), 2, 5, 9 * 16)
    window, y = Window.along((6, 5), (6, 4), (1, 1), (0, 0)), np.zeros(16 * 128, np.uint8)
    corner = np.array(
        (0, first % 6, first // 6 % 4, first // 24, 0, tap),
        dtype=np.dtype([(name, np.int32) for name in ("c", "w", "h", "n", "offset_w", "offset_h")]),
    )[()]
    described = TensorMap(x, "float16", (64, 6, 5, 2), (64, 16), window, (32, 288, 1440))
    launch("load_im2col", [described, y, np.int32(16), corner])
    want = np.zeros((16, 64), np.uint16)
    for row, number in enumerate(range(first, min(first + 16, 48))):
        begin = number % 6 * 16
        want[row] = x[number // 24, number // 6 % 4 + tap, begin : begin + 64]
    assert np.array_equal(y, swizzled(want.view(np.uint8)))


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize(("c0", "c1"), [(0, 0), (32, 5), (72, 12), (200, 0), (0, 30)])
def test_stores_undo_the_swizzle_and_are_clipped(launch, c0, c1, mode):
    """What lies outside of the matrix is not written, what lies inside is, once."""
    tile = elements(np.random.default_rng(4), 16, 64)
    y = np.zeros((46, 88), np.uint16)  # of which the map knows 20 rows
    arguments = [TensorMap(y, "float16", (88, 20), (64, 16)), swizzled(tile.view(np.uint8)), np.int32(16)]
    launch("store_2d", [*arguments, np.int32(c0), np.int32(c1)], schedule=mode[0], copies=mode[1])
    want = np.zeros((46, 264), np.uint16)
    want[c1 : 16 + c1, c0 : 64 + c0] = tile
    want[20:] = 0
    assert np.array_equal(y, want[:, :88])


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_matrices_are_stored_where_their_lanes_say(launch, mode):
    """Four of 8 x 8 of each warp: register i of lane l is 32 bits number l % 4 of row l / 4 of matrix i."""
    random = np.random.default_rng(6)
    x, rows = random.integers(1, 2**32, (4, 32, 4), np.uint32), random.permutation(64)[:32].astype(np.uint32)
    y = np.zeros(4096, np.uint8)
    launch("store_matrices", [x, rows, y], schedule=mode[0], copies=mode[1])
    want = np.zeros((4, 64, 4), np.uint32)
    for lane, register in itertools.product(range(32), range(4)):
        want[:, rows[8 * register + lane // 4], lane % 4] = x[:, lane, register]
    assert np.array_equal(y.view(np.uint32), want.reshape(-1))


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_transposed_matrices_are_stored_where_their_lanes_say(launch, mode):
    """Register i of lane l is rows 2 (l % 4) and the next, in column l / 4 of matrix i."""
    random = np.random.default_rng(7)
    x, rows = random.integers(1, 2**16, (4, 32, 4, 2), np.uint16), random.permutation(64)[:32].astype(np.uint32)
    y = np.zeros(4096, np.uint8)
    launch("store_matrices_transposed", [x.view(np.uint32), rows, y], schedule=mode[0], copies=mode[1])
    want = np.zeros((4, 64, 8), np.uint16)
    for lane, register, half in itertools.product(range(32), range(4), range(2)):
        want[:, rows[8 * register + lane % 4 * 2 + half], lane // 4] = x[:, lane, register, half]
    assert np.array_equal(y.view(np.uint16), want.reshape(-1))


def fragments(y, n):
    """Give the 64 x n sums of a warpgroup's registers: what lane and register hold, as the PTX manual draws it."""
    out = np.empty((64, n))
    for thread, register in itertools.product(range(128), range(n // 2)):
        row = thread // 32 * 16 + thread % 32 // 4 + register // 2 % 2 * 8
        out[row, register // 4 * 8 + thread % 4 * 2 + register % 2] = y[thread, register]
    return out


def tile_of(values, dtype, *, turned):
    """Lay (outer, 128 bytes of k) out in shared memory; turned, blocks of 64 outer places by all of k."""
    stored = values.astype(np.float32) if dtype == "tf32" else encoded(values, dtype)
    if turned:
        stored = np.concatenate([stored[i : i + 64].T for i in range(0, len(stored), 64)])
    placed = swizzled(np.ascontiguousarray(stored).view(np.uint8))
    return np.concatenate([placed, np.zeros(32768 - placed.size, np.uint8)])


PRODUCTS = [
    ("multiply_f16_nt", "float16", 128, False, False),
    ("multiply_f16_nn", "float16", 128, False, True),
    ("multiply_f16_tn", "float16", 256, True, True),
    ("multiply_f16_tt", "float16", 256, True, False),
    ("multiply_bf16_nt", "bfloat16", 256, False, False),
    ("multiply_bf16_nn", "bfloat16", 192, False, True),
    ("multiply_tf32_nt", "tf32", 128, False, False),
]


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize(("entry", "dtype", "n", "a_turned", "b_turned"), PRODUCTS, ids=str)
def test_products_read_swizzled_tiles_by_their_descriptors(launch, entry, dtype, n, a_turned, b_turned, step):
    """32 bytes of gemm_k, from any step of the tile on, are added to the sums; tf32 has what 19 bits hold."""
    random = np.random.default_rng(5)
    deep, each = (32, 8) if dtype == "tf32" else (64, 16)
    a, b = random.uniform(-1, 1, (64, deep)), random.uniform(-1, 1, (n, deep))
    if dtype == "tf32":
        a, b = (np.float32(x).view(np.uint32) & 0xFFFFE000 for x in (a, b))
        a, b = (x.view(np.float32).astype(np.float64) for x in (a, b))
    else:
        a, b = (decoded(encoded(x, dtype)) for x in (a, b))
    tiles = [tile_of(x, dtype, turned=turned) for x, turned in ((a, a_turned), (b, b_turned))]
    offsets = np.array(
        [number for turned in (a_turned, b_turned) for number in (step * (2048 if turned else 32), 8192, 1024)],
        np.uint32,
    )
    y = np.zeros((128, n // 2), np.float32)
    launch(entry, [*tiles, y, offsets])
    part = slice(step * each, (step + 1) * each)
    want = 1 + a[:, part] @ b[:, part].T
    magnitude = 1 + abs(a[:, part]) @ abs(b[:, part]).T
    assert_within(fragments(y, n), want, bound(each + 1, magnitude, want))


@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_barriers_turn_their_phase_for_every_number_that_is_handed_over(launch, mode):
    """Full and empty, one arrival and 32: nothing is lost, nothing comes twice."""
    y = np.zeros((50, 32), np.int32)
    launch("hand_over", [y, np.int32(50)], shared=64, threads=64, schedule=mode[0], copies=mode[1])
    assert np.array_equal(y, np.arange(50)[:, None] ** 2 + np.arange(32))


MISUSES = {
    0: "a barrier that was not initialised",
    1: "more arrivals at a barrier than it expects",
    2: r"deadlock: thread 0 waits in cb_barrier_wait at tests/cpusim/hopper_misuse\.cu:\d+",
    3: "more bytes arrive than the barrier expects, 128, the last",
    4: "a copy is still under way when its block ends",
    5: "a tile that is not aligned to 128 bytes",
    6: "a tile outside of shared memory",
    7: "a copy of another kind of map",
    8: "a store still reads shared memory when its thread returns",
    9: "a barrier is 8 bytes of shared memory",
    10: "a descriptor of another swizzle",
    11: "threads of a warpgroup disagree on a product",
    12: "a product is still under way when a thread of its warpgroup returns",
    13: "an operation of a warpgroup that has lost a thread",
    14: "no block of that rank is in the cluster",
    15: "a barrier without a cb_barrier_init_fence after its initialisation",
    16: "a tile that no copy and no cb_write has written is read",
    17: r"what thread \d+ wrote without a cb_proxy_fence after it is read",
    18: r"what thread \d+ wrote without a cb_proxy_fence after it is read",
    19: "a product on sums without a cb_wgmma_fence since they were waited for",
    20: "sums that were written while a product was under way",
    21: "a product on a part of the sums of products under way",
    22: "a product on sums without a cb_wgmma_fence since they were waited for",
    23: "a tile outside of shared memory",
    24: "products on more sets of sums under way than cpusim keeps",
    25: "a store that starts before the first row or column",
    26: "a store that starts before the first row or column",
    27: "a tile that starts between multiples of 16 bytes",
    28: "a tile that starts between multiples of 16 bytes",
}


@pytest.mark.parametrize("which", MISUSES)
def test_misuse_is_an_error_with_its_place(which):
    """What a GPU would answer with a hang, with wrong numbers or with an illegal instruction."""
    x, y = np.zeros((64, 64), np.float16), np.zeros(128, np.float32)
    described = TensorMap(x, "float16", (64, 64), (64, 64))
    source = str(Path(__file__).parent / "hopper_misuse.cu")
    kernel = attrs.evolve(twin("misuse", 128, 8192 + 16), source=source)
    with pytest.raises(SimulationError, match=MISUSES[which]) as caught:
        simulate(kernel, [described, y, np.int32(which)], schedule="in_order")
    assert "hopper_misuse.cu:" in str(caught.value)


def test_a_misaligned_array_has_no_tensor_map(launch):
    """As the driver refuses it."""
    x = np.zeros(64 * 64 + 1, np.float16)[1:].reshape(64, 64)
    y = np.zeros(64 * 128, np.uint8)
    with pytest.raises(InvalidArgument, match="a multiple of 16"):
        launch("load_2d", [TensorMap(x, "float16", (64, 64), (64, 64)), y, np.int32(64), np.int32(0), np.int32(0)])
