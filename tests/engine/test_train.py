"""Training on the sample of MNIST: it learns, and says so when it does not."""

from __future__ import annotations

import functools
import json
import math
import tracemalloc
from pathlib import Path

import attrs
import numpy as np
import pytest

from cubatch.engine import data
from cubatch.engine.network import Model
from cubatch.engine.train import accuracy, train
from cubatch.errors import InvalidArgument, InvalidData, UnsupportedLayer
from cubatch.hardware import probe
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import BatchNorm2d, Conv2d, Dropout, Flatten, Linear, Opaque, ReLU, Softmax
from cubatch.network.weight_files import load_weights
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma
from tests.engine import rounded
from tests.engine.thread_ranks import Group

SAMPLE = Path(__file__).parents[1] / "data" / "mnist-sample"
HERE = probe.device("cpu")

small = functools.partial(train, models.build("mnist-cnn"), data=SAMPLE, batch_size=40, device=HERE)
narrow = Network(
    input_shape=(28, 28, 1),
    layers=[
        Conv2d(k=4, r=5, s=5, stride=2), ReLU(), Conv2d(k=6, r=3, s=3, stride=2), ReLU(), Flatten(), Dropout(p=0.3),
        Linear(k=10),
    ],
)  # fmt: skip
softmax_regression = Network(input_shape=(28, 28, 1), layers=[Flatten(), Linear(name="scores", k=10)])


def linear(network=softmax_regression, **options):
    """Train a linear classifier, for an epoch unless told otherwise."""
    return train(network, **{"data": SAMPLE, "batch_size": 40, "device": HERE, "epochs": 1} | options)


@pytest.mark.case("numpy-mnist")
def test_it_learns_to_read_digits():
    """
    case: numpy-mnist. 800 images, eight epochs: at least 80 % of 200 others are read right, and the loss falls.

    (Guessing is right for 10 %.  About 87 % are right, of which rounding and chance move 2.4 % of 200, one deviation.)
    """
    told = []
    result = small(epochs=8, progress=told.append)
    assert told == list(result.epochs)
    losses = [epoch.loss for epoch in result.epochs]
    assert losses[-1] < 0.2 * losses[0]
    assert losses[-1] < 0.3
    assert result.epochs[-1].test_accuracy >= 0.8
    assert [epoch.number for epoch in result.epochs] == list(range(1, 9))
    assert not result.diverged
    assert result.parameters == 421_642  # 320 + 18 496 + 401 536 + 1 290
    assert json.loads(json.dumps(result.to_mapping()))["epochs"][0]["loss"] == losses[0]


def test_no_seed_draws_the_order_of_another_ones_epoch(monkeypatch):
    """Runs of seeds 0, 1 and 2 are independent: each of their nine epochs sees the images in an order of its own."""
    orders, real = {}, data.Dataset.batch

    def batch(self, index):
        if not isinstance(index, slice):  # which is of the test
            orders.setdefault(run, []).extend(index.tolist())
        return real(self, index)

    monkeypatch.setattr(data.Dataset, "batch", batch)
    for run in range(3):
        linear(seed=run, epochs=3)
    epochs = {tuple(order[begin : begin + 800]) for order in orders.values() for begin in (0, 800, 1600)}
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(range(800))}
    assert len(epochs) == 9


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_other_optimizers_learn_too(optimizer):
    """Each lowers the loss of a linear classifier below half of guessing, ln 10."""
    rate = {"sgd": 0.05, "adam": 0.002}[optimizer]
    result = train(
        softmax_regression, data=SAMPLE, batch_size=20, device=HERE, epochs=5, learning_rate=rate, optimizer=optimizer
    )
    assert result.epochs[-1].loss < 0.5 * math.log(10)
    assert result.epochs[-1].test_accuracy > 0.75


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_learn_too(monkeypatch, dtype):
    """As float32 does above; `benchmarks.mixed_precision` holds the accuracies of a network against each other."""
    operations = rounded.operations()
    monkeypatch.setattr("cubatch.engine.train.Model", functools.partial(Model, operations=operations))
    result = train(
        softmax_regression, data=SAMPLE, batch_size=20, device=HERE, dtype=dtype, epochs=5, optimizer="sgd"
    )  # fmt: skip
    assert result.dtype == dtype
    assert result.epochs[-1].loss < 0.5 * math.log(10)
    assert result.epochs[-1].test_accuracy > 0.75


