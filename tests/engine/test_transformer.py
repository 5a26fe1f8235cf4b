"""Layer norm, layer scale, tokens and attention on arrays, against the reference loops and their own slopes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from cubatch.engine import functional
from cubatch.memory import blocks
from tests import reference
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma
from tests.engine.slopes import check_gradient
from tests.thorough import examples

TARGETS = st.sampled_from([0, 1500, 2**20])
DTYPES = st.sampled_from(["float32", "float64"])
SEEDS = st.integers(0, 2**32 - 1)


def room(need, samples, target):
    """Scratch memory by the rule, filled with what is no number."""
    return np.full(blocks.workspace_bytes([need], samples, target), 0xFF, np.uint8)


# --- layer norm ------------------------------------------------------------------------------------------------


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 40)),
    far=st.sampled_from([0, 1, 30, 1000]), dtype=DTYPES, target=TARGETS, seed=SEEDS,
)  # fmt: skip
@example(shape=(1, 1, 10), far=1000, dtype="float64", target=0, seed=348)  # a float64 reference is off by as much
@settings(max_examples=examples(150), deadline=None)
def test_layer_norm_normalises_each_position(shape, far, dtype, target, seed):
    """
    Statistics and output against loops, however many deviations the mean is away from zero, in blocks of any size.

    A first mean is off by a sum of c elements of size |x|, what it is corrected by only by one of their deviations.
    What is subtracted is rounded with |x| once: for a position whose deviation is small beside that the error is the
    input's own.  A relative error of a square root's argument counts half; eps bounds the inverse deviation.
    """
    random, u, c, eps = np.random.default_rng(seed), UNIT_ROUNDOFF[dtype], shape[-1], 1e-2
    x = (far + random.uniform(-1, 1, shape)).astype(dtype)
    gamma_, beta = random.uniform(-1, 1, (2, c)).astype(dtype)
    statistics = np.full((shape[0], 2 * shape[1]), np.nan, dtype)
    need = blocks.RowNorm(itemsize=x.itemsize, channels=c)
    y = functional.layer_norm(
        x, gamma_, beta, eps=eps, statistics=statistics, out=np.full_like(x, np.nan),
        workspace=room(need, shape[0] * shape[1], target),
    )  # fmt: skip
    want, mean, variance = reference.layer_norm(x, gamma_, beta, eps=eps)
    assert y.dtype == x.dtype
    kept, first = statistics.reshape(2, *shape[:-1]), gamma(c + 2, u) * (far + 1)
    off = gamma(c + 3, u) * (2 + first) + u * (far + 1)  # of a deviation from the mean; deviations are at most 2
    assert_within(kept[0], mean, off + u * (far + 1), label="mean")
    inverse = 1 / np.sqrt(variance + eps)
    relative = (gamma(c + 4, u) * 4 + 2 * 2 * off + off**2) / (variance + eps) + gamma(4, u)
    assert_within(kept[1], inverse, inverse * relative, label="inverse deviation")
    spread = inverse[..., None]
    bound = abs(gamma_) * spread * (off + 2 * (relative[..., None] + gamma(4, u))) * (1 + relative[..., None])
    assert_within(y, want, bound + gamma(2, u) * (abs(want) + abs(beta)), axes="ntc", label=str(shape))


@pytest.mark.parametrize("over", ["dy", "residual"])
@pytest.mark.parametrize("target", [0, 2**20])
def test_layer_norm_gradients_are_its_slopes(target, over):
    """Through the statistics too: they depend on x; dx may be written over dy, or over what is added to it."""
    random = np.random.default_rng(8)
    x, gamma_, beta = random.standard_normal((3, 4, 5)), random.standard_normal(5), random.standard_normal(5)
    weights, statistics = random.standard_normal(x.shape), np.empty(24)

    def loss(x=x, gamma_=gamma_, beta=beta):
        return (functional.layer_norm(x, gamma_, beta, eps=1e-3) * weights).sum()

    functional.layer_norm(x, gamma_, beta, eps=1e-3, statistics=statistics)
    dy, dgamma, dbeta = weights.copy(), np.full(5, np.nan), np.full(5, np.nan)
    workspace = room(blocks.RowNorm(itemsize=8, channels=5), 12, target)
    other = random.standard_normal(x.shape)
    held = {"dy": dy, "residual": other.copy()}
    residual = held["residual"] if over == "residual" else None
    dx = functional.layer_norm_backward(
        dy, x, gamma_, statistics=statistics, dgamma=dgamma, dbeta=dbeta, residual=residual, out=held[over],
        workspace=workspace,
    )  # fmt: skip
    assert dx is held[over]
    check_gradient(lambda value: loss(x=value), x, dx - (other if over == "residual" else 0))
    check_gradient(lambda value: loss(gamma_=value), gamma_, dgamma)
    check_gradient(lambda value: loss(beta=value), beta, dbeta)


# --- layer scale and tokens --------------------------------------------------------------------------------------


@given(shape=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9)), dtype=DTYPES, target=TARGETS)
@settings(max_examples=examples(60), deadline=None)
def test_layer_scale_and_its_gradients(shape, dtype, target):
    """A product each, in place too; the factors' gradient is a sum of as many products as there are positions."""
    random, u = np.random.default_rng(sum(shape)), UNIT_ROUNDOFF[dtype]
    x, dy, (gamma_, dgamma) = *random.uniform(-1, 1, (2, *shape)).astype(dtype), np.ones((2, shape[-1]), dtype)
    gamma_ *= random.uniform(-1, 1, shape[-1])
    want_dx, terms = dy * gamma_, dy.astype(np.float64) * x
    np.testing.assert_array_equal(functional.layer_scale(x, gamma_), x * gamma_)
    scratch, other = room(blocks.Ends(itemsize=x.itemsize, row=shape[-1]), shape[0] * shape[1], target), dy.copy()
    functional.layer_scale(x, gamma_, residual=other, out=other, workspace=scratch)
    np.testing.assert_array_equal(other, x * gamma_ + dy)
    workspace = room(blocks.Norm(itemsize=x.itemsize, channels=shape[-1]), shape[0] * shape[1], target)
    functional.layer_scale_backward(dy, x, gamma_, dgamma=dgamma, out=dy, workspace=workspace)
    np.testing.assert_array_equal(dy, want_dx)
    sums, count = abs(terms).sum((0, 1)), shape[0] * shape[1]
    assert_within(dgamma, terms.sum((0, 1)), gamma(count + 2, u) * sums, label=str(shape))


