"""Pooling kernels against the NumPy engine in float64: bit by bit where no sum is rounded."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from cubatch.engine import functional
from cubatch.engine.native import window_pooling
from cubatch.network.windows import Window
from tests.checks import assert_within
from tests.kernels.cases import DTYPES, bound, decoded, drawn, encoded
from tests.kernels.placing import place, room


@st.composite
def pools(draw):
    """A small pooling: shapes, window, stored type, and whether arrays start between vectors."""
    r, s = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    pad = (*(draw(st.integers(0, r - 1)) for _ in range(2)), *(draw(st.integers(0, s - 1)) for _ in range(2)))
    return {
        "x_shape": (
            draw(st.integers(1, 3)),
            draw(st.integers(max(1, r - pad[0] - pad[1]), 9)),
            draw(st.integers(max(1, s - pad[2] - pad[3]), 9)),
            draw(st.sampled_from([1, 3, 4, 8, 10, 24])),
        ),
        "window": {
            "r": r,
            "s": s,
            "stride": draw(st.sampled_from([(1, 1), (2, 2), (3, 1), (1, 4)])),
            "pad": pad,
            "ceil_mode": draw(st.booleans()),
        },
        "dtype": draw(st.sampled_from(DTYPES)),
        "shift": draw(st.sampled_from([0, 0, 1])),
        "winners_shift": draw(st.sampled_from([0, 0, 1])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def _coarse(case, shape):
    """Whole numbers, so that windows hold equal ones."""
    return encoded(np.random.default_rng(case["seed"]).integers(-3, 4, shape), case["dtype"])


def _fine(case, shape):
    return drawn(np.random.default_rng(case["seed"]), shape, case["dtype"])


def _max_pool(launcher, case, x, *, relu):
    """Give y and the winners, from kernels."""
    want = functional.max_pool2d(decoded(x), Window(**case["window"]), relu=relu)
    y = room(launcher, want.shape, x.dtype, case["shift"])
    argmax = room(launcher, want.shape, np.uint8, case["winners_shift"])
    given_x = place(launcher, x, case["shift"])
    window_pooling.max_pool2d(launcher.context(), given_x, Window(**case["window"]), relu=relu, out=y, argmax=argmax)
    return decoded(launcher.get(y)), launcher.get(argmax)


@given(case=pools(), relu=st.booleans(), nans=st.booleans())
@settings(max_examples=30, deadline=None)
def test_max_pool_and_its_winners_are_those_of_the_numpy_engine(launcher, case, relu, nans):
    """Nothing is rounded: values, the first of equal winners and the way of NaNs are the engine's, exactly."""
    x = _coarse(case, case["x_shape"])
    if nans:
        x.reshape(-1)[:: max(1, x.size // 5)] = encoded(np.nan, case["dtype"])

    y, winners = _max_pool(launcher, case, x, relu=relu)

    want_winners = np.empty(winners.shape, np.uint8)
    want = functional.max_pool2d(decoded(x), Window(**case["window"]), relu=relu, argmax=want_winners)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(winners, want_winners)


@given(case=pools(), relu=st.booleans())
@settings(max_examples=20, deadline=None)
def test_max_pool_backward_gives_each_gradient_to_its_winner(launcher, case, relu):
    """An input gets the sum of dy over the windows it won, at most r * s of them; all others get zero."""
    x = _coarse(case, case["x_shape"])
    window = case["window"]
    winners = np.empty(functional.max_pool2d(decoded(x), Window(**window)).shape, np.uint8)
    functional.max_pool2d(decoded(x), Window(**window), relu=relu, argmax=winners)
    dy = _fine(case, winners.shape)

    dx = room(launcher, x.shape, x.dtype, case["shift"])
    arrays = place(launcher, dy, case["shift"]), place(launcher, winners, case["winners_shift"])
    window_pooling.max_pool2d_backward(launcher.context(), *arrays, Window(**window), x_shape=x.shape, out=dx)

    want, size = (
        functional.max_pool2d_backward(f(decoded(dy)), winners, Window(**window), x_shape=x.shape)
        for f in (np.asarray, abs)
    )
    within = bound(window["r"] * window["s"], size, want, case["dtype"])
    assert_within(decoded(launcher.get(dx)), want, within, axes="nhwc", label=f"max_pool2d_backward {case}")


@given(case=pools(), counts_pad=st.booleans())
@settings(max_examples=20, deadline=None)
def test_avg_pool_stays_within_the_rounding_of_its_sums(launcher, case, counts_pad):
    """A mean is a sum of at most r * s values and a division."""
    x = _fine(case, case["x_shape"])
    window = Window(**case["window"], count_include_pad=counts_pad)
    want, size = (functional.avg_pool2d(f(decoded(x)), window) for f in (np.asarray, abs))

    y = room(launcher, want.shape, x.dtype, case["shift"])
    window_pooling.avg_pool2d(launcher.context(), place(launcher, x, case["shift"]), window, out=y)

    within = bound(window.r * window.s + 1, size, want, case["dtype"])
    assert_within(decoded(launcher.get(y)), want, within, axes="npqc", label=f"avg_pool2d {case}")


@given(case=pools(), counts_pad=st.booleans())
@settings(max_examples=20, deadline=None)
def test_avg_pool_backward_spreads_each_gradient_evenly(launcher, case, counts_pad):
    """Each input gets the share of every window that sees it, the exact transpose of the forward pass."""
    window, x_shape = Window(**case["window"], count_include_pad=counts_pad), case["x_shape"]
    dy = _fine(case, functional.avg_pool2d(np.zeros(x_shape), window).shape)

    dx = room(launcher, x_shape, dy.dtype, case["shift"])
    given_dy = place(launcher, dy, case["shift"])
    window_pooling.avg_pool2d_backward(launcher.context(), given_dy, window, x_shape=x_shape, out=dx)

    want, size = (functional.avg_pool2d_backward(f(decoded(dy)), window, x_shape=x_shape) for f in (np.asarray, abs))
    within = bound(window.r * window.s + 2, size, want, case["dtype"])
    assert_within(decoded(launcher.get(dx)), want, within, axes="nhwc", label=f"avg_pool2d_backward {case}")


def test_max_pool_does_without_its_winners(launcher):
    """Inference hands in no array for them."""
    x = encoded(np.arange(2 * 4 * 4 * 4).reshape(2, 4, 4, 4), "float32")
    y = room(launcher, (2, 2, 2, 4), np.float32)
    window_pooling.max_pool2d(launcher.context(), place(launcher, x), Window(2, 2), out=y)
    np.testing.assert_array_equal(launcher.get(y), x[:, 1::2, 1::2])
