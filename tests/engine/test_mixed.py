"""
16-bit storage on NumPy: rounded once, stepped in float32, its loss scaled; the semantics that kernels must have.

Whole steps of a network are test_mixed_steps.py's.
"""

from __future__ import annotations

import inspect
import sys

import attrs
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from cubatch.engine import functional, loss_scale, optim, storage
from cubatch.engine.network import Model
from cubatch.errors import MissingDependency, UnsupportedDtype
from cubatch.hardware import probe
from cubatch.memory.plan import ALIGNMENT
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import BatchNorm2d, Conv2d, Dropout, Flatten, HardSwish, Linear, MaxPool2d, ReLU
from tests.engine import rounded

HERE = probe.device("cpu")
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
NARROW = pytest.mark.parametrize("dtype", KINDS)
NETWORK = Network(
    input_shape=(8, 9, 3),
    layers=[
        Conv2d(name="conv", k=8, r=3, s=3, pad=1),
        BatchNorm2d(name="norm"),
        ReLU(),
        MaxPool2d(r=2, s=2),
        Dropout(p=0.2),
        Conv2d(k=6, r=3, s=3, groups=2),
        HardSwish(),
        Flatten(),
        Linear(name="last", k=4),
    ],
)


def cpu(threads):
    return attrs.evolve(HERE, threads=threads)


def model_of(dtype, spec=NETWORK, **options):
    """A model in training on data of its own, with a batch of six."""
    options = {
        "mode": "training",
        "device": cpu(2),
        "learning_rate": 0.05,
        "operations": rounded.operations(),
    } | options
    model = Model(spec, dtype=dtype, **options)
    model.prepare(6)
    model.load_random()
    return model


# --- storage -------------------------------------------------------------------------------------------------


@given(values=arrays.arrays(np.float32, 50, elements=st.floats(width=32)))
def test_bits_of_bfloat16_are_those_of_ml_dtypes(values):
    """Rounded to nearest, ties to even, denormals and infinities too; a NaN stays one."""
    with np.errstate(all="ignore"):
        want = values.astype(ml_dtypes.bfloat16)
    got = storage.encoded(values, np.uint16)
    np.testing.assert_array_equal(np.isnan(storage.decoded(got)), np.isnan(values))
    there = ~np.isnan(values)
    np.testing.assert_array_equal(got[there], want.view(np.uint16)[there])


