"""Products that compute a batch norm's sums while they store a result: kernels/hopper/sums.cuh, and what stands in."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from cubatch.engine.native import batch_norm, conv, gemm
from cubatch.engine.native.operands import Fused
from cubatch.kernels import variant
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma
from tests.kernels import cases, hopper_cases
from tests.kernels.hopper_cases import Recording, chooser, element

launcher = hopper_cases.launcher

TILES = sorted({one.tile.name for one in variant.kernels() if one.operation == "gemm_nt_sums"})
PRODUCTS = [("float16", tile) for tile in TILES] + [("bfloat16", "128x256x64"), ("bfloat16", "256x64x64")]
EPS, MOMENTUM = 1e-5, 0.25
F32 = UNIT_ROUNDOFF["float32"]


def context(launcher, tile=None, slices=1):
    recording = Recording(launcher.launcher)
    choose = functools.partial(chooser, tile=tile, slices=slices)
    return launcher.context(chooser=choose, launcher=recording), recording.operations


def far_rows(random, rows, columns, dtype):
    """Left operand and bias of a product whose columns have means far from zero; the last few rows are as the first."""
    return cases.drawn(random, (rows, columns), dtype), cases.encoded(random.uniform(20, 40, 136), dtype)


def behind(launcher, channels):
    """The arguments of a norm behind a product, and the arrays that they name."""
    new = {name: launcher.unwritten((channels,), np.float32) for name in ("mean", "inv_std")}
    old = {name: launcher.put(np.full(channels, 2, np.float32)) for name in ("running_mean", "running_var")}
    return new | old | {"momentum": MOMENTUM, "eps": EPS}


def statistics_are_right(launcher, norm, y, label):
    """By float64 from what was stored; means in pairs, so that few roundings lie on the way to each."""
    y = cases.decoded(launcher.get(y)).reshape(-1, y.shape[-1])
    rows, mean, var = len(y), y.mean(axis=0), y.var(axis=0)
    slack = gamma(24, F32) * abs(y).max(axis=0)
    got = {name: launcher.get(array) for name, array in norm.items() if hasattr(array, "shape")}
    assert_within(got["mean"], mean, slack, axes="k", label=f"{label} mean")
    spread = gamma(80, F32) * ((y - mean) ** 2).mean(axis=0) + slack * abs(y - mean).mean(axis=0) + slack**2
    found = 1 / got["inv_std"].astype(np.float64) ** 2 - EPS
    assert_within(found, var, spread + gamma(6, F32) * (var + EPS), axes="k", label=f"{label} variance")
    want = 2 + MOMENTUM * (mean - 2)
    assert_within(got["running_mean"], want, slack + gamma(4, F32) * 40, axes="k", label=f"{label} running mean")
    want = 2 + MOMENTUM * (var * rows / (rows - 1) - 2)
    assert_within(got["running_var"], want, 2 * spread + gamma(8, F32) * (2 + var), axes="k", label=f"{label} running")


@pytest.mark.parametrize(("dtype", "tile"), PRODUCTS)
@pytest.mark.parametrize("m", [601, 40])
def test_a_product_leaves_the_statistics_of_the_norm_behind_it(launcher, dtype, tile, m):
    """Several tiles and a part of one, means far from zero; the product is stored as without the sums, bit by bit."""
    random = np.random.default_rng(m)
    a, bias = far_rows(random, m, 72, dtype)
    b = cases.drawn(random, (136, 72), dtype)
    where, launched = context(launcher, tile)
    operands = launcher.put(a), launcher.put(b), launcher.put(bias)
    plain = launcher.get(gemm.gemm(where, *operands))
    launched.clear()
    y, norm = launcher.unwritten((m, 136), element(dtype)), behind(launcher, 136)
    gemm.gemm(where, *operands, out=y, norm=norm)
    assert launched == ["gemm_nt_sums", "batch_norm_finish"]
    np.testing.assert_array_equal(launcher.get(y), plain)
    statistics_are_right(launcher, norm, y, f"{dtype} {tile}")


@pytest.mark.parametrize("tile", ["128x256x64_c2", "256x64x64"])
def test_a_strided_convolution_leaves_the_statistics_too(launcher, tile):
    """Pixels of several images, no bias, one channel of equal values: its variance is zero and no rounding is in it."""
    drawn, random = (
        cases.Conv(n=3, h=15, w=14, c=24, k=72, r=3, s=3, stride=(2, 2), pad=(1, 1, 1, 1)),
        np.random.default_rng(2),
    )
    x, w = (cases.drawn(random, shape, "float16") for shape in (drawn.x_shape, drawn.w_shape))
    w[5] = 0
    where, launched = context(launcher, tile)
    norm = behind(launcher, drawn.k)
    y = conv.conv2d(where, launcher.put(x), launcher.put(w), norm=norm, **drawn.options)
    assert launched == ["conv2d_fprop_sums", "batch_norm_finish"]
    statistics_are_right(launcher, norm, y, tile)
    assert launcher.get(norm["mean"])[5] == 0
    assert launcher.get(norm["inv_std"])[5] == np.float32(1) / np.sqrt(np.float32(EPS))


def test_statistics_of_very_many_tiles_are_merged_first(launcher):
    """More tiles than one launch merges: 64 rows each."""
    m, random = 64 * 1024 + 7, np.random.default_rng(8)
    a, b = cases.drawn(random, (m, 8), "float16"), cases.drawn(random, (8, 8), "float16")
    where, launched = context(launcher, "128x64x64")
    norm = behind(launcher, 8)
    y = gemm.gemm(where, launcher.put(a), launcher.put(b), norm=norm)
    assert launched == ["gemm_nt_sums", "batch_norm_merge", "batch_norm_finish"]
    statistics_are_right(launcher, norm, y, "merged")


def before(launcher, random, rows, channels, dtype, *, relu):
    """A norm before a product: its arguments, and the result of its ReLU as the norm's kernels store it."""
    x = launcher.put(cases.encoded(random.normal(3, 2, (rows, channels)), dtype))
    parameters = [launcher.put(cases.encoded(random.normal(size=channels), dtype)) for _ in range(2)]
    mean, inv_std = (launcher.put(random.uniform(low, 4, channels).astype(np.float32)) for low in (2, 0.25))
    y = batch_norm.batch_norm_apply(
        launcher.context(),
        x,
        *parameters,
        mean=mean,
        inv_std=inv_std,
        relu=True,
        out=launcher.unwritten(x.shape, x.dtype),
    )
    gradients = {name: launcher.unwritten((channels,), element(dtype)) for name in ("dgamma", "dbeta")}
    gamma_, beta = parameters if relu else (None, None)
    means = launcher.unwritten((2, channels), np.float32)
    return {"x": x, "mean": mean, "inv_std": inv_std, "gamma": gamma_, "beta": beta, "means": means} | gradients, y


