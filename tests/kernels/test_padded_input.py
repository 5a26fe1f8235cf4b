"""Convolutions over a batch stored with a fourth channel of zeros or in patches, against those over three channels."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from cubatch.engine.native import conv
from cubatch.engine.network import Model
from cubatch.kernels.padding import filter_bytes
from cubatch.kernels.workspace.product_scratch import conv2d_workspace
from cubatch.network.layers import Conv2d
from cubatch.network.windows import conv_shape
from tests.checks import assert_within
from tests.kernels import cases, patches
from tests.kernels.passes import Passes, clamped

SHAPES = [
    cases.Conv(n=3, h=11, w=9, c=3, k=8, r=7, s=7, stride=(2, 2), pad=(3, 3, 3, 3)),
    cases.Conv(n=2, h=6, w=7, c=3, k=5, r=3, s=2, pad=(1, 0, 0, 1)),
    cases.Conv(n=5, h=3, w=2, c=3, k=4, r=1, s=1),
    cases.Conv(n=1, h=24, w=24, c=3, k=8, r=16, s=16),  # the forward pass is split
    cases.Conv(n=16, h=16, w=16, c=3, k=8, r=3, s=3),  # the filter's gradient is
]
DTYPES = pytest.mark.parametrize("dtype", cases.DTYPES)
CASES = pytest.mark.parametrize("drawn", SHAPES, ids=["7x7 of stride 2", "3x2", "1x1", "16x16", "many"])


def stored(x):
    return np.concatenate([x, np.zeros((*x.shape[:-1], 1), x.dtype)], axis=-1)


def passes(launcher, pass_, drawn, dtype):
    """Checks in scratch memory of just the bytes that are planned, which nothing is written behind."""
    shape = conv_shape(drawn.x_shape[1:], drawn.w_shape, drawn.stride, drawn.pad, drawn.dilation)
    num_bytes = conv2d_workspace(pass_, shape, drawn.n, dtype, launcher.device)
    options = {"workspace": launcher.unwritten((num_bytes,), np.uint8)}
    return Passes(launcher, launcher.context(), dtype, ends=clamped, stored=stored, options=options)


def over_patches(launcher, pass_, drawn, dtype):
    """The same checks on a batch that is stored in patches."""
    computed = patches.computed(drawn)
    num_bytes = conv2d_workspace(pass_, computed, drawn.n, dtype, launcher.device) + filter_bytes(computed, dtype)
    options = {"workspace": launcher.unwritten((num_bytes,), np.uint8)}
    cut = functools.partial(patches.cut, drawn)
    return Passes(launcher, launcher.context(), dtype, ends=clamped, stored=cut, options=options)


@CASES
@DTYPES
def test_forward_is_that_of_three_channels(launcher, drawn, dtype):
    """With a bias, in the planned scratch memory: float64 over three channels, within the rounding of its sums."""
    passes(launcher, conv.Pass.FPROP, drawn, dtype).fprop(drawn)


@pytest.mark.parametrize("adds", [False, True])
@CASES
@DTYPES
def test_the_filters_gradient_is_that_of_three_channels(launcher, drawn, dtype, adds):
    """Into a gradient of three channels, or added to what is there; the bias's comes after it from the same memory."""
    passes(launcher, conv.Pass.WGRAD, drawn, dtype).wgrad(drawn, bias=True, adds=adds)


@patches.CASES
@DTYPES
def test_forward_over_patches_is_that_of_pixels(launcher, drawn, dtype):
    """With a bias, in the planned scratch memory: float64 over three channels, within the rounding of its sums."""
    over_patches(launcher, conv.Pass.FPROP, drawn, dtype).fprop(drawn)


@pytest.mark.parametrize("adds", [False, True])
@patches.CASES
@DTYPES
def test_the_filters_gradient_over_patches_is_that_of_pixels(launcher, drawn, dtype, adds):
    """Into a gradient of three channels and all taps, or added to it; the bias's comes from the same memory."""
    over_patches(launcher, conv.Pass.WGRAD, drawn, dtype).wgrad(drawn, bias=True, adds=adds)


@patches.CASES
@DTYPES
def test_a_batch_that_is_loaded_is_cut_into_patches(launcher, drawn, dtype):
    """A model stores what it is given in patches, with zeros for padding; drawn numbers too."""
    facts = {"stride": drawn.stride, "pad": drawn.pad, "k": drawn.k, "r": drawn.r, "s": drawn.s, "bias": False}
    layer, random = Conv2d(h=drawn.h, w=drawn.w, c=3, **facts), np.random.default_rng(4)
    x = random.standard_normal(drawn.x_shape)
    how = {"context": launcher.context(), "experimental": ["space_to_depth"]}
    with Model(layer, device=launcher.device, dtype=dtype, **how) as model:
        model.prepare(drawn.n)
        (given,) = model.plan.schedule.given
        held = model._places[0][0].arena[given]
        model.load(x)
        want = patches.cut(drawn, cases.encoded(x, dtype))
        np.testing.assert_array_equal(launcher.get(held), want)
        model.step()
        output, w = model.output(), cases.decoded(launcher.get(model.parameters["conv2d"]["w"]))
        held[...] = launcher.put(np.ones(want.shape, held.dtype))
        model.load_random()
        holds = patches.cut(drawn, np.ones(drawn.x_shape)) != 0
        assert np.count_nonzero(launcher.get(held)[~holds]) == 0
        assert np.count_nonzero(launcher.get(held)[holds] != 1) == np.count_nonzero(holds)
    x = cases.decoded(cases.encoded(x, dtype))
    want = cases.conv2d(drawn, x, w)
    tolerance = cases.bound(w[0].size + 1, cases.conv2d(drawn, abs(x), abs(w)), want, dtype)
    assert_within(output, want, tolerance, axes="npqk", label=dtype)


@DTYPES
def test_a_batch_that_is_loaded_is_stored_with_a_fourth_channel(launcher, dtype):
    """What a model is given are three channels, loaded or drawn; its output is theirs."""
    layer, random = Conv2d(h=5, w=6, c=3, k=4, r=3, s=3, pad=1, bias=False), np.random.default_rng(3)
    x = random.standard_normal((7, 5, 6, 3))
    with Model(layer, device=launcher.device, dtype=dtype, context=launcher.context()) as model:
        model.prepare(7)
        (given,) = model.plan.schedule.given
        held = model._places[0][0].arena[given]
        for load in (model.load_random, functools.partial(model.load, x)):
            held[...] = launcher.put(np.ones((7, 5, 6, 4), held.dtype))
            load()
            assert np.count_nonzero(launcher.get(held)[..., 3]) == 0
            assert np.count_nonzero(launcher.get(held)[..., :3] != 1) == 7 * 5 * 6 * 3
        model.step()
        output, w = model.output(), cases.decoded(launcher.get(model.parameters["conv2d"]["w"]))
    drawn = cases.Conv(n=7, h=5, w=6, c=3, k=4, r=3, s=3, pad=(1, 1, 1, 1))
    x = cases.decoded(cases.encoded(x, dtype))
    want = cases.conv2d(drawn, x, w)
    tolerance = cases.bound(28, cases.conv2d(drawn, abs(x), abs(w)), want, dtype)
    assert_within(output, want, tolerance, axes="npqk", label=dtype)
