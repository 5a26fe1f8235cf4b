"""What neighbours do for each other changes nothing: whole steps beside the same network, layer by layer."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.engine.network import Model
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import (
    Add,
    BatchNorm2d,
    Concat,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool,
    Linear,
    ReLU,
    Slice,
)
from tests.engine.layer_by_layer import LayerByLayer
from tests.engine.networks import branched, cpu, deal, flat, mobile, narrow
from tests.thorough import examples

# Of the largest value of an array, or 1e-6 where terms of order one cancel.  Both sides round float64, 1e-16, in sums
# of thousands of products; norms over a handful of positions divide that by their deviations, layer after layer.  A
# wrong epilogue is off by as much as the values.
CLOSE = 1e-6
RATE = 0.05


def without_draws(network):
    """The network with dropouts that drop nothing."""
    kept = [attrs.evolve(layer, p=0.0) if isinstance(layer, Dropout) else layer for layer in network.layers]
    return Network(input_shape=network.input_shape, layers=kept, name=network.name)


# What an epilogue does comes in one order, norm, sum, ReLU; each of these comes in another, or twice.
ORDERS = {
    "relu norm": [ReLU(), BatchNorm2d()],
    "norm norm": [BatchNorm2d(), BatchNorm2d()],
    "relu sum": [ReLU(name="r"), Add(inputs=["stem", "r"])],
    "sum norm": [Add(name="s", inputs=["stem", "c"]), BatchNorm2d()],
    "sum sum": [Add(name="s", inputs=["stem", "c"]), Add(inputs=["s", "stem"])],
    "relu relu": [ReLU(), ReLU()],
    "norm relu sum relu": [BatchNorm2d(), ReLU(name="r"), Add(inputs=["r", "stem"]), ReLU()],
    "norm sum relu norm": [BatchNorm2d(name="n"), Add(inputs=["n", "stem"]), ReLU(), BatchNorm2d()],
    "flat norm": [Flatten(), BatchNorm2d()],
    "itself": [BatchNorm2d(name="n"), Add(inputs=["n", "n"]), ReLU()],
    "three": [BatchNorm2d(name="n"), Add(inputs=["n", "stem", "stem"]), ReLU()],
}


def drawn_statistics(states, seed=0):
    """Running statistics as training leaves them: neither zeros nor ones."""
    random = np.random.default_rng(seed)
    for state in states.values():
        for name, array in state.items():
            array[...] = random.uniform(0.5, 2.0, array.shape) if name == "var" else random.normal(size=array.shape)


def close(got, want, label=""):
    """Within `CLOSE` of the largest value."""
    np.testing.assert_allclose(got, want, rtol=0, atol=CLOSE * max(1e-6, float(np.abs(want).max())), err_msg=label)


def check_training(network, n, *, steps=3, **options):
    """Losses, parameters and statistics of a few steps, and then an output, agree."""
    options = {"device": cpu(1), "dtype": "float64"} | options
    with (
        Model(network, mode="training", learning_rate=RATE, **options) as model,
        Model(network, device=options["device"], dtype="float64", share=model) as tested,
    ):
        plain = LayerByLayer(network, model.parameters, model.states)
        model.prepare(n)
        for step in range(steps):
            images, labels = deal(network, n, step)
            model.load(images, labels)
            model.step()
            close(model.loss(), plain.step(images, labels, RATE), f"step {step}")
            for name, of in plain.gradients.items():
                for key, want in of.items():
                    close(model.gradients[name][key], want, f"{step} {name} {key}")
        close(flat(model.parameters), flat(plain.parameters))
        if plain.states:
            close(flat(model.states), flat(plain.states))
        tested.prepare(n)
        tested.load(images)
        tested.step()
        close(tested.output(), plain.output(images))


NETWORKS = [
    branched(),
    mobile(),
    models.build("mnist-cnn", input_shape=(12, 12, 1)),
    narrow(models.build("resnet18", input_shape=(32, 32, 3), classes=56), 8),
    narrow(without_draws(models.build("mobilenet-v3-large", input_shape=(32, 32, 3), classes=56)), 8),
]


@pytest.mark.parametrize("network", NETWORKS, ids=str)
@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_training_is_that_of_each_layer_by_itself(network, recompute):
    """Whatever an operation does of its neighbours: three steps in float64, and the output with what was learnt."""
    check_training(network, 4, recompute=recompute)


def test_training_in_float32_keeps_to_the_layers_within_its_rounding():
    """
    Two steps of `mnist-cnn`, whose longest sums are of 12 x 12 x 6 positions: 2^-24 of each of some hundred roundings.

    What a ReLU cuts at zero may fall to the other side; then one term of a sum is there or not.
    """
    network = models.build("mnist-cnn", input_shape=(12, 12, 1))
    with Model(network, device=cpu(1), mode="training", learning_rate=RATE) as model:
        plain = LayerByLayer(network, model.parameters, model.states)
        model.prepare(6)
        for step in range(2):
            images, labels = deal(network, 6, step)
            model.load(images, labels)
            model.step()
            np.testing.assert_allclose(model.loss(), plain.step(images.astype(np.float32), labels, RATE), rtol=1e-5)
        for name, of in plain.parameters.items():
            for key, want in of.items():
                near = 1e-4 * np.abs(want).max()
                np.testing.assert_allclose(
                    model.parameters[name][key], want, rtol=0, atol=near, err_msg=f"{name} {key}"
                )


def test_members_of_a_team_train_as_one():
    """Each member's epilogues are of its own shard, statistics of the whole batch."""
    check_training(branched(), 5, device=cpu(2))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_what_comes_in_another_order_is_done_in_that(order, groups):
    """After a convolution, a grouped and a depthwise one: in training, and then with what was learnt."""
    stem = [Conv2d(name="stem", k=4, r=1, s=1), Conv2d(name="c", k=4, r=3, s=3, pad=1, groups=groups)]
    network = Network(input_shape=(4, 5, 3), layers=[*stem, *ORDERS[order], GlobalAvgPool(), Linear(k=3)])
    check_training(network, 3)


