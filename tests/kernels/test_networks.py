"""Whole training steps on hand-written kernels, operation by operation beside the NumPy engine."""

from __future__ import annotations

import math
import tracemalloc

import attrs
import numpy as np
import pytest

from cubatch.engine import functional, loss_scale
from cubatch.engine.network import Model
from cubatch.hardware import probe
from cubatch.kernels.padding import stored_row
from cubatch.memory import plan, schedule
from cubatch.network import layers, models
from tests.checks import UNIT_ROUNDOFF, assert_within, gamma
from tests.engine import rounded
from tests.engine.every_kind import EVERY_KIND
from tests.engine.networks import narrow
from tests.kernels.attention_stages import Stages
from tests.kernels.cases import SMALLEST, bound, decoded, encoded
from tests.thorough import THOROUGH

pytestmark = pytest.mark.heavy

BATCH = 4
SUMS = (layers.Conv2d, layers.Linear)
OVER_POSITIONS = (layers.BatchNorm2d, layers.LayerNorm, layers.LayerScale, layers.Tokens)
SCALE = 8.0  # of the loss in float16: with the usual 2^16 the first steps of random data overflow
# Roundings on the longest way through an operation that is no product: a few for each element, and for
# batch norm those of sums over the batch in blocks.
SUM_ROUNDINGS, USUAL_ROUNDINGS = 600, 40


def one_thread():
    """The CPU as one member, so that both engines hold the batch in one piece."""
    return attrs.evolve(probe.device("cpu"), threads=1)


def product_terms(op, inputs, weights):
    """Sum of the absolute values of the terms of each result of a convolution or linear layer, by role."""
    layer, x = op.node.layer, np.abs(inputs["x0"])
    if isinstance(layer, layers.Conv2d):
        window = {"stride": layer.stride, "pad": layer.pad, "dilation": layer.dilation, "groups": layer.groups}
        if op.kind == "forward":
            return {"y": ended(functional.conv2d(x, weights["w"], weights.get("b"), **window), inputs)}
        dy = np.abs(inputs["dy"]).reshape(len(x), *layer.output_shape)
        dw, db = np.empty_like(weights["w"]), np.empty(len(weights["w"]))
        functional.conv2d_wgrad(x, dy, dw=dw, db=db, **window)
        dx = functional.conv2d_dgrad(dy, weights["w"], x_shape=x.shape, **window)
        return {"w": dw, "b": db, "dx0": dx + np.abs(inputs.get("residual", 0))}
    rows = x.reshape(-1, layer.parameter_shapes["w"][1])
    if op.kind == "forward":
        return {"y": ended(functional.linear(rows, weights["w"], weights.get("b")), inputs)}
    dy = np.abs(inputs["dy"]).reshape(len(rows), -1)
    dw, db = np.empty_like(weights["w"]), np.empty(len(weights["w"]))
    functional.linear_wgrad(rows, dy, dw=dw, db=db)
    added = np.abs(inputs.get("residual", np.zeros(1))).reshape(-1, rows.shape[1] if "residual" in inputs else 1)
    return {"w": dw, "b": db, "dx0": functional.linear_dgrad(dy, weights["w"]) + added}


def ended(terms, inputs):
    """The same with what a forward pass ends with: a norm, in the place of a bias, and another branch."""
    scale, shift = np.abs(inputs.get("folded", np.array([[1.0], [0.0]])))
    added = np.abs(inputs["residual"]).reshape(terms.shape) if "residual" in inputs else 0
    return terms * scale + shift + added


