"""Gradients against the slopes of their functions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checks import UNIT_ROUNDOFF

U = UNIT_ROUNDOFF["float32"]


def difference(function, x, direction):
    step = 1e-5
    return (function(x + step * direction) - function(x - step * direction)) / (2 * step)


def check_gradient(function, x, gradient):
    """Central differences along random directions: error O(step^2) and rounding O(u / step), both below 1e-8."""
    random = np.random.default_rng(0)
    for _ in range(3):
        direction = random.standard_normal(x.shape)
        slope = difference(function, x, direction)
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-6, abs=1e-7)
