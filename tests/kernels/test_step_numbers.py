"""Steps whose launches are prepared once: learning rate, Adam's step and dropout's draw are those of each step."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from cubatch.engine.native import pointwise
from cubatch.engine.network import Model
from cubatch.hardware import probe
from cubatch.network.graph import Network
from cubatch.network.layers import Dropout, Linear
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma

N, WIDTH = 4, 12


def network(*layers):
    return Network(input_shape=(1, 1, WIDTH), layers=[*layers, Linear(k=5)])


def losses_and_parameters(model):
    random = np.random.default_rng(0)
    x, labels = random.standard_normal((N, 1, 1, WIDTH)), random.integers(0, 5, N)
    model.prepare(N)
    losses = []
    for rate in (0.5, 0.25, 0.0, 0.125):
        model.learning_rate = rate
        model.load(x, labels)
        model.step()
        losses.append(model.loss())
    return losses, model._flat


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_a_learning_rate_that_changes_is_that_of_each_step(launcher, optimizer):
    """
    Four steps beside the NumPy engine in float64, at four rates.

    A linear layer has tens of roundings a step; by momentum and Adam an error of a step stays in the next, and Adam
    divides by gradients that may be small, of which these data have none below 1e-3 of the largest: 2^14 roundings of
    the largest parameter are far above that, and far below the steps of 0.1 that a wrong rate or number would miss.
    """
    options = {"mode": "training", "optimizer": optimizer, "seed": 2}
    with Model(network(), device=launcher.device, context=launcher.context(), **options) as model:
        losses, flat = losses_and_parameters(model)
        got = launcher.get(flat).astype(np.float64)
    one = attrs.evolve(probe.device("cpu"), threads=1)
    with Model(network(), device=one, dtype="float64", **options) as model:
        expected, want = losses_and_parameters(model)
    error = gamma(2**14, UNIT_ROUNDOFF["float32"])
    assert_within(got, want, error * np.abs(want).max(), label=optimizer)
    np.testing.assert_allclose(losses, expected, rtol=error)


def test_every_step_draws_the_mask_of_its_number(launcher):
    """What the layer, bound once, drops in steps 1 to 3 is what the operation does by its seed and these numbers."""
    context = launcher.context()
    with Model(network(Dropout()), device=launcher.device, context=context, mode="training", seed=2) as model:
        model.prepare(N)
        ops = model.plan.schedule.ops
        (index,) = [index for index, op in enumerate(ops) if "mask" in op.writes]
        mask = model._places[0][0].arena[ops[index].writes["mask"]]
        ones = launcher.put(np.ones(N * WIDTH, np.float32))
        drawn = []
        for number in (1, 2, 3):
            model._numbers.write(number, number, 0.0)
            model._program.works[0][0][index]()
            drawn.append(launcher.get(mask).reshape(-1).astype(bool).copy())
            seed = (2, 0, *ops[index].node.name.encode())
            _, want = pointwise.dropout(context, ones, p=0.5, seed=seed, step=number)
            np.testing.assert_array_equal(drawn[-1], launcher.get(want))
    assert (drawn[0] != drawn[1]).any()
    assert (drawn[1] != drawn[2]).any()