def norm_terms(op, inputs, weights):
    """The same for the gradients of a batch norm: sums over the batch that nearly cancel; a slope is at most 1.5."""
    x, dy, (mean, inv_std) = inputs["x0"], np.abs(inputs["dy"].reshape(inputs["x0"].shape)), inputs["statistics"]
    if "pooled" in inputs:
        dy += np.abs(inputs["pooled"]).reshape(len(dy), 1, 1, -1) / math.prod(dy.shape[1:3])
    dy = dy if op.activation is None else 1.5 * dy
    normed, axes = (np.abs(x) + np.abs(mean)) * inv_std, (0, 1, 2)
    spread = dy + dy.mean(axes) + normed * (dy * normed).mean(axes)
    return {"gamma": (dy * normed).sum(axes), "beta": dy.sum(axes), "dx0": weights["gamma"] * inv_std * spread}


def position_terms(layer, inputs, weights):
    """The same for gradients of a layer norm, a layer scale, and of tokens: sums over positions, or over samples."""
    dy = np.abs(inputs["dy"])
    if isinstance(layer, layers.Tokens):
        position = dy.reshape(len(dy), -1, layer.c).sum(0)
        return {"position": position, "token": position[0]}
    x = np.abs(inputs["x0"])
    dy, axes = dy.reshape(x.shape), (0, 1, 2)
    if isinstance(layer, layers.LayerScale):
        return {"gamma": (dy * x).sum(axes)}
    mean, inv_std = (kept.reshape(*x.shape[:3], 1) for kept in inputs["statistics"].reshape(2, -1))
    normed, error = (x + np.abs(mean)) * inv_std, dy * weights["gamma"]
    spread = error + error.mean(-1, keepdims=True) + normed * (error * normed).mean(-1, keepdims=True)
    return {"gamma": (dy * normed).sum(axes), "beta": dy.sum(axes), "dx0": inv_std * spread}


def magnitudes(op, inputs, parameters):
    """Sum of the absolute values of the terms of each result that is a sum of many, by role."""
    layer = op.node.layer if op.node else None
    inputs = {role: array.astype(np.float64) for role, array in inputs.items()}
    weights = {name: np.abs(array.astype(np.float64)) for name, array in parameters.items()}
    if isinstance(layer, SUMS):
        return product_terms(op, inputs, weights)
    if op.kind == "forward" or not isinstance(layer, OVER_POSITIONS):
        return {}
    return (
        norm_terms(op, inputs, weights)
        if isinstance(layer, layers.BatchNorm2d)
        else position_terms(layer, inputs, weights)
    )


def roundings(op, role):
    """How many roundings lie on the longest way to an element of a result."""
    layer = op.node.layer if op.node else None
    if isinstance(layer, SUMS):
        pixels, filters = BATCH * math.prod(layer.output_shape[:2]), layer.parameter_shapes["w"]
        taps = layer.r * layer.s if isinstance(layer, layers.Conv2d) else 1
        return {"y": math.prod(filters[1:]) + 4, "w": pixels, "b": pixels, "dx0": filters[0] * taps + 1}[role]
    return SUM_ROUNDINGS if isinstance(layer, OVER_POSITIONS) else USUAL_ROUNDINGS


def step(expected, tested, op, works, launcher):
    """Run one operation on both engines, on the same inputs; give those, and the two results by role."""
    places = expected._places[0][0], tested._places[0][0]
    for role, number in op.reads.items():
        source = places[0].arena[number]
        put(launcher, places[1].arena[number], padded(op.node.layer, source) if role == "weights" else source)
    inputs = {role: places[0].arena[number].copy() for role, number in op.reads.items()}
    results = []
    for place, work in zip(places, works, strict=True):
        gradients = place.gradients.get(op.node.name, {}) if op.node and op.kind == "backward" else {}
        for array in gradients.values():
            array.view(np.uint8)[...] = 0xFF  # NaN, however wide
        work()
        results.append({role: place.arena[number] for role, number in op.writes.items()} | gradients)
    want, got = results
    return inputs, want, {role: launcher.get(array).view(want[role].dtype) for role, array in got.items()}


