"""kernels/simt: every operation, tile shape, load width and storage type against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubatch.engine.native import conv, gemm, linear
from cubatch.engine.native.operands import Fused, divisor
from cubatch.hardware.facts import Device
from cubatch.kernels import variant
from cubatch.kernels.ranking import SplitKernel
from cubatch.kernels.workspace.product_scratch import conv2d_workspace
from cubatch.network.windows import conv_shape
from tests.checks import assert_within, gamma
from tests.cpusim.simulator import Simulator
from tests.kernels import cases, epilogues
from tests.kernels.tiles import FEW, SEEDS, context, convolutions, dtypes, element, operand, products


@given(products(), st.sampled_from(cases.DTYPES), st.booleans(), epilogues.PARTS, SEEDS)
@FEW
def test_products_stay_within_the_rounding_of_their_sums(launcher, product, dtype, relu, parts, seed):
    """Each output is a dot product of length k and its layout's epilogue, residues on every axis."""
    dtype = dtype if dtype in dtypes(launcher) else "float32"
    (layout, m, n, k), random = product, np.random.default_rng(seed)
    a = operand(random, m, k, dtype, turned=layout[0] == "t")
    b = operand(random, k, n, dtype, turned=layout[1] == "t")
    end = epilogues.drawn(random, layout, m, n, dtype, activation="relu" if relu else "none", parts=parts)
    out = launcher.unwritten((m, n), element(dtype))
    bias, fused = end.put(launcher)
    gemm.gemm(context(launcher), launcher.put(a), launcher.put(b), bias, layout=layout, out=out, fused=fused)
    left = cases.decoded(a).T if layout[0] == "t" else cases.decoded(a)
    right = cases.decoded(b).T if layout[1] == "t" else cases.decoded(b)
    want = end.masked(left @ right + end.added())
    if end.activation == "relu":
        want = np.maximum(want, 0)
    tolerance = end.masked(cases.bound(k + 1, abs(left) @ abs(right) + abs(end.added()), want, dtype))
    assert_within(cases.decoded(launcher.get(out)), want, tolerance, axes="mn", label=layout)


@given(convolutions(), st.sampled_from(cases.DTYPES), st.booleans(), SEEDS)
@FEW
def test_fprop_stays_within_the_rounding_of_its_sums(launcher, drawn, dtype, relu, seed):
    """Any stride, one-sided pad, dilation and groups, with bias and ReLU."""
    dtype = dtype if dtype in dtypes(launcher) else "float32"
    random = np.random.default_rng(seed)
    x, w, b = (cases.drawn(random, shape, dtype) for shape in (drawn.x_shape, drawn.w_shape, (drawn.k,)))
    y = launcher.unwritten(drawn.y_shape, element(dtype))
    fused = Fused(activation="relu" if relu else "none")  # given, so depthwise shapes stay here
    conv.conv2d(
        context(launcher), launcher.put(x), launcher.put(w), launcher.put(b), out=y, fused=fused, **drawn.options
    )
    x, w, b = cases.decoded(x), cases.decoded(w), cases.decoded(b)
    want, magnitude = cases.conv2d(drawn, x, w, b), cases.conv2d(drawn, abs(x), abs(w), abs(b))
    if relu:
        want = np.maximum(want, 0)
    tolerance = cases.bound(w[0].size + 1, magnitude, want, dtype)
    assert_within(cases.decoded(launcher.get(y)), want, tolerance, axes="npqk", label=str(drawn))


