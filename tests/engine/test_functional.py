"""The engine's operations against float64 loops, finite differences and their own promises."""

from __future__ import annotations

import functools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubatch.engine import backend, functional
from cubatch.engine.team import Team
from cubatch.errors import InvalidArgument
from cubatch.memory import blocks as scratch_blocks
from cubatch.network.windows import conv_shape, pool_axes
from tests import reference
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma
from tests.thorough import examples

U = UNIT_ROUNDOFF["float32"]


@st.composite
def convolutions(draw):
    """A small convolution: shapes, options and a seed; what does not fit is not drawn."""
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    depthwise = groups > 1 and draw(st.booleans())
    group_c, group_k = (1, 1) if depthwise else (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    r, s = draw(st.sampled_from([(1, 1), (3, 3), (2, 3), (3, 1), (1, 4)]))
    dilation = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    pad = tuple(draw(st.lists(st.integers(0, 2), min_size=4, max_size=4)))
    tall, wide = (r - 1) * dilation[0] + 1, (s - 1) * dilation[1] + 1
    return {
        "n": draw(st.integers(1, 3)),
        "h": draw(st.integers(max(1, tall - pad[0] - pad[1]), 7)),
        "w": draw(st.integers(max(1, wide - pad[2] - pad[3]), 8)),
        "krsc": (groups * group_k, r, s, group_c),
        "options": {
            "stride": draw(st.sampled_from([(1, 1), (2, 2), (3, 2), (1, 3)])),
            "pad": pad,
            "dilation": dilation,
            "groups": groups,
        },
        "seed": draw(st.integers(0, 2**32 - 1)),
        "rows_only": draw(st.booleans()),
    }


def _arrays(case, dtype=np.float32):
    random = np.random.default_rng(case["seed"])
    x_shape = (case["n"], case["h"], case["w"], case["krsc"][3] * case["options"]["groups"])
    x, w = random.uniform(-1, 1, x_shape).astype(dtype), random.uniform(-1, 1, case["krsc"]).astype(dtype)
    return random, x, w


def _shape(case):
    options = case["options"]
    hwc = (case["h"], case["w"], case["krsc"][3] * options["groups"])
    return conv_shape(hwc, case["krsc"], *(options[name] for name in ("stride", "pad", "dilation", "groups")))


def _workspace(case, needs):
    """The least that works, so that blocks are single rows, or plenty, filled with what is no number."""
    size = scratch_blocks.workspace_bytes(needs, case["n"], 0 if case["rows_only"] else 2**20)
    return np.full(size, 0xFF, dtype=np.uint8)


@given(convolutions())
@settings(max_examples=examples(150), deadline=None)
def test_conv2d_stays_within_the_rounding_of_its_dot_products(case):
    """Each output is one dot product of length r*s*c and a bias, in whatever order it is summed."""
    random, x, w = _arrays(case)
    b = random.uniform(-1, 1, w.shape[0]).astype(np.float32)

    y = functional.conv2d(
        x, w, b, **case["options"], workspace=_workspace(case, scratch_blocks.conv2d_forward(_shape(case), 4))
    )

    bound = gamma(w[0].size + 1, U) * reference.conv2d(abs(x), abs(w), abs(b), **case["options"])
    assert_within(y, reference.conv2d(x, w, b, **case["options"]), bound, axes="npqk", label=str(case))


@given(convolutions())
@settings(max_examples=examples(150), deadline=None)
def test_conv2d_dgrad_stays_within_the_rounding_of_its_dot_products(case):
    """An input is read by at most r*s taps of k / groups filters, so its gradient sums that many products."""
    random, x, w = _arrays(case)
    dy = random.uniform(-1, 1, reference.conv2d(x, w, **case["options"]).shape).astype(np.float32)

    dx = functional.conv2d_dgrad(
        dy,
        w,
        x_shape=x.shape,
        **case["options"],
        out=np.full(x.shape, np.nan, np.float32),
        workspace=_workspace(case, scratch_blocks.conv2d_dgrad(_shape(case), 4)),
    )

    length = w[..., 0].size // case["options"]["groups"]
    bound = gamma(length, U) * reference.conv2d_dgrad(abs(dy), abs(w), x_shape=x.shape, **case["options"])
    want = reference.conv2d_dgrad(dy, w, x_shape=x.shape, **case["options"])
    assert_within(dx, want, bound, axes="nhwc", label=str(case))


@given(convolutions())
@settings(max_examples=examples(150), deadline=None)
def test_conv2d_wgrad_stays_within_the_rounding_of_its_dot_products(case):
    """A filter tap meets every output pixel of the batch once; so does the bias."""
    random, x, w = _arrays(case)
    dy = random.uniform(-1, 1, reference.conv2d(x, w, **case["options"]).shape).astype(np.float32)
    dw, db = np.full(w.shape, np.nan, np.float32), np.full(w.shape[0], np.nan, np.float32)

    functional.conv2d_wgrad(
        x, dy, dw=dw, db=db, **case["options"], workspace=_workspace(case, scratch_blocks.conv2d_wgrad(_shape(case), 4))
    )

    slack = gamma(dy[..., 0].size + 1, U)
    want_w, want_b = reference.conv2d_wgrad(x, dy, w_shape=w.shape, **case["options"])
    size_w, size_b = reference.conv2d_wgrad(abs(x), abs(dy), w_shape=w.shape, **case["options"])
    assert_within(dw, want_w, slack * size_w, axes="krsc", label=str(case))
    assert_within(db, want_b, slack * size_b, axes="k", label=str(case))


def test_relu_in_conv2d_is_relu_of_conv2d():
    """Clamping in the cache changes when, not what."""
    random = np.random.default_rng(1)
    x, w = random.standard_normal((3, 6, 5, 4)), random.standard_normal((3, 3, 3, 4))
    plain = functional.conv2d(x, w, pad=(1, 1, 1, 1))
    clamped = functional.conv2d(x, w, pad=(1, 1, 1, 1), relu=True)
    assert (plain < 0).any()
    np.testing.assert_array_equal(clamped, np.maximum(plain, 0))


@pytest.mark.parametrize("groups", [1, 4], ids=["full", "depthwise"])
def test_shards_of_a_batch_give_the_batch(groups):
    """A team hands each member some samples: outputs and input gradients side by side, filter gradients summed."""
    random = np.random.default_rng(2)
    x, w = random.standard_normal((5, 6, 7, 4)), random.standard_normal((4, 3, 3, 4 // groups))
    options = {"pad": (1, 0, 2, 1), "stride": (2, 1), "groups": groups}
    y = functional.conv2d(x, w, **options)
    dy = random.standard_normal(y.shape)
    whole = functional.conv2d_wgrad(x, dy, dw=np.empty_like(w), **options)
    parts = [slice(0, 3), slice(3, 5), slice(5, 5)]
    summed = sum(functional.conv2d_wgrad(x[part], dy[part], dw=np.empty_like(w), **options) for part in parts)
    np.testing.assert_allclose(np.concatenate([functional.conv2d(x[part], w, **options) for part in parts]), y)
    np.testing.assert_allclose(summed, whole, rtol=1e-12, atol=1e-12)


def _difference(function, x, direction, step=1e-5):
    return (function(x + step * direction) - function(x - step * direction)) / (2 * step)


def _check_gradient(function, x, gradient, seed=0):
    """Central differences along random directions: error O(step^2) and rounding O(u / step), both below 1e-8."""
    random = np.random.default_rng(seed)
    for _ in range(3):
        direction = random.standard_normal(x.shape)
        slope = _difference(function, x, direction)
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-6, abs=1e-7)


def test_conv2d_gradients_are_the_slopes_of_conv2d():
    """Finite differences know nothing of how the gradients are computed."""
    random = np.random.default_rng(3)
    x, w, b = random.standard_normal((2, 6, 7, 4)), random.standard_normal((6, 3, 2, 2)), random.standard_normal(6)
    options = {"stride": (2, 1), "pad": (1, 2, 0, 1), "dilation": (2, 2), "groups": 2}
    weights = random.standard_normal(functional.conv2d(x, w, b, **options).shape)
    dw, db = np.empty_like(w), np.empty_like(b)
    functional.conv2d_wgrad(x, weights, dw=dw, db=db, **options)
    dx = functional.conv2d_dgrad(weights, w, x_shape=x.shape, **options)
    _check_gradient(lambda value: (functional.conv2d(value, w, b, **options) * weights).sum(), x, dx)
    _check_gradient(lambda value: (functional.conv2d(x, value, b, **options) * weights).sum(), w, dw)
    _check_gradient(lambda value: (functional.conv2d(x, w, value, **options) * weights).sum(), b, db)


def test_linear_works_on_the_last_axis_of_any_rank():
    """A sequence is a batch of positions."""
    random = np.random.default_rng(4)
    x, w, b = random.standard_normal((2, 3, 4)), random.standard_normal((5, 4)), random.standard_normal(5)
    want = np.array([[[sum(x[n, t] * w[k]) + b[k] for k in range(5)] for t in range(3)] for n in range(2)])
    np.testing.assert_allclose(functional.linear(x, w, b), want, rtol=1e-13, atol=1e-13)
    turned = functional.linear(x, w, b, relu=True, workspace=np.empty(2 * 3 * 5 * 8, np.uint8))
    np.testing.assert_allclose(turned, np.maximum(want, 0), rtol=1e-13, atol=1e-13)


def test_linear_gradients_are_the_slopes_of_linear():
    """Finite differences know nothing of how the gradients are computed."""
    random = np.random.default_rng(5)
    x, w, b = random.standard_normal((2, 3, 4)), random.standard_normal((5, 4)), random.standard_normal(5)
    weights, dw, db = random.standard_normal((2, 3, 5)), np.empty_like(w), np.empty_like(b)
    functional.linear_wgrad(x, weights, dw=dw, db=db)
    _check_gradient(
        lambda value: (functional.linear(value, w, b) * weights).sum(), x, functional.linear_dgrad(weights, w)
    )
    _check_gradient(lambda value: (functional.linear(x, value, b) * weights).sum(), w, dw)
    _check_gradient(lambda value: (functional.linear(x, w, value) * weights).sum(), b, db)


@st.composite
def poolings(draw):
    """A small pooling: extents, window, options and whether blocks are single rows."""
    r, s = draw(st.sampled_from([(2, 2), (3, 3), (1, 2), (3, 2)]))
    return {
        "x": draw(st.tuples(st.integers(1, 3), st.integers(3, 8), st.integers(3, 9), st.integers(1, 3))),
        "options": {
            "r": r,
            "s": s,
            "stride": draw(st.sampled_from([(1, 1), (2, 2), (3, 2), (r, s)])),
            "pad": tuple(draw(st.integers(0, extent - 1)) for extent in (r, r, s, s)),
            "ceil_mode": draw(st.booleans()),
        },
        "seed": draw(st.integers(0, 2**32 - 1)),
        "rows_only": draw(st.booleans()),
    }


def _pool_workspace(case):
    n, h, w, c = case["x"]
    options = case["options"]
    v, q = pool_axes(
        (h, w), (options["r"], options["s"]), options["stride"], options["pad"], ceil_mode=options["ceil_mode"]
    )
    need = scratch_blocks.Pool(itemsize=8, rows=v.out, vertical=v, horizontal=q, channels=c)
    return np.full(scratch_blocks.workspace_bytes([need], n, 0 if case["rows_only"] else 2**20), 0xFF, dtype=np.uint8)


@given(poolings())
@settings(max_examples=examples(150), deadline=None)
def test_max_pool2d_takes_the_first_of_the_largest(case):
    """Small whole numbers tie often, so the rule for ties is tested with the values."""
    x = np.random.default_rng(case["seed"]).integers(-2, 3, case["x"]).astype(np.float64)
    want, winner = reference.max_pool2d(x, **case["options"])
    argmax = np.full(want.shape, 0xEE, np.uint8)
    y = functional.max_pool2d(x, **case["options"], argmax=argmax, workspace=_pool_workspace(case))
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(argmax, winner)


@given(poolings())
@settings(max_examples=examples(100), deadline=None)
def test_max_pool2d_with_relu_is_relu_then_max_pool2d(case):
    """Values agree exactly, and so do gradients, since neither passes any where nothing is positive."""
    random = np.random.default_rng(case["seed"])
    x = random.integers(-3, 3, case["x"]).astype(np.float64)
    clamped = np.maximum(x, 0)
    want, winner = reference.max_pool2d(clamped, **case["options"])
    argmax, workspace = np.empty(want.shape, np.uint8), _pool_workspace(case)
    y = functional.max_pool2d(x, **case["options"], relu=True, argmax=argmax, workspace=workspace)
    np.testing.assert_array_equal(y, want)
    dy = random.integers(-4, 5, want.shape).astype(np.float64)
    fused = functional.max_pool2d_backward(dy, argmax, x_shape=x.shape, **case["options"], workspace=workspace)
    plain = functional.max_pool2d_backward(dy, winner.astype(np.uint8), x_shape=x.shape, **case["options"])
    np.testing.assert_array_equal(fused, plain * (clamped > 0))


@given(poolings())
@settings(max_examples=examples(100), deadline=None)
def test_max_pool2d_backward_gives_each_gradient_to_its_winner(case):
    """Every dy arrives once, at the tap the reference names; overlapping windows add up."""
    random = np.random.default_rng(case["seed"])
    x = random.standard_normal(case["x"])
    options = case["options"]
    y, winner = reference.max_pool2d(x, **options)
    dy = random.integers(-4, 5, y.shape).astype(np.float64)
    want = np.zeros(x.shape)
    for n, p, q, c in np.ndindex(y.shape):
        r, s = divmod(winner[n, p, q, c] - 1, options["s"])
        want[
            n, p * options["stride"][0] - options["pad"][0] + r, q * options["stride"][1] - options["pad"][2] + s, c
        ] += dy[n, p, q, c]
    dx = functional.max_pool2d_backward(
        dy,
        winner.astype(np.uint8),
        x_shape=x.shape,
        **options,
        out=np.full(x.shape, np.nan),
        workspace=_pool_workspace(case),
    )
    np.testing.assert_array_equal(dx, want)


@given(poolings(), st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_avg_pool2d_divides_by_what_it_counts(case, include):
    """A mean of m numbers is a sum of m and at most two divisions; the gradient spreads it evenly."""
    random = np.random.default_rng(case["seed"])
    x, options = random.uniform(-1, 1, case["x"]), {**case["options"], "count_include_pad": include}
    want, workspace = reference.avg_pool2d(x, **options), _pool_workspace(case)
    y = functional.avg_pool2d(x, **options, workspace=workspace)
    taps = options["r"] * options["s"]
    bound = gamma(taps + 2, UNIT_ROUNDOFF["float64"]) * reference.avg_pool2d(abs(x), **options)
    assert_within(y, want, bound, axes="npqc", label=str(case))
    dy, other = random.standard_normal(y.shape), random.standard_normal(x.shape)
    dx = functional.avg_pool2d_backward(dy, x_shape=x.shape, **options, workspace=workspace)
    # The pooling is linear, so its gradient is its transpose: <dy, pool(v)> = <dx, v> for every v.
    assert (dx * other).sum() == pytest.approx(
        (dy * reference.avg_pool2d(other, **options)).sum(), rel=1e-10, abs=1e-10
    )


def test_global_avg_pool_is_the_mean_and_spreads_evenly():
    """One number per sample and channel."""
    x = np.random.default_rng(6).standard_normal((2, 3, 4, 5))
    np.testing.assert_allclose(
        functional.global_avg_pool(x), [[x[n, :, :, c].mean() for c in range(5)] for n in range(2)]
    )
    dx = functional.global_avg_pool_backward(np.ones((2, 5)), x_shape=x.shape)
    np.testing.assert_array_equal(dx, np.full(x.shape, 1 / 12))


def test_relu_and_its_gradient_work_in_place_and_at_zero():
    """At zero nothing passes, as in PyTorch; an infinite gradient behind a closed gate stays out."""
    x = np.array([-1.0, 0.0, 2.0, np.inf] * 3000)
    y = functional.relu(x.copy())
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    dy = np.array([np.inf, 5.0, 7.0, 9.0] * 3000)
    functional.relu_backward(dy, y, out=dy, workspace=np.empty(64, np.uint8))
    np.testing.assert_array_equal(dy, [0.0, 0.0, 7.0, 9.0] * 3000)


@pytest.mark.parametrize("blocks", ["many", "one"])
def test_batch_norm_train_normalises_by_the_batch(blocks):
    """Statistics, output and running averages against loops; the offset 100 would ruin a one-pass variance."""
    random = np.random.default_rng(7)
    x = (100 + random.standard_normal((4, 3, 5, 6))).astype(np.float32)
    gamma_, beta = random.standard_normal((2, 6)).astype(np.float32)
    want, mean, var = reference.batch_norm(x, gamma_, beta)
    got_mean, inv_std = np.empty(6, np.float32), np.empty(6, np.float32)
    running_mean, running_var = np.ones(6, np.float32), np.ones(6, np.float32)
    need = scratch_blocks.Norm(itemsize=4, channels=6)
    workspace = np.full(need.least if blocks == "many" else need.whole(60), 0xFF, np.uint8)
    y = functional.batch_norm_train(
        x,
        gamma_,
        beta,
        mean=got_mean,
        inv_std=inv_std,
        running_mean=running_mean,
        running_var=running_var,
        workspace=workspace,
    )
    # The deviations x - mean carry the mean's rounding, 100 u; everything after is of order one.
    np.testing.assert_allclose(got_mean, mean, rtol=gamma(61, U))
    np.testing.assert_allclose(1 / inv_std.astype(np.float64) ** 2 - 1e-5, var, rtol=1e-4)
    np.testing.assert_allclose(y, want, atol=8 * gamma(61, U) * 100 * 3)
    np.testing.assert_allclose(running_mean, 0.9 + 0.1 * mean, rtol=gamma(64, U))
    np.testing.assert_allclose(running_var, 0.9 + 0.1 * var * 60 / 59, rtol=1e-4)


def test_batch_norm_gradients_are_its_slopes():
    """Through the statistics too: they depend on x."""
    random = np.random.default_rng(8)
    x, gamma_, beta = random.standard_normal((3, 2, 2, 4)), random.standard_normal(4), random.standard_normal(4)
    weights, saved = random.standard_normal(x.shape), {"mean": np.empty(4), "inv_std": np.empty(4)}

    def loss(x=x, gamma_=gamma_, beta=beta):
        return (functional.batch_norm_train(x, gamma_, beta, mean=np.empty(4), inv_std=np.empty(4)) * weights).sum()

    functional.batch_norm_train(x, gamma_, beta, **saved)
    dgamma, dbeta = np.empty(4), np.empty(4)
    dx = functional.batch_norm_backward(weights.copy(), x, gamma_, **saved, dgamma=dgamma, dbeta=dbeta)
    _check_gradient(lambda value: loss(x=value), x, dx)
    _check_gradient(lambda value: loss(gamma_=value), gamma_, dgamma)
    _check_gradient(lambda value: loss(beta=value), beta, dbeta)


def test_batch_norm_inference_uses_the_running_statistics():
    """In place, with ReLU: what a deployed network does."""
    x = np.array([[1.0, 10.0], [3.0, -10.0]])
    y = functional.batch_norm_inference(
        x, np.array([2.0, 1.0]), np.array([1.0, 0.0]),
        running_mean=np.array([1.0, 0.0]), running_var=np.array([4.0, 25.0]), eps=0.0, relu=True, out=x,
    )  # fmt: skip
    np.testing.assert_allclose(y, [[1.0, 2.0], [3.0, 0.0]])


def test_dropout_drops_its_share_and_keeps_the_mean():
    """Of 40 000 draws at p = 0.3 the share lies within 5 standard deviations, 0.0115, of p."""
    x = np.ones((200, 200), np.float32)
    y, mask = functional.dropout(x, p=0.3, seed=(1, 2))
    assert abs((~mask).mean() - 0.3) < 5 * math.sqrt(0.3 * 0.7 / x.size)
    np.testing.assert_array_equal(y, np.where(mask, np.float32(1 / 0.7), 0))
    np.testing.assert_array_equal(functional.dropout_backward(x, mask, p=0.3), y)


def test_dropout_repeats_with_its_seed_whatever_the_blocks():
    """A replayed step must draw the same mask."""
    x = np.ones(5000, np.float32)
    first = functional.dropout(x, p=0.5, seed=(3, 1))[1]
    again = functional.dropout(x, p=0.5, seed=(3, 1), workspace=np.empty(256, np.uint8))[1]
    other = functional.dropout(x, p=0.5, seed=(3, 2))[1]
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_concat_and_its_gradient_are_inverse():
    """A branch whose gradient nobody wants is skipped."""
    branches = [np.arange(6.0).reshape(1, 2, 1, 3), np.arange(4.0).reshape(1, 2, 1, 2)]
    joined = functional.concat(branches)
    assert joined.shape == (1, 2, 1, 5)
    back = np.empty_like(branches[1])
    functional.concat_backward(joined, [3, 2], outs=[None, back])
    np.testing.assert_array_equal(back, branches[1])


@pytest.mark.parametrize("room", [0, 1 << 16], ids=["row by row", "at once"])
def test_softmax_cross_entropy_and_its_gradient(room):
    """The loss against loops, the gradient against its slopes; logits of 1000 must not overflow."""
    random = np.random.default_rng(9)
    logits, labels = random.standard_normal((3, 4, 6)) + 1000, random.integers(0, 6, (3, 4))
    need = scratch_blocks.Scores(itemsize=8, classes=6)
    workspace = np.full(max(need.least, room), 0xFF, np.uint8)
    dlogits = np.empty_like(logits)
    loss = functional.softmax_cross_entropy(logits, labels, dlogits=dlogits, workspace=workspace)
    assert loss.item() == pytest.approx(reference.softmax_cross_entropy(logits, labels), rel=1e-12)
    _check_gradient(lambda value: reference.softmax_cross_entropy(value, labels), logits, dlogits)


def test_losses_of_shards_add_up_to_the_batchs():
    """Each shard divides by the whole batch's count."""
    random = np.random.default_rng(10)
    logits, labels = random.standard_normal((5, 3)), np.array([0, 2, 1, 1, 0])
    parts = [functional.softmax_cross_entropy(logits[s], labels[s], count=5) for s in (slice(0, 2), slice(2, 5))]
    assert sum(parts).item() == pytest.approx(reference.softmax_cross_entropy(logits, labels), rel=1e-14)


def test_softmax_backward_is_its_slope():
    """Rows sum to one, so the gradient by a constant is zero."""
    random = np.random.default_rng(11)
    x, weights = random.standard_normal((4, 5)), random.standard_normal((4, 5))
    y = functional.softmax(x)
    np.testing.assert_allclose(y.sum(axis=1), 1)
    _check_gradient(
        lambda value: (functional.softmax(value) * weights).sum(), x, functional.softmax_backward(weights, y)
    )


def _large_calls():
    """Every operation that has scratch memory, on arrays of megabytes with all its arrays given."""
    random = np.random.default_rng(12)

    def new(*shape, dtype=np.float32):
        return random.standard_normal(shape, dtype=np.float32).astype(dtype)

    x, big, w, b = new(24, 32, 32, 16), new(24, 32, 32, 16), new(16, 3, 3, 16), new(16)
    pooled, argmax = new(24, 16, 16, 16), np.ones((24, 16, 16, 16), np.uint8)
    x1, w1 = new(64, 32, 32, 1), new(16, 3, 3, 1)
    y1 = new(64, 32, 32, 16)
    scores, other, labels = new(20000, 10), new(20000, 10), random.integers(0, 10, 20000)
    factors, curves = new(24, 1, 1, 16), ("relu6", "sigmoid", "silu", "hard_sigmoid", "hard_swish")
    mask, flat, joined, rows = np.ones(x.shape, bool), new(2**20), new(2**18, 8), new(24 * 1024, 16)
    room = np.empty(1 << 19, np.uint8)
    pad = {"pad": (1, 1, 1, 1), "workspace": room}
    f = functional
    return {
        "conv2d": lambda: f.conv2d(x, w, b, **pad, relu=True, out=big),
        "conv2d of one channel": lambda: f.conv2d(x1, w1, b, **pad, out=y1),
        "conv2d strided": lambda: f.conv2d(x, w, b, **pad, stride=(2, 2), out=pooled),
        "conv2d grouped": lambda: f.conv2d(x, w[..., :8].copy(), b, **pad, groups=2, out=big),
        "depthwise": lambda: f.conv2d(x, w[..., :1].copy(), b, **pad, groups=16, out=big),
        "conv2d_dgrad": lambda: f.conv2d_dgrad(big, w, x_shape=x.shape, **pad, out=x),
        "conv2d_dgrad strided": lambda: f.conv2d_dgrad(pooled, w, x_shape=x.shape, **pad, stride=(2, 2), out=x),
        "depthwise dgrad": lambda: f.conv2d_dgrad(big, w[..., :1].copy(), x_shape=x.shape, **pad, groups=16, out=x),
        "conv2d_wgrad": lambda: f.conv2d_wgrad(x, big, dw=w, db=b, **pad),
        "conv2d_wgrad of one channel": lambda: f.conv2d_wgrad(x1, y1, dw=w1, db=b, **pad),
        "depthwise wgrad": lambda: f.conv2d_wgrad(x, big, dw=new(16, 3, 3, 1), db=b, **pad, groups=16),
        "linear": lambda: f.linear(rows, w[:, 0, 0], b, out=big.reshape(-1, 16), relu=True),
        "linear_dgrad": lambda: f.linear_dgrad(big.reshape(-1, 16), w[:, 0, 0].copy(), out=rows),
        "linear_wgrad": lambda: f.linear_wgrad(rows, big.reshape(-1, 16), dw=new(16, 16), db=b),
        "max_pool2d": lambda: f.max_pool2d(x, r=2, s=2, out=pooled, argmax=argmax, workspace=room),
        "max_pool2d_backward": lambda: f.max_pool2d_backward(
            pooled, argmax, x_shape=x.shape, r=2, s=2, out=x, workspace=room
        ),
        "max_pool2d_backward overlapping": lambda: f.max_pool2d_backward(
            pooled, argmax, x_shape=x.shape, r=3, s=3, stride=(2, 2), pad=(1, 1, 1, 1), out=x, workspace=room
        ),
        "avg_pool2d": lambda: f.avg_pool2d(x, r=2, s=2, out=pooled, workspace=room),
        "avg_pool2d_backward": lambda: f.avg_pool2d_backward(pooled, x_shape=x.shape, r=2, s=2, out=x, workspace=room),
        "global_avg_pool": lambda: f.global_avg_pool(x, out=rows[:24]),
        "global_avg_pool_backward": lambda: f.global_avg_pool_backward(rows[:24], x_shape=x.shape, out=x),
        "relu": lambda: f.relu(x, out=big),
        "relu_backward": lambda: f.relu_backward(big, x, out=big, workspace=room),
        **{kind: lambda kind=kind: f.activation(x, kind=kind, out=big, workspace=room) for kind in curves},
        **{
            f"{kind} backward": lambda kind=kind: f.activation_backward(x, big, kind=kind, out=x, workspace=room)
            for kind in curves
        },
        "scale": lambda: f.scale(x, factors, out=big),
        "scale_backward": lambda: f.scale_backward(big, x, factors, dx=big, ds=factors, workspace=room),
        "batch_norm_train": lambda: f.batch_norm_train(x, b, b, mean=new(16), inv_std=new(16), out=big, workspace=room),
        "batch_norm_inference": lambda: f.batch_norm_inference(
            x, b, b, running_mean=b, running_var=b * b, out=big, workspace=room
        ),
        "batch_norm_backward": lambda: f.batch_norm_backward(
            big, x, b, mean=b, inv_std=b, dgamma=new(16), dbeta=new(16), out=big, workspace=room
        ),
        "dropout": lambda: f.dropout(x, p=0.5, seed=1, out=big, mask=mask, workspace=room),
        "dropout_backward": lambda: f.dropout_backward(x, mask, p=0.5, out=big),
        "add": lambda: f.add([x, big, x], relu=True, out=big),
        "concat": lambda: f.concat([flat.reshape(-1, 4), flat.reshape(-1, 4)], out=joined),
        "concat_backward": lambda: f.concat_backward(joined, [4, 4], outs=[flat.reshape(-1, 4), None]),
        "softmax": lambda: f.softmax(scores, out=scores, workspace=room),
        "softmax_backward": lambda: f.softmax_backward(scores, other, out=scores, workspace=room),
        "softmax_cross_entropy": lambda: f.softmax_cross_entropy(
            scores, labels, loss=np.empty(1), dlogits=scores, workspace=room
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", _large_calls())
def test_temporaries_do_not_grow_with_the_batch(name):
    """Beyond its arrays a call may take two of NumPy's casting buffers, 64 KiB each; the arrays here are megabytes."""
    run = _large_calls()[name]
    run()
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 160 * 1024


def test_a_prepared_call_repeats_the_call():
    """Recording keeps the calls and the views, so new contents of the same arrays give new results."""
    random = np.random.default_rng(13)
    x, w, y = random.standard_normal((7, 6, 5, 3)), random.standard_normal((4, 3, 3, 3)), np.empty((7, 6, 5, 4))
    step = backend.prepare(functional.conv2d, x, w, pad=(1, 1, 1, 1), out=y, workspace=np.empty(1 << 14, np.uint8))
    for _ in range(2):
        x[...] = random.standard_normal(x.shape)
        step()
        np.testing.assert_allclose(y, reference.conv2d(x, w, pad=(1, 1, 1, 1)), rtol=1e-12, atol=1e-12)


def test_a_call_with_too_many_blocks_is_prepared_as_it_is(monkeypatch):
    """A recording longer than the limit would cost more memory than time."""
    monkeypatch.setattr(backend, "MOST_RECORDED_CALLS", 3)
    x, out = np.ones(1 << 15), np.empty(1 << 15)
    step = backend.prepare(
        functional.dropout, x, p=0.0, seed=1, out=out, mask=np.empty(x.shape, bool), workspace=np.empty(64, np.uint8)
    )
    assert isinstance(step, functools.partial)
    assert step.func is functional.dropout
    step()
    np.testing.assert_array_equal(out, x)


def test_a_call_whose_result_would_be_lost_cannot_be_recorded():
    """A recording only works on arrays that exist already."""
    with pytest.raises(TypeError, match="out="):
        backend.prepare(lambda: backend.of(np.ones(1)).add(1, 1))


def test_batch_norm_in_a_team_is_batch_norm_of_the_whole_batch():
    """Shards of different sizes are normalised by common statistics, forward and backward."""
    random = np.random.default_rng(14)
    x, dy, gamma_, beta = *random.standard_normal((2, 5, 3, 2, 4)), *random.standard_normal((2, 4))

    def run(x, dy, saved, **shared):
        y = functional.batch_norm_train(x, gamma_, beta, **saved, **shared)
        dgamma, dbeta = np.empty(4), np.empty(4)
        dx = functional.batch_norm_backward(dy, x, gamma_, **saved, dgamma=dgamma, dbeta=dbeta, **shared)
        return y, dx, dgamma, dbeta

    y, dx, dgamma, dbeta = run(x, dy, {"mean": np.empty(4), "inv_std": np.empty(4)})
    parts = {}
    with Team(2) as team:

        def work(rank):
            shard, saved = team.shard(5, rank), {"mean": np.empty(4), "inv_std": np.empty(4)}
            parts[rank] = run(x[shard], dy[shard], saved, count=30, reduce=functools.partial(team.sum, rank))

        team.run(work)
    np.testing.assert_allclose(np.concatenate([parts[0][0], parts[1][0]]), y, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([parts[0][1], parts[1][1]]), dx, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(parts[0][2] + parts[1][2], dgamma, rtol=1e-11)
    np.testing.assert_allclose(parts[0][3] + parts[1][3], dbeta, rtol=1e-11)


def test_a_workspace_below_one_row_is_an_error_with_both_numbers():
    """Nothing is silently allocated in its place."""
    with pytest.raises(InvalidArgument) as failure:
        functional.conv2d(np.ones((1, 4, 4, 1)), np.ones((1, 3, 3, 1)), workspace=np.empty(16, np.uint8))
    (need,) = scratch_blocks.conv2d_forward(conv_shape((4, 4, 1), (1, 3, 3, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1), 8)
    assert failure.value.args[:3] == ("workspace", 16, f"at least {need.least} bytes")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (((4, 4, 3), (2, 3, 3, 2), (1, 1), (0, 0, 0, 0), (1, 1), 1), "w"),
        (((4, 4, 3), (2, 3, 3, 1), (1, 1), (0, 0, 0, 0), (1, 1), 3), "groups"),
        (((4, 4, 3), (2, 5, 3, 3), (1, 1), (0, 0, 0, 0), (1, 1), 1), "filter height"),
        (((4, 4, 3), (2, 3, 3, 3), (0, 1), (0, 0, 0, 0), (1, 1), 1), "filter height"),
        (((4, 4, 3), (2, 3, 3, 3), (1, 1), (0, 0, -1, 0), (1, 1), 1), "pad"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_go_together_are_named(arguments, field):
    """The field says which argument to look at."""
    with pytest.raises(InvalidArgument) as failure:
        conv_shape(*arguments)
    assert failure.value.field == field