def padded(layer, weights):
    """Attention's weights as kernels store them, whose rows are padded: here with NaN."""
    h, w, _ = layer.input_shape
    rows = np.empty((BATCH, layer.heads * h * w, stored_row(h * w)), weights.dtype)
    rows.view(np.uint8)[...] = 0xFF
    rows[..., : h * w] = weights.reshape(*rows.shape[:2], -1)
    return rows.reshape(BATCH, -1)


def put(launcher, target, source):
    """Copy the NumPy engine's elements bit by bit to the other's, where bfloat16 is uint16 and 3 channels are 4."""
    source = source.view(target.dtype)
    if source.shape != target.shape:
        source = np.concatenate([source, np.zeros((*source.shape[:-1], 1), source.dtype)], axis=-1)
    target[...] = launcher.put(source)


def drop(layer, inputs, got):
    """What a dropout layer must give by the mask that it drew, which must keep as many as it should."""
    kept, keep = got.pop("mask").astype(bool), 1 - layer.p
    assert abs(kept.mean() - keep) < 6 * math.sqrt(layer.p * keep / kept.size)
    return {"y": np.where(kept.reshape(inputs["x0"].shape), inputs["x0"] / np.float32(keep), np.float32(0))}


def attention_is_right(op, inputs, got, parameters, tested, launcher, dtype, label):
    """Check it stage by stage, so that what 16 bits lose between its stages is no part of a bound."""
    layer, place = op.node.layer, tested._places[0][0]
    h, w, c = layer.input_shape
    roles = "qkv", "weights", "mixed"
    stages = Stages((BATCH, h * w, c), layer.heads, dtype, label, device=launcher.device)
    workspace = launcher.get(place.arena.workspace(op.workspace))
    between = stages.between(workspace, place.arena[op.reads["x0"]].dtype, forward=op.kind == "forward")
    if op.kind == "forward":
        kept = [got[role] for role in roles] if "qkv" in got else between
        stages.forward(inputs["x0"], parameters, kept, got["y"])
    else:
        saved, gradients = [inputs[role] for role in roles], {name: got[name] for name in parameters}
        stages.backward(inputs["dy"], inputs["x0"], parameters, saved, gradients, between, got["dx0"])


def models_of(launcher, network, dtype, **options):
    """The NumPy engine's model and ours, prepared, with the same parameters and data."""
    options = {"mode": "training", "seed": 3} | options
    is_tf32 = dtype == "tf32"
    operations = rounded.operations() if dtype in {"float16", "bfloat16"} else None
    expected = Model(
        network, device=one_thread(), dtype="float32" if is_tf32 else dtype, operations=operations, **options
    )  # fmt: skip
    context = launcher.context(tf32=is_tf32)
    tested = Model(network, device=launcher.device, dtype=dtype, context=context, **options)
    with pytest.MonkeyPatch.context() as patch:  # the same operations, with activations inside batch norm
        patch.setattr(schedule, "norms_activate", lambda _: True)
        patch.setattr(plan, "schedule_of", lambda spec, mode, recompute, library, experimental: schedule.schedule(
            spec, mode, recompute=recompute, library=library, experimental=experimental))  # fmt: skip
        expected.prepare(BATCH)
    tested.prepare(BATCH)
    for model in (expected, tested):
        model.load_random()
        if dtype == "float16" and model.mode == "training":
            model._stepper.loss_scale[loss_scale.SCALE] = SCALE
    return expected, tested


def within(op, role, want, sums, dtype):
    """Bound how far two results may be apart: gamma of both sums in float32, half a unit of both when stored."""
    if want.dtype == np.uint8:
        return 0
    size = sums[role].reshape(want.shape) if role in sums else np.abs(want).max()
    error = gamma(roundings(op, role), UNIT_ROUNDOFF["float32"]) * np.asarray(size, np.float64)
    if dtype == "tf32":  # both factors may lose all but 10 bits after the point
        is_product = op.node is not None and isinstance(op.node.layer, SUMS)
        return 2 * error + is_product * 2 * 2.0**-10 * np.asarray(size)
    if dtype == "float32" or role == "statistics" or op.kind == "fold":
        return 2 * error
    return 2 * (error + UNIT_ROUNDOFF[dtype] * (np.abs(want.astype(np.float64)) + error) + SMALLEST[dtype] / 2)


