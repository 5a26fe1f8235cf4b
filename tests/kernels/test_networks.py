"""Whole training steps on hand-written kernels, operation by operation beside the NumPy engine."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest

from cubatch import kinds, models, probe
from cubatch.engine import functional
from cubatch.engine.network import Model
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma

pytestmark = pytest.mark.heavy

BATCH = 4
SUMS = (kinds.Conv2d, kinds.Linear)
# Roundings on the longest way through an operation that is no product: a few for each element, and for
# batch norm those of sums over the batch in blocks.
SUM_ROUNDINGS, USUAL_ROUNDINGS = 600, 40


def one_thread():
    """The CPU as one member, so that both engines hold the batch in one piece."""
    return attrs.evolve(probe.device("cpu"), threads=1)


def product_terms(op, inputs, weights):
    """Sum of the absolute values of the terms of each result of a convolution or linear layer, by role."""
    layer, x = op.node.layer, np.abs(inputs["x0"])
    if isinstance(layer, kinds.Conv2d):
        window = {"stride": layer.stride, "pad": layer.pad, "dilation": layer.dilation, "groups": layer.groups}
        if op.kind == "forward":
            return {"y": functional.conv2d(x, weights["w"], weights.get("b"), **window)}
        dy = np.abs(inputs["dy"]).reshape(len(x), *layer.output_shape)
        dw, db = np.empty_like(weights["w"]), np.empty(len(weights["w"]))
        functional.conv2d_wgrad(x, dy, dw=dw, db=db, **window)
        return {"w": dw, "b": db, "dx0": functional.conv2d_dgrad(dy, weights["w"], x_shape=x.shape, **window)}
    rows = x.reshape(-1, layer.parameter_shapes["w"][1])
    if op.kind == "forward":
        return {"y": functional.linear(rows, weights["w"], weights.get("b"))}
    dy = np.abs(inputs["dy"]).reshape(len(rows), -1)
    dw, db = np.empty_like(weights["w"]), np.empty(len(weights["w"]))
    functional.linear_wgrad(rows, dy, dw=dw, db=db)
    return {"w": dw, "b": db, "dx0": functional.linear_dgrad(dy, weights["w"])}


def norm_terms(inputs, weights):
    """The same for the gradients of a batch norm: sums over the batch that nearly cancel."""
    x, dy, (mean, inv_std) = inputs["x0"], np.abs(inputs["dy"].reshape(inputs["x0"].shape)), inputs["statistics"]
    normed, axes = (np.abs(x) + np.abs(mean)) * inv_std, (0, 1, 2)
    spread = dy + dy.mean(axes) + normed * (dy * normed).mean(axes)
    return {"gamma": (dy * normed).sum(axes), "beta": dy.sum(axes), "dx0": weights["gamma"] * inv_std * spread}


def magnitudes(op, inputs, parameters):
    """Sum of the absolute values of the terms of each result that is a sum of many, by role."""
    layer = op.node.layer if op.node else None
    inputs = {role: array.astype(np.float64) for role, array in inputs.items()}
    weights = {name: np.abs(array).astype(np.float64) for name, array in parameters.items()}
    if isinstance(layer, SUMS):
        return product_terms(op, inputs, weights)
    return norm_terms(inputs, weights) if isinstance(layer, kinds.BatchNorm2d) and op.kind == "backward" else {}


def roundings(op, role):
    """How many roundings lie on the longest way to an element of a result."""
    layer = op.node.layer if op.node else None
    if isinstance(layer, SUMS):
        pixels, filters = BATCH * math.prod(layer.output_shape[:2]), layer.parameter_shapes["w"]
        taps = layer.r * layer.s if isinstance(layer, kinds.Conv2d) else 1
        return {"y": math.prod(filters[1:]) + 1, "w": pixels, "b": pixels, "dx0": filters[0] * taps}[role]
    return SUM_ROUNDINGS if isinstance(layer, kinds.BatchNorm2d) else USUAL_ROUNDINGS


def step(expected, tested, op, works, launcher):
    """Run one operation on both engines, on the same inputs; give those, and the two results by role."""
    places = expected._places[0][0], tested._places[0][0]
    for number in op.reads.values():
        places[1].arena[number][...] = launcher.put(places[0].arena[number])
    inputs = {role: places[0].arena[number].copy() for role, number in op.reads.items()}
    results = []
    for place, work in zip(places, works, strict=True):
        gradients = place.gradients.get(op.node.name, {}) if op.node and op.kind == "backward" else {}
        for array in gradients.values():
            array[...] = np.nan
        work()
        results.append({role: place.arena[number] for role, number in op.writes.items()} | gradients)
    want, got = results
    return inputs, want, {role: launcher.get(array) for role, array in got.items()}


def drop(layer, inputs, got):
    """What a dropout layer must give by the mask that it drew, which must keep as many as it should."""
    kept, keep = got.pop("mask").astype(bool), 1 - layer.p
    assert abs(kept.mean() - keep) < 6 * math.sqrt(layer.p * keep / kept.size)
    return {"y": np.where(kept.reshape(inputs["x0"].shape), inputs["x0"] / np.float32(keep), np.float32(0))}


@pytest.mark.parametrize(
    ("name", "shape"), [("mnist-cnn", (28, 28, 1)), ("resnet18", (64, 64, 3)), ("mobilenet-v3-large", (64, 64, 3))]
)
def test_every_operation_of_a_training_step_equals_the_numpy_engine(launcher, name, shape):
    """
    Fed the same inputs, each operation's two results differ by at most the rounding of both: gamma of its terms
    times the sum of their absolute values for products, some roundings of the largest value for the others.
    """
    network = models.build(name, input_shape=shape, classes=10)
    expected = Model(network, device=one_thread(), mode="training", seed=3)
    tested = Model(network, device=launcher.device, mode="training", seed=3, context=launcher.context())
    for model in (expected, tested):
        model.prepare(BATCH)
        model.load_random()
    unit, seen = UNIT_ROUNDOFF["float32"], set()
    for op, *works in zip(expected.plan.schedule.ops, expected._programs[0][0], tested._programs[0][0], strict=True):
        if op.kind == "update":
            continue
        label = f"{name} {op.kind} {op.node.name if op.node else ''}"
        inputs, wants, gots = step(expected, tested, op, works, launcher)
        if op.kind == "loss":
            np.testing.assert_allclose(tested.loss(), expected.loss(), rtol=gamma(100, unit), err_msg=label)
        if op.kind == "forward" and isinstance(op.node.layer, kinds.Dropout):
            wants = drop(op.node.layer, inputs, gots)
        sums = magnitudes(op, inputs, expected.parameters.get(op.node.name, {}) if op.node else {})
        for role, want in wants.items():
            size = sums[role].reshape(want.shape) if role in sums else np.abs(want).max()
            bound = 0 if want.dtype == np.uint8 else 2 * gamma(roundings(op, role), unit) * size
            assert_within(gots[role], want, bound, label=f"{label} {role}")
            seen.add((op.node.layer.type if op.node else "", op.kind, role))
    assert {("conv2d", "backward", "w"), ("linear", "forward", "y"), ("linear", "backward", "dx0")} <= seen