def gradients_are_right(launcher, norm, dx, dtype, label):
    """Sums over the rows of what was stored, by float64."""
    dx = cases.decoded(launcher.get(dx)).reshape(-1, dx.shape[-1])
    x = cases.decoded(launcher.get(norm["x"])).reshape(dx.shape)
    mean, inv_std = (launcher.get(norm[name]).astype(np.float64) for name in ("mean", "inv_std"))
    normed, magnitude = (x - mean) * inv_std, (abs(x) + abs(mean)) * inv_std
    for name, terms, sizes in (("dgamma", dx * normed, abs(dx) * magnitude), ("dbeta", dx, abs(dx))):
        want, size = terms.sum(axis=0), sizes.sum(axis=0)
        assert_within(
            cases.decoded(launcher.get(norm[name])),
            want,
            cases.bound(40, size, want, dtype),
            axes="k",
            label=f"{label} {name}",
        )
        got = launcher.get(norm["means"])[int(name == "dbeta")]
        assert_within(
            got, want / len(dx), cases.bound(42, size / len(dx), want), axes="k", label=f"{label} mean of {name}"
        )


@pytest.mark.parametrize(
    "terms", [(), ("residual",), ("mask",), ("residual", "mask"), ("residual", "slope")], ids="-".join
)
@pytest.mark.parametrize(("dtype", "tile"), PRODUCTS)
def test_a_product_leaves_the_sums_of_the_gradient_of_the_norm_before_it(launcher, dtype, tile, terms):
    """As stored, with another branch and the mask of a ReLU; the slope from the norm's input is that of its result."""
    m, n, random = 601, 136, np.random.default_rng(len(terms))
    a, b = cases.drawn(random, (m, 72), dtype), cases.drawn(random, (72, n), dtype)
    norm, y = before(launcher, random, m, n, dtype, relu="slope" in terms)
    residual = launcher.put(cases.drawn(random, (m, n), dtype)) if "residual" in terms else None
    fused = Fused(residual=residual, mask=y if {"mask", "slope"} & {*terms} else None)
    where, launched = context(launcher, tile)
    plain = launcher.get(gemm.gemm(where, launcher.put(a), launcher.put(b), layout="nn", fused=fused))
    launched.clear()
    dx = launcher.unwritten((m, n), element(dtype))
    gemm.gemm(where, launcher.put(a), launcher.put(b), layout="nn", fused=fused, out=dx, norm=norm)
    assert launched == ["gemm_nn_sums", "batch_norm_backward_finish"]
    np.testing.assert_array_equal(launcher.get(dx), plain)
    gradients_are_right(launcher, norm, dx, dtype, f"{dtype} {tile} {terms}")


