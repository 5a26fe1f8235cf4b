"""Whole networks beside PyTorch in float64: losses, parameters and running statistics over several training steps."""

from __future__ import annotations

import functools

import attrs
import numpy as np
import pytest

from cubatch.engine.network import Model
from cubatch.hardware import probe
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import (
    Dropout,
)
from tests.parity.blocks import BLOCK, block, walk

torch = pytest.importorskip("torch")
F = torch.nn.functional
torch.set_num_threads(1)  # networks this small wait for threads longer than they compute

HERE = probe.device("cpu")
STEPS = 4
# Rounding of float64 over a few steps of sums of thousands of products.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def mnist_cnn(x, p, norm):
    """Run `mnist-cnn` as PyTorch has it; flatten reads height, width, channels as ours does."""
    for conv in ("conv1", "conv2"):
        x = F.max_pool2d(F.relu(F.conv2d(x, p[conv, "w"], p[conv, "b"], padding=1)), 2)
    x = x.permute(0, 2, 3, 1).flatten(1)
    x = F.relu(F.linear(x, p["fc1", "w"], p["fc1", "b"]))
    return F.linear(x, p["fc2", "w"], p["fc2", "b"])


def mobilenet():
    """`mobilenet-v3-large` for images of 64 x 64, without dropout, whose draws differ."""
    usual = models.build("mobilenet-v3-large", input_shape=(64, 64, 3))
    layers = [attrs.evolve(layer, p=0.0) if isinstance(layer, Dropout) else layer for layer in usual.layers]
    return Network(input_shape=usual.input_shape, layers=layers, name=usual.name)


CASES = [(models.build("mnist-cnn"), mnist_cnn, 5), (BLOCK, block, 7)]


class Beside:
    """Parameters and statistics of a model as PyTorch's tensors: filters as (k, c, r, s)."""

    def __init__(self, model):
        self.parameters = {}
        for layer, arrays in model.parameters.items():
            for name, array in arrays.items():
                turned = array.transpose(0, 3, 1, 2) if array.ndim == 4 else array
                self.parameters[layer, name] = torch.tensor(np.ascontiguousarray(turned), requires_grad=True)
        self.states = {
            (layer, name): torch.tensor(array)
            for layer, arrays in model.states.items()
            for name, array in arrays.items()
        }
        self.training = True

    def norm(self, layer, x, *, momentum=0.1, eps=1e-5):
        p, s = self.parameters, self.states
        return F.batch_norm(
            x, s[layer, "mean"], s[layer, "var"], p[layer, "gamma"], p[layer, "beta"], self.training, momentum, eps
        )

    def outputs(self, forward, images):
        return forward(torch.tensor(images.transpose(0, 3, 1, 2)), self.parameters, self.norm)

    def agrees_with(self, model):
        for (layer, name), tensor in self.parameters.items():
            ours = model.parameters[layer][name]
            turned = ours.transpose(0, 3, 1, 2) if ours.ndim == 4 else ours
            np.testing.assert_allclose(turned, tensor.detach().numpy(), **CLOSE, err_msg=f"{layer} {name}")
        for (layer, name), tensor in self.states.items():
            np.testing.assert_allclose(model.states[layer][name], tensor.numpy(), **CLOSE, err_msg=f"{layer} {name}")


def data(network, n, seed):
    random = np.random.default_rng(seed)
    return random.standard_normal((n, *network.input_shape)), random.integers(0, network.output_shape[2], n)