SIDE = 64 if THOROUGH else 32  # of images: the last layers have 2 x 2 pixels, or one
MNIST, RESNET = ("mnist-cnn", (28, 28, 1)), ("resnet18", (SIDE, SIDE, 3))
MOBILENET, EVERY = ("mobilenet-v3-large", (SIDE, SIDE, 3)), ("every kind", None)
BIG = {"resnet18", "mobilenet-v3-large"}


def network_of(launcher, name, shape):
    """The network; on the simulator a large one of half the width, unless all is tried."""
    network = models.build(name, input_shape=shape, classes=10) if shape else EVERY_KIND
    simulated = launcher.launcher.module is np
    return narrow(network, 2) if name in BIG and simulated and not THOROUGH else network


def everywhere(*cases, thorough=()):
    """Cross networks and types with what they run on: large ones on the older architecture where all is tried."""
    found = []
    for where in ("cpusim-52", "cpusim-80", "cuda"):
        for case in (*cases, *thorough):
            is_thorough = case in thorough or (where == "cpusim-52" and case[0] in BIG)
            marks = [pytest.mark.thorough] * is_thorough + [pytest.mark.gpu] * (where == "cuda")
            found.append(pytest.param(where, *case, marks=marks))
    return found


@pytest.mark.parametrize(
    ("launcher", "name", "shape", "dtype"),
    everywhere(
        *((*network, "float32") for network in (MNIST, RESNET, MOBILENET)),
        *((*EVERY, dtype) for dtype in ("tf32", "float16", "bfloat16")),
        thorough=[(*RESNET, "float16"), *((*MNIST, dtype) for dtype in ("tf32", "float16", "bfloat16"))],
    ),
    indirect=["launcher"],
)
def test_every_operation_of_a_training_step_equals_the_numpy_engine(launcher, name, shape, dtype):
    """
    Fed the same inputs, each operation's two results differ by at most the rounding of both: gamma of its terms
    times the sum of their absolute values for products, some roundings of the largest value for the others; in 16
    bits half a unit in the last place more.
    """
    network = network_of(launcher, name, shape)
    expected, tested = models_of(launcher, network, dtype)
    unit, seen = UNIT_ROUNDOFF["float32"], set()
    for op, *works in zip(
        expected.plan.schedule.ops, expected._program.works[0][0], tested._program.works[0][0], strict=True
    ):
        if op.kind == "update":
            continue
        label = f"{name} {dtype} {op.kind} {op.node.name if op.node else ''}"
        inputs, wants, gots = step(expected, tested, op, works, launcher)
        if op.kind == "loss":
            np.testing.assert_allclose(tested.loss(), expected.loss(), rtol=gamma(100, unit), err_msg=label)
        if op.kind == "forward" and isinstance(op.node.layer, layers.Dropout):
            wants = drop(op.node.layer, inputs, gots)
        parameters = expected.parameters.get(op.node.name, {}) if op.node else {}
        if op.node and op.kind != "accumulate" and isinstance(op.node.layer, layers.Attention):
            attention_is_right(op, inputs, gots, parameters, tested, launcher, dtype, label)
            continue
        sums = magnitudes(op, inputs, parameters)
        for role, want in wants.items():
            apart = within(op, role, want, sums, dtype)
            assert_within(gots[role].astype(np.float64), want.astype(np.float64), apart, label=f"{label} {role}")
            seen.add((op.node.layer.type if op.node else "", op.kind, role))
    assert {("conv2d", "backward", "w"), ("linear", "forward", "y"), ("linear", "backward", "dx0")} <= seen


