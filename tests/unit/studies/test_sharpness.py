"""The largest eigenvalue of a Hessian, beside Hessians that are written down and diagonalised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from cubatch.engine.network import Model
from cubatch.hardware import probe
from cubatch.network.graph import Network
from cubatch.network.layers import Dropout, Linear, ReLU
from cubatch.studies import sharpness as module
from cubatch.studies.sharpness import sharpness

CPU = probe.device("cpu")


def in_float64(network, images, labels, seed=0):
    """The same in float64, which the engine computes with for tests only."""
    with Model(network, device=CPU, mode="training", dtype="float64", learning_rate=0.0) as model:
        return module._of(model, images, labels, seed)


def softmax_hessian(x, w, b):
    """
    The Hessian of the mean cross entropy of a linear layer, in its weights and biases: it does not depend on labels.

    For one sample it is (diag(p) - p p^T) times the outer product of (x, 1) with itself (Kronecker).
    """
    total = 0.0
    for one in x:
        logits = w @ one + b
        p = np.exp(logits - logits.max())
        p /= p.sum()
        extended = np.append(one, 1.0)
        total = total + np.kron(np.diag(p) - np.outer(p, p), np.outer(extended, extended)) / len(x)
    return total


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 12), st.integers(0, 1000))
@example(4, 2, 3, 384)  # the first direction hardly has the largest's
def test_of_a_linear_layer_it_is_the_largest_eigenvalue(c, k, n, seed):
    """
    Beside NumPy's eigenvalues of the Hessian written down, in float64.

    The iteration ends where an eigenvalue lies within a hundredth.  The difference of gradients adds STEP**2 / 6 of the
    gradient's third derivative along a direction of length 1, which is below |x|**4 / 4: with |x|**2 of at most 7
    with the bias, STEP**2 / 6 * 49 / 4 = 2e-4.
    """
    random = np.random.default_rng(seed)
    images = random.uniform(-1, 1, (n, 1, 1, c))
    w, b = random.normal(0, 0.5, (k, c)).astype(np.float32), random.normal(0, 0.5, k).astype(np.float32)
    layers = [Linear(name="fc", c=c, k=k)]
    network = Network(input_shape=(1, 1, c), layers=layers, weights={"fc": {"w": w, "b": b}})
    labels = random.integers(0, k, n)
    hessian = softmax_hessian(images.reshape(n, c), w.astype(np.float64), b.astype(np.float64))
    largest = np.linalg.eigvalsh(hessian)[-1]
    found = in_float64(network, images, labels, seed)
    assert found.settled
    assert found.eigenvalue == pytest.approx(largest, rel=0.01, abs=2e-4)


def test_of_two_layers_it_is_that_of_differences_of_the_loss():
    """
    Beside a Hessian from second differences of the loss alone, whose gradients nobody computes.

    With steps of 1e-4 in float64 a second difference is off by 1e-16 / 4e-8 of rounding and by 1e-8 times fourth
    derivatives: far below the hundredth by which the iteration ends, and the change of the curvature over its step.
    """
    layers = [Linear(name="a", c=3, k=4), ReLU(name="r"), Linear(name="b", c=4, k=2)]
    network = Network(input_shape=(1, 1, 3), layers=layers)
    random = np.random.default_rng(3)
    images, labels = random.normal(0, 1, (6, 1, 1, 3)), random.integers(0, 2, 6)
    with Model(network, device=CPU, mode="training", dtype="float64", learning_rate=0.0, seed=1) as model:
        model.prepare(6)
        landscape = module._Landscape(model, images, labels)
        start, step = landscape.weights, 1e-4

        def loss(moved):
            landscape._gradient(moved)
            return model.loss()

        size = start.size
        unit = np.eye(size) * step
        hessian = np.empty((size, size))
        for i in range(size):
            for j in range(i + 1):
                corners = [loss(start + s * unit[i] + t * unit[j]) * s * t for s in (1, -1) for t in (1, -1)]
                hessian[i, j] = hessian[j, i] = sum(corners) / (4 * step**2)
        values = np.linalg.eigvalsh(hessian)
        trained = model.trained()
    largest = values[np.argmax(np.abs(values))]
    found = in_float64(trained, images, labels)
    assert found.settled
    assert found.eigenvalue == pytest.approx(largest, rel=0.02)


def test_weights_are_left_as_they_are():
    """Whoever hands a network in gets nothing changed: the model has copies."""
    weights = {"w": np.ones((2, 2), np.float32), "b": np.zeros(2, np.float32)}
    network = Network(input_shape=(1, 1, 2), layers=[Linear(name="fc", c=2, k=2)], weights={"fc": weights})
    sharpness(network, np.ones((4, 1, 1, 2)), np.zeros(4, int), device=CPU)
    assert (weights["w"] == 1).all()
    assert (weights["b"] == 0).all()


def test_a_loss_that_is_drawn_has_no_hessian():
    """Dropout draws another mask at each step."""
    layers = [Dropout(name="d"), Linear(name="fc", c=2, k=2)]
    network = Network(input_shape=(1, 1, 2), layers=layers)
    assert sharpness(network, np.ones((4, 1, 1, 2)), np.zeros(4, int), device=CPU) is None