OPTIMIZERS = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("network", "forward", "n"), CASES, ids=["mnist-cnn", "residual block"])
@pytest.mark.parametrize("recompute", [False, True])
def test_training_takes_the_same_steps(network, forward, n, optimizer, recompute):
    """From equal parameters, on equal batches, every loss, parameter and running statistic agrees; then the outputs."""
    rate = 0.01
    options = {"mode": "training", "dtype": "float64", "optimizer": optimizer, "learning_rate": rate}
    with (
        Model(network, device=HERE, recompute=recompute, **options) as model,
        Model(network, device=HERE, dtype="float64", share=model) as tested,
    ):
        beside = Beside(model)
        steps = OPTIMIZERS[optimizer](list(beside.parameters.values()), rate)
        model.prepare(n)
        for step in range(STEPS):
            images, labels = data(network, n, step)
            model.load(images, labels)
            model.step()
            loss = F.cross_entropy(beside.outputs(forward, images), torch.tensor(labels))
            steps.zero_grad()
            loss.backward()
            steps.step()
            assert model.loss() == pytest.approx(loss.item(), rel=1e-9)
            beside.agrees_with(model)
        beside.training = False  # running statistics, as they have become
        images, _ = data(network, 4, STEPS)
        tested.prepare(4)
        tested.load(images)
        tested.step()
        with torch.no_grad():
            want = beside.outputs(forward, images).numpy()
        np.testing.assert_allclose(tested.output().reshape(want.shape), want, **CLOSE)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("network", "forward", "n"), CASES, ids=["mnist-cnn", "residual block"])
def test_gradients_that_are_added_up_take_the_steps_that_pytorchs_take(network, forward, n, optimizer):
    """Three batches an optimiser's step, as PyTorch's loops do it: each loss over three, backward, then one step."""
    rate, parts = 0.01, 3
    options = {"mode": "training", "dtype": "float64", "optimizer": optimizer, "learning_rate": rate}
    with Model(network, device=HERE, **options) as model:
        beside = Beside(model)
        steps = OPTIMIZERS[optimizer](list(beside.parameters.values()), rate)
        model.prepare(n, parts * n)
        for step in range(STEPS):
            steps.zero_grad()
            for part in range(parts):
                images, labels = data(network, n, parts * step + part)
                model.load(images, labels)
                model.step()
                loss = F.cross_entropy(beside.outputs(forward, images), torch.tensor(labels)) / parts
                loss.backward()
                assert model.loss() == pytest.approx(loss.item(), rel=1e-9)
            model.update()
            steps.step()
            beside.agrees_with(model)  # running statistics too, which every batch moves


def test_mobilenet_v3_large_trains_as_pytorchs():
    """Loss, every gradient and running statistic of a step agree, gates shut and open included; then the outputs."""
    network, random = mobilenet(), np.random.default_rng(0)
    options = {"dtype": "float64", "learning_rate": 0.0}
    with (
        Model(network, device=HERE, mode="training", **options) as model,
        Model(network, device=HERE, share=model, **options) as tested,
    ):
        for arrays in model.parameters.values():
            for name in sorted(arrays.keys() & {"b", "beta", "gamma"}):  # zeros and ones hide what is left out
                arrays[name][...] += random.standard_normal(arrays[name].shape) * (2.0 if name == "b" else 0.3)
        beside = Beside(model)
        forward = functools.partial(walk, network)
        images, labels = data(network, 4, 1)
        model.prepare(4)
        model.load(images, labels)
        model.step()
        loss = F.cross_entropy(beside.outputs(forward, images), torch.tensor(labels))
        loss.backward()
        assert model.loss() == pytest.approx(loss.item(), rel=1e-9)
        beside.agrees_with(model)
        for (layer, name), tensor in beside.parameters.items():
            ours, theirs = model.gradients[layer][name], tensor.grad.numpy()
            turned = ours.transpose(0, 3, 1, 2) if ours.ndim == 4 else ours
            np.testing.assert_allclose(turned, theirs, **CLOSE, err_msg=f"gradient of {layer} {name}")
        beside.training = False
        tested.prepare(4)
        tested.load(images)
        tested.step()
        with torch.no_grad():
            want = beside.outputs(forward, images).numpy()
        np.testing.assert_allclose(tested.output().reshape(want.shape), want, **CLOSE)
