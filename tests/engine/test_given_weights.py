"""A network that brings weights is run with them."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.engine.network import Model
from cubatch.network.graph import Network
from cubatch.network.layers import BatchNorm2d, Linear
from tests.engine.networks import cpu

W, VAR = np.array([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.25]]), np.array([4.0, 0.25])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_given_is_used_and_the_rest_is_drawn(dtype):
    """Filter and variance as given, the mean at zero, scale and shift as new: the numbers of the formula."""
    weights = {"fc": {"w": W, "b": np.array([0.5, -1.0])}, "norm": {"var": VAR}}
    layers = [Linear(name="fc", k=2), BatchNorm2d(name="norm", eps=1e-12)]
    network = Network(input_shape=(1, 1, 3), layers=layers, weights=weights)
    x = np.array([[1.0, -1.0, 2.0], [0.0, 3.0, 1.0]])
    with Model(network, device=cpu(1), dtype=dtype) as model:
        model.prepare(2)
        model.load(x.reshape(2, 1, 1, 3))
        model.step()
        want = (x @ W.T + [0.5, -1.0]) / np.sqrt(VAR)
        np.testing.assert_allclose(model.output().reshape(2, 2), want, rtol=1e-6)
        model.states["norm"]["var"][...] = 1.0
    assert VAR.tolist() == [4.0, 0.25]  # the model has copies