@st.composite
def graphs(draw):
    """
    Chains, forks that meet again, values with several readers, ReLUs in a row and sums of a thing with itself.

    Some are cut into two ranges of channels, which meet, or leave some out, and are joined again.

    All values are (5, 4, 4) or (3, 2, 4), so that any two of an extent can be added.
    """
    layers, wide, small = [Conv2d(name="v0", k=4, r=3, s=3, pad=1, bias=draw(st.booleans()))], ["v0"], []
    for number in range(1, draw(st.integers(3, 12))):
        pool = small if small and draw(st.booleans()) else wide
        x = draw(st.sampled_from([*pool[-3:], *pool[-1:] * 4]))  # chains more than forks
        other = draw(st.sampled_from(pool))
        name = f"v{number}"
        kinds = ["conv", "norm", "relu", "relu", "add", "down", "thin", "grouped", "deep", "line", "cut"]
        kind = draw(st.sampled_from(kinds))
        if kind == "cut":
            for part in "ab":
                start = draw(st.integers(0, 2))
                layers.append(Slice(name=f"{name}{part}", inputs=[x], start=start, end=start + 2))
        made = {
            "conv": lambda x=x: Conv2d(inputs=[x], k=4, r=3, s=3, pad=1, bias=False),
            "norm": lambda x=x: BatchNorm2d(inputs=[x]),
            "relu": lambda x=x: ReLU(inputs=[x]),
            "add": lambda x=x, other=other: Add(inputs=[other, x]),
            "down": lambda x=x: Conv2d(inputs=[x], k=4, r=1, s=1, stride=2),
            "thin": lambda x=x: Conv2d(inputs=[x], k=4, r=1, s=1),
            "grouped": lambda x=x: Conv2d(inputs=[x], k=4, r=3, s=3, pad=1, groups=2),
            "deep": lambda x=x: Conv2d(inputs=[x], k=4, r=3, s=3, pad=1, groups=4),
            "line": lambda x=x: Linear(inputs=[x], k=4),
            "cut": lambda name=name: Concat(inputs=[f"{name}b", f"{name}a"]),
        }[kind]()
        if kind == "down" and pool is small:
            continue
        layers.append(attrs.evolve(made, name=name))
        (small if kind == "down" else pool).append(name)
    read = {name for layer in layers for name in layer.inputs or ()}
    ends = [name for name in wide + small if name not in read]
    heads = []
    for number, name in enumerate(ends):
        flattens = draw(st.booleans())
        layers.append(
            Flatten(name=f"f{number}", inputs=[name]) if flattens else GlobalAvgPool(name=f"f{number}", inputs=[name])
        )
        layers.append(Linear(name=f"h{number}", k=3))
        heads.append(f"h{number}")
    layers.append(Concat(inputs=heads) if len(heads) > 1 else ReLU(inputs=heads))
    layers.append(Linear(k=3))
    return Network(input_shape=(5, 4, 3), layers=layers)


@given(graphs(), st.booleans(), st.integers(1, 3))
@settings(max_examples=examples(60), deadline=None)
def test_any_graph_trains_as_its_layers_do_one_by_one(network, recompute, n):
    """What is shared, written over, added where it is made or masked there: gradients of two steps are the same."""
    check_training(network, n, steps=2, recompute=recompute)


@given(graphs(), st.integers(1, 3))
@settings(max_examples=examples(60), deadline=None)
def test_any_graph_infers_as_its_layers_do_one_by_one(network, n):
    """With running statistics as training leaves them; changed between two steps they are not forgotten."""
    with Model(network, device=cpu(1), dtype="float64") as model:
        model.prepare(n)
        for seed in (1, 2):
            drawn_statistics(model.states, seed)
            images, _ = deal(network, n, seed)
            model.load(images)
            model.step()
            plain = LayerByLayer(network, model.parameters, model.states)
            close(model.output(), plain.output(images))
