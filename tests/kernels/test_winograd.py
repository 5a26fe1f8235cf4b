"""kernels/winograd: 3x3 convolutions and gradients of their inputs against float64, with data meant to break them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cubatch.engine.native import conv
from cubatch.engine.native.operands import Fused
from cubatch.errors import InvalidArgument
from cubatch.hardware.facts import Device
from cubatch.kernels import winograd_plan
from cubatch.kernels.workspace.product_scratch import conv2d_workspace
from cubatch.network.windows import conv_shape
from tests import reference
from tests.checks import assert_within, gamma
from tests.cpusim.simulator import Simulator
from tests.kernels import cases, epilogues, winograd_cases as wc
from tests.kernels.hopper_cases import Recording
from tests.kernels.tiles import FEW, SEEDS

KINDS = ("none", "relu", "relu6", "silu", "sigmoid", "hard_sigmoid", "hard_swish")
USUAL = cases.Conv(n=2, h=9, w=6, c=8, k=12, r=3, s=3, pad=(1, 1, 1, 1))


def context(launcher, outputs):
    return launcher.context(chooser=wc.chooser(outputs))


def fprop(launcher, outputs, drawn, x, w, **more):
    """A forward pass into memory that holds NaN."""
    y = launcher.unwritten(drawn.y_shape, np.float32)
    conv.conv2d(context(launcher, outputs), launcher.put(x), launcher.put(w), out=y, **drawn.options, **more)
    return launcher.get(y)


def dgrad(launcher, outputs, drawn, dy, w, **more):
    """The gradient of an input into memory that holds NaN."""
    dx = launcher.unwritten(drawn.x_shape, np.float32)
    conv.conv2d_dgrad(
        context(launcher, outputs), launcher.put(dy), launcher.put(w), x_shape=drawn.x_shape, out=dx,
        **drawn.options, **more,
    )  # fmt: skip
    return launcher.get(dx)


@given(wc.convolutions(), st.sampled_from(wc.SIZES), SEEDS)
@FEW
def test_fprop_stays_within_the_bound_of_its_transforms(launcher, drawn, outputs, seed):
    """Any pad up to 2, image and channels, whole tiles or not: off by no more than the terms' roundings."""
    random = np.random.default_rng(seed)
    x, w = cases.drawn(random, drawn.x_shape), cases.drawn(random, drawn.w_shape)
    want = cases.conv2d(drawn, cases.decoded(x), cases.decoded(w))
    tolerance = wc.bound(drawn, x, w, outputs)
    assert_within(fprop(launcher, outputs, drawn, x, w), want, tolerance, axes="npqk", label=f"{drawn}, {outputs}")