def test_the_same_seed_gives_the_same_losses():
    """Parameters, order and masks follow from the seed alone; recomputing changes nothing."""
    short = functools.partial(linear, narrow, epochs=2, device=attrs.evolve(HERE, threads=2))
    losses = [epoch.loss for epoch in short(seed=3).epochs]
    assert [epoch.loss for epoch in short(seed=3, recompute=True).epochs] == losses
    assert [epoch.loss for epoch in short(seed=4).epochs] != losses


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_the_learning_rate_follows_its_schedule(schedule, monkeypatch):
    """Along half a cosine to zero over all steps, or as it began: at every step, from one epoch to the next."""
    rates = []
    step = Model.step

    def noted(model):
        if model.mode == "training":
            rates.append(model.learning_rate)
        step(model)

    monkeypatch.setattr(Model, "step", noted)
    told = []
    linear(schedule=schedule, batch_size=400, epochs=3, learning_rate=0.5, stepped=told.append)
    want = [0.25 * (1 + math.cos(math.pi * done / 6)) for done in range(6)] if schedule == "cosine" else [0.5] * 6
    assert rates == pytest.approx(want, rel=1e-15)
    assert [(step.done, step.total, step.epoch) for step in told] == [(i + 1, 6, i // 2 + 1) for i in range(6)]
    assert [step.test_accuracy is None for step in told] == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("accuracies", "patience", "epochs"),
    [
        ([0.5, 0.6, 0.6, 0.6], 2, 4),  # 0.6 again is no better
        ([0.5, 0.4, 0.6, 0.5, 0.5], 2, 5),
        ([0.5, 0.4], 1, 2),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 1, 6),
        ([0.9, 0.1, 0.1, 0.1, 0.1, 0.1], None, 6),
    ],
)
def test_training_ends_when_the_accuracy_has_stopped_rising(monkeypatch, accuracies, patience, epochs):
    """After `patience` epochs in a row that brought nothing better than what was before them; else after all six."""
    each = iter(accuracies)
    monkeypatch.setattr("cubatch.engine.train.accuracy", lambda *_: next(each))
    result = linear(epochs=6, batch_size=400, patience=patience)
    assert len(result.epochs) == epochs
    assert result.stopped_early == (epochs < 6)


def test_a_target_batch_teaches_what_the_large_batch_does(tmp_path):
    """
    The same images in the same order: weights agree after ten steps of 80 in batches of 20, in float32.

    No step errs by more than a sum of 80 terms in another order may: gamma of 80 roundings of what the gradients' terms
    are at most. An image has 784 places of at most 3 deviations, scores change each by less than 1: the terms of a
    gradient are below 3, and ten steps of 0.05 with momentum 0.9 add up to less than 10 x 0.5 of them.
    """
    options = {"epochs": 1, "learning_rate": 0.05}
    linear(batch_size=80, save=tmp_path / "large.npz", **options)
    linear(batch_size=20, target_batch_size=80, save=tmp_path / "small.npz", **options)
    large, small_ = (load_weights(softmax_regression, tmp_path / f"{name}.npz") for name in ("large", "small"))
    bound = 10 * 0.5 * 3 * gamma(80, UNIT_ROUNDOFF["float32"])
    for name, want in large.weights["scores"].items():
        assert_within(small_.weights["scores"][name], want, bound, label=name)
        assert not np.array_equal(want, np.zeros_like(want))


def test_what_is_saved_is_where_another_run_begins(tmp_path):
    """With a rate of nearly nothing the second run keeps the weights, and tests with the accuracy of the first."""
    first = linear(epochs=2, save=tmp_path / "w.safetensors")
    given = load_weights(softmax_regression, tmp_path / "w.safetensors")
    second = linear(network=given, learning_rate=1e-30, save=tmp_path / "again.safetensors")
    assert second.epochs[0].test_accuracy == first.epochs[-1].test_accuracy
    again = load_weights(softmax_regression, tmp_path / "again.safetensors")
    for name, array in given.weights["scores"].items():
        np.testing.assert_array_equal(again.weights["scores"][name], array)


def test_where_weights_cannot_be_saved_nothing_is_trained(tmp_path):
    """Another ending, or a folder that is not there."""
    for path in (tmp_path / "w.pt", tmp_path / "no" / "w.npz"):
        with pytest.raises(InvalidArgument, match=r"^save must be"):
            small(save=path, stepped=lambda _: pytest.fail("it trained"))


def test_a_run_that_diverges_says_so_and_ends():
    """A learning rate far too large: no warning from within, one epoch, `diverged`."""
    result = small(epochs=3, learning_rate=1e4)
    assert result.diverged
    assert len(result.epochs) == 1
    assert not math.isfinite(result.epochs[0].loss)


@pytest.mark.parametrize(("batch_size", "ranks"), [(1000, 1), (64, 1), (1, 1), (64, 3), (500, 7)])
def test_accuracy_counts_every_image_once(batch_size, ranks):
    """Whatever goes through together and however many ranks share them: counted one by one it is the same share."""
    _, test_set = data.load_mnist(SAMPLE)
    repeated = attrs.evolve(test_set, images=np.tile(test_set.images, (3, 1, 1, 1)), labels=np.tile(test_set.labels, 3))
    with Model(softmax_regression, device=HERE) as model:
        images, labels = repeated.batch(slice(None))
        weights = model.parameters["scores"]
        scores = images.reshape(len(images), -1) @ weights["w"].T + weights["b"]
        want = (scores.argmax(axis=1) == labels).mean()

    def found(exchange):
        with Model(softmax_regression, device=HERE) as model:
            return accuracy(model, repeated, batch_size, exchange)

    assert Group(ranks).together(found) == [want] * ranks


