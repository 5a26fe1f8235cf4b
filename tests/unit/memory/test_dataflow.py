"""Who reads what, in small graphs worked out by hand."""

from __future__ import annotations

import pytest

from cubatch.memory.dataflow import Dataflow
from cubatch.network.graph import Network
from cubatch.network.layers import Add, BatchNorm2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, ReLU

NETWORK = Network(
    input_shape=(4, 4, 4),
    layers=[
        Dropout(name="drop"),
        Conv2d(name="a", k=4, r=1, s=1),
        ReLU(name="b"),
        MaxPool2d(name="c", r=2, s=2),
        ReLU(name="d"),
        Flatten(name="e"),
        Linear(name="f", k=16),
        ReLU(name="g"),
        Linear(name="h", k=16),
        Add(name="i", inputs=["g", "h"]),
    ],
)


def test_memory_has_an_origin_and_its_readers():
    """Flatten and a pooled ReLU are names of what they read, dropout in inference alone."""
    training, inference = (Dataflow(NETWORK, training=mode) for mode in (True, False))
    assert training.pooled == inference.pooled == {"b"}
    assert [training.origin[name] for name in ("drop", "b", "e", "g")] == ["drop", "a", "d", "g"]
    assert inference.origin["drop"] == "input"
    assert {name: [node.name for node in nodes] for name, nodes in inference.readers.items()} == {
        "input": ["a"], "a": ["c"], "c": ["d"], "d": ["f"], "f": ["g"], "g": ["h", "i"], "h": ["i"],
    }  # fmt: skip
    assert training.trained == {"a", "b", "c", "d", "e", "f", "g", "h", "i"}


def test_a_value_is_free_for_its_only_reader_unless_its_own_gradient_needs_it():
    """A ReLU's output is read again in the backward pass; the network's input stays, and what two read."""
    nodes = {node.name: node for node in NETWORK.nodes}
    for training in (True, False):
        flow = Dataflow(NETWORK, training=training)
        assert flow.is_done_with("h", nodes["i"])
        assert flow.is_done_with("f", nodes["g"])
        assert not flow.is_done_with("g", nodes["h"])
        assert flow.is_done_with("e", nodes["f"]) is not training
    assert not Dataflow(NETWORK, training=False).is_done_with("drop", nodes["a"])


@pytest.mark.parametrize(("reader", "slope"), [("a", None), ("c", None), ("f", "d"), ("h", "g"), ("i", None)])
def test_a_slope_is_applied_by_the_first_reader_if_that_is_a_product(reader, slope):
    """Through a flatten too; not by a max pool, whose argmax does it, nor by a sum, which is no product."""
    flow = Dataflow(NETWORK, training=True)
    found = flow.slope(flow.nodes[reader])
    assert (found and found.name) == slope


@pytest.mark.parametrize(
    ("layers", "slope"),
    [
        ([Conv2d(name="first", inputs=["r"], k=4, r=1, s=1), BatchNorm2d(name="n", inputs=["r"])], "r"),
        ([BatchNorm2d(name="n", inputs=["r"]), Conv2d(name="first", inputs=["r"], k=4, r=1, s=1)], None),
        ([Conv2d(name="first", inputs=["r"], k=4, r=1, s=1, groups=4), BatchNorm2d(name="n", inputs=["r"])], None),
        ([Flatten(name="v", inputs=["r"]), Linear(name="first", k=64), Linear(name="n", inputs=["r"], k=4)], None),
    ],
)  # fmt: skip
def test_of_several_readers_the_last_to_contribute_decides(layers, slope):
    """Backward the first in the network comes last; a depthwise convolution has no epilogue, and a view no say."""
    ends = [Flatten(name="x", inputs=["n"]), Linear(name="y", k=64), Flatten(name="z", inputs=["first"]), Linear(k=64)]
    ends.append(Add(inputs=["y", ends[-1].name or f"layer{len(layers) + 6}"]))
    network = Network(input_shape=(4, 4, 4), layers=[Conv2d(name="o", k=4, r=1, s=1), ReLU(name="r"), *layers, *ends])
    flow = Dataflow(network, training=True)
    found = flow.slope(flow.nodes["first"])
    assert (found and found.name) == slope
