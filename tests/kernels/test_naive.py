"""The naive kernels: whatever else is wrong, these are right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.engine.native import naive
from tests.cpusim.simulator import Simulator
from tests.kernels import cases
from tests.kernels.passes import Passes, clamped

DTYPES = st.sampled_from(cases.DTYPES)
SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=30, deadline=None)
ACTIVATIONS = st.sampled_from(["none", "relu"])


def passes(launcher, dtype, seed):
    return Passes(launcher, launcher.context(), dtype, seed, ends=clamped)


@given(st.sampled_from(["nn", "nt", "tn"]), st.tuples(*[st.integers(1, 20)] * 3), DTYPES, ACTIVATIONS, SEEDS)
@FEW
def test_products_stay_within_the_rounding_of_their_sums(launcher, layout, extents, dtype, activation, seed):
    """Each output is a dot product of length k, a bias and ReLU, in every layout and storage."""
    passes(launcher, dtype, seed).product(layout, extents, activation=activation, parts=("bias",), run=naive.gemm)


CONVOLUTIONS = cases.convolutions(most_extent=7) | cases.convolutions(most_extent=6, depthwise=True)


@given(CONVOLUTIONS, DTYPES, ACTIVATIONS, st.booleans(), SEEDS)
@FEW
def test_fprop_stays_within_the_rounding_of_its_sums(launcher, conv, dtype, activation, has_bias, seed):
    """Any stride, one-sided pad, dilation and groups, with bias and ReLU."""
    passes(launcher, dtype, seed).fprop(conv, bias=has_bias, activation=activation, run=naive.conv2d)


@given(CONVOLUTIONS, DTYPES, SEEDS)
@FEW
def test_dgrad_stays_within_the_rounding_of_its_sums(launcher, conv, dtype, seed):
    """A pixel's gradient has a product for each tap and filter that read it: none where the stride steps over it."""
    passes(launcher, dtype, seed).dgrad(conv, run=naive.conv2d_dgrad)


@given(CONVOLUTIONS, DTYPES, st.booleans(), SEEDS)
@FEW
def test_wgrad_stays_within_the_rounding_of_its_sums(launcher, conv, dtype, has_bias, seed):
    """A tap's gradient and a bias's are sums over all output pixels; the bias's may be left out."""
    passes(launcher, dtype, seed).wgrad(conv, bias=has_bias, run=naive.conv2d_wgrad)


def test_offsets_go_beyond_31_bits(launcher):
    """The last pixel of tensors of more than 2^31 elements is computed from where it lies, in all three passes."""
    if not isinstance(launcher.launcher, Simulator):
        pytest.skip("takes 8 GiB where memory is not reserved page by page")
    last = Simulator(launcher.arch, launcher.launcher.build, blocks=lambda grid: [(grid[0] - 1, 0, 0)])
    context = launcher.context(launcher=last)
    shape = (2**16 + 1, 128, 128, 2)
    x, y = cases.reserved(shape, np.float16), cases.reserved(shape, np.float16)
    w = np.array([[0.5, 0.25], [1, 2]], np.float16).reshape(2, 1, 1, 2)
    x[-1, -1, -1] = 3, 4
    naive.conv2d(context, x, w, out=y)
    assert y[-1, -1, -1].tolist() == [2.5, 11]
    dx = cases.reserved(shape, np.float16)
    naive.conv2d_dgrad(context, y, w, x_shape=shape, out=dx)
    assert dx[-1, -1, -1].tolist() == [2.5 / 2 + 11, 2.5 / 4 + 22]
    a, out = cases.reserved((2**31 + 1, 1), np.float16), cases.reserved((2**31 + 1, 1), np.float16)
    a[-1] = 5
    naive.gemm(context, a, np.array([[2]], np.float16), out=out)
    assert out[-1].tolist() == [10]


def test_samples_may_be_none(launcher):
    """Gradients over no samples are zeros, and nothing else is launched."""
    x = launcher.put(np.zeros((0, 4, 4, 2), np.float32))
    dw, db = launcher.unwritten((2, 3, 3, 1), np.float32), launcher.unwritten((2,), np.float32)
    naive.conv2d_wgrad(launcher.context(), x, x[:, :2, :2], dw=dw, db=db, groups=2)
    assert not launcher.get(dw).any()
    assert not launcher.get(db).any()
