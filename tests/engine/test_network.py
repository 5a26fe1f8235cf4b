"""A network that runs: memory as planned, gradients that are true, the same whatever the threads and the memory."""

from __future__ import annotations

import pickle
import tracemalloc
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.engine.network import Model
from cubatch.engine.train import train
from cubatch.errors import CubatchError, DoesNotFit, InvalidArgument, OutOfMemory, UnsupportedLayer
from cubatch.hardware import memory_limit as hardware_memory
from cubatch.hardware.facts import Device
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import BatchNorm2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, Opaque, ReLU
from cubatch.tuning import step_memory
from tests.engine.networks import HERE, branched, cpu, deal, flat, mobile, trained, transformer

SAMPLE = Path(__file__).parents[1] / "data" / "mnist-sample"

# --- memory --------------------------------------------------------------------------------------------------


@pytest.mark.case("watch")
@pytest.mark.parametrize(
    ("name", "shape", "n", "options"),
    [
        ("mnist-cnn", None, 64, {}),
        ("mnist-cnn", None, 256, {"optimizer": "adam"}),
        ("resnet18", (64, 64, 3), 4, {"optimizer": "momentum"}),
        ("resnet18", (64, 64, 3), 4, {"recompute": True}),
        ("resnet18", (64, 64, 3), 4, {"mode": "inference"}),
        ("mobilenet-v3-large", (64, 64, 3), 4, {}),
        ("mobilenet-v3-large", (64, 64, 3), 4, {"mode": "inference"}),
        ("deit-tiny", (64, 64, 3), 8, {}),
        ("deit-tiny", (64, 64, 3), 8, {"recompute": True}),
        ("deit-tiny", (96, 96, 3), 8, {"mode": "inference"}),
        ("convnext-tiny", (32, 32, 3), 4, {}),
    ],
)
def test_the_peak_of_a_whole_step_is_the_plan(name, shape, n, options):
    """From nothing to the end of a step, NumPy's temporaries included, memory peaks within 5 % of the plan."""
    network = models.build(name, input_shape=shape)
    options = {"mode": "training"} | options
    with Model(network, device=cpu(2), **options) as warm:  # threads and caches of Python are not the step's
        warm.prepare(2)
        warm.load_random()
        warm.step()
    del warm
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        with Model(network, device=cpu(2), **options) as model:
            model.prepare(n)
            model.load_random()
            model.step()
            _, peak = tracemalloc.get_traced_memory()
            planned, held = model.plan.total, model.held_bytes
    finally:
        tracemalloc.stop()
    assert planned <= peak - before <= 1.05 * planned
    assert 0.999 * planned <= held <= planned  # only the plan's rounding up is not held


@pytest.mark.case("allow-growth")
def test_memory_is_given_back_and_taken_anew():
    """Releasing a batch gives its memory back; the next batch size takes its own plan, not the larger one."""
    network = models.build("mnist-cnn")
    with Model(network, device=HERE, mode="training") as model:
        parameters = model.held_bytes
        model.prepare(256)
        large = model.held_bytes
        model.prepare(8)
        assert model.held_bytes < large / 3
        model.release()
        assert model.held_bytes == parameters


@pytest.mark.case("oom-shape")
def test_out_of_memory_names_all_that_matters():
    """case: oom-shape. The error says layer, tensor, shape, batch axis, bytes asked and free, and what fits."""
    n = 2**31 - 1  # more than the address space of any machine holds
    with Model(models.build("mnist-cnn"), device=HERE, mode="training") as model:
        with pytest.raises(OutOfMemory) as caught:
            model.prepare(n)
        error = caught.value
        assert "conv1" in error.tensor
        assert f"({n}, 28, 28, 32)" in error.tensor
        assert "axis 0 is the batch" in error.tensor
        assert error.needed_bytes > 2**47
        assert 0 < error.available_bytes < error.needed_bytes
        assert 0 < error.largest_batch_size < n
        for fact in (error.tensor, "layer conv1", "training of mnist-cnn", str(n), str(error.largest_batch_size)):
            assert fact in str(error)
        ways = f"Take batches of {error.largest_batch_size}, add up the gradients of smaller batches"
        assert ways in str(error)
        assert "recompute=True" in str(error)
        assert "16 bits" not in str(error)  # which a CPU does not take
        model.prepare(2)  # nothing is left of the failure
        model.load_random()
        model.step()


