"""
kernels/hopper around the ring and beyond: every schedule, many channels, slices, clusters on a GPU, 2^31 elements.

What one launch computes is test_hopper.py's.
"""

from __future__ import annotations

import functools
import itertools

import attrs
import numpy as np
import pytest

from cubatch.engine.native import conv, gemm
from cubatch.engine.native.operands import Fused
from cubatch.kernels import transposing
from cubatch.kernels.workspace.product_scratch import product_workspace
from tests.checks import assert_within
from tests.cpusim import building
from tests.cpusim.simulator import SCHEDULES, Simulator
from tests.kernels import cases, hopper_cases
from tests.kernels.conftest import BUILD, Target
from tests.kernels.hopper_cases import H200, SWAPPED, TILES, bound, chooser, context, element
from tests.kernels.passes import Passes, repeats, watched
from tests.simulated import IS_SIMULATED

launcher = hopper_cases.launcher

SWAPS = pytest.mark.parametrize("swapped", [False, True])
CHANNELS = cases.Conv(n=2, h=5, w=7, c=512, k=40, r=3, s=3, stride=(2, 1), pad=(1, 1, 0, 1))


def rng(seed):
    return np.random.default_rng(seed)


@SWAPS
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_512_channels_go_around_the_ring_for_every_tap(launcher, dtype, swapped):
    """72 steps along gemm_k or more through 4 or 6 stages, of a strided and padded filter."""
    Passes(launcher, context(launcher, swapped=swapped), dtype, bound=bound).fprop(CHANNELS, bias=False)


@SWAPS
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_the_gradient_of_512_filters_goes_around_the_ring_for_every_tap(launcher, dtype, swapped):
    """Phases of 3 and 6 taps of 8 or 16 steps each."""
    drawn = attrs.evolve(CHANNELS, c=CHANNELS.k, k=CHANNELS.c)
    Passes(launcher, context(launcher, swapped=swapped), dtype, bound=bound).dgrad(drawn)


@pytest.mark.parametrize("dtype", TILES)
def test_the_filters_gradient_has_512_channels_a_tap(launcher, dtype):
    """Eight boxes of channels a tap: 36 or 18 tiles for two SMs."""
    Passes(launcher, context(launcher), dtype, bound=bound).wgrad(CHANNELS)


def integers(random, dtype, *shape):
    """Draw integers whose products and sums are exact in every type: sums stay below 2^8."""
    return cases.encoded(random.integers(-1, 2, shape), dtype)


SCHEDULED = [
    ("float16", "128x64x64"), ("float16", "128x128x64"), ("float16", "128x256x64"), ("bfloat16", "128x256x64"),
    ("float16", "128x192x64"), ("float16", "256x128x64"), ("float16", "256x64x64"), ("float32", "256x64x32"),
    ("float32", None),
]  # fmt: skip


@pytest.mark.skipif(BUILD == "thread", reason="the same lines as above, in more orders")
@pytest.mark.parametrize("mode", list(itertools.product(SCHEDULES, ("late", "early"))), ids="-".join)
@pytest.mark.parametrize(("dtype", "tile"), SCHEDULED)
def test_results_are_exact_in_every_schedule(dtype, tile, mode):
    """Two tiles a block or more, four times around the ring and a residue, in every order of threads and copies."""
    if reason := building.reason_to_skip():
        pytest.skip(reason)
    random, simulator = rng(5), Simulator(90, BUILD, schedule=mode[0], copies=mode[1], seed=11)
    where = Target(H200, simulator).context(chooser=functools.partial(chooser, tile=tile), tf32=True)

    def drawn_as(*shapes):
        stored = [integers(random, dtype, *shape) for shape in shapes]
        return stored + [cases.decoded(array) for array in stored]

    swapped, tall = tile in SWAPPED.values(), str(tile).startswith("256")
    a, b, wide_a, wide_b = drawn_as((600 if tall else 264, 520), (264, 520))
    exact(gemm.gemm(where, a, b), wide_a @ wide_b.T, dtype)
    residual, wide_residual = drawn_as((len(a), len(b)))
    exact(gemm.gemm(where, a, b, fused=Fused(residual=residual)), wide_a @ wide_b.T + wide_residual, dtype)
    if dtype == "float32" or tall:
        exact(gemm.gemm(where, a, b.reshape(520, 264), layout="nn"), wide_a @ wide_b.reshape(520, 264), dtype)
    drawn = cases.Conv(n=3, h=7, w=10, c=72, k=136, r=3, s=2, stride=(2, 1), dilation=(1, 2), pad=(2, 1, 0, 3))
    drawn = attrs.evolve(drawn, n=8) if tall else drawn
    x, w, dy, *wide = drawn_as(drawn.x_shape, drawn.w_shape, drawn.y_shape)
    exact(conv.conv2d(where, x, w, **drawn.options), cases.conv2d(drawn, wide[0], wide[1]), dtype)
    dx = conv.conv2d_dgrad(where, dy, w, x_shape=x.shape, **drawn.options)
    exact(dx, cases.conv2d_dgrad(drawn, wide[2], wide[1]), dtype)
    if dtype != "float32" and not swapped:
        dw = np.zeros_like(w)
        conv.conv2d_wgrad(where, x, dy, dw=dw, **drawn.options)
        exact(dw, cases.conv2d_wgrad(drawn, wide[0], wide[2])[0], dtype)


