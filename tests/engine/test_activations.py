"""Activation functions and the scaling of channels against one-number-at-a-time references in float64."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.engine import activation_functions, functional
from cubatch.memory import blocks
from cubatch.network.layers import LAYERS
from tests import reference
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma
from tests.thorough import examples

KINDS = list(activation_functions._CURVES)  # the references have formulas of their own
ROUNDINGS = 16
"""
At most so many in a result: exp is good to 3 units in the last place (NumPy 1.17's release notes), which
count as 6, the sum with one and its reciprocal as 2; an output saved for the backward pass carries these.
"""


@st.composite
def curves(draw):
    """
    Numbers of order one, kinks included, in an array of any shape, and how the function is called.

    Sixteenths are exact in float32 as are their sums with 3, so no input lies within rounding of a kink
    except on it: there value and slope would be those of its other side.
    """
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(["float32", "float64"]))
    x = random.integers(-16 * 9, 16 * 9 + 1, shape).astype(dtype) / 16
    return {
        "kind": draw(st.sampled_from(KINDS)),
        "x": x.astype(dtype),
        "dy": random.uniform(-1, 1, shape).astype(dtype),
        "dtype": dtype,
        "in_place": draw(st.booleans()),
        "at_once": draw(st.booleans()),
    }


def _workspace(need, samples, *, at_once):
    """Room for all, or for the least that works, filled with what is no number."""
    return np.full(blocks.workspace_bytes([need], samples, 2**20 if at_once else 0), 0xFF, np.uint8)


def _call(case, function, first, *others):
    need = blocks.Curve(itemsize=case["x"].itemsize)
    workspace = _workspace(need, case["x"].size, at_once=case["at_once"])
    first = first.copy()
    out = first if case["in_place"] else np.full_like(first, np.nan)
    result = function(first, *others, kind=case["kind"], out=out, workspace=workspace)
    assert result is out
    return out


@given(curves())
@settings(max_examples=examples(200), deadline=None)
def test_activations_stay_within_the_rounding_of_their_formulas(case):
    """No formula cancels but x + 3, whose terms are the bound for the hard curves, and x less its tail for GELU."""
    x, kind, u = case["x"], case["kind"], UNIT_ROUNDOFF[case["dtype"]]
    y = _call(case, functional.activation, x)
    want = reference.activation(x, kind=kind)
    terms = {"hard_sigmoid": (abs(x) + 3) / 6, "hard_swish": abs(x) * (abs(x) + 3) / 6, "gelu": abs(x)}
    terms = terms.get(kind, abs(want))
    assert y.dtype == x.dtype
    assert_within(y, want, 0 if kind == "relu6" else gamma(ROUNDINGS, u) * terms, label=kind)


@given(curves())
@settings(max_examples=examples(200), deadline=None)
def test_gradients_of_activations_stay_within_the_rounding_of_their_formulas(case):
    """From what the layer's record says is kept; slopes are sums of at most (1 + |x|)(1 + s) in magnitude."""
    x, dy, kind, u = case["x"], case["dy"], case["kind"], UNIT_ROUNDOFF[case["dtype"]]
    kept = x if LAYERS[kind].backward_reads == {"x"} else functional.activation(x, kind=kind)
    dx = _call(case, functional.activation_backward, dy, kept)
    want = reference.activation_backward(dy, x, kind=kind)
    terms = {"relu6": 0, "hard_sigmoid": 1 / 6}.get(kind, 2 * (1 + abs(x)))
    assert dx.dtype == x.dtype
    assert_within(dx, want, gamma(ROUNDINGS, u) * abs(dy) * terms, label=kind)


@pytest.mark.parametrize("kind", ["sigmoid", "silu", "gelu"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_far_inputs_give_the_curves_ends_without_a_warning(kind, dtype):
    """Where exp(-x) overflows the curve is 0, where it underflows 1 or x; the slope is 0 or 1."""
    x = np.array([-1000.0, 1000.0], dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = functional.activation(x, kind=kind)
        slope = functional.activation_backward(np.ones_like(x), y if kind == "sigmoid" else x, kind=kind)
    np.testing.assert_array_equal(y, [0, 1 if kind == "sigmoid" else 1000])
    np.testing.assert_array_equal(slope, [0, 0 if kind == "sigmoid" else 1])


@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        ("relu6", [0.0, 6.0, 3.0]),
        ("hard_sigmoid", [0.0, 1.0, 0.5]),
        ("hard_swish", [-3.0, -4.0, 0.0]),
    ],
)
def test_an_infinite_gradient_where_a_curve_is_flat_stays_out(kind, saved):
    """Zero is zero even of infinity, on the kink too, as in PyTorch; where the curve rises it comes through."""
    dx = functional.activation_backward(np.full(3, np.inf), np.array(saved), kind=kind)
    np.testing.assert_array_equal(dx, [0, 0, np.inf])


# --- scaling -------------------------------------------------------------------------------------------------


@st.composite
def scalings(draw):
    """Extents, a seed, and whether the blocks are single positions, some of them, or everything."""
    n, h, w, c = draw(st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 7), st.integers(1, 9)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(["float32", "float64"]))
    return {
        "arrays": [random.uniform(-1, 1, shape).astype(dtype) for shape in ((n, h, w, c), (n, h, w, c), (n, 1, 1, c))],
        "u": UNIT_ROUNDOFF[dtype],
        "target": draw(st.sampled_from([0, 1000, 2**20])),
        "in_place": draw(st.booleans()),
    }


@given(scalings())
@settings(max_examples=examples(100), deadline=None)
def test_scale_rounds_one_product(case):
    """Each output is one product."""
    _, x, s = case["arrays"]
    want = np.float64(x) * s
    x = x.copy()
    y = functional.scale(x, s, out=x if case["in_place"] else None)
    assert y.dtype == s.dtype
    assert_within(y, want, case["u"] * abs(want), axes="nhwc")


@given(scalings())
@settings(max_examples=examples(150), deadline=None)
def test_scale_backward_stays_within_the_rounding_of_its_sums(case):
    """A factor's gradient sums h * w products, in whatever order; an input's is one product, also over dy."""
    dy, x, s = case["arrays"]
    n, h, w, c = x.shape
    terms = np.float64(dy) * x
    want_x, want_s, size = np.float64(dy) * s, *(f(terms).sum((1, 2), keepdims=True) for f in (np.asarray, abs))
    dy = dy.copy()
    dx, ds = dy if case["in_place"] else np.full_like(x, np.nan), np.full_like(s, np.nan)
    need = blocks.Products(itemsize=x.itemsize, rows=h * w, channels=c)
    workspace = np.full(blocks.workspace_bytes([need], n, case["target"]), 0xFF, np.uint8)
    functional.scale_backward(dy, x, s, dx=dx, ds=ds, workspace=workspace)
    assert_within(dx, want_x, case["u"] * abs(want_x), axes="nhwc", label="dx")
    assert_within(ds, want_s, gamma(h * w + 1, case["u"]) * size, axes="nhwc", label="ds")


def test_scale_backward_computes_what_is_wanted_alone():
    """Each gradient by itself is the one that both together give."""
    random = np.random.default_rng(1)
    x, dy, s = *random.standard_normal((2, 3, 4, 5, 6)), random.standard_normal((3, 1, 1, 6))
    both, alone = [[np.empty_like(x), np.empty_like(s)] for _ in range(2)]
    functional.scale_backward(dy, x, s, dx=both[0], ds=both[1])
    functional.scale_backward(dy, x, s, dx=alone[0])
    functional.scale_backward(dy, x, s, ds=alone[1])
    for got, want in zip(alone, both, strict=True):
        np.testing.assert_array_equal(got, want)