@given(convolutions(), st.sampled_from(cases.DTYPES), SEEDS)
@FEW
def test_dgrad_adds_to_a_residual_and_masks_by_relu(launcher, drawn, dtype, seed):
    """Every phase of the stride writes its pixels, those without a tap too: the residual, where the mask lets it."""
    dtype = dtype if dtype in dtypes(launcher) else "float32"
    random = np.random.default_rng(seed)
    dy, w = cases.drawn(random, drawn.y_shape, dtype), cases.drawn(random, drawn.w_shape, dtype)
    residual, mask = cases.drawn(random, drawn.x_shape, dtype), cases.drawn(random, drawn.x_shape, dtype)
    dx = launcher.put(residual)
    conv.conv2d_dgrad(
        context(launcher), launcher.put(dy), launcher.put(w), x_shape=drawn.x_shape, out=dx,
        residual=dx, positive=launcher.put(mask), **drawn.options,
    )  # fmt: skip
    dy, w, residual = cases.decoded(dy), cases.decoded(w), cases.decoded(residual)
    passes = cases.decoded(mask) > 0
    want = np.where(passes, cases.conv2d_dgrad(drawn, dy, w) + residual, 0)
    magnitude = cases.conv2d_dgrad(drawn, abs(dy), abs(w)) + abs(residual)
    terms = drawn.k // drawn.groups * drawn.r * drawn.s
    tolerance = np.where(passes, cases.bound(terms + 1, magnitude, want, dtype), 0)
    assert_within(cases.decoded(launcher.get(dx)), want, tolerance, axes="nhwc", label=str(drawn))


@given(convolutions(), st.sampled_from(cases.DTYPES), SEEDS)
@FEW
def test_wgrad_stays_within_the_rounding_of_its_sums(launcher, drawn, dtype, seed):
    """A filter element's gradient is a sum over all output pixels; the bias's too."""
    dtype = dtype if dtype in dtypes(launcher) else "float32"
    random = np.random.default_rng(seed)
    x, dy = cases.drawn(random, drawn.x_shape, dtype), cases.drawn(random, drawn.y_shape, dtype)
    dw, db = launcher.unwritten(drawn.w_shape, element(dtype)), launcher.unwritten((drawn.k,), element(dtype))
    conv.conv2d_wgrad(context(launcher), launcher.put(x), launcher.put(dy), dw=dw, db=db, **drawn.options)
    x, dy = cases.decoded(x), cases.decoded(dy)
    pixels = dy[..., 0].size
    wants, magnitudes = cases.conv2d_wgrad(drawn, x, dy), cases.conv2d_wgrad(drawn, abs(x), abs(dy))
    for got, want, magnitude, axes in zip((dw, db), wants, magnitudes, ("krsc", "k"), strict=True):
        tolerance = cases.bound(pixels + 1, magnitude, want, dtype)
        assert_within(cases.decoded(launcher.get(got)), want, tolerance, axes=axes, label=str(drawn))


@pytest.mark.parametrize("filters", [2, 3, 4])
def test_groups_whose_columns_are_not_stored_4_at_a_time_stay_apart(launcher, filters):
    """The output's rows may be multiples of 4 where a group's are not: its first column is then not aligned."""
    drawn, random = cases.Conv(n=1, h=4, w=3, c=16, k=4 * filters, r=2, s=1, groups=4), np.random.default_rng(2)
    x, w = cases.drawn(random, drawn.x_shape), cases.drawn(random, drawn.w_shape)
    y = conv.conv2d(context(launcher), launcher.put(x), launcher.put(w), **drawn.options)
    want, magnitude = (cases.conv2d(drawn, f(x), f(w)) for f in (np.float64, lambda v: abs(np.float64(v))))
    assert_within(launcher.get(y), want, cases.bound(8, magnitude, want), axes="npqk")


def test_tiles_that_are_walked_in_bands_are_each_computed_once(launcher):
    """With many tile columns, blocks go down bands of tile rows, of which the last is cut."""

    def choose(problem, *_):
        return SplitKernel(variant.find(problem.operation, "float32", tile="128x32x8", vector=4))

    random = np.random.default_rng(4)
    a, b = cases.drawn(random, (8, 132)), cases.drawn(random, (8, 18 * 32))
    where, out = launcher.context(chooser=choose), launcher.unwritten((132, 18 * 32), np.float32)
    gemm.gemm(where, launcher.put(a), launcher.put(b), layout="tn", out=out)
    want = a.T.astype(np.float64) @ b
    assert_within(launcher.get(out), want, cases.bound(8, abs(a).T @ abs(b), want), axes="mn")


