"""Networks of thousands of layers: planned as small ones are, in a time that their number can be afforded in."""

from __future__ import annotations

import bisect
import functools
import math

import pytest
from hypothesis import given, strategies as st

from cubatch.hardware import catalogue
from cubatch.memory import plan, schedule
from cubatch.network.graph import INPUT, Network
from cubatch.network.layers import Add, BatchNorm2d, Conv2d, Dropout, Flatten, Linear, ReLU, Sigmoid
from cubatch.tuning.step_memory import footprint, max_batch_size


def placed(sizes, spans):
    """Place buffers one by one, each in the lowest gap between those that it meets: the rule, as it is written."""
    offsets, there = [0] * len(sizes), []
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        size, (first, last) = sizes[number], spans[number]
        if not size:
            continue
        offset = 0
        for start, end, begins, ends in there:
            if ends >= first and begins <= last:
                if start - offset >= size:
                    break
                offset = max(offset, end)
        offsets[number] = offset
        bisect.insort(there, (offset, offset + size, first, last))
    return offsets, max((end for _, end, _, _ in there), default=0)


SPANS = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted).map(tuple)


@given(st.lists(st.tuples(st.integers(0, 9), SPANS), max_size=25), st.sampled_from([1, 256, 2**40, 2**62]))
def test_buffers_are_placed_where_the_rule_places_them(buffers, unit):
    """The same offsets as one by one, also where their sum is beyond 64 bits."""
    sizes, spans = [unit * count for count, _ in buffers], [span for _, span in buffers]
    assert plan._place(sizes, spans) == placed(sizes, spans)


def segments(network):
    """Find where segments may end: where one output alone, of the layer before, is read there or later."""
    writer = schedule._Writer(network, "training", single=False)
    nodes, flow = network.nodes, writer.flow
    last = {origin: max(nodes.index(node) for node in readers) for origin, readers in flow.readers.items()}
    found = []
    for i in range(1, len(nodes)):
        live = {origin for origin in last if last[origin] >= i and origin in {node.name for node in nodes[:i]}}
        if live == {flow.origin[nodes[i - 1].name]} and writer.overwritten(nodes[i]) is None:
            found.append(i)
    return found


@st.composite
def networks(draw):
    """Draw chains with branches: some layers read one above the last."""
    layers = []
    for number in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from([Conv2d, BatchNorm2d, ReLU, Dropout, Add]))
        options = {"k": 4, "r": 3, "s": 3, "pad": 1} if kind is Conv2d else {}
        if kind is Add and number:
            options["inputs"] = [f"n{number - 1}", f"n{draw(st.integers(0, number - 1))}"]
        elif kind is Add:
            kind = ReLU
        layers.append(kind(name=f"n{number}", **options))
    end = [Flatten(name="f"), Linear(k=3, name="l")] if draw(st.booleans()) else []
    return Network(input_shape=(4, 4, 4), layers=[*layers, *end])


@given(networks())
def test_segments_end_only_where_one_output_is_all_that_lives(network):
    """The same cuts as by looking at all that lives at each place, of which those are taken that divide evenly."""
    possible, sizes = segments(network), [math.prod(node.layer.output_shape) for node in network.nodes]
    share, held, expected = sum(sizes) / max(1, math.isqrt(len(possible))), 0, []
    for i, size in enumerate(sizes, start=1):
        held += size
        if held >= share and i in possible:
            expected.append(i)
            held = 0
    assert schedule._Writer(network, "training", single=False).cuts() == [*expected, len(network.nodes)]


@functools.cache
def chain(count):
    """Give a network of so many layers, a sum over one of them among each five."""
    layers = []
    for number in range(count // 5):
        name, before = f"b{number}", f"b{number - 1}.sum" if number else INPUT
        layers += [
            Conv2d(k=8, r=3, s=3, pad=1, name=f"{name}.conv", inputs=[before]), BatchNorm2d(name=f"{name}.norm"),
            ReLU(name=f"{name}.relu"), Conv2d(k=8, r=1, s=1, name=f"{name}.last"),
            Add(name=f"{name}.sum", inputs=[f"{name}.last", before]),
        ]  # fmt: skip
    return Network(input_shape=(4, 4, 8), layers=layers)


@pytest.mark.parametrize("options", [{}, {"mode": "training"}, {"mode": "training", "recompute": True}], ids=str)
def test_a_network_of_thousands_of_layers_is_planned(options):
    """Its peak grows in proportion to its depth, or with the square root of that where it recomputes."""
    few, many = (footprint(chain(count), batch_size=2, device="cpu", **options).total for count in (250, 2000))
    assert (2.4 if "recompute" in options else 6) < many / few <= 8  # some memory is of no depth


def test_the_largest_batch_of_a_deep_network_is_found():
    """By plans of many sizes, each in a second or less."""
    net = chain(1000)
    most = max_batch_size(net, memory="64MiB", mode="training", device="cpu")
    totals = [footprint(net, batch_size=n, mode="training", device="cpu").total for n in (most, most + 1)]
    assert totals[0] <= 64 * 2**20 < totals[1]


@pytest.mark.parametrize("library", ["im2col", "cubatch"])
def test_equal_layers_are_sized_once(monkeypatch, library):
    """500 equal norms and sigmoids need no more workspace computations per batch size than two of each."""
    calls = []
    for name in ("kernel_workspace_bytes", "im2col_workspace_bytes"):
        whole = getattr(plan.workspace, name)
        monkeypatch.setattr(plan.workspace, name, lambda op, *rest, whole=whole: calls.append(op) or whole(op, *rest))
    counts = []
    for layers in (2, 500):
        pairs = [layer for _ in range(layers) for layer in (BatchNorm2d(), Sigmoid())]
        network = Network(input_shape=(8, 8, 4), layers=pairs)
        program = plan.schedule_of(network, "training", recompute=False, library=library)
        calls.clear()
        sizes = plan.buffer_sizes(program, 16, "float32", catalogue.find("v100-sxm2-16gb"), library)
        assert len(sizes) == len(program.buffers)
        counts.append(len(calls))
    assert counts[0] == counts[1] <= 6