def room_of(free):
    """Memory of which so much is free, beside what is held."""
    return lambda device, held=0: hardware_memory.MemoryLimit(free + held, free + held, "by the test")


@pytest.mark.case("oom-shape")
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_batch_that_the_system_would_promise_is_refused_before_it_is_taken(monkeypatch, mode):
    """case: oom-shape. Addresses are given for what is not there, and whoever writes to them is killed."""
    free = 50 * 2**20
    monkeypatch.setattr(hardware_memory, "memory_limit", room_of(free))
    with Model(models.build("mnist-cnn"), device=HERE, mode=mode) as model:
        with pytest.raises(OutOfMemory) as caught:
            model.prepare(100_000)
        assert model.plan is None
        assert caught.value.available_bytes == free + model.held_bytes > free  # the parameters are planned, and there
        most = caught.value.largest_batch_size
        model.prepare(most)
        with pytest.raises(OutOfMemory, match=f"largest batch that fits is {most}"):
            model.prepare(2 * most)


@pytest.mark.case("oom-shape")
def test_training_with_a_batch_that_does_not_fit_says_what_does(monkeypatch):
    """case: oom-shape. The same words from `cubatch train`, before the first step."""
    free = 20 * 2**20
    monkeypatch.setattr(hardware_memory, "memory_limit", room_of(free))
    with pytest.raises(OutOfMemory, match=r"axis 0 is the batch.*the largest batch that fits is \d+\. Take batches of"):
        train(models.build("mnist-cnn"), data=SAMPLE, batch_size=800, device=HERE)


@pytest.mark.case("oom-shape")
def test_a_refusal_by_the_plan_names_the_largest_tensor_too():
    """case: oom-shape. Where not even one sample fits: layer, tensor, shape and which axis is the batch."""
    with pytest.raises(DoesNotFit) as caught:
        step_memory.max_batch_size("vgg16", memory="100MiB", mode="training", device="t4")
    error = caught.value
    assert "the largest tensor is conv1_1.y (1, 224, 224, 64) of layer conv1_1, axis 0 is the batch, 12.25 MiB" in str(
        error
    )
    assert "1.03 GiB of parameters" in str(error)  # 2 x 138 million in float32
    assert "short by" in str(error)
    assert pickle.loads(pickle.dumps(error)).tensor == error.tensor


# --- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [branched(), mobile(), transformer()], ids=str)
def test_gradients_are_those_of_finite_differences(network):
    """
    Along random directions the loss changes as the gradient says.

    A central difference with h = 1e-6 misses by h^2 and by 1e-16 / h of rounding, both below 1e-9 of a loss of order 1.
    """
    n, h = 3, 1e-6
    images, labels = deal(network, n)
    random = np.random.default_rng(1)
    with Model(network, device=HERE, mode="training", dtype="float64", learning_rate=0.0) as model:
        model.prepare(n)
        model.load(images, labels)
        at = {name: {key: value.copy() for key, value in layer.items()} for name, layer in model.parameters.items()}

        def loss(directions, size):
            for name, layer in at.items():
                for key, value in layer.items():
                    model.parameters[name][key][...] = value + size * directions.get((name, key), 0.0)
            model.step()
            return model.loss()

        loss({}, 0.0)
        gradients = {
            (name, key): value.copy() for name, layer in model.gradients.items() for key, value in layer.items()
        }
        for place, gradient in gradients.items():  # each parameter array by itself, so that none hides another
            towards = {place: random.standard_normal(gradient.shape)}
            slope = (loss(towards, h) - loss(towards, -h)) / (2 * h)
            assert slope == pytest.approx(float((gradient * towards[place]).sum()), rel=1e-6, abs=1e-8), place