STRIDED = [
    cases.Conv(n=2, h=9, w=6, c=8, k=4, r=1, s=1, stride=(2, 2)),  # three of four phases have no tap
    cases.Conv(n=1, h=7, w=8, c=4, k=8, r=3, s=3, stride=(2, 3), pad=(1, 0, 0, 2)),
    cases.Conv(n=2, h=10, w=9, c=4, k=4, r=3, s=2, stride=(3, 2), pad=(2, 1, 1, 0), dilation=(2, 2)),
    cases.Conv(n=1, h=1, w=5, c=8, k=8, r=1, s=3, stride=(4, 4), pad=(1, 2, 0, 0), dilation=(1, 2), groups=2),
    cases.Conv(n=3, h=5, w=5, c=3, k=5, r=5, s=4, stride=(2, 2), pad=(2, 2, 2, 2)),
]


@pytest.mark.parametrize("drawn", STRIDED, ids=str)
def test_the_phases_of_a_stride_cover_each_pixel_once(launcher, drawn):
    """Strides 2, 3 and 4, dilations that share a factor, extents they do not divide, fewer rows than phases."""
    random = np.random.default_rng(0)
    dy, w = cases.drawn(random, drawn.y_shape), cases.drawn(random, drawn.w_shape)
    dx = launcher.unwritten(drawn.x_shape, np.float32)
    conv.conv2d_dgrad(
        context(launcher), launcher.put(dy), launcher.put(w), x_shape=drawn.x_shape, out=dx, **drawn.options
    )  # fmt: skip
    want = cases.conv2d_dgrad(drawn, cases.decoded(dy), cases.decoded(w))
    magnitude = cases.conv2d_dgrad(drawn, abs(cases.decoded(dy)), abs(cases.decoded(w)))
    terms = drawn.k // drawn.groups * drawn.r * drawn.s
    assert_within(launcher.get(dx), want, cases.bound(terms, magnitude, want), axes="nhwc", label=str(drawn))


def test_views_that_are_not_aligned_take_the_scalar_variant(launcher):
    """An operand or an output that starts 4 bytes into an array gives the same numbers."""
    random = np.random.default_rng(7)
    a, b = cases.drawn(random, (20, 8)), cases.drawn(random, (12, 8))
    shifted = launcher.put(np.concatenate([np.float32([np.nan]), a.reshape(-1)]))[1:].reshape(20, 8)
    out = launcher.unwritten((241,), np.float32)[1:].reshape(20, 12)
    assert gemm.gemm_problem(context(launcher), shifted, launcher.put(b)).vector == 1
    gemm.gemm(context(launcher), shifted, launcher.put(b), out=out)
    want = a.astype(np.float64) @ b.astype(np.float64).T
    assert_within(launcher.get(out), want, cases.bound(8, abs(a) @ abs(b).T, want), axes="mn")


def test_linear_layers_are_products_over_their_last_axis(launcher):
    """Forward and both gradients, of an input with two batch axes."""
    random = np.random.default_rng(9)
    x, w, b, dy = (cases.drawn(random, shape) for shape in ((3, 5, 12), (8, 12), (8,), (3, 5, 8)))
    where, dw, db = context(launcher), launcher.unwritten((8, 12), np.float32), launcher.unwritten((8,), np.float32)
    y = linear.linear(where, launcher.put(x), launcher.put(w), launcher.put(b), relu=True)
    dx = linear.linear_dgrad(where, launcher.put(dy), launcher.put(w))
    linear.linear_wgrad(where, launcher.put(x), launcher.put(dy), dw=dw, db=db)
    x, w, b, dy = (array.astype(np.float64) for array in (x, w, b, dy))
    for got, want, most in (
        (y, np.maximum(x @ w.T + b, 0), 13 * 2),
        (dx, dy @ w, 8),
        (dw, np.einsum("ntk,ntc->kc", dy, x), 15),
        (db, dy.sum(axis=(0, 1)), 15),
    ):
        assert_within(launcher.get(got), want, gamma(16, 2.0**-24) * most)