def test_halfway_between_two_bfloat16_it_is_the_even_one():
    """Every such float32 is rounded as by ml_dtypes; rounding half up would be wrong every other time."""
    halfway = (np.arange(2**16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    halfway = halfway[np.isfinite(halfway)]
    with np.errstate(over="ignore"):
        want = halfway.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(storage.encoded(halfway, np.uint16), want)


def test_every_bfloat16_is_decoded_as_ml_dtypes_has_it():
    """All 65536 of them, and what is decoded encodes to the same bits."""
    bits = np.arange(2**16, dtype=np.uint16)
    values = storage.decoded(bits)
    np.testing.assert_array_equal(values, bits.view(ml_dtypes.bfloat16).astype(np.float32))
    there = ~np.isnan(values)
    np.testing.assert_array_equal(storage.encoded(values, np.uint16)[there], bits[there])


def test_bfloat16_without_ml_dtypes_says_what_to_install(monkeypatch):
    """NumPy has no such type; kernels need none."""
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(MissingDependency, match="ml_dtypes"):
        storage.element_type("bfloat16", "im2col")
    assert storage.element_type("bfloat16", "cubatch") is np.uint16


# --- operations ----------------------------------------------------------------------------------------------


@NARROW
def test_sums_are_float32_and_rounded_once(dtype):
    """4096 ones and as many products of 1/64: in 16 bits alone the sum would stop growing; stored it is exact."""
    kind = KINDS[dtype]
    x, w, y = np.ones((1, 8192), kind), np.full((1, 8192), 1 / 64, kind), np.empty((1, 1), kind)
    rounded.operations().linear(x, w, np.array([0.5], kind), out=y)
    assert float(y[0, 0]) == float(np.float32(128.5).astype(kind))
    x[0, 1:] = 0
    w[0, 0], bias = 1, np.array([2.0**-9], kind)
    rounded.operations().linear(x, w, bias, out=y)
    assert y[0, 0] == np.float32(1 + 2.0**-9).astype(kind)


@NARROW
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_operations_are_those_of_functional_on_what_is_stored(dtype, data):
    """Each result is float32's, rounded; inputs are left as they are, and what is in place may be."""
    kind, random = KINDS[dtype], np.random.default_rng(data.draw(st.integers(0, 99)))
    x, w, b = (random.uniform(-2, 2, shape).astype(kind) for shape in ((2, 5, 4, 3), (6, 3, 3, 3), (6,)))
    wide = [array.astype(np.float32) for array in (x, w, b)]
    y, before = np.empty((2, 3, 2, 6), kind), x.copy()
    narrow = rounded.operations()
    narrow.conv2d(x, w, b, relu=True, out=y)
    np.testing.assert_array_equal(y, functional.conv2d(*wide, relu=True).astype(kind))
    np.testing.assert_array_equal(x, before)
    dw, db = np.empty_like(w), np.empty_like(b)
    narrow.conv2d_wgrad(x, y, dw=dw, db=db)
    dw32, db32 = np.empty(w.shape, np.float32), np.empty(b.shape, np.float32)
    functional.conv2d_wgrad(wide[0], y.astype(np.float32), dw=dw32, db=db32)
    np.testing.assert_array_equal(dw, dw32.astype(kind))
    np.testing.assert_array_equal(db, db32.astype(kind))
    narrow.add([x, before, before], out=x)
    np.testing.assert_array_equal(x, (3 * wide[0]).astype(kind))
    halves = [np.empty((2, 5, 4, 1), kind), np.empty((2, 5, 4, 2), kind)]
    narrow.concat_backward(x, [1, 2], outs=halves)
    np.testing.assert_array_equal(np.concatenate(halves, axis=-1), x)


def test_every_result_of_functional_is_known_by_its_keyword():
    """A result under another name would be computed in a copy and lost; arrays are what is annotated as Any."""
    known = rounded.RESULTS | {"loss", "mask", "argmax", "mean", "inv_std", "running_mean", "running_var", "scales",
                               "shifts", "statistics", "workspace"}  # fmt: skip
    inputs = {"x", "w", "b", "y", "s", "dy", "gamma", "beta", "logits", "labels", "branches", "mask", "argmax", "saved",
              "scale", "shift", "residual", "positive", "seed", "reduce", "gammas", "betas", "biases", "means",
              "variances", "token", "position", "w_in", "w_out", "b_in", "b_out", "parts", "pooled"}  # fmt: skip
    for name in functional.__all__:
        if name not in rounded._KNOW_STORAGE:
            parameters = inspect.signature(getattr(functional, name)).parameters
            arrays = {key for key, parameter in parameters.items() if "Any" in str(parameter.annotation)}
            assert arrays <= known | inputs, name


# --- steps ---------------------------------------------------------------------------------------------------


@NARROW
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
def test_a_step_smaller_than_a_unit_of_the_parameters_is_kept_in_the_master(dtype, rule):
    """A weight of 1 less a hundred steps of 1e-5: 0.999, where 16 bits alone would stay at 1."""
    kind = KINDS[dtype]
    w, g, master = np.ones(5, kind), np.ones(5, kind), np.ones(5, np.float32)
    state = [np.zeros(5, np.float32) for _ in range({"sgd": 0, "momentum": 1, "adam": 2}[rule])]
    for number in range(100):
        step = {"step": number + 1} if rule == "adam" else {}
        factor = {"factor": 0.0} if rule == "momentum" else {}
        getattr(optim, rule)(w, [g], *state, lr=1e-5, master=master, **step, **factor)
    # Each step is rounded to half a unit of numbers below 1, 2^-25; its own few roundings are of 1e-5.  Adam's divides
    # by 1 + 1e-8.
    np.testing.assert_allclose(master, 0.999, rtol=0, atol=100 * (2.0**-25 + 1e-5 * (8 * 2.0**-24 + 1e-8)))
    np.testing.assert_array_equal(w, master.astype(kind))


def test_parts_of_a_gradient_add_up_in_float32():
    """In float16 the sum of two parts of 2048 and 1 would be 2048 again."""
    w, master = np.zeros(2, np.float16), np.zeros(2, np.float32)
    optim.sgd(w, [np.float16([2048, 0]), np.float16([1, 1])], lr=1.0, master=master)
    assert master.tolist() == [-2049, -1]


@NARROW
def test_recomputing_gives_the_same_bits(dtype):
    """What is computed again from 16-bit activations is what was forgotten."""
    found = []
    for recompute in (False, True):
        with model_of(dtype, recompute=recompute, optimizer="adam") as model:
            for _ in range(3):
                model.step()
            found.append((model.loss(), model._stepper.master.tobytes()))
    assert found[0] == found[1]


def test_an_overflow_in_one_members_gradient_stops_all_of_them():
    """Members own parts of the parameters; were the check theirs alone, some would step and some would not."""
    with model_of("float16", device=cpu(3)) as model:
        model._stepper.loss_scale[loss_scale.SCALE] = 64
        model.step()
        assert model.skipped_steps == 0
        before = model._stepper.master.copy()
        updates = [programs[-1] for programs in model._program.works[0]]
        model._gradients[2][0] = np.inf
        model._team.run(lambda rank: updates[rank]())
        assert model.skipped_steps == 1
        np.testing.assert_array_equal(model._stepper.master, before)


def test_scaling_saves_gradients_that_float16_would_lose():
    """
    Confident logits leave gradients below 2^-25: nothing without a scale, the true step with one.

    With a margin of 20 the softmax's error is e^-20 = 2^-28.9 for each class.
    """
    network = Network(input_shape=(1, 1, 4), layers=[Linear(name="last", k=4, bias=False)])
    moved = {}
    for scale in (1.0, 2.0**16):
        options = {"mode": "training", "dtype": "float16", "learning_rate": 1.0, "operations": rounded.operations()}
        with Model(network, device=cpu(1), **options) as model:
            model.prepare(1)
            model._stepper.master[...] = (20 * np.eye(4, dtype=np.float32)).ravel()
            model._flat[...] = model._stepper.master
            model._stepper.loss_scale[loss_scale.SCALE] = scale
            model.load(np.eye(4, dtype=np.float32)[:1].reshape(1, 1, 1, 4), np.array([0]))
            model.step()
            moved[scale] = (20 * np.eye(4) - model._stepper.master.reshape(4, 4))[1:, 0]
    assert not moved[1.0].any()
    # The gradient times 2^16 is 1.35e-4, a normal float16: half a unit of 2^-11, and the softmax's few of 2^-24.
    np.testing.assert_allclose(moved[2.0**16], np.exp(-20), rtol=2.0**-11 + 2.0**-18)


def test_the_loss_itself_is_not_scaled():
    """What is reported is the loss, whatever its gradient was multiplied by."""
    with model_of("float16", learning_rate=0.0) as model:
        found = []
        for scale in (1.0, 1024.0):
            model._clock[0] = 0  # the same dropout mask
            model._stepper.loss_scale[loss_scale.SCALE] = scale
            model.step()
            found.append(model.loss())
        assert found[0] == found[1]


def test_16_bits_without_operations_that_compute_with_them_are_refused():
    """NumPy would sum in 16 bits: a model on the CPU is refused."""
    with pytest.raises(UnsupportedDtype, match="float16"):
        Model(NETWORK, device=cpu(1), dtype="float16")


# --- memory and data -----------------------------------------------------------------------------------------


@NARROW
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize(("mode", "name"), [("training", "mnist-cnn"), ("inference", "resnet18")])
def test_what_is_held_is_what_is_planned(dtype, optimizer, mode, name):
    """
    Arena, parameters, master weights, state and the words of the scale: only rounding up is not held.

    Six pieces are rounded up beside the arena: parameters, running statistics, gradients of two members, what the
    optimiser keeps, the scale.
    """
    shape = (64, 64, 3) if name == "resnet18" else None
    options = {"mode": mode, "optimizer": optimizer, "dtype": dtype, "operations": rounded.operations()}
    with Model(models.build(name, input_shape=shape), device=cpu(2), **options) as model:
        model.prepare(4)
        assert 0 <= model.plan.total - model.held_bytes < 6 * ALIGNMENT
        model.close()
        assert model.held_bytes == 0


@NARROW
def test_outputs_and_gradients_come_as_float32(dtype):
    """A user of the output has NumPy's own types to work with, and the values that were stored."""
    options = {"dtype": dtype, "operations": rounded.operations()}
    with model_of(dtype) as model, Model(NETWORK, device=HERE, share=model, **options) as tested:
        model.step()
        assert model.gradients["conv"]["w"].dtype == np.float32
        tested.prepare(3)
        tested.load(np.random.default_rng(0).standard_normal((3, 8, 9, 3)))
        tested.step()
        output = tested.output()
        assert output.dtype == np.float32
        np.testing.assert_array_equal(output, output.astype(KINDS[dtype]).astype(np.float32))
        assert np.abs(output).max() > 0
    with Model(Conv2d(h=4, w=4, c=2, k=3, r=1, s=1), device=cpu(1), mode="training", **options) as layer:
        layer.prepare(2)
        layer.load_random()
        layer.step()
        assert layer.input_gradient().dtype == np.float32
