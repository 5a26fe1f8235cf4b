"""A step as a CUDA graph: it computes what launches one by one do, and what no graph can hold stops its capture."""

from __future__ import annotations

import json

import pytest

from tests.cudasim.simulation import NEEDS, cubatch, python

pytestmark = NEEDS

TUNE = (
    "tune", "mnist-cnn", "--no-store", "--json", "-", "--budget", "600", "--device", "cuda", "--batch-sizes", "2,4",
)  # fmt: skip

TRAINING = """
    import hashlib, json, sys
    import numpy as np
    from cubatch.engine.network import Model
    from cubatch.hardware import probe
    from cubatch.measure import kernel_context
    from cubatch.network.graph import Network
    from cubatch.network.layers import Conv2d, Dropout, Flatten, Linear, ReLU

    NETWORK = Network(input_shape=(6, 6, 8), layers=[
        Conv2d(k=8, r=3, s=3, pad=1), ReLU(), Dropout(p=0.3), Flatten(), Linear(k=16), Dropout(), Linear(k=5),
    ])
    GPU = probe.device("cuda")
    random = np.random.default_rng(0)
    DATA = [(random.standard_normal((4, 6, 6, 8), dtype=np.float32), random.integers(0, 5, 4)) for _ in range(5)]

    def trained(optimizer, dtype, *, graphs, spoil=None):
        context = kernel_context.kernel_context(GPU, dtype, overlaps=True, seconds=0.0, path=None)
        with Model(NETWORK, device=GPU, mode="training", dtype=dtype, optimizer=optimizer, context=context,
                   seed=3, graphs=graphs) as model:
            model.prepare(4)
            if dtype == "float16":
                model._stepper.loss_scale[0] = 2.0**22  # some steps overflow
            if spoil:
                model._program.works[0][0].insert(1, spoil)
            digest, losses, launch = hashlib.sha256(), [], []
            for number, (images, labels) in enumerate(DATA):
                model.learning_rate = 0.1 / (1 + number // 2)
                model.load(images, labels)
                model.step()
                losses.append(model.loss())
                launch.append(model.launch)
                for array in (model._flat, *model._stepper.arrays):
                    digest.update(array.get().tobytes())
            return {"digest": digest.hexdigest(), "losses": losses, "launch": launch, "skipped": model.skipped_steps}
"""


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("sgd", "float32"), ("momentum", "float32"), ("adam", "float32"), ("adam", "float16")]
)
def test_five_steps_as_graphs_are_those_of_launches_to_the_bit(optimizer, dtype, late):
    """
    Parameters, state and loss after each, with dropout, a learning rate that falls and, in float16, skipped steps.

    The first step is launched as ever, the others are graphs, and every step draws masks of its own.
    """
    code = f"""
    one, other = (trained({optimizer!r}, {dtype!r}, graphs=graphs) for graphs in (False, True))
    assert one["digest"] == other["digest"], (one, other)
    assert one["losses"] == other["losses"]
    assert (one["skipped"] > 0) == ({dtype!r} == "float16")
    assert [found["graph"] for found in other["launch"]] == [False] + 4 * [True], other
    assert not any(found["graph"] for found in one["launch"])
    assert one["launch"][0]["launches"] == other["launch"][0]["launches"] > 10
    print("same")
    """
    assert python(TRAINING + code, devices="a100", late=late) == "same"


ADDED_UP = """
    def added_up(graphs):
        context = kernel_context.kernel_context(GPU, "bfloat16", overlaps=True, seconds=0.0, path=None)
        options = {"mode": "training", "dtype": "bfloat16", "optimizer": "adam", "learning_rate": 0.1}
        with Model(NETWORK, device=GPU, context=context, seed=3, graphs=graphs, **options) as model:
            model.prepare(4, 8)
            for number, (images, labels) in enumerate(DATA[:4]):
                model.load(images, labels)
                model.step()
                if number % 2:
                    model.update()
            kept = model.snapshot()
            return {name: array.tobytes() for name, array in kept.items()}, model.launch
"""


