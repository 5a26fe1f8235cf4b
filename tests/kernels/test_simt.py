"""kernels/simt: every operation, tile shape, load width and storage type against float64."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given, strategies as st

from cubatch.engine.native import conv, gemm, linear
from cubatch.engine.native.operands import divisor
from cubatch.hardware.facts import Device
from cubatch.kernels import variant
from cubatch.kernels.ranking import SplitKernel
from cubatch.kernels.workspace.product_scratch import conv2d_workspace
from cubatch.network.windows import conv_shape
from tests.checks import assert_within, gamma
from tests.cpusim.simulator import Simulator
from tests.kernels import cases, epilogues
from tests.kernels.passes import Passes, check_last_images
from tests.kernels.tiles import ACTIVATIONS, FEW, SEEDS, context, convolutions, dtypes, products


def passes(launcher, dtype="float32", seed=0):
    return Passes(launcher, context(launcher), dtype if dtype in dtypes(launcher) else "float32", seed)


@given(products(), st.sampled_from(cases.DTYPES), ACTIVATIONS, epilogues.PARTS, SEEDS)
@FEW
def test_products_stay_within_the_rounding_of_their_sums(launcher, product, dtype, activation, parts, seed):
    """Each output is a dot product of length k and its layout's epilogue, residues on every axis."""
    layout, *extents = product
    passes(launcher, dtype, seed).product(layout, extents, activation=activation, parts=parts)


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_every_warp_of_a_wide_tile_stores_its_columns(launcher, layout):
    """Two rows of tiles and two columns of them, the second of 4 places: 128 columns of 32 rows among others."""
    passes(launcher).product(layout, (40, 132, 72))


@given(convolutions(), st.sampled_from(cases.DTYPES), ACTIVATIONS, SEEDS)
@FEW
def test_fprop_stays_within_the_rounding_of_its_sums(launcher, drawn, dtype, activation, seed):
    """Any stride, one-sided pad, dilation and groups, with bias and ReLU."""
    passes(launcher, dtype, seed).fprop(drawn, activation=activation)


@given(convolutions(), st.sampled_from(cases.DTYPES), SEEDS)
@FEW
def test_dgrad_adds_to_a_residual_and_masks_by_relu(launcher, drawn, dtype, seed):
    """Every phase of the stride writes its pixels, those without a tap too: the residual, where the mask lets it."""
    passes(launcher, dtype, seed).dgrad(drawn, parts=("residual", "positive"), in_place="residual")


@given(convolutions(), st.sampled_from(cases.DTYPES), SEEDS)
@FEW
def test_wgrad_stays_within_the_rounding_of_its_sums(launcher, drawn, dtype, seed):
    """A filter element's gradient is a sum over all output pixels; the bias's too."""
    passes(launcher, dtype, seed).wgrad(drawn, bias=True)


@pytest.mark.parametrize("filters", [2, 3, 4])
def test_groups_whose_columns_are_not_stored_4_at_a_time_stay_apart(launcher, filters):
    """The output's rows may be multiples of 4 where a group's are not: its first column is then not aligned."""
    passes(launcher).fprop(cases.Conv(n=1, h=4, w=3, c=16, k=4 * filters, r=2, s=1, groups=4), bias=False)


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
    passes(launcher).dgrad(drawn)


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
    workspace = launcher.unwritten((num_bytes,), np.uint8)
    attrs.evolve(passes(launcher), more=8, options={"workspace": workspace}).wgrad(drawn, bias=True)


BIG = cases.Conv(n=2**16 + 3, h=8, w=8, c=512, k=4, r=3, s=3, pad=(1, 1, 1, 1))


def test_offsets_beyond_2_to_the_31_reach_the_last_images():
    """A batch whose activation has more than 2^31 elements: the last tile of the forward pass and of the gradient."""
    device = Device(name="big", compute_capability=(8, 0), num_sms=4)
    last = Simulator(80, blocks=lambda grid: [(grid[0] - 1, 0, 0)])

    def choose(problem, *_):
        return SplitKernel(variant.find(problem.operation, "float32", tile="64x64x16", vector=4))

    check_last_images(conv.Context(device, last, choose), BIG, "float32")


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_a_divisor_divides_every_number_below_2_to_the_31(number, dividend):
    """Multiply and shift as the kernels do gives the quotient, at both ends of the range and around multiples."""
    by, multiplier, shift = divisor(number)
    assert multiplier < 2**32
    for x in (dividend, dividend // number * number, max(0, dividend // number * number - 1), 2**31 - 1):
        assert (x if by == 1 else (x * multiplier >> 32) >> shift) == x // number