@pytest.mark.parametrize(
    ("launcher", "name", "shape", "dtype"),
    everywhere(
        *((*network, "float32") for network in (RESNET, MOBILENET)),
        (*RESNET, "bfloat16"),
        *((*EVERY, dtype) for dtype in ("tf32", "float16", "bfloat16")),
        thorough=[(*RESNET, "float16")],
    ),
    indirect=["launcher"],
)
def test_every_operation_of_inference_equals_the_numpy_engine(launcher, name, shape, dtype):
    """The same without gradients, where products do what follows them: norms by running statistics, sums, ReLUs."""
    network = network_of(launcher, name, shape)
    expected, tested = models_of(launcher, network, dtype, mode="inference")
    random, seen = np.random.default_rng(5), set()
    for norm, state in expected.states.items():
        for key, array in state.items():
            array[...] = random.uniform(0.5, 2, array.shape) if key == "var" else random.normal(size=array.shape)
            put(launcher, tested.states[norm][key], array)
    for op, *works in zip(
        expected.plan.schedule.ops, expected._program.works[0][0], tested._program.works[0][0], strict=True
    ):
        inputs, wants, gots = step(expected, tested, op, works, launcher)
        label, parameters = f"{name} {dtype} {op.kind}", expected.parameters.get(op.node.name, {}) if op.node else {}
        if op.node and isinstance(op.node.layer, layers.Attention):
            attention_is_right(op, inputs, gots, parameters, tested, launcher, dtype, label)
            continue
        sums = magnitudes(op, inputs, parameters)
        for role, want in wants.items():
            apart = within(op, role, want, sums, dtype)
            name_of = f"{label} {op.node.name if op.node else ''} {role}"
            assert_within(gots[role].astype(np.float64), want.astype(np.float64), apart, label=name_of)
        seen |= op.ending
    assert seen == {"folded", "residual"}


