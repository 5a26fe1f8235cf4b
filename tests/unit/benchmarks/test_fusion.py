"""What the counter of moved bytes counts, by hand, and the lines that are made of it."""

from __future__ import annotations

from benchmarks.bench_fusion import launches, moved_elements
from benchmarks.pages.fusion import fusion
from cubatch.memory.schedule import schedule
from cubatch.network.graph import Network
from cubatch.network.layers import Add, BatchNorm2d, Conv2d, Linear, ReLU

FORKED = Network(
    input_shape=(2, 3, 8),
    layers=[
        Linear(name="a", k=8, bias=False),
        BatchNorm2d(name="b"),
        ReLU(name="c"),
        Conv2d(name="d", k=8, r=1, s=1),
        BatchNorm2d(name="e"),
        Add(name="f", inputs=["c", "e"]),
    ],
)
X, W = 5 * 2 * 3 * 8, 64


def counted(mode):
    """Elements and launches of each operation of five samples, by kind and layer."""
    program = schedule(FORKED, mode)
    buffers = program.buffers
    return {
        (op.kind, op.node.name if op.node else ""): (moved_elements(op, buffers, 5), launches(op, buffers))
        for op in program.ops
        if op.kind not in {"loss", "update"}
    }


def test_each_array_is_counted_as_often_as_it_is_gone_through():
    """Inference: two products, one with a branch. Training: a norm reads twice, a gradient reads slope and branch."""
    assert counted("inference") == {
        ("fold", ""): (0, 1),
        ("forward", "a"): (2 * X + W, 1),
        ("forward", "d"): (3 * X + W + 8, 1),
    }
    found = counted("training")
    assert found["forward", "b"] == (3 * X + 16, 3)
    assert found["forward", "e"] == (4 * X + 16, 3)
    assert found["backward", "e"] == (5 * X + 32, 3)
    # x and dy for the filter; dy, slope and branch for dx; the filter's gradient and the filter; a bias's sums.
    assert found["backward", "d"] == (6 * X + 2 * (W + 8), 3)
    assert found["backward", "a"] == (2 * X + W, 1)


def test_a_batch_of_three_channels_costs_a_copy_of_the_filter():
    """Stored with four: the filter before the forward pass, its gradient after it; one channel is stored as it is."""
    for channels, more in ((3, 1), (1, 0)):
        network = Network(input_shape=(4, 4, channels), layers=[Conv2d(k=8, r=3, s=3, bias=False)])
        program = schedule(network, "training", library="cubatch")
        found = {op.kind: launches(op, program.buffers) for op in program.ops if op.node}
        assert (found["forward"], found["backward"]) == (1 + more, 1 + more)


def test_a_line_names_both_counts_and_says_that_times_are_predicted():
    """A page that reads like a measurement would be false."""
    counts = {"operations": 141, "launches": 150, "bytes": 37.25e9, "predicted_seconds": 0.018}
    fewer = {"operations": 57, "launches": 58, "bytes": 14.6e9, "predicted_seconds": 0.0067}
    both = {"inference": counts, "training": counts}
    result = {
        "network": "resnet50", "batch_size": 256, "dtype": "float16", "commit": "b", "date": "2026-11-23",
        "before": {"commit": "a", **both}, "now": {"inference": fewer, "training": fewer},
    }  # fmt: skip
    line = fusion(result).splitlines()[0]
    for said in ("141 to 57 operations", "150 to 58 launches", "37.2 to 14.6 GB", "not measured"):
        assert said in line
