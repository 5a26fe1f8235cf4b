"""How sharp a minimum is: the largest eigenvalue of the loss's Hessian, from gradients alone."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from cubatch.engine import backend
from cubatch.engine.network import Model
from cubatch.hardware.facts import Device
from cubatch.measure import kernel_context
from cubatch.network.graph import Network
from cubatch.network.layers import Dropout

STEP = 1e-2
"""How far weights are moved along a direction of length 1, forth and back, for a difference of gradients."""
MOST_ITERATIONS = 40
LEAST_ITERATIONS = 10  # fewer may settle on a smaller eigenvalue, where the first direction hardly has the largest's
EXHAUSTED = 1e-6  # what is left of a product, as a share of the eigenvalue, where no new direction is in it
ENOUGH = 0.01  # an eigenvalue is known where it cannot be further from the estimate than this share of it


@attrs.frozen(kw_only=True)
class Sharpness:
    """The largest eigenvalue, the number of Lanczos iterations, and whether the eigenvalue's error is at most 1 %."""

    eigenvalue: float
    iterations: int
    settled: bool


def sharpness(network: Network, images: Any, labels: Any, *, device: Device, seed: int = 0) -> Sharpness | None:
    """
    Return the largest eigenvalue of the Hessian of the mean loss over samples; None for a network with dropout.

    Cohen et al. (2021, arXiv:2103.00065) call it sharpness.  The Lanczos method (1950) computes it.  Its products of
    the Hessian with a direction v are differences of gradients, (g(w + e v) - g(w - e v)) / 2e.  `seed` draws the first
    direction.

    Example:
        With weights of 0, both classes have p = 1/2.  The eigenvalue is 2 p (1 - p) (|x|^2 + 1), where the 1 is the
        bias's: 0.5 (3^2 + 4^2 + 1).

        >>> from cubatch.hardware import probe
        >>> from cubatch.network.layers import Linear
        >>> zero = {"fc": {"w": np.zeros((2, 2), np.float32), "b": np.zeros(2, np.float32)}}
        >>> net = Network(input_shape=(1, 1, 2), layers=[Linear(name="fc", c=2, k=2)], weights=zero)
        >>> images, labels = np.array([[[[3.0, 4.0]]]], np.float32), np.array([0])
        >>> round(sharpness(net, images, labels, device=probe.device("cpu")).eigenvalue, 1)
        13.0
    """
    if any(isinstance(node.layer, Dropout) for node in network.nodes):  # its loss is not the same function twice
        return None
    context = kernel_context.usual_context(device)
    with Model(network, device=device, mode="training", learning_rate=0.0, context=context) as model:
        return _of(model, images, labels, seed)


def _of(model: Model, images: Any, labels: Any, seed: int) -> Sharpness:
    """
    Return the sharpness of a model's loss on labeled images; `seed` draws the first direction.

    The model has a learning rate of 0, so that its steps change no weight.
    """
    model.prepare(len(images))
    landscape = _Landscape(model, images, labels)
    start = np.random.default_rng(seed).standard_normal(landscape.weights.size)
    basis, rows = [start / np.linalg.norm(start)], np.zeros((MOST_ITERATIONS, MOST_ITERATIONS))
    for number in range(MOST_ITERATIONS):
        product = landscape.curvature(basis[-1])
        rows[number, number] = basis[-1] @ product
        for _ in range(2):  # rounding would bring directions back that were found before
            for vector in basis:
                product -= (vector @ product) * vector
        rest = float(np.linalg.norm(product))
        values, vectors = np.linalg.eigh(rows[: number + 1, : number + 1])
        largest, unsure = float(values[-1]), rest * abs(float(vectors[-1, -1]))
        is_settled = unsure <= ENOUGH * abs(largest) and number + 1 >= LEAST_ITERATIONS
        if is_settled or rest <= EXHAUSTED * abs(largest) or number + 1 == min(MOST_ITERATIONS, start.size):
            break
        basis.append(product / rest)
        rows[number, number + 1] = rows[number + 1, number] = rest
    return Sharpness(eigenvalue=largest, iterations=number + 1, settled=unsure <= ENOUGH * abs(largest))


class _Landscape:
    """A model's mean loss over samples, as a function of all weights in one vector on the host."""

    def __init__(self, model: Model, images: Any, labels: Any) -> None:
        self._model, self._images, self._labels = model, images, labels
        self._snapshot = model.snapshot()
        self._names = sorted(name for name in self._snapshot if name.startswith("parameters."))
        self.weights = np.concatenate([self._snapshot[name].ravel() for name in self._names]).astype(np.float64)

    def curvature(self, direction: Any) -> Any:
        """Return the product of the Hessian and a direction of length 1, as a vector."""
        forth, back = (self._gradient(self.weights + step * direction) for step in (STEP, -STEP))
        return (forth - back) / (2 * STEP)

    def _gradient(self, weights: Any) -> Any:
        begin, moved = 0, dict(self._snapshot)
        for name in self._names:
            array = self._snapshot[name]
            moved[name] = weights[begin : begin + array.size].reshape(array.shape).astype(array.dtype)
            begin += array.size
        self._model.restore(moved)
        self._model.load(self._images, self._labels)
        self._model.step()
        gradients = {
            f"parameters.{layer}.{name}": np.asarray(backend.to_host(array), np.float64)
            for layer, arrays in self._model.gradients.items()
            for name, array in arrays.items()
        }
        return np.concatenate([gradients[name].ravel() for name in self._names])