@given(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5)), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_tokens_begin_with_the_class_and_give_every_gradient_back(shape, wanted):
    """Sums to the bit; the gradient of what is added is the sum over samples, of the rest a copy."""
    random, (n, h, w, c) = np.random.default_rng(sum(shape)), shape
    x, (token, dtoken), position = random.standard_normal(shape), np.empty((2, c)), np.empty((h * w + 1, c))
    token[:], position[:] = random.standard_normal(c), random.standard_normal(position.shape)
    y = functional.tokens(x, token, position)
    before = np.concatenate([np.broadcast_to(token, (n, 1, c)), x.reshape(n, h * w, c)], axis=1)
    np.testing.assert_array_equal(y[:, :, 0], before + position)
    dy = random.integers(-9, 10, y.shape).astype(np.float64)  # whole numbers add up exactly
    dposition, dx = np.empty_like(position), np.full(shape, np.nan)
    functional.tokens_backward(dy, dtoken=dtoken, dposition=dposition, out=dx if wanted else None)
    np.testing.assert_array_equal(dposition, dy[:, :, 0].sum(0))
    np.testing.assert_array_equal(dtoken, dy[:, 0, 0].sum(0))
    np.testing.assert_array_equal(dx, dy[:, 1:].reshape(shape) if wanted else np.full(shape, np.nan))


def test_the_class_token_is_the_first_and_alone_has_a_gradient():
    """Of a map as of a row of tokens."""
    x = np.random.default_rng(0).standard_normal((3, 4, 2, 5))
    y = functional.class_token(x)
    np.testing.assert_array_equal(y[:, 0, 0], x[:, 0, 0])
    dx = functional.class_token_backward(y, x_shape=x.shape, out=np.full(x.shape, np.nan))
    np.testing.assert_array_equal(dx[:, 0, 0], y[:, 0, 0])
    assert np.count_nonzero(dx) == y.size


# --- attention ---------------------------------------------------------------------------------------------------


@st.composite
def attentions(draw):
    """Extents, whether there are biases, whether what the backward pass reads is kept, and the size of blocks."""
    heads, width = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return {
        "shape": (draw(st.integers(1, 4)), draw(st.integers(1, 7)), heads * width), "heads": heads,
        "has_bias": draw(st.booleans()), "keeps": draw(st.booleans()), "target": draw(TARGETS),
        "dtype": draw(DTYPES), "seed": draw(SEEDS),
    }  # fmt: skip


def parameters(c, random, *, has_bias=True, dtype="float64"):
    """Projections, and biases or None, by the keywords of `attention`."""
    shapes = {"w_in": (3 * c, c), "w_out": (c, c), "b_in": (3 * c,), "b_out": (c,)}
    return {
        name: random.uniform(-1, 1, shape).astype(dtype) if has_bias or name[0] == "w" else None
        for name, shape in shapes.items()
    }


def saved_arrays(n, t, c, heads, dtype="float64", *, padding=0):
    """Where a forward pass keeps what the backward pass reads; rows of weights end with padding."""
    return [np.full((n, count), np.nan, dtype) for count in (3 * t * c, heads * t * (t + padding), t * c)]