@given(wc.convolutions(), st.sampled_from(wc.SIZES), epilogues.PARTS, SEEDS)
@FEW
def test_dgrad_is_the_same_with_the_taps_turned_around(launcher, drawn, outputs, parts, seed):
    """And with a residual and a ReLU's mask: zero exactly where the mask is not positive."""
    random = np.random.default_rng(seed)
    dy, w = cases.drawn(random, drawn.y_shape), cases.drawn(random, drawn.w_shape)
    given = {part: cases.drawn(random, drawn.x_shape) for part in parts}
    words = {"residual": "residual", "mask": "positive"}
    got = dgrad(launcher, outputs, drawn, dy, w, **{words[part]: launcher.put(array) for part, array in given.items()})
    forward, filters = wc.turned(drawn, w)
    residual = cases.decoded(given["residual"]) if "residual" in given else np.float64(0)
    passes = cases.decoded(given["mask"]) > 0 if "mask" in given else np.True_
    want = np.where(passes, cases.conv2d_dgrad(drawn, cases.decoded(dy), cases.decoded(w)) + residual, 0)
    tolerance = wc.bound(forward, dy, filters, outputs, more=1) + gamma(1, wc.U) * abs(residual)
    assert_within(got, want, np.where(passes, tolerance, 0), axes="nhwc", label=f"{drawn}, {outputs}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "k"), [(2, 12), (4, 12), (4, 10)])
def test_a_forward_pass_ends_as_that_of_other_families(launcher, kind, outputs, k):
    """Scale and shift, bias, residual, activation, in this order, whether or not channels are stored 4 at a time."""
    drawn, random = cases.attrs.evolve(USUAL, k=k), np.random.default_rng(len(kind) + k)
    x, w, residual = (cases.drawn(random, shape) for shape in (drawn.x_shape, drawn.w_shape, drawn.y_shape))
    bias, scale, shift = (4 * cases.drawn(random, (k,)) for _ in range(3))
    fused = Fused(
        scale=launcher.put(scale), shift=launcher.put(shift), residual=launcher.put(residual), activation=kind
    )
    got = fprop(launcher, outputs, drawn, x, w, b=launcher.put(bias), fused=fused)
    plain = cases.conv2d(drawn, cases.decoded(x), cases.decoded(w))
    before = scale.astype(np.float64) * plain + shift + bias + residual
    want = reference.activation(before, kind=kind)
    added = abs(scale * plain) + abs(shift) + abs(bias) + abs(residual)
    off = abs(scale) * wc.bound(drawn, x, w, outputs, more=4) + gamma(4, wc.U) * added
    slope = 1.1 + (abs(before) if kind == "hard_swish" else 0)
    assert_within(got, want, slope * off + gamma(12, wc.U) * (1 + abs(want)), axes="npqk", label=kind)


def test_adding_to_what_is_there_reads_it_once(launcher):
    """A residual that is the output itself."""
    random = np.random.default_rng(1)
    dy, w, held = (cases.drawn(random, shape) for shape in (USUAL.y_shape, USUAL.w_shape, USUAL.x_shape))
    dx = launcher.put(held)
    conv.conv2d_dgrad(
        context(launcher, 4), launcher.put(dy), launcher.put(w), x_shape=USUAL.x_shape, out=dx,
        residual=dx, **USUAL.options,
    )  # fmt: skip
    forward, filters = wc.turned(USUAL, w)
    want = cases.conv2d_dgrad(USUAL, cases.decoded(dy), cases.decoded(w)) + held
    tolerance = wc.bound(forward, dy, filters, 4, more=1) + gamma(1, wc.U) * abs(held)
    assert_within(launcher.get(dx), want, tolerance, axes="nhwc")


@pytest.mark.parametrize("outputs", wc.SIZES)
def test_the_bound_that_allows_a_variant_follows_from_its_matrices(outputs):
    """As many times a direct sum's error as terms may grow."""
    assert winograd_plan.loss(outputs, 64) == pytest.approx(
        wc.growth(outputs) * (64 + {2: 10, 4: 18}[outputs]) / 576, rel=1e-4
    )


def adversaries(outputs, channels, random):
    """
    Data for one tile whose terms are largest and cancel: each tap alone and all, with the signs of each row of B^T.

    Between them elements that a result never sees are thousands of times those that it sees.
    """
    source = np.array(wc.matrices(outputs)[2], dtype=np.float64)
    extent = outputs + 2
    for row in range(extent):
        for column in range(extent):
            signs = np.outer(np.sign(source[row]) + (source[row] == 0), np.sign(source[column]) + (source[column] == 0))
            x = signs[None, :, :, None] * (1 - random.uniform(0, 2.0**-10, (1, extent, extent, channels)))
            for tap in (None, (0, 0), (2, 2), (0, 2), (1, 1)):
                w = np.zeros((1, 3, 3, channels))
                where = (slice(None), *tap) if tap else slice(None)
                w[where] = 1 - random.uniform(0, 2.0**-10, w[where].shape)
                yield np.float32(x), np.float32(w)
    x = np.float32(random.uniform(-1, 1, (1, extent, extent, channels)))
    x[:, -1] *= 4096
    yield x, np.float32(random.uniform(-1, 1, (1, 3, 3, channels)))


@pytest.mark.parametrize("outputs", wc.SIZES)
def test_data_meant_to_break_it_stays_within_both_bounds(launcher, outputs):
    """That of the very terms, and the one by which a variant is allowed: growth * roundings * max |x| * sum |w|."""
    random, channels = np.random.default_rng(outputs), 8
    drawn = cases.Conv(n=1, h=outputs + 2, w=outputs + 2, c=channels, k=1, r=3, s=3)
    most = gamma(winograd_plan.roundings(outputs, channels), wc.U) * wc.growth(outputs)
    found = list(adversaries(outputs, channels, random))
    x, w = np.concatenate([one for one, _ in found]), np.concatenate([one for _, one in found])
    both = cases.attrs.evolve(drawn, n=len(x), k=len(w))
    got = fprop(launcher, outputs, both, x, w)
    for i, (one, filters) in enumerate(found):
        want = cases.conv2d(drawn, cases.decoded(one), cases.decoded(filters))
        tolerance = wc.bound(drawn, one, filters, outputs)
        assert_within(got[i : i + 1, ..., i : i + 1], want, tolerance, axes="npqk", label=f"case {i}")
        assert (tolerance <= most * abs(one).max() * abs(filters).sum() * (1 + 1e-12)).all()


@pytest.mark.parametrize("outputs", wc.SIZES)
def test_infinities_and_nan_are_not_lost(launcher, outputs):
    """What is not finite reaches all results of its window; tiles that do not read it are as without."""
    random = np.random.default_rng(3)
    x, w = cases.drawn(random, USUAL.x_shape), cases.drawn(random, USUAL.w_shape)
    plain = fprop(launcher, outputs, USUAL, x, w)
    for value in (np.inf, -np.inf, np.nan):
        x[0, 0, 0, 3] = value
        got = fprop(launcher, outputs, USUAL, x, w)
        assert not np.isfinite(got[0, :2, :2]).any()
        np.testing.assert_array_equal(got[1], plain[1])


@pytest.mark.parametrize("outputs", wc.SIZES)
def test_parts_of_a_batch_give_the_bits_of_the_whole(launcher, outputs, monkeypatch):
    """Where scratch memory holds few tiles, a batch is computed in parts that begin inside images; twice the same."""
    drawn, random = cases.Conv(n=4, h=35, w=33, c=4, k=4, r=3, s=3, pad=(1, 2, 0, 1)), np.random.default_rng(5)
    x, w = cases.drawn(random, drawn.x_shape), cases.drawn(random, drawn.w_shape)
    dy = cases.drawn(random, drawn.y_shape)
    whole, gradient = fprop(launcher, outputs, drawn, x, w), dgrad(launcher, outputs, drawn, dy, w)
    want, tolerance = cases.conv2d(drawn, cases.decoded(x), cases.decoded(w)), wc.bound(drawn, x, w, outputs)
    assert_within(whole, want, tolerance, axes="npqk")
    np.testing.assert_array_equal(fprop(launcher, outputs, drawn, x, w), whole)
    shape = conv_shape(drawn.x_shape[1:], drawn.w_shape, (1, 1), drawn.pad, (1, 1))
    monkeypatch.setattr(winograd_plan, "MOST_TRANSFORMED_BYTES", 256 * 4 * (outputs + 2) ** 2 * (4 + 4))
    winograd_plan._cut.cache_clear()
    try:
        problem = conv.conv2d_problem(conv.Pass.FPROP, shape, 4, "float32", 4)
        chosen = wc.chooser(outputs)(problem, launcher.device).kernel
        parts = list(winograd_plan.cut(problem, chosen).parts())
        assert len(parts) > 1
        np.testing.assert_array_equal(fprop(launcher, outputs, drawn, x, w), whole)
        np.testing.assert_array_equal(dgrad(launcher, outputs, drawn, dy, w), gradient)
    finally:
        winograd_plan._cut.cache_clear()


def test_arrays_that_are_not_aligned_give_the_same_bits(launcher):
    """Views that begin 4 bytes into an array, of every operand."""
    random = np.random.default_rng(7)
    x, w = cases.drawn(random, USUAL.x_shape), cases.drawn(random, USUAL.w_shape)

    def shifted(array):
        return launcher.put(np.concatenate([np.float32([np.nan]), array.reshape(-1)]))[1:].reshape(array.shape)

    y = shifted(np.full(USUAL.y_shape, np.nan, np.float32))
    conv.conv2d(context(launcher, 4), shifted(x), shifted(w), out=y, **USUAL.options)
    np.testing.assert_array_equal(launcher.get(y), fprop(launcher, 4, USUAL, x, w))


@pytest.mark.parametrize("outputs", wc.SIZES)
def test_the_planned_workspace_is_enough_and_a_byte_less_is_refused(launcher, outputs):
    """With just the bytes that the memory plan counts, and with what the variant itself takes."""
    drawn, random = cases.Conv(n=2, h=10, w=9, c=36, k=25, r=3, s=3, pad=(1, 1, 1, 1)), np.random.default_rng(0)
    shape = conv_shape(drawn.x_shape[1:], drawn.w_shape, (1, 1), drawn.pad, (1, 1))
    x, w, dy = (cases.drawn(random, one) for one in (drawn.x_shape, drawn.w_shape, drawn.y_shape))
    planned = conv2d_workspace(conv.Pass.FPROP, shape, 2, "float32", launcher.device)
    workspace = launcher.unwritten((planned,), np.uint8)
    want = cases.conv2d(drawn, cases.decoded(x), cases.decoded(w))
    got = fprop(launcher, outputs, drawn, x, w, workspace=workspace)
    assert_within(got, want, wc.bound(drawn, x, w, outputs), axes="npqk")
    problem = conv.conv2d_problem(conv.Pass.FPROP, shape, 2, "float32", 4)
    own = winograd_plan.workspace_bytes(problem, wc.chooser(outputs)(problem, launcher.device).kernel)
    assert own <= planned
    fprop(launcher, outputs, drawn, x, w, workspace=launcher.unwritten((own,), np.uint8))
    with pytest.raises(InvalidArgument, match="workspace"):
        fprop(launcher, outputs, drawn, x, w, workspace=launcher.unwritten((own - 1,), np.uint8))
    backward = launcher.unwritten((conv2d_workspace(conv.Pass.DGRAD, shape, 2, "float32", launcher.device),), np.uint8)
    forward, filters = wc.turned(drawn, w)
    want = cases.conv2d_dgrad(drawn, cases.decoded(dy), cases.decoded(w))
    got = dgrad(launcher, outputs, drawn, dy, w, workspace=backward)
    assert_within(got, want, wc.bound(forward, dy, filters, outputs), axes="nhwc")


def test_no_images_are_no_launch(launcher):
    """Of an empty batch nothing is written."""
    where = context(launcher, 4)
    x, w = launcher.put(np.zeros((0, 5, 5, 4), np.float32)), launcher.put(np.ones((8, 3, 3, 4), np.float32))
    assert conv.conv2d(where, x, w).shape == (0, 3, 3, 8)


def test_a_norm_sums_what_winograds_algorithm_computes(launcher):
    """No block owns whole rows of the result, so that none can compute their moments."""
    random, recording = np.random.default_rng(4), Recording(launcher.launcher)
    where = launcher.context(chooser=wc.chooser(4), launcher=recording)
    x, w = (launcher.put(cases.drawn(random, shape)) for shape in (USUAL.x_shape, USUAL.w_shape))
    mean, inv_std = (launcher.unwritten((USUAL.k,), np.float32) for _ in range(2))
    y = conv.conv2d(where, x, w, norm={"mean": mean, "inv_std": inv_std}, **USUAL.options)
    assert recording.operations[-3:] == ["winograd_result", "batch_norm_statistics", "batch_norm_finish"]
    np.testing.assert_allclose(launcher.get(mean), launcher.get(y).mean(axis=(0, 1, 2)), atol=1e-5)


BIG = cases.Conv(n=2**16 + 3, h=8, w=8, c=512, k=4, r=3, s=3, pad=(1, 1, 1, 1))


class LastPart:
    """A launcher that runs the transform of the filter, and of the last part the blocks that the last image needs."""

    def __init__(self):
        self.module, self.bound = np, []

    def bind(self, kernel, grid, arguments):
        few = grid[0] if kernel.operation == "winograd_filter" else 8 if kernel.entry.startswith("gemm") else 32
        blocks = [(x, 0, z) for x in range(max(0, grid[0] - few), grid[0]) for z in range(grid[2])]
        self.bound.append(Simulator(80, blocks=lambda _: blocks).bind(kernel, grid, arguments))
        return lambda: None

    def run(self):
        for step in [self.bound[0], *self.bound[-3:]]:
            step()
        self.bound.clear()


@pytest.mark.heavy
@pytest.mark.parametrize("outputs", wc.SIZES)
def test_offsets_beyond_2_to_the_31_reach_the_last_images(outputs):
    """A batch whose activation has more than 2^31 elements: its last tiles, forward and of the gradient."""
    device, last = Device(name="big", compute_capability=(8, 0), num_sms=4), LastPart()
    where, few = conv.Context(device, last, wc.chooser(outputs)), cases.attrs.evolve(BIG, n=1)
    x, y = cases.reserved(BIG.x_shape, np.float32), cases.reserved(BIG.y_shape, np.float32)
    random = np.random.default_rng(0)
    w, tail = cases.drawn(random, BIG.w_shape), cases.drawn(random, (1, *BIG.x_shape[1:]))
    x[-1:] = tail
    conv.conv2d(where, x, w, out=y, **BIG.options)
    last.run()
    want = cases.conv2d(few, cases.decoded(tail), cases.decoded(w))
    assert_within(y[-1:], want, wc.bound(few, tail, w, outputs), axes="npqk")
    dy = cases.drawn(random, (1, *BIG.y_shape[1:]))
    y[-1:] = dy
    x[-1:] = 0
    conv.conv2d_dgrad(where, y, w, x_shape=BIG.x_shape, out=x, **BIG.options)
    last.run()
    forward, filters = wc.turned(few, w)
    want = cases.conv2d_dgrad(few, cases.decoded(dy), cases.decoded(w))
    assert_within(x[-1:], want, wc.bound(forward, dy, filters, outputs), axes="nhwc")