def test_gradients_are_added_up_beside_graphs_to_the_bit():
    """Two steps of two batches: passes as graphs, sums and the optimiser's step beside them, give what launches do."""
    code = """
    one, other = added_up(False), added_up(True)
    assert one[0] == other[0]
    assert (one[1]["graph"], other[1]["graph"], other[1]["refusal"]) == (False, True, None), other[1]
    print("same")
    """
    assert python(TRAINING + ADDED_UP + code, devices="a100") == "same"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("float(word[0])", "RuntimeError: the current stream is capturing"),
        ("cupy.cuda.get_current_stream().synchronize()", "CUDARuntimeError: cudaErrorStreamCaptureUnsupported"),
        ("cupy.empty(1 << 20)", "MemoryError: the step allocates 8388608 bytes while it runs"),
    ],
)
def test_what_a_graph_cannot_hold_falls_back_and_says_so(spoil, said):
    """A planted copy to the host, wait or array: steps are launched as ever, to the same bits; the reason is kept."""
    code = f"""
    import cupy
    word = cupy.ones(1)
    found = trained("momentum", "float32", graphs=True, spoil=lambda: {spoil})
    assert found["digest"] == trained("momentum", "float32", graphs=False)["digest"]
    print(found["launch"][-1]["graph"], found["launch"][-1]["refusal"])
    """
    assert python(TRAINING + code, devices="a100").startswith(f"False {said}")


@pytest.mark.parametrize(
    ("fault", "said"), [("graph:begin", "NotSupported"), ("graph:instantiate", "MemoryAllocation")]
)
def test_a_driver_that_refuses_costs_the_graph_and_nothing_else(fault, said):
    """Whatever it says to a capture or a graph, steps are launched as ever."""
    code = """
    found = trained("sgd", "float32", graphs=True)
    assert found["digest"] == trained("sgd", "float32", graphs=False)["digest"]
    print(found["launch"][-1]["graph"], found["launch"][-1]["refusal"])
    """
    found = python(TRAINING + code, devices="a100", faults=fault)
    assert found.startswith("False CUDARuntimeError")
    assert said in found


def test_a_graph_that_cannot_be_launched_is_named():
    """The driver's status of the launch is that of a step's graph."""
    found = python(TRAINING + """
    from cubatch.errors import DeviceFailed
    try:
        trained("sgd", "float32", graphs=True)
    except DeviceFailed as error:
        print(error)
    """, devices="a100", faults="graph:launch")  # fmt: skip
    assert found == "launching a step's graph failed with CUDA driver status 719"


@pytest.mark.parametrize(("fault", "is_graph"), [("", True), ("graph:begin", False)])
def test_tuning_says_how_steps_were_launched(fault, is_graph):
    """In the result's environment, by the worker's runner; where they are no graph, one sentence says why."""
    result = json.loads(cubatch(*TUNE, devices="a100", late=True, faults=fault).stdout)
    assert all(m["timings_seconds"] for m in result["measurements"])
    launch = result["environment"]["launch"]
    assert (launch["graph"], launch["refusal"] is None) == (is_graph, is_graph)
    assert launch["launches"] > 3
    assert any("no CUDA graph" in reason for reason in result["reasons"]) == (not is_graph)


def test_a_kernel_that_faults_in_a_graph_is_told_to_have_been_in_one():
    """The first step of a size runs it by itself, so the fault is planted behind it; the worker ends, the tuner not."""
    code = (
        TRAINING
        + """
    import os
    from cubatch.measure.replies import describe_error
    from cubatch.worker import _Worker
    from cubatch.measure import clocks
    from cubatch.measure.network_runner import NetworkRunner
    context = kernel_context.kernel_context(GPU, "float32", overlaps=True, seconds=0.0, path=None)
    worker = _Worker()
    model = Model(NETWORK, device=GPU, mode="training", context=context)
    worker._runner = NetworkRunner(model, clocks.cupy_clock(None))
    worker.prepare(4)
    worker.time(3)
    import ctypes
    ctypes.CDLL(None).setenv(b"CUDASIM_FAULTS", b"trap:dropout", 1)
    try:
        worker.time(2)
    except Exception as error:
        print(describe_error(error)["text"], flush=True)
    os._exit(0)
    """
    )
    assert "It happened in a step's graph of" in python(code, devices="a100")
