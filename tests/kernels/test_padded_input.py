"""Convolutions over a batch that is stored with a fourth channel of zeros, beside those over its three."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from cubatch.engine.native import conv
from cubatch.engine.native.operands import Fused
from cubatch.engine.network import Model
from cubatch.errors import InvalidArgument
from cubatch.kernels.workspace.product_scratch import conv2d_workspace
from cubatch.network.layers import Conv2d
from cubatch.network.windows import conv_shape
from tests.checks import assert_within
from tests.kernels import cases

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


def exactly(launcher, pass_, drawn, dtype):
    """Scratch memory of just the bytes that are planned, which nothing is written behind."""
    shape = conv_shape(drawn.x_shape[1:], drawn.w_shape, drawn.stride, drawn.pad, drawn.dilation)
    return launcher.unwritten((conv2d_workspace(pass_, shape, drawn.n, dtype, launcher.device),), np.uint8)


@CASES
@DTYPES
def test_forward_is_that_of_three_channels(launcher, drawn, dtype):
    """With a bias, in the planned scratch memory: float64 over three channels, within the rounding of its sums."""
    random = np.random.default_rng(0)
    x, w, b = (cases.drawn(random, shape, dtype) for shape in (drawn.x_shape, drawn.w_shape, (drawn.k,)))
    y = launcher.unwritten(drawn.y_shape, x.dtype)
    conv.conv2d(
        launcher.context(), launcher.put(stored(x)), launcher.put(w), launcher.put(b), out=y,
        workspace=exactly(launcher, conv.Pass.FPROP, drawn, dtype), **drawn.options,
    )  # fmt: skip
    x, w, b = cases.decoded(x), cases.decoded(w), cases.decoded(b)
    want, magnitude = cases.conv2d(drawn, x, w, b), cases.conv2d(drawn, abs(x), abs(w), abs(b))
    tolerance = cases.bound(w[0].size + 1, magnitude, want, dtype)
    assert_within(cases.decoded(launcher.get(y)), want, tolerance, axes="npqk", label=str(drawn))


@pytest.mark.parametrize("adds", [False, True])
@CASES
@DTYPES
def test_the_filters_gradient_is_that_of_three_channels(launcher, drawn, dtype, adds):
    """Into a gradient of three channels, or added to what is there; the bias's comes after it from the same memory."""
    random = np.random.default_rng(1)
    x, dy, before = (cases.drawn(random, shape, dtype) for shape in (drawn.x_shape, drawn.y_shape, drawn.w_shape))
    dw, db = launcher.put(before), launcher.unwritten((drawn.k,), x.dtype)
    more = {"fused": Fused(residual=dw)} if adds else {}
    conv.conv2d_wgrad(
        launcher.context(), launcher.put(stored(x)), launcher.put(dy), dw=dw, db=db,
        workspace=exactly(launcher, conv.Pass.WGRAD, drawn, dtype), **drawn.options, **more,
    )  # fmt: skip
    x, dy, before = cases.decoded(x), cases.decoded(dy), cases.decoded(before) * adds
    wants, sizes = cases.conv2d_wgrad(drawn, x, dy), cases.conv2d_wgrad(drawn, abs(x), abs(dy))
    pixels = dy[..., 0].size
    for got, want, size in ((dw, wants[0] + before, sizes[0] + abs(before)), (db, wants[1], sizes[1])):
        tolerance = cases.bound(pixels + 2, size, want, dtype)
        assert_within(cases.decoded(launcher.get(got)), want, tolerance, label=str(drawn))


def test_other_channels_than_the_filters_are_refused(launcher):
    """Five for three, or four for three in groups, is no batch of ours."""
    random = np.random.default_rng(2)
    x, w = cases.drawn(random, (1, 4, 4, 5)), cases.drawn(random, (2, 1, 1, 3))
    with pytest.raises(InvalidArgument):
        conv.conv2d(launcher.context(), launcher.put(x), launcher.put(w))
    with pytest.raises(InvalidArgument):
        conv.conv2d(launcher.context(), launcher.put(x[..., :4].copy()), launcher.put(w), groups=2)


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