def exact(got, want, dtype):
    """Compare results that are integers small enough for every type."""
    assert abs(want).max() < 2**8
    assert np.array_equal(got, cases.encoded(want, dtype))


def split(launcher, *, swapped=False):
    """Give the context of 100 SMs, for which few tiles are split, and the list of the slices of each product."""
    choose, slices = watched(functools.partial(chooser, swapped=swapped))
    device = attrs.evolve(launcher.device, num_sms=100)
    return attrs.evolve(launcher.context(chooser=choose, tf32=True), device=device), slices


@pytest.mark.parametrize("dtype", TILES)
def test_a_split_product_repeats_itself_to_the_bit(launcher, dtype):
    """Few tiles and many pixels are split into slices, whose sums are added up in one order."""
    where, slices = split(launcher)
    drawn = cases.Conv(n=3, h=30, w=28, c=24, k=16, r=1, s=2)
    check = repeats(Passes(launcher, where, dtype, bound=bound, more=128), "wgrad", drawn)
    assert 1 < min(slices) <= max(slices) <= check.more


@SWAPS
def test_slices_and_a_transposed_operand_share_the_workspace_that_is_planned(launcher, swapped):
    """Of tf32: b is laid along gemm_k first, its slices' sums behind it, in as many bytes as the plan has."""
    where, seen = split(launcher, swapped=swapped)
    a, b = cases.drawn(rng(3), (40, 2052)), cases.drawn(rng(4), (2052, 24))
    held = [launcher.put(array) for array in (a, b)]
    planned = product_workspace(gemm.gemm_problem(where, *held, layout="nn"), where.device)
    workspace = launcher.unwritten((planned,), np.uint8)
    out = gemm.gemm(where, *held, layout="nn", workspace=workspace)
    assert min(seen) > 1
    want, magnitude = a.astype(np.float64) @ b, abs(a.astype(np.float64)) @ abs(b)
    assert_within(launcher.get(out), want, bound(2052 + seen[0], magnitude, want, "float32"), axes="mn")
    assert np.array_equal(launcher.get(workspace)[: b.nbytes].view(np.float32).reshape(24, 2052), b.T)


@pytest.mark.parametrize("slices", [None, 4])
def test_both_operands_are_transposed_in_parts_of_gemm_k(launcher, monkeypatch, slices):
    """
    Of tf32: three parts, the last one shorter, and a residual, in as many bytes as the plan has.

    With four slices, for which more is allocated, two of the last part have no step, and the residual is the output.
    """
    m, n, k = 516, 520, 300
    monkeypatch.setattr(transposing, "MOST_TRANSPOSED_BYTES", 4 * (m + n) * 128)
    recording = hopper_cases.Recording(launcher.launcher)
    where = attrs.evolve(context(launcher, slices=slices), launcher=recording)
    a, b, added = (cases.drawn(rng(7 + i), shape) for i, shape in enumerate(((k, m), (k, n), (m, n))))
    left, right, residual = (launcher.put(array) for array in (a, b, added))
    out = residual if slices else launcher.unwritten((m, n), np.float32)
    planned = product_workspace(gemm.gemm_problem(where, left, right, layout="tn"), where.device)
    assert planned == 4 * (m + n) * 128
    workspace = None if slices else launcher.unwritten((planned,), np.uint8)
    gemm.gemm(where, left, right, layout="tn", out=out, workspace=workspace, fused=Fused(residual=residual))
    part = ["transpose", "transpose", "gemm_nt", *["split_k_reduce"] * bool(slices)]
    assert recording.operations == 3 * part
    a, b, added = (array.astype(np.float64) for array in (a, b, added))
    want, magnitude = a.T @ b + added, abs(a).T @ abs(b) + abs(added)
    assert_within(launcher.get(out), want, bound(k + 3 * (slices or 1), magnitude, want, "float32"), axes="mn")


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_clusters_share_their_operands(launcher, dtype):
    """Two blocks that load half of B each for both give what one gives alone, to the bit; odd tiles leave one idle."""
    if IS_SIMULATED or (launcher.arch == 90 and isinstance(launcher.launcher, Simulator)):
        pytest.skip("too large for the CPU: test_hopper_clusters.py has small ones")
    random, tile = rng(6), "128x256x32" if dtype == "float32" else "128x256x64"
    drawn = cases.Conv(n=3, h=29, w=27, c=136, k=264, r=3, s=2, stride=(2, 1), dilation=(1, 2), pad=(2, 1, 0, 3))
    x, w, dy = (
        launcher.put(cases.drawn(random, shape, dtype)) for shape in (drawn.x_shape, drawn.w_shape, drawn.y_shape)
    )
    a, b = (launcher.put(cases.drawn(random, (rows, 1160), dtype)) for rows in (1304, 2056))
    results = []
    for suffix in ("", "_c2"):
        where = launcher.context(
            tf32=True,
            chooser=functools.partial(chooser, tile=tile + suffix, slices=1),  # an idle block may be worth more
        )
        found = [gemm.gemm(where, a, b), gemm.gemm(where, a, b.reshape(1160, 2056), layout="nn")]
        found.append(conv.conv2d(where, x, w, **drawn.options))
        found.append(conv.conv2d_dgrad(where, dy, w, x_shape=drawn.x_shape, **drawn.options))
        if dtype != "float32":
            dw = launcher.unwritten(drawn.w_shape, element(dtype))
            conv.conv2d_wgrad(where, x, dy, dw=dw, **drawn.options)
            found += [dw, gemm.gemm(where, b.reshape(1160, 2056), a.reshape(1160, 1304), layout="tn")]
        results.append([launcher.get(array).tobytes() for array in found])
    assert results[0] == results[1]