@given(
    network=st.sampled_from([branched(), mobile(), transformer()]),
    n=st.sampled_from([1, 2, 3, 5]),
    threads=st.sampled_from([2, 3]),
    seed=st.integers(0, 9),
)
@settings(max_examples=20, deadline=None)
def test_threads_change_nothing_but_rounding(network, n, threads, seed):
    """Batches that do not divide among the threads, and smaller than them: losses, gradients, statistics agree."""
    losses, gradients, parameters, states = trained(network, n, steps=2, device=cpu(1), seed=seed)
    others = trained(network, n, steps=2, device=cpu(threads), seed=seed)
    for got, want in zip(others[:3], (losses, gradients, parameters), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)
    if states:
        np.testing.assert_allclose(flat(others[3]), flat(states), rtol=1e-9, atol=1e-11)


def test_recomputing_gives_the_same_bits():
    """Activations that are computed again are those that were forgotten: dropout masks and statistics too."""
    network = branched(p=0.4)
    deep = Network(
        input_shape=(8, 8, 3),
        layers=[
            layer
            for i in range(6)
            for layer in (Conv2d(name=f"c{i}", k=6, r=3, s=3, pad=1), BatchNorm2d(), ReLU(), Dropout(p=0.3))
        ]
        + [MaxPool2d(r=2, s=2), Flatten(), Linear(k=4)],
    )
    for spec in (network, mobile(p=0.4), transformer(p=0.4), deep, models.build("mnist-cnn")):
        kept = trained(spec, 3, steps=3, device=cpu(2), optimizer="momentum")
        again = trained(spec, 3, steps=3, device=cpu(2), optimizer="momentum", recompute=True)
        for got, want in zip(again[:3], kept[:3], strict=True):
            np.testing.assert_array_equal(got, want)
        assert {**again[3]}.keys() == kept[3].keys()
        if kept[3]:
            np.testing.assert_array_equal(flat(again[3]), flat(kept[3]))


def test_dropout_draws_anew_in_each_step_and_alike_for_each_seed():
    """Equal seeds give equal losses, another step another mask."""
    network = branched(p=0.5)

    def losses(seed):
        with Model(network, device=HERE, mode="training", dtype="float64", learning_rate=0.0, seed=seed) as model:
            model.prepare(4)
            model.load(*deal(network, 4))
            found = []
            for _ in range(3):
                model.step()
                found.append(model.loss())
        return found

    first = losses(1)
    assert first == losses(1)
    assert len(set(first)) == 3


# --- inference -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "network", [branched(p=0.5), mobile(p=0.5), transformer(p=0.5)], ids=str
)  # p does nothing in inference
def test_a_samples_output_does_not_depend_on_its_batch(network):
    """Seven images at once, one by one, or by two threads: the same outputs up to rounding."""
    images, _ = deal(network, 7)
    with (
        Model(network, device=cpu(2), dtype="float64") as model,
        Model(network, device=cpu(1), dtype="float64", share=model) as alone,
    ):
        model.prepare(7)
        model.load(images)
        model.step()
        together = model.output()
        assert together.shape == (7, 1, 1, 5)
        alone.prepare(1)
        for image, want in zip(images, together, strict=True):
            alone.load(image[None])
            alone.step()
            np.testing.assert_allclose(alone.output()[0], want, rtol=1e-11, atol=1e-13)


def test_a_model_that_shares_parameters_follows_the_training():
    """The model for testing sees parameters and running statistics as the trained one left them."""
    network = branched()
    images, labels = deal(network, 4)
    with (
        Model(network, device=HERE, mode="training", learning_rate=0.1) as model,
        Model(network, device=HERE, share=model) as tested,
    ):
        tested.prepare(4)
        tested.load(images)
        tested.step()
        before = tested.output()
        model.prepare(4)
        model.load(images, labels)
        model.step()
        tested.step()
        assert not np.allclose(tested.output(), before)
        assert not np.allclose(tested.states["norm"]["mean"], 0)
        np.testing.assert_array_equal(tested.parameters["stem"]["w"], model.parameters["stem"]["w"])


