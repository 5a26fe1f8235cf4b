"""A network that runs: memory as planned, gradients that are true, the same whatever the threads and the memory."""

from __future__ import annotations

import tracemalloc
import types

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubatch.engine.network import Model
from cubatch.errors import CubatchError, InvalidArgument, OutOfMemory, UnsupportedLayer
from cubatch.hardware import probe
from cubatch.hardware.facts import Device
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import (
    GELU,
    Add,
    AvgPool2d,
    BatchNorm2d,
    Concat,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool,
    HardSigmoid,
    HardSwish,
    Linear,
    MaxPool2d,
    ReLU,
    ReLU6,
    Scale,
    Sigmoid,
    SiLU,
    Softmax,
)
from tests import reference

HERE = probe.device("cpu")


def cpu(threads):
    """This machine's CPU with so many threads."""
    return attrs.evolve(HERE, threads=threads)


def branched(p=0.0):
    """Branches of every kind: in place, shared, concatenated, pooled in all three ways."""
    return Network(
        input_shape=(6, 7, 3),
        layers=[
            Conv2d(name="stem", k=4, r=3, s=3, pad=1),
            BatchNorm2d(name="norm"),
            ReLU(name="a"),
            Conv2d(name="left", k=4, r=3, s=2, pad=[1, 1, 0, 1], groups=2, bias=False),
            ReLU(name="left2"),
            Add(name="sum", inputs=["left2", "a"]),
            Conv2d(name="thin", k=4, r=3, s=3, pad=1, groups=4),
            Add(name="sum2", inputs=["a", "sum", "thin"]),
            Concat(name="both", inputs=["sum2", "sum"]),
            Dropout(p=p),
            MaxPool2d(name="max", r=3, s=3, stride=2, pad=1),
            AvgPool2d(name="mean", inputs=["both"], r=2, s=3, stride=2, pad=[1, 0, 1, 1], ceil=True),
            Conv2d(name="down", inputs=["both"], k=8, r=3, s=3, stride=2, pad=1),
            BatchNorm2d(name="norm2"),
            Add(name="sum3", inputs=["norm2", "max"]),
            ReLU(),
            GlobalAvgPool(name="pooled"),
            Flatten(name="flat", inputs=["mean"]),
            Linear(name="wide", k=8),
            ReLU(name="wide2"),
            Add(name="sum4", inputs=["wide2", "pooled"]),
            Linear(k=5),
        ],
        name="branched",
    )


def mobile(p=0.0):
    """Squeeze-and-excite twice, by either gate, and every activation function: in place, beside its input, in a row."""
    return Network(
        input_shape=(7, 6, 3),
        layers=[
            Conv2d(k=4, r=3, s=3, stride=2, pad=1, bias=False),
            BatchNorm2d(),
            HardSwish(name="stem"),
            Conv2d(k=8, r=1, s=1, bias=False),
            BatchNorm2d(),
            ReLU6(),
            Conv2d(k=8, r=3, s=3, pad=1, groups=8, bias=False),
            BatchNorm2d(),
            SiLU(name="wide"),
            GlobalAvgPool(),
            Conv2d(k=4, r=1, s=1),
            ReLU(),
            Conv2d(k=8, r=1, s=1),
            HardSigmoid(name="gate"),
            Scale(name="excited", inputs=["wide", "gate"]),
            Conv2d(k=4, r=1, s=1),
            Add(name="sum", inputs=["stem", "layer16"]),
            GlobalAvgPool(),
            Linear(k=4),
            Sigmoid(name="gate2"),
            Scale(inputs=["sum", "gate2"]),
            Flatten(),
            Linear(k=9),
            Sigmoid(),
            ReLU6(),
            HardSwish(),
            HardSigmoid(),
            Dropout(p=p),
            Linear(k=5),
        ],
        name="mobile",
    )


def deal(network, n, seed=0):
    """Random images and labels."""
    random = np.random.default_rng(seed)
    images = random.standard_normal((n, *network.input_shape))
    return images, random.integers(0, network.output_shape[2], n)


def flat(parameters):
    """All parameters, gradients or statistics as one array, copied."""
    return np.concatenate([array.ravel() for layer in parameters.values() for array in layer.values()])


def trained(network, n, *, steps=1, device=HERE, **options):
    """Losses, last gradients and parameters of a few steps in float64, each on data of its own."""
    losses = []
    options = {"dtype": "float64", "learning_rate": 0.1} | options
    with Model(network, device=device, mode="training", **options) as model:
        model.prepare(n)
        for step in range(steps):
            model.load(*deal(network, n, step))
            model.step()
            losses.append(model.loss())
        return np.array(losses), flat(model.gradients), flat(model.parameters), {**model.states}


# --- memory --------------------------------------------------------------------------------------------------


@pytest.mark.case("watch")
@pytest.mark.parametrize(
    ("name", "shape", "n", "options"),
    [
        ("mnist-cnn", None, 64, {}),
        ("mnist-cnn", None, 256, {"optimizer": "adam"}),
        ("mnist-cnn", None, 1024, {}),
        ("resnet18", (64, 64, 3), 4, {"optimizer": "momentum"}),
        ("resnet18", (64, 64, 3), 4, {"recompute": True}),
        ("resnet18", (64, 64, 3), 4, {"mode": "inference"}),
        ("mobilenet-v3-large", (64, 64, 3), 4, {}),
        ("mobilenet-v3-large", (64, 64, 3), 4, {"mode": "inference"}),
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
        for fact in (error.tensor, "training of mnist-cnn", str(n), str(error.largest_batch_size)):
            assert fact in str(error)
        model.prepare(2)  # nothing is left of the failure
        model.load_random()
        model.step()


# --- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [branched(), mobile()], ids=str)
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
    network=st.sampled_from([branched(), mobile()]),
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
    for spec in (network, mobile(p=0.4), deep, models.build("mnist-cnn")):
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


@pytest.mark.parametrize("network", [branched(p=0.5), mobile(p=0.5)], ids=str)  # p does nothing in inference
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


# --- a layer on its own --------------------------------------------------------------------------------------


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
    network = Network(input_shape=(4, 4, 2), layers=[Conv2d(k=2, r=1, s=1), GELU(name="curve"), Linear(k=2)])
    with pytest.raises(UnsupportedLayer, match=r"curve \(gelu\)"):
        Model(network, device=HERE)


def test_an_error_in_a_step_reaches_the_caller(monkeypatch):
    """What one member raises ends the step for all of them and is raised; the model can be prepared again."""
    with Model(models.build("mlp"), device=cpu(2), mode="training") as model:
        model.prepare(4)
        model.load_random()

        def fail():
            raise CubatchError("in the step")

        model._programs[0][1][1] = fail
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
    monkeypatch.setattr("cubatch.engine.network.backend.module", lambda kind: fake)
    Model(models.build("mlp"), device=Device(name="a GPU", index=1, live=True, compute_capability=(7, 0))).close()
    assert used == [1, "allocated", 0]