@pytest.mark.parametrize("stride", [1, 2])
def test_phases_of_a_stride_leave_the_sums_to_the_kernels_of_the_norm(launcher, stride):
    """Their pixels do not follow each other: the result is read again, as without sums in the product."""
    drawn = cases.Conv(n=2, h=9, w=10, c=72, k=64, r=3, s=3, stride=(stride, stride), pad=(1, 1, 1, 1))
    random = np.random.default_rng(stride)
    dy, w = (cases.drawn(random, shape, "float16") for shape in (drawn.y_shape, drawn.w_shape))
    norm, y = before(launcher, random, drawn.n * drawn.h * drawn.w, drawn.c, "float16", relu=True)
    where, launched = context(launcher)
    dx = conv.conv2d_dgrad(
        where, launcher.put(dy), launcher.put(w), x_shape=drawn.x_shape, positive=y.reshape(drawn.x_shape), norm=norm,
        **drawn.options,
    )  # fmt: skip
    own = ["conv2d_dgrad_sums"] if stride == 1 else ["conv2d_dgrad", "batch_norm_backward_sums"]
    assert launched == [*own, "batch_norm_backward_finish"]
    gradients_are_right(launcher, norm, dx, "float16", f"stride {stride}")


def test_a_split_product_leaves_the_statistics_to_the_kernels_of_the_norm(launcher):
    """No block has whole sums."""
    random = np.random.default_rng(4)
    a, b = cases.drawn(random, (40, 1024), "float16"), cases.drawn(random, (24, 1024), "float16")
    where, launched = context(launcher, slices=2)
    norm = behind(launcher, 24)
    y = gemm.gemm(where, launcher.put(a), launcher.put(b), norm=norm)
    assert launched == ["gemm_nt", "split_k_reduce", "batch_norm_statistics", "batch_norm_finish"]
    statistics_are_right(launcher, norm, y, "split")


def test_sums_of_very_many_tiles_are_added_up_first(launcher):
    """More tiles than one launch adds up."""
    m, random = 64 * 1024 + 7, np.random.default_rng(8)
    a, b = cases.drawn(random, (m, 8), "float16"), cases.drawn(random, (8, 8), "float16")
    norm, _ = before(launcher, random, m, 8, "float16", relu=False)
    where, launched = context(launcher, "128x64x64")
    dx = gemm.gemm(where, launcher.put(a), launcher.put(b), layout="nn", norm=norm)
    assert launched == ["gemm_nn_sums", "column_sums", "batch_norm_backward_finish"]
    gradients_are_right(launcher, norm, dx, "float16", "many")
