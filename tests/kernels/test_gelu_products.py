"""Gradients that products multiply by the slope of GELU: kernels/hopper with -DCURVE, and what stands in."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from cubatch.engine.native import activation_functions, conv, gemm
from cubatch.engine.native.operands import Fused
from cubatch.kernels import variant
from tests.checks import UNIT_ROUNDOFF, assert_within
from tests.kernels import cases, hopper_cases
from tests.kernels.hopper_cases import Recording, chooser, element
from tests.reference import CURVES

launcher = hopper_cases.launcher

TILES = sorted({one.tile.name for one in variant.kernels() if one.operation == "gemm_nn_gelu"})
PRODUCTS = [("float16", tile) for tile in TILES] + [("bfloat16", "128x256x64"), ("bfloat16", "256x64x64")]
SHORT = 2e-7
"""What the normal distribution function of epilogues is off by, see short_normal_cdf of kernels/hopper/curve.cuh."""


def context(launcher, tile=None, slices=1):
    recording = Recording(launcher.launcher)
    choose = functools.partial(chooser, tile=tile, slices=slices)
    return launcher.context(chooser=choose, launcher=recording), recording.operations


def gradient_is_right(launcher, dx, db, plain, x, dtype, *, fused, label):
    """
    The gradient without the slope times that of float64, and the sums over the rows of what was stored.

    The plain one was rounded when it was stored, and again where a kernel of its own applies the slope.
    """
    unsloped, at = cases.decoded(plain), cases.decoded(x)
    slope = CURVES["gelu"][1](at)
    want = unsloped * slope
    once = UNIT_ROUNDOFF[dtype] * abs(want) + 2.0**-24
    within = (
        (fused + 1) * once
        + abs(unsloped) * (1 + abs(at)) * SHORT
        + cases.bound(12, abs(unsloped) * (1 + abs(at)), want, dtype)
    )
    got = cases.decoded(launcher.get(dx)).reshape(want.shape)
    assert_within(got, want, within, label=f"{label} gradient")
    if db is not None:
        sums = got.sum(axis=0)
        # In products the terms are not rounded yet.
        within = cases.bound(40, abs(got).sum(axis=0), sums, dtype) + fused * UNIT_ROUNDOFF[dtype] * abs(got).sum(
            axis=0
        )
        assert_within(cases.decoded(launcher.get(db)), sums, within, axes="k", label=f"{label} bias")


@pytest.mark.parametrize("terms", [(), ("residual",), ("no bias",)], ids="-".join)
@pytest.mark.parametrize(("dtype", "tile"), PRODUCTS)
def test_a_product_applies_the_slope_of_gelu_and_sums_the_gradient_of_a_bias(launcher, dtype, tile, terms):
    """At the input of the activation, to the sum with another branch; sums are those of the stored gradient."""
    m, n, random = 601, 136, np.random.default_rng(len(terms))
    a, b = cases.drawn(random, (m, 72), dtype), cases.drawn(random, (72, n), dtype)
    x = cases.encoded(random.normal(0, 2, (m, n)), dtype)
    residual = launcher.put(cases.drawn(random, (m, n), dtype)) if "residual" in terms else None
    where, launched = context(launcher, tile)
    operands = launcher.put(a), launcher.put(b)
    plain = launcher.get(gemm.gemm(where, *operands, layout="nn", fused=Fused(residual=residual)))
    launched.clear()
    dx = launcher.unwritten((m, n), element(dtype))
    db = None if "no bias" in terms else launcher.unwritten((n,), element(dtype))
    curve = {"kind": "gelu", "x": launcher.put(x), "db": db}
    gemm.gemm(where, *operands, layout="nn", fused=Fused(residual=residual), out=dx, norm=curve)
    assert launched == ["gemm_nn_gelu", *([] if db is None else ["column_sums_finish"])]
    gradient_is_right(launcher, dx, db, plain, x, dtype, fused=True, label=f"{dtype} {tile} {terms}")


@pytest.mark.parametrize(("taps", "stride"), [(1, 1), (3, 1), (1, 2)])
def test_other_convolutions_leave_slope_and_sums_to_kernels_of_their_own(launcher, taps, stride):
    """Those of several taps, and phases of a stride, whose pixels do not follow each other."""
    pad = (taps // 2,) * 4
    drawn = cases.Conv(n=2, h=9, w=10, c=72, k=64, r=taps, s=taps, stride=(stride, stride), pad=pad)
    random = np.random.default_rng(stride)
    dy, w = (cases.drawn(random, shape, "float16") for shape in (drawn.y_shape, drawn.w_shape))
    x = cases.drawn(random, drawn.x_shape, "float16")
    where, launched = context(launcher)
    arrays, options = (launcher.put(dy), launcher.put(w)), {"x_shape": drawn.x_shape, **drawn.options}
    plain = launcher.get(conv.conv2d_dgrad(where, *arrays, **options)).reshape(-1, drawn.c)
    launched.clear()
    db = launcher.unwritten((drawn.c,), element("float16"))
    dx = conv.conv2d_dgrad(where, *arrays, norm={"kind": "gelu", "x": launcher.put(x), "db": db}, **options)
    is_product = taps == stride == 1
    own = ["gemm_nn_gelu"] if is_product else ["conv2d_dgrad", "activation_backward", "column_sums"]
    assert launched == [*own, "column_sums_finish"]
    gradient_is_right(
        launcher, dx, db, plain, x.reshape(-1, drawn.c), "float16", fused=is_product, label=f"{taps} {stride}"
    )


def test_sums_of_very_many_tiles_are_added_up_first(launcher):
    """More tiles than one launch adds up."""
    m, random = 64 * 1024 + 7, np.random.default_rng(8)
    a, b = cases.drawn(random, (m, 8), "float16"), cases.drawn(random, (8, 8), "float16")
    x = cases.drawn(random, (m, 8), "float16")
    where, launched = context(launcher, "128x64x64")
    plain = launcher.get(gemm.gemm(where, launcher.put(a), launcher.put(b), layout="nn"))
    launched.clear()
    db = launcher.unwritten((8,), element("float16"))
    curve = {"kind": "gelu", "x": launcher.put(x), "db": db}
    dx = gemm.gemm(where, launcher.put(a), launcher.put(b), layout="nn", norm=curve)
    assert launched == ["gemm_nn_gelu", "column_sums", "column_sums_finish"]
    gradient_is_right(launcher, dx, db, plain, x, "float16", fused=True, label="many")


def test_special_values_have_the_slopes_of_the_usual_kernel(launcher):
    """Far tails, zeros of both signs, infinities and NaN."""
    special = [-np.inf, -60000, -6, -3, -0.0, 0, 3, 6, 60000, np.inf, np.nan, 1, -1, 0.5, -0.5, 2]
    x = np.repeat(np.array(special, np.float16)[:, None], 8, axis=1)
    ones, first = np.zeros(x.shape, np.float16), np.zeros((8, 8), np.float16)
    ones[:, 0], first[0] = 1, 1  # a product of ones
    where, launched = context(launcher, "128x64x64")
    curve = {"kind": "gelu", "x": launcher.put(x), "db": None}
    got = launcher.get(gemm.gemm(where, launcher.put(ones), launcher.put(first), layout="nn", norm=curve))
    assert launched == ["gemm_nn_gelu"]
    dy = launcher.put(np.ones_like(x))
    usual = launcher.get(activation_functions.activation_backward(where, dy, launcher.put(x), kind="gelu"))
    np.testing.assert_allclose(got.astype(float), usual.astype(float), rtol=2.0**-10, atol=2.0**-19)