# --- bad input -----------------------------------------------------------------------------------------------


def test_a_step_needs_a_prepared_batch():
    """Everything that touches a batch says that none is prepared, also after release."""
    network = branched()
    model = Model(network, device=HERE, mode="training")
    model.prepare(2)
    model.release()
    for use in (model.step, model.load_random, model.output, lambda: model.load(*deal(network, 2))):
        with pytest.raises(InvalidArgument, match="prepare"):
            use()


@pytest.mark.parametrize(
    ("x", "labels", "field"),
    [
        (np.zeros((3, 6, 7, 3)), np.zeros(2, int), "x"),
        (np.zeros((2, 7, 6, 3)), np.zeros(2, int), "x"),
        (np.zeros((2, 126)), np.zeros(2, int), "x"),
        (np.zeros((2, 6, 7, 3)), np.zeros(3, int), "labels"),
        (np.zeros((2, 6, 7, 3)), np.array([0, 5]), "labels"),
        (np.zeros((2, 6, 7, 3)), np.array([-1, 0]), "labels"),
        (np.zeros((2, 6, 7, 3)), np.zeros((2, 4), int), "labels"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(x, labels, field):
    """Shapes and class numbers are checked before anything is written."""
    with Model(branched(), device=HERE, mode="training") as model:
        model.prepare(2)
        with pytest.raises(InvalidArgument) as caught:
            model.load(x, labels)
        assert caught.value.field == field


def test_parameters_are_shared_only_with_the_same_network_and_dtype():
    """Parameters of another network or dtype would be read as something else, so they are refused."""
    with Model(branched(), device=HERE) as model:
        for network, dtype in ((models.build("mlp"), "float32"), (branched(), "float64")):
            with pytest.raises(InvalidArgument, match="share"):
                Model(network, device=HERE, dtype=dtype, share=model)


def test_a_layer_without_code_is_refused_by_name():
    """The engine says which layer it cannot run, before it takes memory."""
    unknown = Opaque(name="einsum", operator="Einsum", output=(4, 4, 2))
    network = Network(input_shape=(4, 4, 2), layers=[Conv2d(k=2, r=1, s=1), unknown, Flatten(), Linear(k=2)])
    with pytest.raises(UnsupportedLayer, match=r"einsum \(opaque\)"):
        Model(network, device=HERE)


def test_an_error_in_a_step_reaches_the_caller(monkeypatch):
    """What one member raises ends the step for all of them and is raised; the model can be prepared again."""
    with Model(models.build("mlp"), device=cpu(2), mode="training") as model:
        model.prepare(4)
        model.load_random()

        def fail():
            raise CubatchError("in the step")

        model._program.works[0][1][1] = fail
        with pytest.raises(CubatchError, match="in the step"):
            model.step()
        model.prepare(4)
        model.load_random()
        model.step()


def test_a_model_runs_on_the_gpu_that_was_asked_for(monkeypatch):
    """On cuda:1 device 1 is made the current one before anything is allocated, and the usual one again at the end."""
    used = []

    class Chosen:
        def __init__(self, index=None):
            self.id = index if index is not None else 0

        def use(self):
            used.append(self.id)

    pool = types.SimpleNamespace(free_all_blocks=lambda: None)
    fake = types.SimpleNamespace(
        cuda=types.SimpleNamespace(Device=Chosen), get_default_memory_pool=lambda: pool, empty=np.empty,
        asarray=lambda array: used.append("allocated") or array, zeros_like=np.zeros_like, full=np.full,
    )  # fmt: skip
    monkeypatch.setattr("cubatch.engine.network.gpu_library.cupy", lambda: fake)
    Model(models.build("mlp"), device=Device(name="a GPU", index=1, live=True, compute_capability=(7, 0))).close()
    assert used == [1, "allocated", 0]
