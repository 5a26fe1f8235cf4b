"""Convolutions and matrix products on arrays, against the reference loops and their own slopes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubatch.engine import functional, linear
from cubatch.errors import InvalidArgument
from cubatch.memory import blocks as scratch_blocks
from cubatch.memory import conv_blocks
from cubatch.network.windows import conv_shape
from tests import reference
from tests.checks import assert_within, gamma
from tests.engine.slopes import U, check_gradient
from tests.thorough import examples


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
    return conv_shape(hwc, case["krsc"], **{name: options[name] for name in ("stride", "pad", "dilation", "groups")})


def _workspace(case, needs):
    """The least that works, so that blocks are single rows, or plenty, filled with what is no number."""
    least = max((need.least for need in needs), default=0)
    size = least if case["rows_only"] else scratch_blocks.workspace_bytes(needs, case["n"], 2**20)
    return np.full(size, 0xFF, dtype=np.uint8)


@given(convolutions())
@settings(max_examples=examples(150), deadline=None)
def test_conv2d_stays_within_the_rounding_of_its_dot_products(case):
    """Each output is one dot product of length r*s*c and a bias, in whatever order it is summed."""
    random, x, w = _arrays(case)
    b = random.uniform(-1, 1, w.shape[0]).astype(np.float32)

    y = functional.conv2d(
        x, w, b, **case["options"], workspace=_workspace(case, conv_blocks.conv2d_forward(_shape(case), 4))
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
        workspace=_workspace(case, conv_blocks.conv2d_dgrad(_shape(case), 4)),
    )

    length = w[..., 0].size // case["options"]["groups"]
    bound = gamma(length, U) * reference.conv2d_dgrad(abs(dy), abs(w), x_shape=x.shape, **case["options"])
    want = reference.conv2d_dgrad(dy, w, x_shape=x.shape, **case["options"])
    assert_within(dx, want, bound, axes="nhwc", label=str(case))


@given(convolutions(), st.sampled_from([("residual",), ("positive",), ("residual", "positive")]))
@settings(max_examples=examples(150), deadline=None)
def test_conv2d_dgrad_adds_to_what_is_there_and_applies_a_slope(case, ends):
    """
    In place, in blocks of rows too, in phases without taps too; where nothing passes not even infinity does.

    One rounding more than the sum of products, of a term more; a depthwise one says that it does not.
    """
    random, x, w = _arrays(case)
    dy = random.uniform(-1, 1, reference.conv2d(x, w, **case["options"]).shape).astype(np.float32)
    there, saved = (random.uniform(-1, 1, x.shape).astype(np.float32) for _ in range(2))
    saved = np.maximum(saved, 0)
    out = there.copy() if "residual" in ends else np.full(x.shape, np.nan, np.float32)
    given = {name: {"residual": out, "positive": saved}[name] for name in ends}
    workspace = _workspace(case, conv_blocks.conv2d_dgrad(_shape(case), 4, frozenset(ends)))
    options = {"x_shape": x.shape, **case["options"], **given, "out": out, "workspace": workspace}
    if _shape(case).is_depthwise:
        with pytest.raises(InvalidArgument, match="groups"):
            functional.conv2d_dgrad(dy, w, **options)
        return
    passes = saved > 0 if "positive" in ends else np.full(x.shape, fill_value=True)
    if "positive" in ends and "residual" in ends:
        out[~passes] = np.inf

    dx = functional.conv2d_dgrad(dy, w, **options)

    added = there if "residual" in ends else np.zeros_like(there)
    length = w[..., 0].size // case["options"]["groups"]
    terms = reference.conv2d_dgrad(abs(dy), abs(w), x_shape=x.shape, **case["options"]) + abs(added)
    want = reference.conv2d_dgrad(dy, w, x_shape=x.shape, **case["options"]) + added
    bound = np.where(passes, gamma(length + 1, U) * terms, 0)
    assert_within(dx, np.where(passes, want, 0), bound, axes="nhwc", label=f"{case} {ends}")


@given(st.integers(1, 9), st.booleans(), st.sets(st.sampled_from(["residual", "positive"]), min_size=1))
def test_linear_dgrad_adds_to_what_is_there_and_applies_a_slope(rows, is_tight, ends):
    """In place, row by row where scratch memory holds no more: one rounding more than the dot products."""
    random = np.random.default_rng(rows)
    dy, w, there, saved = (
        random.uniform(-1, 1, shape).astype(np.float32) for shape in ((rows, 6), (6, 5), (rows, 5), (rows, 5))
    )
    out, saved = there.copy(), np.maximum(saved, 0)
    given = {name: {"residual": out, "positive": saved}[name] for name in ends}
    need = scratch_blocks.Ends(itemsize=4, row=5)
    workspace = np.full(need.least if is_tight else need.whole(rows), 0xFF, np.uint8)
    functional.linear_dgrad(dy, w, **given, out=out, workspace=workspace)
    passes = saved > 0 if "positive" in ends else np.full(saved.shape, fill_value=True)
    added = there if "residual" in ends else np.zeros_like(there)
    wide = dy.astype(np.float64) @ w.astype(np.float64) + added
    bound = gamma(7, U) * (abs(dy).astype(np.float64) @ abs(w) + abs(added))
    assert_within(out, np.where(passes, wide, 0), np.where(passes, bound, 0), label=str((rows, ends)))


@given(convolutions())
@settings(max_examples=examples(150), deadline=None)
def test_conv2d_wgrad_stays_within_the_rounding_of_its_dot_products(case):
    """A filter tap meets every output pixel of the batch once; so does the bias."""
    random, x, w = _arrays(case)
    dy = random.uniform(-1, 1, reference.conv2d(x, w, **case["options"]).shape).astype(np.float32)
    dw, db = np.full(w.shape, np.nan, np.float32), np.full(w.shape[0], np.nan, np.float32)

    functional.conv2d_wgrad(
        x, dy, dw=dw, db=db, **case["options"], workspace=_workspace(case, conv_blocks.conv2d_wgrad(_shape(case), 4))
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


def test_conv2d_gradients_are_the_slopes_of_conv2d():
    """Finite differences know nothing of how the gradients are computed."""
    random = np.random.default_rng(3)
    x, w, b = random.standard_normal((2, 6, 7, 4)), random.standard_normal((6, 3, 2, 2)), random.standard_normal(6)
    options = {"stride": (2, 1), "pad": (1, 2, 0, 1), "dilation": (2, 2), "groups": 2}
    weights = random.standard_normal(functional.conv2d(x, w, b, **options).shape)
    dw, db = np.empty_like(w), np.empty_like(b)
    functional.conv2d_wgrad(x, weights, dw=dw, db=db, **options)
    dx = functional.conv2d_dgrad(weights, w, x_shape=x.shape, **options)
    check_gradient(lambda value: (functional.conv2d(value, w, b, **options) * weights).sum(), x, dx)
    check_gradient(lambda value: (functional.conv2d(x, value, b, **options) * weights).sum(), w, dw)
    check_gradient(lambda value: (functional.conv2d(x, w, value, **options) * weights).sum(), b, db)


def test_linear_works_on_the_last_axis_of_any_rank():
    """A sequence is a batch of positions."""
    random = np.random.default_rng(4)
    x, w, b = random.standard_normal((2, 3, 4)), random.standard_normal((5, 4)), random.standard_normal(5)
    want = np.array([[[sum(x[n, t] * w[k]) + b[k] for k in range(5)] for t in range(3)] for n in range(2)])
    np.testing.assert_allclose(functional.linear(x, w, b), want, rtol=1e-13, atol=1e-13)
    turned = functional.linear(x, w, b, relu=True, workspace=np.empty(2 * 3 * 5 * 8, np.uint8))
    np.testing.assert_allclose(turned, np.maximum(want, 0), rtol=1e-13, atol=1e-13)


@given(rows=st.integers(2, 9), k=st.integers(1, 43), c=st.integers(170, 400), seed=st.integers(0, 99))
@settings(max_examples=examples(12), deadline=None)
def test_a_few_rows_through_a_large_filter_meet_all_of_its_outputs(rows, k, c, seed):
    """They are computed some outputs at a time: with all in place, each within the rounding of its sum."""
    random = np.random.default_rng(seed)
    x, w = random.standard_normal((rows, c), np.float32), random.standard_normal((k, c), np.float32)
    b, out = random.standard_normal(k, np.float32), np.full((rows, k), np.nan, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "UNPACKED_PRODUCTS", conv_blocks.UNPACKED_PRODUCTS // 100)
        functional.linear(x, w, b, out=out)
    wide_x, wide_w = x.astype(np.float64), w.astype(np.float64)
    bound = gamma(c + 1, 2.0**-24) * (abs(wide_x) @ abs(wide_w).T + abs(b))
    assert_within(out, wide_x @ wide_w.T + b, bound, axes="nk")


def test_linear_gradients_are_the_slopes_of_linear():
    """Finite differences know nothing of how the gradients are computed."""
    random = np.random.default_rng(5)
    x, w, b = random.standard_normal((2, 3, 4)), random.standard_normal((5, 4)), random.standard_normal(5)
    weights, dw, db = random.standard_normal((2, 3, 5)), np.empty_like(w), np.empty_like(b)
    functional.linear_wgrad(x, weights, dw=dw, db=db)
    check_gradient(
        lambda value: (functional.linear(value, w, b) * weights).sum(), x, functional.linear_dgrad(weights, w)
    )
    check_gradient(lambda value: (functional.linear(x, value, b) * weights).sum(), w, dw)
    check_gradient(lambda value: (functional.linear(x, w, value) * weights).sum(), b, db)
