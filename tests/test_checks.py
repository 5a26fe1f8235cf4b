"""The proof that the comparison helpers fail when they should."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checks import UNIT_ROUNDOFF, assert_within, gamma


def test_equal_arrays_pass_with_a_bound_of_zero():
    """The bound is inclusive, so exact results need no slack."""
    assert_within(np.ones((2, 3)), np.ones((2, 3)), 0.0)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1.001, -1.0])
def test_one_wrong_element_fails(wrong):
    """NaN compares false with everything, so the condition is written as "not within"."""
    got = np.ones((2, 3))
    got[1, 2] = wrong
    with pytest.raises(AssertionError, match=r"1 of 6 elements"):
        assert_within(got, np.ones((2, 3)), 1e-4)


def test_a_nan_among_the_wanted_values_fails():
    """A reference that broke down must not pass everything."""
    with pytest.raises(AssertionError):
        assert_within(np.ones(2), np.array([1.0, np.nan]), 1.0)


def test_a_different_shape_fails_though_it_would_broadcast():
    """A (1,) result for a (3,) truth is a bug, not a broadcast."""
    with pytest.raises(AssertionError, match="shape"):
        assert_within(np.ones(1), np.ones(3), 1.0)


def test_the_message_names_place_values_and_axes():
    """The coordinates of the failures are the diagnosis."""
    got = np.zeros((2, 3))
    got[1, :] = 2.0
    with pytest.raises(AssertionError) as failure:
        assert_within(got, np.zeros((2, 3)), 0.5, axes="nk", label="case")
    text = str(failure.value)
    assert "case: 3 of 6" in text
    assert "[n=1, k=0]: got 2, want 0, 4x the bound" in text
    assert "n in [1]; k in [0, 1, 2]" in text


def test_a_bound_per_element_is_applied_per_element():
    """A loose bound in one place must not excuse another."""
    with pytest.raises(AssertionError, match=r"\[i=1\]"):
        assert_within(np.array([1.0, 1.0]), np.zeros(2), np.array([2.0, 0.5]))


def test_gamma_is_highams():
    """Gamma_k = k u / (1 - k u), Higham (2002), lemma 3.1."""
    assert gamma(4, 0.125) == 1.0
    assert gamma(1000, UNIT_ROUNDOFF["float32"]) == pytest.approx(1000 * 2**-24, rel=1e-3)


def test_gamma_refuses_sums_too_long_for_the_type():
    """With k u >= 1 there is no bound at all."""
    with pytest.raises(ValueError, match="no correct digit"):
        gamma(4096, UNIT_ROUNDOFF["float16"])
