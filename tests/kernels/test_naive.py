"""The naive kernels: whatever else is wrong, these are right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubatch.engine.native import naive
from cubatch.errors import InvalidArgument
from tests.checks import assert_within
from tests.cpusim.simulator import Simulator
from tests.kernels import cases

DTYPES = st.sampled_from(cases.DTYPES)
SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=30, deadline=None)


def element(dtype):
    return cases.encoded(0, dtype).dtype


@given(st.sampled_from(["nn", "nt", "tn"]), st.tuples(*[st.integers(1, 20)] * 3), DTYPES, st.booleans(), SEEDS)
@FEW
def test_products_stay_within_the_rounding_of_their_sums(launcher, layout, extents, dtype, relu, seed):
    """Each output is a dot product of length k and a bias, in every layout and storage."""
    m, n, k = extents
    random = np.random.default_rng(seed)
    a = cases.drawn(random, (k, m) if layout[0] == "t" else (m, k), dtype)
    b = cases.drawn(random, (n, k) if layout[1] == "t" else (k, n), dtype)
    bias = cases.drawn(random, (n,), dtype) if seed % 2 else None
    out = launcher.unwritten((m, n), element(dtype))
    on_device = None if bias is None else launcher.put(bias)
    naive.gemm(launcher.context(), launcher.put(a), launcher.put(b), on_device, layout=layout, relu=relu, out=out)
    left = cases.decoded(a).T if layout[0] == "t" else cases.decoded(a)
    right = cases.decoded(b).T if layout[1] == "t" else cases.decoded(b)
    shift = np.zeros(n) if bias is None else cases.decoded(bias)
    want = left @ right + shift
    if relu:
        want = np.maximum(want, 0)
    tolerance = cases.bound(k + 1, abs(left) @ abs(right) + abs(shift), want, dtype)
    assert_within(cases.decoded(launcher.get(out)), want, tolerance, axes="mn")


CONVOLUTIONS = cases.convolutions(most_extent=7) | cases.convolutions(most_extent=6, depthwise=True)


@given(CONVOLUTIONS, DTYPES, st.booleans(), st.booleans(), SEEDS)
@FEW
def test_fprop_stays_within_the_rounding_of_its_sums(launcher, conv, dtype, relu, has_bias, seed):
    """Any stride, one-sided pad, dilation and groups, with bias and ReLU."""
    random = np.random.default_rng(seed)
    x, w = cases.drawn(random, conv.x_shape, dtype), cases.drawn(random, conv.w_shape, dtype)
    b = cases.drawn(random, (conv.k,), dtype) if has_bias else None
    y = launcher.unwritten(conv.y_shape, element(dtype))
    on_device = None if b is None else launcher.put(b)
    naive.conv2d(launcher.context(), launcher.put(x), launcher.put(w), on_device, relu=relu, out=y, **conv.options)
    x, w, b = cases.decoded(x), cases.decoded(w), np.zeros(conv.k) if b is None else cases.decoded(b)
    want, magnitude = cases.conv2d(conv, x, w, b), cases.conv2d(conv, abs(x), abs(w), abs(b))
    if relu:
        want = np.maximum(want, 0)
    tolerance = cases.bound(w[0].size + 1, magnitude, want, dtype)
    assert_within(cases.decoded(launcher.get(y)), want, tolerance, axes="npqk", label=str(conv))


@given(CONVOLUTIONS, DTYPES, SEEDS)
@FEW
def test_dgrad_stays_within_the_rounding_of_its_sums(launcher, conv, dtype, seed):
    """A pixel's gradient has a product for each tap and filter that read it: none where the stride steps over it."""
    random = np.random.default_rng(seed)
    dy, w = cases.drawn(random, conv.y_shape, dtype), cases.drawn(random, conv.w_shape, dtype)
    dx = launcher.unwritten(conv.x_shape, element(dtype))
    naive.conv2d_dgrad(
        launcher.context(), launcher.put(dy), launcher.put(w), x_shape=conv.x_shape, out=dx, **conv.options
    )
    dy, w = cases.decoded(dy), cases.decoded(w)
    want = cases.conv2d_dgrad(conv, dy, w)
    terms = conv.r * conv.s * conv.k // conv.groups
    tolerance = cases.bound(terms, cases.conv2d_dgrad(conv, abs(dy), abs(w)), want, dtype)
    assert_within(cases.decoded(launcher.get(dx)), want, tolerance, axes="nhwc", label=str(conv))


@given(CONVOLUTIONS, DTYPES, st.booleans(), SEEDS)
@FEW
def test_wgrad_stays_within_the_rounding_of_its_sums(launcher, conv, dtype, has_bias, seed):
    """A tap's gradient and a bias's are sums over all output pixels; the bias's may be left out."""
    random = np.random.default_rng(seed)
    x, dy = cases.drawn(random, conv.x_shape, dtype), cases.drawn(random, conv.y_shape, dtype)
    dw = launcher.unwritten(conv.w_shape, element(dtype))
    db = launcher.unwritten((conv.k,), element(dtype)) if has_bias else None
    naive.conv2d_wgrad(launcher.context(), launcher.put(x), launcher.put(dy), dw=dw, db=db, **conv.options)
    x, dy = cases.decoded(x), cases.decoded(dy)
    want, magnitude = cases.conv2d_wgrad(conv, x, dy), cases.conv2d_wgrad(conv, abs(x), abs(dy))
    terms = int(np.prod(conv.y_shape[:3]))
    for got, exact, size in zip((dw, db), want, magnitude, strict=True):
        if got is not None:
            tolerance = cases.bound(terms, size, exact, dtype)
            assert_within(cases.decoded(launcher.get(got)), exact, tolerance, label=str(conv))


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


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layout": "tt"}, "layout"),
        ({"b": np.zeros((3, 4), np.float32)}, "b"),
        ({"out": np.zeros((2, 4), np.float32)}, "out"),
        ({"bias": np.zeros(3, np.float64)}, "bias"),
    ],
)
def test_matrices_that_do_not_go_together_are_refused(launcher, change, field):
    """An error names the argument before a kernel reads or writes beyond it."""
    arguments = {"a": np.zeros((2, 5), np.float32), "b": np.zeros((3, 5), np.float32)} | change
    with pytest.raises(InvalidArgument) as error:
        naive.gemm(launcher.context(), **arguments)
    assert error.value.args[0] == field


def test_samples_may_be_none(launcher):
    """Gradients over no samples are zeros, and nothing else is launched."""
    x = launcher.put(np.zeros((0, 4, 4, 2), np.float32))
    dw, db = launcher.unwritten((2, 3, 3, 1), np.float32), launcher.unwritten((2,), np.float32)
    naive.conv2d_wgrad(launcher.context(), x, x[:, :2, :2], dw=dw, db=db, groups=2)
    assert not launcher.get(dw).any()
    assert not launcher.get(db).any()
