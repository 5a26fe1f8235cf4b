"""The proof that what the kernels' tests rely on is right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from tests import reference
from tests.checks import UNIT_ROUNDOFF, assert_within
from tests.kernels.cases import (
    SMALLEST,
    bound,
    conv2d,
    conv2d_dgrad,
    conv2d_wgrad,
    convolutions,
    decoded,
    encoded,
    reserved,
)
from tests.thorough import examples


@given(convolutions(most_extent=6, most_channels=4) | convolutions(most_extent=5, most_channels=4, depthwise=True))
@settings(max_examples=examples(40))
def test_references_are_those_of_the_loops(conv):
    """All three passes agree with one multiply-add at a time, on integers, whose sums are exact."""
    random = np.random.default_rng(0)
    x, w, dy, b = (
        random.integers(-8, 9, shape).astype(float) for shape in (conv.x_shape, conv.w_shape, conv.y_shape, (conv.k,))
    )
    assert np.array_equal(conv2d(conv, x, w, b), reference.conv2d(x, w, b, **conv.options))
    dx = reference.conv2d_dgrad(dy, w, x_shape=conv.x_shape, **conv.options)
    assert np.array_equal(conv2d_dgrad(conv, dy, w), dx)
    dw, db = reference.conv2d_wgrad(x, dy, w_shape=conv.w_shape, **conv.options)
    assert np.array_equal(conv2d_wgrad(conv, x, dy)[0], dw)
    assert np.array_equal(conv2d_wgrad(conv, x, dy)[1], db)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_bound_covers_what_storing_rounds(dtype):
    """A sum that is right to the last bit is off by half a unit in the last place, or half a denormal, at most."""
    exact = np.concatenate([np.linspace(-2, 2, 4001), SMALLEST[dtype] * np.linspace(-4, 4, 33)])
    want = exact.astype(np.float32).astype(np.float64)
    assert_within(decoded(encoded(want, dtype)), want, bound(0, 0, want, dtype))
    assert bound(0, 0, 1.0, dtype) < 2 * UNIT_ROUNDOFF[dtype]


def test_a_reserved_array_is_larger_than_any_memory():
    """Only what is touched is there."""
    array = reserved((2**40,), np.uint8)
    array[-1] = 7
    assert (array[0], array[-1]) == (0, 7)
