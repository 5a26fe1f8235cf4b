"""A layer on its own, as a network of one: all of its passes, and what it does to the cache."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.engine.network import Model
from cubatch.hardware.facts import Device
from cubatch.network.layers import (
    Conv2d,
    Flatten,
    GlobalAvgPool,
    HardSigmoid,
    HardSwish,
    Linear,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
)
from tests import reference
from tests.engine.networks import cpu


def given_arrays(model):
    """Input and output gradient as the model holds them, in one piece."""
    place = model._places[0][0]
    names = {model.plan.schedule.buffers[number].part: number for number in model.plan.schedule.given}
    return place.arena[names["activations"]].copy(), place.arena[names["activation_gradients"]].copy()


def test_a_single_convolution_does_all_three_passes():
    """Output gradient in, gradients of input, filter and bias out: those of the reference loops."""
    conv = Conv2d(h=5, w=6, c=4, k=6, r=3, s=2, stride=[2, 1], pad=[1, 0, 1, 1], groups=2)
    geometry = {"stride": conv.stride, "pad": conv.pad, "dilation": conv.dilation, "groups": conv.groups}
    with Model(conv, device=cpu(1), mode="training", dtype="float64") as model:
        model.prepare(2)
        model.load_random()
        x, dy = given_arrays(model)
        parameters = model.parameters["conv2d"]
        w = parameters["w"].copy()
        model.step()
        dw, db = reference.conv2d_wgrad(x, dy, w_shape=w.shape, **geometry)
        dx = reference.conv2d_dgrad(dy, w, x_shape=x.shape, **geometry)
        np.testing.assert_allclose(model.input_gradient(), dx, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(model.gradients["conv2d"]["w"], dw, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(model.gradients["conv2d"]["b"], db, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(parameters["w"], w)  # there is no loss that a step could lower


@pytest.mark.parametrize(
    ("layer", "gradient"),
    [
        (Linear(c=5, k=3), lambda x, dy, p: dy @ p["w"]),
        (ReLU(h=2, w=3, c=4), lambda x, dy, p: dy * (x > 0)),
        *(
            (kind(h=2, w=3, c=4), lambda x, dy, p, kind=kind: reference.activation_backward(dy, x, kind=kind.type))
            for kind in (ReLU6, Sigmoid, SiLU, HardSigmoid, HardSwish)
        ),
        (GlobalAvgPool(h=2, w=3, c=4), lambda x, dy, p: np.broadcast_to(dy / 6, x.shape)),
        (Flatten(h=2, w=3, c=4), lambda x, dy, p: dy.reshape(x.shape)),
        (Softmax(h=1, w=1, c=3), lambda x, dy, p: softmax(x) * (dy - (dy * softmax(x)).sum(-1, keepdims=True))),
    ],
    ids=lambda value: getattr(value, "type", ""),
)
def test_other_layers_on_their_own_give_their_inputs_gradient(layer, gradient):
    """The gradient of the input follows from the output's by the layer's formula, in whichever buffer it lies."""
    with Model(layer, device=cpu(1), mode="training", dtype="float64") as model:
        model.prepare(3)
        model.load_random()
        x, dy = given_arrays(model)
        dy *= 1.5
        for place in model._places[0]:
            for number in model.plan.schedule.given:
                if model.plan.schedule.buffers[number].part == "activation_gradients":
                    place.arena[number][...] = dy
        model.step()
        parameters = model.parameters.get(layer.type, {})
        np.testing.assert_allclose(model.input_gradient(), gradient(x, dy, parameters), rtol=1e-12, atol=1e-12)


def softmax(x):
    """Probabilities along the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def test_a_small_layer_rotates_over_buffers():
    """With a known L2 a small layer has several sets of buffers, and walks through them in turn."""
    device = Device(name="a GPU's L2", kind="cpu", threads=1, l2_bytes=1 << 20)
    layer = Linear(c=64, k=64)
    with Model(layer, device=device, dtype="float32") as model:
        model.prepare(64)
        assert model.plan.copies * model.plan.arena_bytes >= 2 << 20
        x = np.random.default_rng(0).standard_normal((64, 1, 1, 64)).astype(np.float32)
        model.load(x)
        want = (x.reshape(64, 64) @ model.parameters["linear"]["w"].T).reshape(64, 1, 1, 64)
        for _ in range(model.plan.copies + 1):
            model.step()
            np.testing.assert_allclose(model.output(), want, rtol=1e-4, atol=1e-5)
        assert len({place.arena._block.ctypes.data for places in model._places for place in places}) > 1
