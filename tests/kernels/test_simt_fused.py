"""What kernels/simt fuse with a product: epilogues, and statistics for a batch norm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cubatch.engine.native import activation_functions, batch_norm, conv, gemm
from cubatch.engine.native.operands import Fused
from cubatch.engine.native.product import statistics_tiles
from cubatch.network.windows import conv_shape
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma
from tests.kernels import cases
from tests.kernels.passes import Passes
from tests.kernels.tiles import FEWER, SEEDS, context

KINDS = ("none", "relu", "relu6", "silu", "sigmoid", "hard_sigmoid", "hard_swish")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [12, 10])
def test_an_epilogue_folds_a_batch_norm_adds_a_residual_and_activates(launcher, kind, columns):
    """In this order, whether columns are stored 4 at a time or one by one; nothing is stored beyond the last."""
    Passes(launcher, context(launcher), seed=len(kind)).columns((70, columns, 20), kind)


@given(st.integers(1, 300), st.sampled_from([8, 7]), st.integers(1, 40), SEEDS)
@FEWER
def test_statistics_give_batch_norm_its_mean_and_variance(launcher, pixels, filters, channels, seed):
    """The epilogue's moments, merged as batch norm merges its own: also where the mean is far from zero."""
    random = np.random.default_rng(seed)
    x, w = cases.drawn(random, (pixels, 1, 1, channels)), cases.drawn(random, (filters, 1, 1, channels))
    b = np.float32(random.uniform(50, 100, filters))
    where = context(launcher)
    on_device, filters_on_device = launcher.put(x), launcher.put(w)
    shape = conv_shape(x.shape[1:], w.shape, (1, 1), (0, 0, 0, 0), (1, 1))
    tiles = statistics_tiles(where, conv.conv2d_fprop_problem(where, on_device, filters_on_device, shape))
    statistics = launcher.unwritten((tiles, 3, filters), np.float32)
    y = conv.conv2d(where, on_device, filters_on_device, launcher.put(b), fused=Fused(statistics=statistics))
    got = launcher.get(statistics).astype(np.float64)
    count, mean, squares = got[:, 0], got[:, 1], got[:, 2]
    stored = launcher.get(y).reshape(-1, filters).astype(np.float64)
    assert (count.sum(axis=0) == pixels).all()
    total = (count * mean).sum(axis=0) / pixels
    u = UNIT_ROUNDOFF["float32"]
    slack = gamma(260, u) * abs(stored).max(axis=0)
    assert_within(total, stored.mean(axis=0), slack, axes="k", label="mean")
    whole = squares.sum(axis=0) + (count * (mean - total) ** 2).sum(axis=0)
    spread = abs(stored - b).max(axis=0)
    # y was rounded near b, the sums were not: each deviation differs by half a unit of y.
    tolerance = pixels * (gamma(300, u) * spread**2 + 4 * spread * slack + slack**2)
    assert_within(whole, ((stored - stored.mean(axis=0)) ** 2).sum(axis=0), tolerance, axes="k", label="squares")


def test_statistics_are_what_batch_norm_finish_takes(launcher):
    """Flattened they go straight into the kernel that turns moments into a mean and an inverse deviation."""
    random = np.random.default_rng(3)
    a, b = cases.drawn(random, (200, 16)), cases.drawn(random, (8, 16))
    where = context(launcher)
    left, right = launcher.put(a), launcher.put(b)
    tiles = statistics_tiles(where, gemm.gemm_problem(where, left, right))
    statistics = launcher.unwritten((tiles, 3, 8), np.float32)
    gemm.gemm(where, left, right, fused=Fused(statistics=statistics))
    mean, inv_std = launcher.unwritten((8,), np.float32), launcher.unwritten((8,), np.float32)
    batch_norm.batch_norm_finish(where, statistics.reshape(-1), tiles, mean=mean, inv_std=inv_std, dtype="float32")
    y = a.astype(np.float64) @ b.astype(np.float64).T
    assert_within(launcher.get(mean), y.mean(axis=0), gamma(300, 2.0**-24) * abs(y).max(), label="mean")
    want = 1 / np.sqrt(y.var(axis=0) + 1e-5)
    assert_within(launcher.get(inv_std), want, gamma(2000, 2.0**-24) * want, label="inverse deviation")


def test_every_activation_is_tested():
    """A new one belongs into this file."""
    assert set(KINDS) == set(activation_functions.ACTIVATIONS) - {"gelu"}
