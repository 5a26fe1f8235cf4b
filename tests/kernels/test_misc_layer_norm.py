"""Layer norm, layer scale and their gradients against float64, however the rows are shared among threads."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.engine.native import layer_norm, scaling
from tests.checks import assert_within, gamma
from tests.kernels.cases import DTYPES, bound, decoded, drawn, encoded
from tests.kernels.placing import place, room

U, EPS = 2.0**-24, 1e-3


@st.composite
def rows_of_channels(draw):
    """Few rows and many, of channels that a thread, a warp or a block shares, whole vectors or not."""
    return {
        "shape": (draw(st.integers(1, 3)), draw(st.sampled_from([1, 7, 50])), draw(CHANNELS)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "far": draw(st.sampled_from([0, 0, 8, 1000])),
        "shift": draw(st.sampled_from([0, 0, 1])),
        "reverses": draw(st.booleans()),
        "sms": draw(st.sampled_from([1, 40])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


CHANNELS = st.sampled_from([1, 3, 8, 24, 40, 192, 250, 768, 1032, 4100, 6144])


def arrays_of(case):
    """The input, the gradient of the output, gamma and beta."""
    random, shape = np.random.default_rng(case["seed"]), case["shape"]
    x = encoded(case["far"] + random.uniform(-1, 1, shape), case["dtype"])
    return x, drawn(random, shape, case["dtype"]), *(drawn(random, shape[-1:], case["dtype"]) for _ in range(2))


def statistics_of(x):
    """Mean, biased variance and deviations of each position, in float64."""
    wide = decoded(x)
    mean = wide.mean(-1, keepdims=True)
    return mean, ((wide - mean) ** 2).mean(-1, keepdims=True), wide - mean


@given(case=rows_of_channels(), keeps=st.booleans())
@settings(max_examples=25, deadline=None)
def test_layer_norm_is_that_of_float64(launcher, case, keeps):
    """
    Statistics and output, however far away the mean is: a deviation is off by the mean's rounding and its own.

    The first mean is off by a sum of c elements, gamma(c + 2) of |x|; what that is corrected by, and the variance, only
    by sums of c deviations and their squares, which are no larger than the deviations and the first mean's error.
    """
    x, _, gamma_, beta = arrays_of(case)
    rows, c = x.size // x.shape[-1], x.shape[-1]
    y = room(launcher, x.shape, x.dtype, case["shift"])
    statistics = launcher.unwritten((rows * 2,), np.float32) if keeps else None
    parameters = place(launcher, gamma_), place(launcher, beta)
    layer_norm.layer_norm(
        launcher.context(), place(launcher, x, case["shift"]), *parameters, eps=EPS, statistics=statistics, out=y
    )
    mean, variance, deviations = statistics_of(x)
    far, large = abs(decoded(x)).max(-1, keepdims=True), abs(deviations).max(-1, keepdims=True)
    first = gamma(c + 2, U) * far
    off = gamma(c + 3, U) * (large + first) + U * far  # of a deviation from the mean
    inverse = 1 / np.sqrt(variance + EPS)
    squares = gamma(c + 4, U) * 2 * (large + first) ** 2 + 2 * large * off + off**2
    relative = squares / (variance + EPS) + gamma(4, U)
    if keeps:
        kept = launcher.get(statistics).reshape(2, *x.shape[:2], 1)
        assert_within(kept[0], mean, off + U * far, label=f"mean {case}")
        assert_within(kept[1], inverse, relative * inverse, label=f"inverse deviation {case}")
    scale, shift = decoded(gamma_), decoded(beta)
    want = deviations * inverse * scale + shift
    size = abs(scale) * inverse * (off + (large + off) * (relative + gamma(3, U)))
    within = size + bound(2, abs(deviations * inverse * scale) + abs(shift), want, case["dtype"])
    assert_within(decoded(launcher.get(y)), want, within * (1 + 2.0**-7), axes="ntc", label=str(case))


@pytest.mark.parametrize("channels", [192, 4100])
def test_equal_values_have_no_deviation_however_large_they_are(launcher, channels):
    """
    The first mean, a rounded sum of them, is off by up to gamma(c + 2) of their size; what it is corrected by is off by
    so much of that error only, and of the variance no more than its square is left.
    """
    x = np.repeat(np.float32([333.3, 1000.1, 7777.7, 54321.1]), channels).reshape(4, channels)
    one, half = np.ones(channels, np.float32), np.full(channels, 0.5, np.float32)
    y, statistics = launcher.unwritten(x.shape, np.float32), launcher.unwritten((8,), np.float32)
    layer_norm.layer_norm(launcher.context(), *map(launcher.put, (x, one, half)), eps=EPS, statistics=statistics, out=y)
    first, inverse = gamma(channels + 2, U) * x.astype(np.float64), 1 / np.sqrt(EPS)
    left = gamma(channels + 4, U) * first
    assert_within(launcher.get(y), np.full(x.shape, 0.5), inverse * left + gamma(2, U), label="y")
    within = inverse * (left[:, 0] * first[:, 0] / EPS + gamma(4, U))
    assert_within(launcher.get(statistics)[4:], np.full(4, inverse), within, label="inverse deviation")


@given(case=rows_of_channels(), over=st.sampled_from(["", "dy", "residual"]), adds=st.booleans())
@settings(max_examples=35, deadline=None)
def test_its_gradients_are_those_of_float64(launcher, case, over, adds):
    """
    From statistics that were kept in float32, which are the kernel's input: sums of c terms for dx, of the rows for
    dgamma and dbeta; dx may be written over dy or another branch's gradient, which is added to it. With one SM a block
    has several rows one after another.
    """
    case["far"] = min(case["far"], 8)
    x, dy, gamma_, _ = arrays_of(case)
    rows, c = x.size // x.shape[-1], x.shape[-1]
    mean, variance, _ = statistics_of(x)
    kept = np.stack([mean.ravel(), 1 / np.sqrt(variance.ravel() + EPS)]).astype(np.float32)
    center, inv_std = kept.astype(np.float64).reshape(2, *x.shape[:2], 1)
    dgamma, dbeta = (launcher.unwritten((c,), x.dtype) for _ in range(2))
    adds = adds or over == "residual"
    other = drawn(np.random.default_rng(rows), x.shape, case["dtype"])
    errors, residual = (place(launcher, each, case["shift"]) for each in (dy, other))
    outs = {"dy": errors, "residual": residual}
    dx = outs[over] if over else room(launcher, x.shape, x.dtype, case["shift"])
    device = attrs.evolve(launcher.device, num_sms=case["sms"])
    context = launcher.context(device=device, reverses_sums=case["reverses"])
    layer_norm.layer_norm_backward(
        context, errors, place(launcher, x, case["shift"]), place(launcher, gamma_),
        statistics=launcher.put(kept), dgamma=dgamma, dbeta=dbeta, residual=residual if adds else None, out=dx,
    )  # fmt: skip
    wide, e = decoded(x), decoded(dy)
    xhat, g = (wide - center) * inv_std, e * decoded(gamma_)
    sizes = (abs(wide - center) + U * abs(wide)) * inv_std * (1 + gamma(2, U))
    want = inv_std * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
    spread = abs(g) + abs(g).mean(-1, keepdims=True) + sizes * (abs(g) * sizes).mean(-1, keepdims=True)
    added = decoded(other) * adds
    want = want + added
    within = bound(c + 13, inv_std * spread + abs(added), want, case["dtype"])
    assert_within(decoded(launcher.get(dx)), want, within, axes="ntc", label=f"dx {case}")
    for array, terms, size in ((dgamma, e * xhat, abs(e) * sizes), (dbeta, e, abs(e))):
        sums = terms.sum((0, 1))
        within = bound(rows + 4, size.sum((0, 1)), sums, case["dtype"])
        assert_within(decoded(launcher.get(array)), sums, within, label=f"sums {case}")


@given(case=rows_of_channels(), in_place=st.booleans(), adds=st.booleans())
@settings(max_examples=20, deadline=None)
def test_layer_scale_and_its_gradients(launcher, case, in_place, adds):
    """A product each, with another branch added; the factors' gradient is a sum of products, one for each position."""
    case["far"] = 0
    x, dy, gamma_, _ = arrays_of(case)
    rows = x.size // x.shape[-1]
    arrays = place(launcher, dy, case["shift"]), place(launcher, x, case["shift"])
    dgamma, factors = launcher.unwritten(gamma_.shape, x.dtype), place(launcher, gamma_)
    y, other = (
        room(launcher, x.shape, x.dtype, case["shift"]),
        drawn(np.random.default_rng(rows), x.shape, case["dtype"]),
    )
    residual = place(launcher, other, case["shift"])
    y = residual if in_place and adds else y
    scaling.layer_scale(launcher.context(), arrays[1], factors, residual=residual if adds else None, out=y)
    dx = arrays[0] if in_place else room(launcher, x.shape, x.dtype, case["shift"])
    context = launcher.context(reverses_sums=case["reverses"])
    scaling.layer_scale_backward(context, *arrays, factors, dgamma=dgamma, out=dx)
    for got, of, added in ((y, x, decoded(other) * adds), (dx, dy, 0 * decoded(other))):
        product = decoded(of) * decoded(gamma_)
        want, size = product + added, abs(product) + abs(added)
        assert_within(decoded(launcher.get(got)), want, bound(2, size, want, case["dtype"]), label=str(case))
    terms = decoded(x) * decoded(dy)
    within = bound(rows + 2, abs(terms).sum((0, 1)), terms.sum((0, 1)), case["dtype"])
    assert_within(decoded(launcher.get(dgamma)), terms.sum((0, 1)), within, label=f"dgamma {case}")
