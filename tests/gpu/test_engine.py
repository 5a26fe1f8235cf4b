"""The engine through CuPy against itself on NumPy, and the whole walk on a GPU; skipped where there is none."""

import attrs
import numpy as np
import pytest

import cubatch as cb
from cubatch.engine import loss_scale
from cubatch.engine.network import Model
from cubatch.hardware import arithmetic, probe
from cubatch.measure import kernel_context
from cubatch.network.graph import Network
from cubatch.network.layers import (
    AvgPool2d,
    BatchNorm2d,
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
)
from tests.engine import rounded
from tests.gpu.here import GPU, NEEDS_GPU

pytestmark = NEEDS_GPU

NETWORK = Network(
    input_shape=(13, 11, 8),
    layers=[
        Conv2d(k=12, r=3, s=3, stride=2, pad=[1, 0, 1, 1]),
        BatchNorm2d(),
        ReLU(),
        Conv2d(k=12, r=3, s=3, pad=1, groups=4),
        ReLU(),
        MaxPool2d(r=2, s=2),
        Conv2d(k=12, r=3, s=3, pad=1, groups=12),
        AvgPool2d(r=2, s=2, pad=1),
        HardSwish(name="wide"),
        GlobalAvgPool(),
        Conv2d(k=6, r=1, s=1),
        SiLU(),
        Conv2d(k=12, r=1, s=1),
        HardSigmoid(name="gate"),
        Scale(inputs=["wide", "gate"]),
        Flatten(),
        Linear(k=16),
        ReLU(),
        Linear(k=16),
        ReLU6(),
        Linear(k=16),
        Sigmoid(),
        Linear(k=5),
    ],
)


# Batch norm takes the mean, so a bias before it has rounding errors for a gradient, of which Adam makes whole steps.
MEANINGLESS = {
    (node.inputs[0], "b") for node in NETWORK.nodes if isinstance(node.layer, BatchNorm2d)
}  # fmt: skip


def our_kernels(dtype="float32"):
    """
    Give what the engine needs to run on our kernels, variants timed as in tuning.

    Launches overlap, as in inference and on several GPUs: what waits for the wrong launch is wrong here.
    """
    return kernel_context.kernel_context(GPU, dtype, overlaps=True, seconds=1.0, path=None)


LIBRARIES = pytest.mark.parametrize("context", [lambda: None, our_kernels], ids=["im2col", "cubatch"])


def trained(device, optimizer, context=None):
    """Train three steps on fixed data and give the losses and the parameters."""
    random = np.random.default_rng(0)
    x = random.standard_normal((6, *NETWORK.input_shape), dtype=np.float32)
    labels = random.integers(0, 5, size=6, dtype=np.int32)
    options = {"mode": "training", "optimizer": optimizer, "seed": 1, "context": context}
    with Model(NETWORK, device=device, **options) as model:
        model.prepare(6)
        losses = []
        for _ in range(3):
            model.load(x, labels)
            model.step()
            losses.append(model.loss())
        parameters = {
            (layer, name): np.asarray(array.get() if hasattr(array, "get") else array)
            for layer, arrays in model.parameters.items()
            for name, array in arrays.items()
        }
    return losses, parameters


@LIBRARIES
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_training_is_that_of_the_cpu(optimizer, context):
    """Three steps of a network of every kind give the CPU's losses and parameters up to float32 rounding."""
    losses, parameters = trained(GPU, optimizer, context())
    expected_losses, expected = trained(attrs.evolve(probe.device("cpu"), threads=1), optimizer)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    for key, array in expected.items():
        if optimizer == "adam" and key in MEANINGLESS:
            continue
        assert np.abs(parameters[key] - array).max() <= 1e-3 * max(np.abs(array).max(), 1e-3), key


