"""Steps as CUDA graphs on a GPU: the bits of launches one by one, memory given back; skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.engine import loss_scale
from cubatch.engine.network import Model
from cubatch.hardware import arithmetic, memory_limit as hardware_memory
from cubatch.measure import kernel_context
from cubatch.network.graph import Network
from cubatch.network.layers import BatchNorm2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, ReLU
from tests.gpu.here import GPU, NEEDS_GPU

pytestmark = NEEDS_GPU

NETWORK = Network(
    input_shape=(9, 8, 8),
    layers=[
        Conv2d(k=16, r=3, s=3, stride=2, pad=1), BatchNorm2d(), ReLU(), MaxPool2d(r=2, s=2), Dropout(p=0.3),
        Flatten(), Linear(k=16), ReLU(), Dropout(), Linear(k=5),
    ],
)  # fmt: skip


def trained(optimizer, dtype, *, graphs):
    """Five steps with a learning rate that falls; what is left of them, bit by bit."""
    random = np.random.default_rng(0)
    context = kernel_context.kernel_context(GPU, dtype, overlaps=True, seconds=0.0, path=None)  # the same variants
    options = {"mode": "training", "optimizer": optimizer, "dtype": dtype, "seed": 3, "context": context}
    with Model(NETWORK, device=GPU, graphs=graphs, **options) as model:
        model.prepare(6)
        if dtype == "float16":
            model._stepper.loss_scale[loss_scale.SCALE] = 2.0**24  # the first steps overflow
        found = []
        for number in range(5):
            model.load(random.standard_normal((6, *NETWORK.input_shape)), random.integers(0, 5, 6))
            model.learning_rate = 0.1 / (1 + number)
            model.step()
            assert model.launch["graph"] == (graphs and number > 0), model.launch
            found.append(model.loss())
        arrays = (model._flat, *model._stepper.arrays, *(a for state in model.states.values() for a in state.values()))
        return found, [array.get().tobytes() for array in arrays], model.skipped_steps


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [("sgd", "float32"), ("momentum", "float32"), ("adam", "float32"), ("adam", "float16"), ("momentum", "bfloat16")],
)
def test_five_steps_as_graphs_are_those_of_launches_to_the_bit(optimizer, dtype):
    """Losses, parameters, optimiser and running statistics, with dropout and, in float16, skipped steps."""
    if dtype not in arithmetic.supported_dtypes(GPU):
        pytest.skip(f"{GPU} has no {dtype}")
    one, other = (trained(optimizer, dtype, graphs=graphs) for graphs in (False, True))
    assert one == other
    assert (one[2] > 0) == (dtype == "float16")


def test_what_a_graph_keeps_is_given_back_with_its_batch():
    """
    Among twenty batches prepared, captured and released, four in a row leave the driver no poorer, but for 3 MiB each.

    The driver knows what is free of a GPU, which others take and give back too, and NVML in a container often does not
    know this process: what others do is in some of the rows, what a batch kept would be in all of them.  Where nobody
    else holds much of it, all twenty leave it no poorer, but for 64 MiB.
    """
    import cupy

    others = hardware_memory.memory_limit(GPU).others

    context = kernel_context.kernel_context(GPU, "float32", overlaps=True, seconds=0.0, path=None)
    with Model(NETWORK, device=GPU, mode="training", context=context) as model:
        free = []
        for _ in range(20):
            model.prepare(6)
            model.load_random()
            for _ in range(3):
                model.step()
            model.loss()
            assert model.launch["graph"]
            model.release()
            free.append(cupy.cuda.runtime.memGetInfo()[0])
    assert min(before - after for before, after in zip(free, free[4:], strict=False)) < 12 << 20, free
    others = others or hardware_memory.memory_limit(GPU).others
    assert others or free[0] - free[-1] < 64 << 20, free