def test_nothing_to_sum_over_leaves_zeros_and_no_batch_writes_nothing(launcher):
    """A batch of none has outputs of none, and a filter gradient of zeros."""
    where = context(launcher)
    x, w = launcher.put(np.zeros((0, 5, 5, 4), np.float32)), launcher.put(np.ones((8, 3, 3, 4), np.float32))
    y = conv.conv2d(where, x, w)
    assert y.shape == (0, 3, 3, 8)
    assert conv.conv2d_dgrad(where, y, w, x_shape=(0, 5, 5, 4)).shape == (0, 5, 5, 4)
    dw = launcher.unwritten((8, 3, 3, 4), np.float32)
    conv.conv2d_wgrad(where, x, y, dw=dw)
    assert (launcher.get(dw) == 0).all()


def test_the_planned_workspace_is_enough(launcher):
    """With just the bytes that the memory plan counts, a split filter gradient runs."""
    drawn = cases.Conv(n=4, h=16, w=17, c=4, k=8, r=2, s=2)
    shape = conv_shape(drawn.x_shape[1:], drawn.w_shape, **{**drawn.options, "groups": 1})
    num_bytes = conv2d_workspace(conv.Pass.WGRAD, shape, 4, "float32", launcher.device)
    x, dy = cases.drawn(np.random.default_rng(0), drawn.x_shape), cases.drawn(np.random.default_rng(1), drawn.y_shape)
    dw, db = launcher.unwritten(drawn.w_shape, np.float32), launcher.unwritten((8,), np.float32)
    workspace = launcher.unwritten((num_bytes,), np.uint8)
    conv.conv2d_wgrad(context(launcher), launcher.put(x), launcher.put(dy), dw=dw, db=db, workspace=workspace)
    want = cases.conv2d_wgrad(drawn, x.astype(np.float64), dy.astype(np.float64))
    magnitude = cases.conv2d_wgrad(drawn, abs(x).astype(np.float64), abs(dy).astype(np.float64))
    for got, exact, most in zip((dw, db), want, magnitude, strict=True):
        assert_within(launcher.get(got), exact, cases.bound(dy[..., 0].size + 9, most, exact))


BIG = cases.Conv(n=2**16 + 3, h=8, w=8, c=512, k=4, r=3, s=3, pad=(1, 1, 1, 1))


def test_offsets_beyond_2_to_the_31_reach_the_last_images():
    """A batch whose activation has more than 2^31 elements: the last tile of the forward pass and of the gradient."""
    device = Device(name="big", compute_capability=(8, 0), num_sms=4)
    last = Simulator(80, blocks=lambda grid: [(grid[0] - 1, 0, 0)])

    def choose(problem, *_):
        return SplitKernel(variant.find(problem.operation, "float32", tile="64x64x16", vector=4))

    where = conv.Context(device, last, choose)
    x, y = cases.reserved(BIG.x_shape, np.float32), cases.reserved(BIG.y_shape, np.float32)
    random = np.random.default_rng(0)
    w, tail = cases.drawn(random, BIG.w_shape), cases.drawn(random, (1, *BIG.x_shape[1:]))
    x[-1:] = tail
    conv.conv2d(where, x, w, out=y, **BIG.options)
    few = cases.attrs.evolve(BIG, n=1)
    want, magnitude = (cases.conv2d(few, f(tail), f(w)) for f in (np.float64, lambda v: abs(np.float64(v))))
    assert_within(y[-1:], want, cases.bound(w[0].size, magnitude, want), axes="npqk")
    assert not y[:-1].any()
    dy = cases.drawn(random, (1, *BIG.y_shape[1:]))
    y[-1:] = dy
    x[-1:] = 0
    conv.conv2d_dgrad(where, y, w, x_shape=BIG.x_shape, out=x, **BIG.options)
    want, magnitude = (cases.conv2d_dgrad(few, f(dy), f(w)) for f in (np.float64, lambda v: abs(np.float64(v))))
    got = x[-1:, ..., -64:]
    assert_within(got, want[..., -64:], cases.bound(36, magnitude, want)[..., -64:], axes="nhwc")


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_a_divisor_divides_every_number_below_2_to_the_31(number, dividend):
    """Multiply and shift as the kernels do gives the quotient, at both ends of the range and around multiples."""
    by, multiplier, shift = divisor(number)
    assert multiplier < 2**32
    for x in (dividend, dividend // number * number, max(0, dividend // number * number - 1), 2**31 - 1):
        assert (x if by == 1 else (x * multiplier >> 32) >> shift) == x // number
