"""Tokens and the class token on kernels: the NumPy engine's to the last bit, but for one rounding of sums."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cubatch.engine.native import tokens
from tests.checks import assert_within
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