BIG = cases.Conv(n=2**16 + 3, h=8, w=8, c=512, k=8, r=3, s=3, pad=(1, 1, 1, 1))


def last_blocks(*, swapped=False):
    """Give the context of a device with an SM for every tile, on which the last block of each launch runs alone."""
    if reason := building.reason_to_skip():
        pytest.skip(reason)
    simulator = Simulator(90, BUILD, blocks=lambda grid: [tuple(extent - 1 for extent in grid)])
    return context(Target(attrs.evolve(H200, num_sms=1 << 24), simulator), swapped=swapped)


@pytest.mark.heavy
@SWAPS
@pytest.mark.parametrize("stride", [(1, 1), (1, 2)])
def test_offsets_beyond_2_to_the_31_reach_the_last_images(stride, swapped):
    """A batch of more than 2^31 elements: the last tile forward, and of the gradient by tiles and by places."""
    where, few = last_blocks(swapped=swapped), attrs.evolve(BIG, n=1, stride=stride)
    big = attrs.evolve(BIG, stride=stride)
    x, y = (cases.reserved(shape, np.float16) for shape in (big.x_shape, big.y_shape))
    w, tail, dy = (cases.drawn(rng(7), shape, "float16") for shape in (few.w_shape, few.x_shape, few.y_shape))
    x[-1:] = tail
    conv.conv2d(where, x, w, out=y, **big.options)
    wide = [array.astype(np.float64) for array in (w, tail, dy)]
    want, magnitude = (cases.conv2d(few, f(wide[1]), f(wide[0])) for f in (np.asarray, abs))
    assert_within(y[-1:], want, bound(w[0].size, magnitude, want, "float16"), axes="npqk")
    assert not y[:-1].any()

    y[-1:], x[-1:] = dy, 0
    conv.conv2d_dgrad(where, y, w, x_shape=x.shape, out=x, **big.options)
    want, magnitude = (cases.conv2d_dgrad(few, f(wide[2]), f(wide[0])) for f in (np.asarray, abs))
    tile = slice(-64 if swapped else -128, None)
    every = (slice(None), slice(None), slice(stride[1] - 1, None, stride[1]), tile)  # of the last phase
    assert_within(x[-1:][every], want[every], bound(72, magnitude, want, "float16")[every], axes="nhwc")


@pytest.mark.heavy
def test_a_filters_gradient_sums_pixels_beyond_2_to_the_31():
    """The last slice, tile and tap of a sum over 2^22 pixels of 512 channels, of which the last image is not zero."""
    where, few = last_blocks(), attrs.evolve(BIG, n=1)
    x, dy = (cases.reserved(shape, np.float16) for shape in (BIG.x_shape, BIG.y_shape))
    x[-1:], dy[-1:] = (cases.drawn(rng(8), shape, "float16") for shape in (few.x_shape, few.y_shape))
    dw = np.zeros(BIG.w_shape, np.float16)
    workspace = cases.reserved((1 << 30,), np.uint8)
    conv.conv2d_wgrad(where, x, dy, dw=dw, workspace=workspace, **BIG.options)
    wide = [array[-1:].astype(np.float64) for array in (x, dy)]
    (want, _), (magnitude, _) = (cases.conv2d_wgrad(few, f(wide[0]), f(wide[1])) for f in (np.asarray, abs))
    last = (-1, -1, -1, slice(-128, None))
    assert_within(dw[last], want[last], bound(64 + 64, magnitude, want, "float16")[last], axes="c")
    assert dw[last].any()