@given(attentions())
@example(
    {
        "shape": (3, 5, 4),
        "heads": 2,
        "has_bias": True,
        "keeps": True,
        "target": 0,
        "dtype": "float64",
        "seed": 0,
    }
)  # what a block keeps is another place for each sample
@settings(max_examples=examples(120), deadline=None)
def test_attention_stays_within_the_rounding_of_its_sums(case):
    """
    Output, and what is kept, against loops, in blocks of one sample or more.

    A score is off by d: its two factors by sums of c, itself by one of as many channels as a head has.  An
    exponential then is off by a factor of 1 + 2 d, a weight by twice that and its sum's and quotient's roundings; mixed
    values and output by that and by sums of t and c, of the sizes that they have with all signs equal.
    """
    (n, t, c), heads, dtype = case["shape"], case["heads"], case["dtype"]
    random, u = np.random.default_rng(case["seed"]), UNIT_ROUNDOFF[dtype]
    x = random.uniform(-1, 1, (n, t, c)).astype(dtype)
    given_ = parameters(c, random, has_bias=case["has_bias"], dtype=dtype)
    keep = saved_arrays(n, t, c, heads, dtype) if case["keeps"] else None
    need = blocks.Attend(itemsize=x.itemsize, tokens=t, channels=c, heads=heads, saves=case["keeps"])
    y = functional.attention(
        x, **given_, heads=heads, keep=keep, out=np.full_like(x, np.nan), workspace=room(need, n, case["target"])
    )
    want, qkv, weights, mixed = reference.attention(x, **given_, heads=heads)
    assert y.dtype == x.dtype

    sizes = {name: None if array is None else abs(array) for name, array in given_.items()}
    large = abs(x) @ sizes["w_in"].T + (0 if sizes["b_in"] is None else sizes["b_in"])
    of_score = c // heads * large.max() ** 2 / math.sqrt(c // heads)
    score = (2 * gamma(c + 1, u) + gamma(c // heads + 3, u)) * of_score * (1 + gamma(c + 1, u))
    weight = 2 * (2 * score + gamma(4, u)) + gamma(t + 2, u)
    values = large[:, :, 2 * c :].max(axis=1, keepdims=True)  # a weighted mean of values is no larger
    of_mixed = values * (weight + gamma(t, u) + gamma(c + 1, u)) * (1 + weight) + np.zeros_like(mixed)
    of_y = (of_mixed + gamma(c + 1, u) * (values + of_mixed)) @ sizes["w_out"].T
    bias = 0 if sizes["b_out"] is None else gamma(c + 1, u) * sizes["b_out"]
    assert_within(y, want, of_y + bias, axes="ntc", label=str(case))
    if keep is not None:
        assert_within(keep[0].reshape(qkv.shape), qkv, gamma(c + 1, u) * large, label="queries, keys and values")
        assert_within(keep[1].reshape(weights.shape), weights, weight * weights, label="weights")
        assert_within(keep[2].reshape(mixed.shape), mixed, of_mixed, label="mixed values")


@pytest.mark.parametrize("has_bias", [True, False], ids=["biases", "no bias"])
@pytest.mark.parametrize("target", [0, 2**20], ids=["sample by sample", "at once"])
@pytest.mark.parametrize("padding", [0, 4])
def test_attention_gradients_are_its_slopes(has_bias, target, padding):
    """By the input, both projections and both biases; dx may be written over dy. Padding of weights stays NaN."""
    random, heads, (n, t, c) = np.random.default_rng(5), 2, (3, 4, 6)
    x, given_ = random.standard_normal((n, t, c)), parameters(c, random, has_bias=has_bias)
    towards, saved = random.standard_normal(x.shape), saved_arrays(n, t, c, heads, padding=padding)
    functional.attention(x, **given_, heads=heads, keep=saved)
    gradients = {f"d{name}": np.full(value.shape, np.nan) for name, value in given_.items() if value is not None}
    need = blocks.AttendBackward(itemsize=8, tokens=t, channels=c, heads=heads)
    dy = towards.copy()
    dx = functional.attention_backward(
        dy, x, given_["w_in"], given_["w_out"], heads=heads, saved=saved, **gradients, out=dy,
        workspace=room(need, n, target),
    )  # fmt: skip
    assert dx is dy
    assert np.isnan(saved[1].reshape(n, heads, t, -1)[..., t:]).all()
    check_gradient(lambda value: (functional.attention(value, **given_, heads=heads) * towards).sum(), x, dx)
    for name, value in given_.items():
        if value is not None:

            def loss(changed, name=name):
                return (functional.attention(x, **given_ | {name: changed}, heads=heads) * towards).sum()

            check_gradient(loss, value, gradients[f"d{name}"])


def test_large_scores_do_not_overflow():
    """Only their differences count: a score that is 1000 larger takes all of the weight."""
    x = np.array([[[1.0, 0.0], [0.0, 1.0]]])
    w_in = np.array([[1000.0, 1000.0], [0, 0], [2.0, 1.0], [0, 0], [1.0, 5.0], [0, 0]])
    y = functional.attention(x, w_in, np.eye(2), heads=2)
    np.testing.assert_array_equal(y[0, :, 0], [1.0, 1.0])
