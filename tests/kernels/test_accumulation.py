"""Gradients of several batches added up on hand-written kernels, and a model put back: beside the NumPy engine."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from cubatch.engine.network import Model
from cubatch.hardware import probe
from cubatch.network.graph import Network
from cubatch.network.layers import BatchNorm2d, Dropout, Linear
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma

N, WIDTH = 6, 12
NETWORK = Network(input_shape=(1, 1, WIDTH), layers=[Linear(k=5)])
RATES = (0.5, 0.25, 0.125)


def trained(model, micro):
    """Losses and parameters of three steps of six samples, cut into batches of `micro`."""
    random = np.random.default_rng(0)
    x, labels = random.standard_normal((N, 1, 1, WIDTH)), random.integers(0, 5, N)
    model.prepare(micro, None if micro == N else N)
    losses = []
    for rate in RATES:
        model.learning_rate = rate
        loss = 0.0
        for start in range(0, N, micro):
            model.load(x[start : start + micro], labels[start : start + micro])
            model.step()
            loss += model.loss()
        if micro != N:
            model.update()
        losses.append(loss)
    return losses, model._flat


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_batches_that_are_added_up_take_the_step_of_the_large_one(launcher, optimizer):
    """
    Three steps of three batches each, beside the NumPy engine's of the whole batch in float64, at three rates.

    The rate, Adam's number and the mean are those of the whole step. A linear layer has tens of roundings a step, and
    Adam divides by gradients of which these data have none below 1e-3 of the largest: 2^14 roundings of the largest
    parameter are far above that, and far below what a step with a wrong number or mean would miss.
    """
    options = {"mode": "training", "optimizer": optimizer, "seed": 2}
    with Model(NETWORK, device=launcher.device, context=launcher.context(), **options) as model:
        losses, flat = trained(model, 2)
        got = launcher.get(flat).astype(np.float64)
    one = attrs.evolve(probe.device("cpu"), threads=1)
    with Model(NETWORK, device=one, dtype="float64", **options) as model:
        expected, want = trained(model, N)
    error = gamma(2**14, UNIT_ROUNDOFF["float32"])
    assert_within(got, want, error * np.abs(want).max(), label=optimizer)
    np.testing.assert_allclose(losses, expected, rtol=error)


def adam_by_hand(x, labels, w, b, rates):
    """Kingma and Ba's algorithm 1 (2015, arXiv:1412.6980) on softmax regression in float64, written out once more."""
    moments = [[np.zeros_like(array), np.zeros_like(array)] for array in (w, b)]
    for number, rate in enumerate(rates, start=1):
        powers = np.exp(x @ w.T + b)
        errors = (powers / powers.sum(axis=1, keepdims=True) - np.eye(len(b))[labels]) / len(x)
        for array, gradient, moment in zip((w, b), (errors.T @ x, errors.sum(axis=0)), moments, strict=True):
            moment[0] = 0.9 * moment[0] + 0.1 * gradient
            moment[1] = 0.999 * moment[1] + 0.001 * gradient**2
            mean, square = moment[0] / (1 - 0.9**number), moment[1] / (1 - 0.999**number)
            array[...] -= rate * mean / (np.sqrt(square) + 1e-8)
    return w, b


def test_adam_counts_its_own_steps_wherever_it_runs(launcher):
    """
    Two steps of three batches each, then two of the whole: numbers 1 to 4 on the host and on kernels, by hand too.

    As many passes are nine: a step that took its number from them would correct its moments by the wrong powers, and
    step half or twice as far. The tolerance is that of the test above.
    """
    random = np.random.default_rng(0)
    x, labels = random.standard_normal((N, 1, 1, WIDTH)), random.integers(0, 5, N)
    options = {"mode": "training", "optimizer": "adam", "seed": 2}

    def four_steps(model):
        before = {name: launcher_get(array) for name, array in model.parameters["fc"].items()}
        for micro, rates in ((2, RATES[:2]), (N, RATES[1:])):
            model.prepare(micro, None if micro == N else N)
            for model.learning_rate in rates:
                for start in range(0, N, micro):
                    model.load(x[start : start + micro], labels[start : start + micro])
                    model.step()
                if micro != N:
                    model.update()
        return before, {name: launcher_get(array) for name, array in model.parameters["fc"].items()}

    def launcher_get(array):
        return np.array(array if isinstance(array, np.ndarray) else launcher.get(array), np.float64)

    network = Network(input_shape=(1, 1, WIDTH), layers=[Linear(name="fc", k=5)])
    with Model(network, device=launcher.device, context=launcher.context(), **options) as model:
        begun, on_kernels = four_steps(model)
    one = attrs.evolve(probe.device("cpu"), threads=1)
    with Model(network, device=one, dtype="float64", **options) as model:
        _, on_host = four_steps(model)
    w, b = adam_by_hand(x.reshape(N, WIDTH), labels, begun["w"], begun["b"], (*RATES[:2], *RATES[1:]))
    for name, want in (("w", w), ("b", b)):
        np.testing.assert_allclose(on_host[name], want, rtol=1e-10, atol=1e-12)
        assert_within(on_kernels[name], want, gamma(2**14, UNIT_ROUNDOFF["float32"]) * np.abs(want).max(), label=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_are_added_up_in_float32(launcher, dtype):
    """The sum of two batches' gradients, decoded, to the bit, from which the master weights then step."""
    random = np.random.default_rng(0)
    x, labels = random.standard_normal((N, 1, 1, WIDTH)) / 8, random.integers(0, 5, N)
    options = {"mode": "training", "dtype": dtype, "seed": 2, "learning_rate": 0.5}
    with Model(NETWORK, device=launcher.device, context=launcher.context(), **options) as model:
        parts = []
        for half in (slice(0, 3), slice(3, 6)):
            model.prepare(3, N)
            model.load(x[half], labels[half])
            model.step()
            parts.append(launcher.get(model._stepper.sums).copy())
        model.prepare(3, N)
        for half in (slice(0, 3), slice(3, 6)):
            model.load(x[half], labels[half])
            model.step()
        np.testing.assert_array_equal(launcher.get(model._stepper.sums), parts[0] + parts[1])
        before = launcher.get(model._stepper.master).copy()
        model.update()
        assert not np.array_equal(launcher.get(model._stepper.master), before)
        assert not launcher.get(model._stepper.sums).any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_model_that_was_put_back_goes_on_to_the_bit(launcher, dtype):
    """With dropout, batch norm and Adam: everything that two more steps change, in a model that began elsewhere."""
    network = Network(input_shape=(1, 1, WIDTH), layers=[BatchNorm2d(), Dropout(), Linear(k=5)])
    random = np.random.default_rng(0)
    x, labels = random.standard_normal((4, 1, 1, WIDTH)) / 8, random.integers(0, 5, 4)
    options = {"mode": "training", "dtype": dtype, "optimizer": "adam", "learning_rate": 0.1, "seed": 3}

    def go_on(model):
        model.prepare(4)
        for _ in range(2):
            model.load(x, labels)
            model.step()

    with Model(network, device=launcher.device, context=launcher.context(), **options) as model:
        go_on(model)
        kept = model.snapshot()
        go_on(model)
        want = model.snapshot()
    with Model(network, device=launcher.device, context=launcher.context(), **options) as model:
        model._flat[...] = 0
        model.restore(kept)
        go_on(model)
        found = model.snapshot()
    assert found.keys() == want.keys()
    for name, array in want.items():
        assert array.tobytes() == found[name].tobytes(), name