def moved_apart(optimizer, t, before):
    """
    Bound what step t, on equal gradients in [-1, 1], adds to the difference of two engines' master weights.

    Each rounds a term of a mean 2 t times at most; in Adam one of the squares 2 t + 1 times, which the root halves, and
    the step five times more.  Its kernel rounds the size five times, two of them in expm1f, and the root of 1 - b2^t
    three times, NumPy each once.  In the end both round the weight.
    """
    roundings = 2 * (2 * t + t + 5) + 1 + 8 + 2 if optimizer == "adam" else 2 * 2 * t
    # Cauchy and Schwarz: for t <= 3 Adam's mean of |g| is at most 1.004 of the root of its mean of squares.
    longest = 0.25 * {"sgd": 1, "momentum": sum(0.9**i for i in range(t)), "adam": 1.004}[optimizer]
    unit = UNIT_ROUNDOFF["float32"]
    return gamma(roundings + 2, unit) * longest + gamma(2, unit) * np.abs(before)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_updates_in_16_bits_equal_the_numpy_engine(launcher, dtype, optimizer):
    """
    On equal gradients, three steps: finite, one of them infinite in float16, finite; master weights and state agree.

    The parameters are the master weights, rounded.
    """
    network = models.build("mlp", input_shape=(1, 1, 20), classes=10)
    expected, tested = models_of(launcher, network, dtype, optimizer=optimizer, learning_rate=0.25)
    random, taken, apart = np.random.default_rng(0), 0, 0
    for number in range(3):
        gradient = (random.uniform(-1, 1, len(expected._flat)) * expected.loss_scale).astype(expected._kind)
        if number == 1 and dtype == "float16":
            gradient[77] = np.inf
        expected._gradients[0][...] = gradient
        put(launcher, tested._gradients[0], gradient)
        before, kept = expected._stepper.master.copy(), np.array(launcher.get(tested._stepper.master))
        tested._numbers.write(number + 1, number + 1, 0.25)
        for model in (expected, tested):
            model._program.works[0][0][-1]()
            model._clock[0] += 1
            model._updates += 1
        skips = number == 1 and dtype == "float16"
        assert np.array_equal(before, expected._stepper.master) == skips
        assert (tested.loss_scale, tested.skipped_steps) == (expected.loss_scale, expected.skipped_steps)
        master = launcher.get(tested._stepper.master)
        assert np.array_equal(kept, master) == skips
        if not skips:
            taken += 1
            # What earlier steps left stays: after a step as long as the weight it is much of the little that is left.
            apart += moved_apart(optimizer, taken, before)
        assert_within(master, expected._stepper.master, apart, label=f"{optimizer} {dtype} step {number}")
        stored = decoded(launcher.get(tested._flat))
        np.testing.assert_array_equal(stored, decoded(master.astype(expected._kind).view(tested._kind)))
    scales = {"float16": SCALE / loss_scale.FACTOR, "bfloat16": 1}
    assert (tested.loss_scale, tested.skipped_steps) == (scales[dtype], int(dtype == "float16"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_training_in_16_bits_goes_as_on_numpy(launcher, dtype):
    """
    Whole steps of both engines, side by side: the first losses agree, both fall, and equally many steps are skipped.

    Later losses need not agree: a gradient that is rounded the other way leads elsewhere.
    """
    network = models.build("mnist-cnn", input_shape=(12, 12, 1))
    both = models_of(launcher, network, dtype, optimizer="momentum", learning_rate=0.01)
    losses = [[], []]
    if dtype == "float16":
        for model in both:
            model._stepper.loss_scale[loss_scale.SCALE] = 2.0**18  # far too much: some steps will be skipped
    random = np.random.default_rng(0)
    images, labels = random.standard_normal((BATCH, 12, 12, 1)), random.integers(0, 10, BATCH)
    for model in both:
        model.load(images, labels)
    for _ in range(15):
        for model, found in zip(both, losses, strict=True):
            model.step()
            found.append(model.loss())
    # As many roundings as the network has sums, each of a unit in the last place of what is stored.
    np.testing.assert_allclose(losses[1][0], losses[0][0], rtol=gamma(6, UNIT_ROUNDOFF[dtype]))
    for model, found in zip(both, losses, strict=True):
        assert found[-1] < 0.5 * found[0]
        assert (model.skipped_steps > 3) == (dtype == "float16")
    assert both[0].loss_scale == both[1].loss_scale
    assert both[0].skipped_steps == both[1].skipped_steps


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_loaded_and_given_out_are_numbers_whatever_is_stored(launcher, dtype):
    """A layer's output by float64 from the numbers that were loaded, rounded as they are stored."""
    layer = layers.Linear(c=24, k=5)
    x = np.random.default_rng(0).standard_normal((7, 1, 1, 24))
    with Model(layer, device=launcher.device, dtype=dtype, context=launcher.context()) as model:
        model.prepare(7)
        model.load(x)
        model.step()
        output = model.output().reshape(7, 5)
        w = decoded(launcher.get(model.parameters["linear"]["w"]))
    x = decoded(encoded(x, dtype)).reshape(7, 24)
    want = x @ w.T
    assert output.dtype == np.float32
    assert_within(output, want, bound(25, np.abs(x) @ np.abs(w.T), want, dtype), label=f"linear {dtype}")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_step_takes_what_is_planned_and_nothing_else(launcher, dtype):
    """On our kernels, in any dtype: what is held is the plan, and a step adds a few of Python's own objects."""
    if launcher.launcher.module is not np:
        pytest.skip("tests/gpu looks into CuPy's pool")
    network = models.build("mnist-cnn", input_shape=(12, 12, 1))
    options = {"mode": "training", "dtype": dtype, "optimizer": "adam", "context": launcher.context()}
    with Model(network, device=launcher.device, **options) as model:
        model.prepare(16)
        model.load_random()
        model.step()  # compiles and loads what is not yet
        tracemalloc.start()
        try:
            model.step()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert model.plan.total - 4096 <= model.held_bytes <= model.plan.total  # only rounding up is not held
        assert peak < 2**16
