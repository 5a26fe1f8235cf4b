"""What importers share: axes of foreign tensors, the builder on steps written by hand, and weights of a network."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cubatch.errors import InvalidSpec, UnknownName
from cubatch.network import importers
from cubatch.network.graph import Network
from cubatch.network.importers import onnx_operators, torch_operators
from cubatch.network.importers.axes import Atom, joined, laid_out, places, reshaped
from cubatch.network.importers.building import Builder
from cubatch.network.importers.layer_rules import RULES
from cubatch.network.importers.refusal import UnsupportedOperator
from cubatch.network.importers.source import Source, Step, einsum_flop
from cubatch.network.layers import LAYERS, Linear, ReLU

# --- axes ------------------------------------------------------------------------------------------------------


def at(dims, batch_size, extents):
    """A foreign tensor of these axes whose elements say where each lies of ours, (n, h, w, c) in order."""
    h, w, c = extents
    strides = {"n": h * w * c, "h": w * c, "w": c, "c": 1}
    found = np.zeros((), dtype=int)
    for atoms in dims:
        steps = np.zeros(1, dtype=int)
        for atom in atoms:
            steps = np.add.outer(steps, np.arange(atom.size) * atom.stride * strides[atom.label]).reshape(-1)
        found = np.add.outer(found, steps)
    assert found.size == batch_size * math.prod(extents)
    return found


@given(data=st.data())
def test_axes_follow_every_reshape_and_permutation(data):
    """Where the atoms say that an element lies is where NumPy's own reshapes and transposes put it."""
    extents = data.draw(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 3]), st.sampled_from([1, 4, 6])))
    dims = laid_out("nchw", 2, extents)
    numbers = np.arange(2 * math.prod(extents)).reshape(2, *extents).transpose(0, 3, 1, 2)
    for _ in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(range(numbers.ndim)))
            dims, numbers = tuple(dims[axis] for axis in order), numbers.transpose(order)
        else:
            rows = data.draw(st.sampled_from([d for d in range(1, numbers.size + 1) if numbers.size % d == 0]))
            shape = data.draw(st.sampled_from([(rows, numbers.size // rows), (1, rows, 1, numbers.size // rows)]))
            found = reshaped(dims, shape)
            if found is None:
                return
            dims, numbers = found, numbers.reshape(shape)
        np.testing.assert_array_equal(at(dims, 2, extents), numbers)


def test_a_reshape_that_cuts_across_axes_is_none():
    """6 channels do not divide into 4 and something, whatever follows them."""
    assert reshaped(laid_out("nchw", 2, (2, 1, 6)), (2, 4, 3)) is None
    assert reshaped(laid_out("nc", 2, (1, 1, 6)), (2, 7)) is None
    assert joined([Atom("c", 2, 3), Atom("c", 3, 1)]) == (Atom("c", 6),)


def test_places_are_of_the_transposed_image():
    """Feature j of a flattened (c, h, w) lies where NumPy finds it in (h, w, c)."""
    extents = (2, 3, 4)
    (_, atoms) = reshaped(laid_out("nchw", 5, extents), (5, 24))
    want = np.arange(24).reshape(extents).transpose(2, 0, 1).reshape(-1)
    assert places(atoms, extents) == want.tolist()


# --- the builder -----------------------------------------------------------------------------------------------


def step(kind, read, result, shape, constants=None, **options):
    """A step of a source written by hand, which reads values by name."""
    return Step(
        kind=kind, operator=f"Op{kind}", place=f"at.{result}", reads=tuple(read.split()), result=result, shape=shape,
        constants=constants or {}, options=options,
    )  # fmt: skip


def built(*steps, shape=(2, 3, 4, 5), fallback=None):
    """The network of some steps."""
    source = Source(name="hand", input="x", input_shape=shape, steps=steps, output=steps[-1].result)
    return Builder(source, RULES, fallback).network()


def test_steps_become_layers_named_by_their_place():
    """A reshape makes none, names are unique, and what nobody reads is neither read nor refused."""
    net = built(
        step("relu", "x", "a", (2, 3, 4, 5)),
        step("nothing known", "a", "unread", (2, 3, 4, 5)),
        step("sigmoid", "a", "b", (2, 3, 4, 5)),
        step("mul", "b a", "c", (2, 3, 4, 5)),
        step("reshape", "c", "d", (2, 60)),
        step("linear", "d", "e", (2, 7), {"w": np.ones((7, 60))}),
    )
    assert [(node.name, node.layer.type, node.inputs) for node in net.nodes] == [
        ("at.a", "relu", ("input",)), ("at.c", "silu", ("at.a",)), ("at.e.flatten", "flatten", ("at.c",)),
        ("at.e", "linear", ("at.e.flatten",)),
    ]  # fmt: skip
    assert (net.name, net.input_shape, net.output_shape) == ("hand", (4, 5, 3), (1, 1, 7))
    assert Network(**{**net.to_mapping(), "layers": net.to_mapping()["layers"]}) == net


def test_what_a_layer_refuses_is_told_with_the_operator_and_its_place():
    """A window larger than its input: the layer's own words, behind the operator's name and place."""
    window = {"window": (9, 9), "stride": (1, 1), "pad": (0, 0, 0, 0), "ceil": False, "dilation": (1, 1)}
    with pytest.raises(UnsupportedOperator, match=r"Opmax_pool at 'at.a' cannot be imported: .* at most 4"):
        built(step("max_pool", "x", "a", (2, 3, 1, 1), **window))


@pytest.mark.parametrize(("shape", "ours"), [((2, 6, 3), (6, 1, 3)), ((2, 9), (1, 1, 9))])
def test_tokens_and_features_are_inputs_too(shape, ours):
    """(n, tokens, c) and (n, features)."""
    assert built(step("relu", "x", "a", shape), shape=shape).input_shape == ours


def test_an_input_of_another_rank_is_refused():
    """Of video, for one."""
    with pytest.raises(InvalidSpec, match="channels, height, width"):
        built(step("relu", "x", "a", (2, 3, 4, 5, 6)), shape=(2, 3, 4, 5, 6))


# --- weights ---------------------------------------------------------------------------------------------------


def test_weights_are_no_part_of_what_a_network_is():
    """Equal and as a mapping alike with weights and without; kept when it is evolved."""
    with_weights = Network(input_shape=(1, 1, 3), layers=[Linear(name="fc", k=2)], weights={"fc": {"b": np.ones(2)}})
    without = Network(input_shape=(1, 1, 3), layers=[Linear(name="fc", k=2)])
    assert with_weights == without
    assert hash(with_weights) == hash(without)
    assert with_weights.to_mapping() == without.to_mapping()


@pytest.mark.parametrize(
    ("weights", "error", "told"),
    [
        ({"nope": {}}, UnknownName, "layer in weights 'nope'"),
        ({"fc": {"v": np.ones(2)}}, UnknownName, "array in weights of fc 'v'"),
        ({"fc": {"w": np.ones((3, 2))}}, InvalidSpec, r"weights\['fc'\]\['w'\] must be of shape \(2, 3\)"),
        ({"fc": {"b": [1.0, 2.0]}}, InvalidSpec, r"weights\['fc'\]\['b'\] must be an array, got \[1.0, 2.0\]\. numpy"),
        ({"fc": np.ones(2)}, InvalidSpec, r"weights\['fc'\] must be a mapping of arrays by name"),
    ],
)
def test_weights_that_fit_no_layer_are_refused(weights, error, told):
    """A layer that is not there, an array that it has not, another shape."""
    with pytest.raises(error, match=told):
        Network(input_shape=(1, 1, 3), layers=[Linear(name="fc", k=2), ReLU()], weights=weights)


# --- the table of operators --------------------------------------------------------------------------------------


def table():
    """Rows of the table of operators: the names in backticks of each column."""
    text = Path(importers.__file__).with_name("README.md").read_text(encoding="utf-8")
    for line in re.findall(r"^\|(?! ---| layer)(.*)\|$", text, re.MULTILINE):
        yield [set(re.findall(r"`(\w+)`", column)) for column in line.split("|")]


def test_the_table_has_every_operator_and_layer():
    """What the front ends know is what the table says they know."""
    rows = list(table())
    listed = [set().union(*(columns[place] for columns in rows)) for place in range(3)]
    assert {f"aten.{name}" for name in listed[1]} == set(torch_operators.OPERATORS) | torch_operators.SEVERAL
    assert listed[2] == set(onnx_operators.OPERATORS) | {"Split"}
    assert listed[0] == set(LAYERS) - {"opaque"}


@pytest.mark.parametrize(
    ("equation", "shapes", "flop"),
    [
        ("...ij, jk -> ...ik", [(2, 3, 5, 4), (4, 7)], 2 * 2 * 3 * 5 * 4 * 7),
        ("...ij,...jk", [(3, 5, 4), (2, 1, 4, 7)], 2 * 2 * 3 * 5 * 4 * 7),
        ("i...,i->...", [(4, 5), (4,)], 2 * 4 * 5),
        ("...i,i", [(4,), (4,)], 2 * 4),
        ("ij,jk", [(2, 3, 4), (4, 5)], 0),
        ("...ijk,k", [(3, 4), (4,)], 0),
    ],
)
def test_dots_of_an_einstein_sum_are_the_axes_that_are_left(equation, shapes, flop):
    """Aligned at their ends, one position beside several; axes that no letter and no dots are for are no sum."""
    assert einsum_flop(equation, shapes) == flop
