"""What kernels/simt fuse with a product: epilogues, and statistics for a batch norm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cubatch.engine.native import activation_functions, conv, gemm
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma
from tests.kernels import cases
from tests.kernels.hopper_cases import Recording
from tests.kernels.passes import Passes, moments
from tests.kernels.tiles import FEWER, SEEDS, chooser, context

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
    operands = [launcher.put(array) for array in (x, w, b)]
    y, got = moments(launcher, pixels, filters, lambda fused: conv.conv2d(where, *operands, fused=fused))
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


@pytest.mark.parametrize("rows", [30, 200])
def test_a_norm_takes_the_moments_of_the_product_before_it(launcher, rows):
    """Or its own kernel sums the product: tiles of 32 rows may have more moments than the scratch memory holds."""
    random = np.random.default_rng(3)
    a, b = cases.drawn(random, (rows, 16)), cases.drawn(random, (8, 16))
    recording = Recording(launcher.launcher)
    where = launcher.context(chooser=chooser, launcher=recording)
    left, right = launcher.put(a), launcher.put(b)
    kernel = where.choose(gemm.gemm_problem(where, left, right)).kernel
    mean, inv_std = (launcher.unwritten((8,), np.float32) for _ in range(2))
    gemm.gemm(where, left, right, norm={"mean": mean, "inv_std": inv_std})
    fits = rows <= 32 or kernel.tile.m > 32
    assert recording.operations == ["gemm_nt", *([] if fits else ["batch_norm_statistics"]), "batch_norm_finish"]
    y = a.astype(np.float64) @ b.astype(np.float64).T
    assert_within(launcher.get(mean), y.mean(axis=0), gamma(300, 2.0**-24) * abs(y).max(), label="mean")
    want = 1 / np.sqrt(y.var(axis=0) + 1e-5)
    assert_within(launcher.get(inv_std), want, gamma(2000, 2.0**-24) * want, label="inverse deviation")


def test_every_activation_is_tested():
    """A new one belongs into this file."""
    assert set(KINDS) == set(activation_functions.ACTIVATIONS) - {"gelu"}
