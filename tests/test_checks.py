"""The proof that the comparison helpers fail when they should."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checks import UNIT_ROUNDOFF, assert_within, gamma


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


def test_gamma_is_highams():
    """Gamma_k = k u / (1 - k u), Higham (2002), lemma 3.1."""
    assert gamma(4, 0.125) == 1.0
    assert gamma(1000, UNIT_ROUNDOFF["float32"]) == pytest.approx(1000 * 2**-24, rel=1e-3)


def test_gamma_refuses_sums_too_long_for_the_type():
    """With k u >= 1 there is no bound at all."""
    with pytest.raises(ValueError, match="no correct digit"):
        gamma(4096, UNIT_ROUNDOFF["float16"])
