"""Tokens and the class token on kernels: the NumPy engine's to the last bit, but for one rounding of sums."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings, strategies as st

from cubatch.engine.native import tokens
from tests.checks import assert_within
from tests.cpusim.simulator import Simulator
from tests.kernels.cases import DTYPES, bound, decoded, drawn
from tests.kernels.placing import place, room


@st.composite
def images(draw):
    """Few samples and many, of few pixels, whole vectors of channels or not."""
    shape = (draw(st.sampled_from([1, 3, 70])), draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    return {
        "shape": (*shape, draw(st.sampled_from([1, 3, 8, 24, 40]))),
        "dtype": draw(st.sampled_from(DTYPES)),
        "shift": draw(st.sampled_from([0, 0, 1])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@given(case=images())
@settings(max_examples=25, deadline=None)
def test_tokens_are_the_class_then_the_pixels_with_their_positions(launcher, case):
    """One addition each, stored once."""
    random, (n, h, w, c), dtype = np.random.default_rng(case["seed"]), case["shape"], case["dtype"]
    x, token, position = (
        drawn(random, (n, h, w, c), dtype),
        drawn(random, c, dtype),
        drawn(random, (h * w + 1, c), dtype),
    )
    y = room(launcher, (n, h * w + 1, 1, c), x.dtype, case["shift"])
    arrays = place(launcher, x, case["shift"]), place(launcher, token), place(launcher, position, case["shift"])
    tokens.tokens(launcher.context(), *arrays, out=y)
    first = np.broadcast_to(decoded(token), (n, 1, c))
    terms = np.concatenate([first, decoded(x).reshape(n, h * w, c)], axis=1), decoded(position)
    want = terms[0] + terms[1]
    within = bound(1, abs(want), want, dtype)
    assert_within(decoded(launcher.get(y))[:, :, 0], want, within, axes="ntc", label=str(case))


@given(case=images(), wanted=st.booleans())
@settings(max_examples=25, deadline=None)
def test_their_gradients_are_sums_over_samples_and_copies(launcher, case, wanted):
    """dposition is a sum of n, dtoken its first row, dx what came for the pixels, or nothing."""
    random, (n, h, w, c), dtype = np.random.default_rng(case["seed"]), case["shape"], case["dtype"]
    dy = drawn(random, (n, h * w + 1, 1, c), dtype)
    dtoken, dposition = launcher.unwritten((c,), dy.dtype), launcher.unwritten((h * w + 1, c), dy.dtype)
    dx = room(launcher, case["shape"], dy.dtype, case["shift"]) if wanted else None
    errors = place(launcher, dy, case["shift"])
    tokens.tokens_backward(launcher.context(), errors, dtoken=dtoken, dposition=dposition, out=dx)
    want, got = decoded(dy).sum(0)[:, 0], decoded(launcher.get(dposition))
    within = bound(n, abs(decoded(dy)).sum(0)[:, 0], want, dtype)
    assert_within(got, want, within, axes="tc", label=str(case))
    np.testing.assert_array_equal(decoded(launcher.get(dtoken)), got[0])
    if wanted:
        np.testing.assert_array_equal(launcher.get(dx), dy[:, 1:].reshape(case["shape"]))


@given(case=images())
@settings(max_examples=25, deadline=None)
def test_the_class_token_is_read_and_alone_has_a_gradient(launcher, case):
    """Copies, and zeros."""
    random, (n, h, w, c), dtype = np.random.default_rng(case["seed"]), case["shape"], case["dtype"]
    x = drawn(random, (n, h, w, c), dtype)
    y = room(launcher, (n, 1, 1, c), x.dtype, case["shift"])
    tokens.class_token(launcher.context(), place(launcher, x, case["shift"]), out=y)
    np.testing.assert_array_equal(launcher.get(y)[:, 0, 0], x[:, 0, 0])
    dx = room(launcher, x.shape, x.dtype, case["shift"])
    tokens.class_token_backward(launcher.context(), y, x_shape=x.shape, out=dx)
    want = np.zeros_like(x)
    want[:, 0, 0] = x[:, 0, 0]
    np.testing.assert_array_equal(launcher.get(dx), want)


def test_more_columns_than_a_grid_has_blocks_in_y_go_on_in_z(launcher):
    """A sample of 65537 positions of 128 channels is of as many blocks; a GPU takes 65535 in y, and no more."""
    count, c = 65537, 128
    if isinstance(launcher.launcher, Simulator):
        launcher.launcher.blocks = _ends
    context, random = launcher.context(), np.random.default_rng(0)
    x, token, position = (drawn(random, shape, "float32") for shape in ((1, 1, count - 1, c), (c,), (count, c)))
    y = launcher.unwritten((1, count, 1, c), np.float32)
    tokens.tokens(context, *map(launcher.put, (x, token, position)), out=y)
    want, ran = np.concatenate([token[None], x[0, 0]]) + position, [0, 32768, 32769, 65536]
    np.testing.assert_array_equal(launcher.get(y)[0, ran, 0], want[ran])

    dtoken, dposition = launcher.unwritten((c,), np.float32), launcher.unwritten((count, c), np.float32)
    dx = launcher.unwritten(x.shape, np.float32)
    tokens.tokens_backward(context, launcher.put(want[None, :, None]), dtoken=dtoken, dposition=dposition, out=dx)
    np.testing.assert_array_equal(launcher.get(dposition)[0, :8], want[0, :8])
    np.testing.assert_array_equal(launcher.get(dposition)[-1, -8:], want[-1, -8:])
    ran = [0, 32767, 32768, 65535]
    np.testing.assert_array_equal(launcher.get(dx)[0, 0, ran], want[1:][ran])

    tokens.class_token_backward(context, launcher.put(token), x_shape=x.shape, out=dx)
    np.testing.assert_array_equal(launcher.get(dx)[0, 0, ran], [token, *np.zeros((3, c))])


def _ends(grid):
    """Give the first and the last blocks of a grid, and the one before in y: in z the columns may end there."""
    return set(itertools.product(*({0, max(0, extent - 2), extent - 1} for extent in grid)))