def test_a_test_takes_no_more_memory_than_training(monkeypatch):
    """Where only training fits nothing more is taken after an epoch: neither larger batches, nor both at once."""
    sets = data.load_mnist(SAMPLE)

    def most():
        tracemalloc.start()
        linear(narrow, data=sets, batch_size=20, epochs=2)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    tested = most()
    monkeypatch.setattr("cubatch.engine.train.accuracy", lambda *_: 0.5)
    assert tested < 1.05 * most()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 801}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 2.5}, "epochs"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"learning_rate": math.inf}, "learning_rate"),
        ({"target_batch_size": 0}, "target_batch_size"),
        ({"target_batch_size": 100}, "target_batch_size"),
        ({"target_batch_size": 20}, "target_batch_size"),
        ({"target_batch_size": 840}, "target_batch_size"),
        ({"schedule": "linear"}, "schedule"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"patience": 0}, "patience"),
        ({"patience": 1.5}, "patience"),
        ({"optimizer": "adamw"}, "optimizer"),
        ({"checkpoint_seconds": -1}, "checkpoint_seconds"),
        ({"checkpoint_seconds": math.inf}, "checkpoint_seconds"),
        ({"save": "run.npz", "checkpoint": "./run.npz"}, "save"),
    ],
)
def test_arguments_out_of_range_are_refused(options, field):
    """Each is named before anything is trained."""
    with pytest.raises(InvalidArgument) as caught:
        small(**options)
    assert caught.value.field == field


def test_a_target_that_no_batches_make_says_what_would_do():
    """The multiple below it, and the nearest size that divides it."""
    with pytest.raises(InvalidArgument, match=r"80 is one, and batches of 50 make 100\."):
        small(target_batch_size=100)


@pytest.mark.parametrize(
    ("network", "field"),
    [
        (Network(input_shape=(32, 32, 1), layers=[Flatten(), Linear(k=10)]), "input_shape"),
        (Network(input_shape=(28, 28, 1), layers=[Flatten(), Linear(k=9)]), "output_shape"),
        (Network(input_shape=(28, 28, 1), layers=[Linear(k=10)]), "output_shape"),
    ],
)
def test_a_network_that_does_not_fit_the_data_is_refused(network, field):
    """Other images, too few classes, or an output for every pixel."""
    with pytest.raises(InvalidArgument) as caught:
        train(network, data=SAMPLE, batch_size=10, device=HERE)
    assert caught.value.field == field


@pytest.mark.parametrize("behind", [[], [Dropout(p=0.2)], [Dropout(p=0.2), Flatten()]], ids=len)
def test_a_softmax_before_that_of_the_loss_is_refused(behind):
    """The loss is of logits, as PyTorch's cross-entropy is; a softmax between other layers is trained."""
    layers = [Flatten(), Linear(k=10), Softmax()]
    with pytest.raises(InvalidArgument, match=r"^network must be one that ends in logits.*Leave out its last softmax"):
        linear(Network(input_shape=(28, 28, 1), layers=[*layers, *behind]), stepped=lambda _: pytest.fail("it trained"))
    assert linear(Network(input_shape=(28, 28, 1), layers=[*layers, *behind, Linear(k=10)])).epochs


def test_batch_norm_of_one_value_is_refused_before_an_epoch():
    """As PyTorch refuses it ("Expected more than 1 value per channel when training"); of two samples it trains."""
    layers = [Flatten(), Linear(k=10), BatchNorm2d(name="last")]
    network = Network(input_shape=(28, 28, 1), layers=layers)
    with pytest.raises(InvalidArgument, match=r"^batch_size must be at least 2: batch norm 'last' .*, got 1$"):
        train(network, data=SAMPLE, batch_size=1, target_batch_size=2, device=HERE)
    assert math.isfinite(train(network, data=SAMPLE, batch_size=2, device=HERE, epochs=1).epochs[0].loss)


def test_test_images_of_another_shape_are_refused_before_an_epoch():
    """Not when they are met."""
    training_set, test_set = data.load_mnist(SAMPLE)
    other = attrs.evolve(test_set, images=test_set.images[:, :27])
    with pytest.raises(InvalidArgument, match=r"^data must be .*\(28, 28, 1\), .*got .*\(27, 28, 1\)"):
        linear(data=(training_set, other), stepped=lambda _: pytest.fail("it trained"))


def test_what_cannot_be_trained_is_refused(tmp_path):
    """No data, or a layer that the engine has no code for."""
    with pytest.raises(InvalidData):
        small(data=tmp_path)
    network = Network(input_shape=(28, 28, 1), layers=[Flatten(), Opaque(), Linear(k=10)])
    with pytest.raises(UnsupportedLayer):
        train(network, data=SAMPLE, batch_size=10, device=HERE)