def test_dropout_draws_for_every_element():
    """Of many elements about half survive, not all or none of a piece."""
    network = Network(input_shape=(32, 32, 16), layers=[Conv2d(k=16, r=1, s=1), Dropout(), Flatten(), Linear(k=2)])
    with Model(network, device=GPU, mode="training") as model:
        model.prepare(8)
        model.load_random()
        model.step()
        (op,) = [op for op in model.plan.schedule.ops if "mask" in op.writes]
        kept = float(model._places[0][0].arena[op.writes["mask"]].mean())
    assert abs(kept - 0.5) < 0.02  # 131072 draws: 14 standard deviations


@pytest.mark.parametrize(("dtype", "unit"), [("tf32", 2.0**-11), ("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_other_dtypes_train_as_on_the_cpu(dtype, unit):
    """
    The first loss is that of NumPy's path (for tf32 of float32) up to a rounding of each of the network's 20 layers.

    Then both fall; no step of float16 is skipped at a scale that suits.
    """
    if dtype not in arithmetic.supported_dtypes(GPU):
        pytest.skip(f"{GPU} has no {dtype}")
    random = np.random.default_rng(0)
    x, labels = random.standard_normal((6, *NETWORK.input_shape)), random.integers(0, 5, size=6, dtype=np.int32)
    options = {"mode": "training", "optimizer": "momentum", "learning_rate": 0.05, "seed": 1}
    on_cpu = {"device": attrs.evolve(probe.device("cpu"), threads=1), "dtype": "float32" if dtype == "tf32" else dtype}
    if dtype in {"float16", "bfloat16"}:
        on_cpu["operations"] = rounded.operations()
    losses = []
    for place in ({"device": GPU, "dtype": dtype, "context": our_kernels(dtype)}, on_cpu):
        with Model(NETWORK, **place, **options) as model:
            model.prepare(6)
            if dtype == "float16":
                model._stepper.loss_scale[loss_scale.SCALE] = 256
            losses.append([])
            for _ in range(10):
                model.load(x, labels)
                model.step()
                losses[-1].append(model.loss())
            assert model.skipped_steps == 0
    assert losses[0][0] == pytest.approx(losses[1][0], rel=20 * unit)
    assert all(found[-1] < found[0] for found in losses)


def test_an_overflow_on_the_gpu_changes_nothing_but_the_scale():
    """Scaled by 2^60 the step is skipped by the device itself; parameters and state keep every bit."""
    options = {"mode": "training", "optimizer": "adam", "dtype": "float16", "context": our_kernels("float16")}
    with Model(NETWORK, device=GPU, **options) as model:
        model.prepare(6)
        model.load_random()
        model._stepper.loss_scale[loss_scale.SCALE] = 2.0**60
        kept = [model._flat, model._stepper.master, *model._stepper.state]
        before = [array.get().tobytes() for array in kept]
        model.step()
        assert [array.get().tobytes() for array in kept] == before
        assert (model.loss_scale, model.skipped_steps) == (2.0**59, 1)


@pytest.mark.parametrize(
    ("library", "dtype"),
    [("im2col", "float32"), ("cubatch", "float32"), ("cubatch", "float16"), ("cubatch", "bfloat16")],
)
def test_the_pool_holds_what_was_planned(library, dtype):
    """What CuPy took from the device for a training step is the plan, up to 2 % and the pool's own rounding."""
    network = cb.models.build("resnet18", input_shape=(64, 64, 3))
    context = our_kernels(dtype) if library == "cubatch" else None
    with Model(network, device=GPU, mode="training", dtype=dtype, context=context) as model:
        model.prepare(16)
        model.load_random()
        model.step()
        model.loss()
        assert model.held_bytes <= 1.02 * model.plan.total + 128 * 2**20  # half of that is the clock's


def test_the_whole_walk():
    """Autotune measures on the GPU in a worker, by events, and answers."""
    result = cb.autotune("mnist-cnn", mode="training", device="cuda", budget=20.0, max_batch_size=4096, store=False)
    assert result.device["kind"] == "cuda"
    assert result.fastest_batch_size in {m.batch_size for m in result.measurements if m.status == "ok"}
    assert all(m.peak_bytes for m in result.measurements if m.status == "ok")
