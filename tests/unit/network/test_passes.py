"""One mapping between passes and matrix products: layers, kernels, the predictor and the bench agree on it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from cubatch.bench import cases
from cubatch.errors import InvalidSpec
from cubatch.estimate.vendor.algorithms import PASSES, Work
from cubatch.estimate.vendor.vendor_calls import of_product
from cubatch.kernels.problem import problem_of
from cubatch.network.layers import Conv2d, Linear, MaxPool2d
from cubatch.network.passes import Gemm, Pass, linear_of, product_extents

EXTENT = st.integers(1, 40)
PASS = st.sampled_from(list(Pass))


@st.composite
def convolutions(draw, *, step=3):
    """Convolutions of all kinds whose filter fits, with up to `step` as stride."""
    r, s, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    return Conv2d(
        h=draw(st.integers((r - 1) * dilation[0] + 1, 12)), w=draw(st.integers((s - 1) * dilation[1] + 1, 12)),
        c=groups * draw(st.integers(2, 5)), k=groups * draw(st.integers(1, 5)), r=r, s=s, groups=groups,
        stride=draw(st.tuples(st.integers(1, step), st.integers(1, step))), dilation=dilation,
        pad=draw(st.tuples(*[st.integers(0, 2)] * 4)),
    )  # fmt: skip


def work_of(layer, pass_, n):
    """The same pass as a row of the predictor's table."""
    (h, w, c), (p, q, k) = layer.input_shape, layer.output_shape
    stride, dilation = layer.stride, max(layer.dilation)
    return Work.of(
        np.array([PASSES.index(pass_)]), n=n, h=h, w=w, c=c, k=k, r=layer.r, s=layer.s, p=p, q=q, stride_h=stride[0],
        stride_w=stride[1], dilation=dilation, groups=layer.groups,
    )  # fmt: skip


@given(conv=convolutions(step=1), pass_=PASS, n=st.integers(1, 9))
def test_layer_kernels_and_predictor_see_one_product_in_a_pass(conv, pass_, n):
    """At stride 1 every pass is one product of a group, of the same extents wherever it is asked for."""
    (gemm,) = conv.gemms(pass_, n)
    problem, work = problem_of(conv, pass_, n, "float32"), work_of(conv, pass_, n)
    assume(conv.groups > 1 or conv.c != 3)  # a batch of three channels is stored with four
    assert (problem.m, problem.n, problem.k, problem.groups) == (gemm.m, gemm.n, gemm.k, gemm.count)
    assert (work.m[0], work.columns[0], work.depth[0]) == (gemm.m, gemm.n, gemm.k)


@given(conv=convolutions(), pass_=PASS, n=st.integers(1, 9))
def test_a_strided_gradient_is_as_many_products_as_its_launch_has_phases_that_work(conv, pass_, n):
    """The launch is of the largest phase and the mean depth, which cover every product of the layer."""
    assume(conv.groups > 1 or conv.c != 3)
    gemms, problem = conv.gemms(pass_, n), problem_of(conv, pass_, n, "float32")
    strided = pass_ is Pass.DGRAD
    assert problem.phases == (conv.stride[0] * conv.stride[1] if strided else 1)
    assert len(gemms) <= problem.phases
    assert max((gemm.m for gemm in gemms), default=0) <= problem.m
    assert {gemm.n for gemm in gemms} <= {problem.n}
    assert sum(gemm.k for gemm in gemms) <= problem.k * problem.phases
    assert sum(gemm.m for gemm in gemms) <= n * conv.h * conv.w or not strided


@given(rows=EXTENT, c=EXTENT, k=EXTENT, pass_=PASS)
def test_a_linear_layer_is_a_convolution_of_one_pixel(rows, c, k, pass_):
    """One tap, as many inputs as outputs: layer, kernels, predictor and the way back."""
    linear, conv = Linear(c=c, k=k), Conv2d(h=1, w=1, c=c, k=k, r=1, s=1)
    (gemm,) = linear.gemms(pass_, rows)
    problem, work = problem_of(linear, pass_, rows, "float32"), work_of(conv, pass_, rows)
    assert conv.gemms(pass_, rows) == (gemm,)
    assert problem.operation == f"gemm_{pass_.layout}"
    assert (problem.m, problem.n, problem.k) == (work.m[0], work.columns[0], work.depth[0]) == (gemm.m, gemm.n, gemm.k)
    assert linear_of(pass_, gemm.m, gemm.n, gemm.k) == (rows, c, k)


@given(m=EXTENT, n=EXTENT, k=EXTENT, count=st.integers(1, 4), pass_=PASS)
def test_a_product_is_that_pass_of_the_linear_layer_it_is_taken_for(m, n, k, count, pass_):
    """The predictor's groups of linear layers and the bench's cases are the product that was asked for."""
    rows, _, _, c, features, *_, groups = of_product(Gemm(m, n, k, count), pass_)
    extents = product_extents(pass_, outputs=rows, inputs=rows, c=c // groups, k=features // groups)
    assert (*extents, groups) == (m, n, k, count)
    case = cases.gemm(m, n, k, layout=pass_.layout)
    assert case.layer.gemms(pass_, case.batch_size) == (Gemm(m, n, k),)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Conv2d(h=5, w=9, c=1, k=1, r=3, s=2, dilation=3), "r must be at most 2, for the filter to fit"),
        (lambda: Conv2d(h=9, w=3, c=1, k=1, r=1, s=6, pad=1), "(w=3 + pad 2, dilation 1)"),
        (lambda: Conv2d(h=9, w=4, c=1, k=1, r=1, s=3, dilation=(1, 2)), "s must be at most 2, for the filter to fit"),
        (lambda: MaxPool2d(h=2, w=9, c=1, r=3, s=1), "r must be at most 2, for the filter to fit"),
    ],
)
def test_a_window_that_does_not_fit_is_told_in_the_words_of_the_layer(wrong, said):
    """Which field, how large it may be, and by which extents: of convolution and pooling alike."""
    with pytest.raises(InvalidSpec) as caught:
        wrong()
    assert said in str(caught.value)
