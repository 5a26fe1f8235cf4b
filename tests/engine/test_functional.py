"""Convolutions and matrix products on arrays, against the reference loops and their own slopes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.engine import functional, linear
from cubatch.errors import InvalidArgument
from cubatch.memory import blocks as scratch_blocks, conv_blocks
from cubatch.network.windows import conv_shape
from tests.checks import assert_within, gamma
from tests.engine.slopes import U
from tests.kernels import cases
from tests.kernels.conftest import Target
from tests.kernels.passes import Passes, clamped
from tests.thorough import examples

NUMPY = Target(None, None)
RUN = {"fprop": functional.conv2d, "dgrad": functional.conv2d_dgrad, "wgrad": functional.conv2d_wgrad}
NEEDS = {"fprop": conv_blocks.conv2d_forward, "dgrad": conv_blocks.conv2d_dgrad, "wgrad": conv_blocks.conv2d_wgrad}
CONVOLUTIONS = cases.convolutions(most_extent=8) | cases.convolutions(most_extent=7, depthwise=True)


def check(direction, drawn, seed, *, rows_only, parts=(), **more):
    """Check a pass in the least scratch memory that works, so that blocks are single rows, or in plenty."""
    shape = conv_shape(drawn.x_shape[1:], drawn.w_shape, **drawn.options)
    needs = NEEDS[direction](shape, 4, *([frozenset(parts)] if parts else []))
    least = max((need.least for need in needs), default=0)
    size = least if rows_only else scratch_blocks.workspace_bytes(needs, drawn.n, 2**20)
    options, more = {"workspace": np.full(size, 0xFF, np.uint8)}, more | ({"parts": parts} if parts else {})
    passes = Passes(NUMPY, None, seed=seed, ends=clamped, options=options)
    getattr(passes, direction)(drawn, run=lambda _, *arrays, **given: RUN[direction](*arrays, **given), **more)


@pytest.mark.parametrize("direction", RUN)
@given(CONVOLUTIONS, st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_a_pass_stays_within_the_rounding_of_its_sums(direction, drawn, seed, rows_only):
    """Each output is a dot product and a bias; each gradient sums the products that read an input, filter or bias."""
    check(direction, drawn, seed, rows_only=rows_only, **({"bias": True} if direction == "wgrad" else {}))


@given(CONVOLUTIONS, st.sampled_from([("residual",), ("positive",), ("residual", "positive")]), st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_conv2d_dgrad_adds_to_what_is_there_and_applies_a_slope(drawn, parts, rows_only):
    """
    In place, in blocks of rows too, in phases without taps too; where nothing passes not even infinity does.

    A depthwise one says that it does not.
    """
    in_place = "residual" if "residual" in parts else ""
    if conv_shape(drawn.x_shape[1:], drawn.w_shape, **drawn.options).is_depthwise:
        with pytest.raises(InvalidArgument, match="groups"):
            check("dgrad", drawn, 1, rows_only=rows_only, parts=parts, in_place=in_place)
    else:
        check("dgrad", drawn, 1, rows_only=rows_only, parts=parts, in_place=in_place)


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


def test_linear_works_on_the_last_axis_of_any_rank():
    """A sequence is a batch of positions."""
    random = np.random.default_rng(4)
    x, w, b = random.standard_normal((2, 3, 4)), random.standard_normal((5, 4)), random.standard_normal(5)
    want = np.array([[[sum(x[n, t] * w[k]) + b[k] for k in range(5)] for t in range(3)] for n in range(2)])
    np.testing.assert_allclose(functional.linear(x, w, b), want, rtol=1e-13, atol=1e-13)
    turned = functional.linear(x, w, b, relu=True, workspace=np.empty(2 * 3 * 5 * 8, np.uint8))
    np.testing.assert_allclose(turned, np.maximum(want, 0), rtol=1e-13, atol=1e-13)
    dw, db = np.empty_like(w), np.empty_like(b)
    functional.linear_wgrad(x, want, dw=dw, db=db)
    np.testing.assert_allclose(dw, sum(np.outer(want[n, t], x[n, t]) for n in range(2) for t in range(3)), rtol=1e-12)
    np.testing.assert_allclose(db, want.sum(axis=(0, 1)), rtol=1e-12)


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
