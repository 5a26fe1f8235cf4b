"""Training in 16 bits against the same by hand: each operation of a network on float32, rounded where it is stored."""

from __future__ import annotations

import attrs
import ml_dtypes
import numpy as np
import pytest

from cubatch.engine import flat_parameters, loss_scale, optim
from cubatch.engine.network import Model
from cubatch.hardware import probe
from cubatch.network.graph import Network
from cubatch.network.layers import BatchNorm2d, Conv2d, Flatten, HardSwish, Linear, MaxPool2d, ReLU
from tests.engine import rounded
from tests.engine.layer_by_layer import LayerByLayer

HERE = probe.device("cpu")
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
NARROW = pytest.mark.parametrize("dtype", KINDS)
BATCH, RATE = 6, 0.05


def network(*, normalised):
    norm = [BatchNorm2d(name="norm")] if normalised else []
    return Network(
        input_shape=(8, 9, 3),
        layers=[
            Conv2d(name="conv", k=8, r=3, s=3, pad=1), *norm, ReLU(), MaxPool2d(r=2, s=2),
            Conv2d(name="grouped", k=6, r=3, s=3, groups=2), HardSwish(), Flatten(), Linear(name="last", k=4),
        ],
    )  # fmt: skip


class ByHand:
    """
    The same network, batch and rule as a model's, each member's part of the batch for itself.

    Its batch norm is that of one member: the statistics of several are merged in a float32 of another last bit.
    """

    def __init__(self, model, members, optimizer):
        self.network, self.kind, self.optimizer = model.network, model._flat.dtype, optimizer
        self.states = {name: dict(state) for name, state in model.states.items()}
        self.stored, self.master = model._flat.copy(), model._stepper.master.copy()
        self.state = [array.copy() for array in model._stepper.state]
        self.scaling = None if model._stepper.loss_scale is None else model._stepper.loss_scale.copy()
        random = np.random.default_rng(4)
        self.x = random.standard_normal((BATCH, 8, 9, 3), np.float32).astype(self.kind)
        self.labels = random.integers(0, 4, BATCH, dtype=np.int32)
        self.shards = [slice(i * BATCH // members, (i + 1) * BATCH // members) for i in range(members)]
        self.steps = 0

    def gradients(self, shard, flat):
        """Go forward and back with a part of the batch; give its loss, write its gradients as they are stored."""
        views = flat_parameters.views(self.network, self.stored)
        layers = LayerByLayer(self.network, views, self.states, self.kind)
        scale = None if self.scaling is None else self.scaling[:1]
        loss = layers.differentiate(self.x[shard], self.labels[shard], count=BATCH, scale=scale)
        for name, arrays in flat_parameters.views(self.network, flat).items():
            for key, array in arrays.items():
                array[...] = layers.gradients[name][key].astype(self.kind)
        return loss

    def step(self):
        """Take a step; give the loss before it."""
        parts = [np.empty_like(self.stored) for _ in self.shards]
        with np.errstate(all="ignore"):  # of a scale that is too large
            found = sum(self.gradients(shard, part) for shard, part in zip(self.shards, parts, strict=True))
            if self.scaling is not None:
                loss_scale.update_loss_scale(self.scaling, parts)
            self.steps += 1
            number = {"step": self.steps} if self.optimizer == "adam" else {}
            getattr(optim, self.optimizer)(
                self.stored, parts, *self.state, lr=RATE, master=self.master, scaling=self.scaling, **number
            )  # fmt: skip
        return found


def model_of(dtype, optimizer, threads, *, normalised):
    """A model in training, prepared for a batch, and the same by hand."""
    device = attrs.evolve(HERE, threads=threads)
    model = Model(
        network(normalised=normalised), device=device, mode="training", dtype=dtype, optimizer=optimizer,
        learning_rate=RATE, operations=rounded.operations(),
    )  # fmt: skip
    model.prepare(BATCH)
    by_hand = ByHand(model, threads, optimizer)
    model.load(by_hand.x.astype(np.float32), by_hand.labels)
    return model, by_hand


def same(model, by_hand):
    pairs = [(model._flat, by_hand.stored), (model._stepper.master, by_hand.master)]
    pairs += zip(model._stepper.state, by_hand.state, strict=True)
    return all(got.tobytes() == want.tobytes() for got, want in pairs)


@NARROW
@pytest.mark.parametrize(("threads", "normalised"), [(1, True), (1, False), (3, False)])
def test_a_network_trains_as_its_operations_do_one_after_the_other(dtype, threads, normalised):
    """Eight steps: every loss, weight and master weight to the bit, with statistics of the batch and without."""
    model, by_hand = model_of(dtype, "momentum", threads, normalised=normalised)
    with model:
        for _ in range(8):
            want = by_hand.step()
            model.step()
            assert model.loss() == want
            assert same(model, by_hand)
        assert not np.array_equal(model._stepper.master, model._flat)
        assert {array.dtype for state in model.states.values() for array in state.values()} <= {np.dtype(np.float32)}


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("threads", [1, 3])
def test_loss_scaling_survives_a_forced_overflow(optimizer, threads):
    """
    Scaled by 2^40, no gradient is finite: the step changes no bit and the scale is halved, until steps go well again.

    Which of 40 steps those are, and what they do, is as by hand.
    """
    model, by_hand = model_of("float16", optimizer, threads, normalised=False)
    with model:
        for state in (model._stepper.loss_scale, by_hand.scaling):
            state[loss_scale.SCALE] = 2.0**40
        before = [array.tobytes() for array in (model._flat, model._stepper.master, *model._stepper.state)]
        model.step()
        assert (model.loss_scale, model.skipped_steps) == (2.0**39, 1)
        assert [array.tobytes() for array in (model._flat, model._stepper.master, *model._stepper.state)] == before
        by_hand.step()
        for _ in range(39):
            want = by_hand.step()
            model.step()
            assert model.loss() == want
            assert (model.loss_scale, model.skipped_steps) == (by_hand.scaling[0], by_hand.scaling[3])
            assert same(model, by_hand)
        assert model.loss_scale == 2.0 ** (40 - model.skipped_steps)
        assert model.skipped_steps < 40
        assert np.isfinite(model._stepper.master).all()
        assert model._stepper.master.tobytes() != before[1]
