"""Networks and spec files: connections, extents, what is refused and how it is said."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cubatch.errors import InvalidArgument, InvalidSpec, UnknownName
from cubatch.network.graph import Network, SuspiciousSpec, as_network
from cubatch.network.layer import Layer
from cubatch.network.layers import LAYERS, Add, Concat, Conv2d, Flatten, GlobalAvgPool, Linear, MaxPool2d, ReLU, Scale
from cubatch.network.passes import Pass
from cubatch.network.specfile import from_mapping, load_spec

REFERENCE = (Path(__file__).parents[3] / "docs/reference/files.md").read_text(encoding="utf-8")
(TINY_RESNET,) = re.findall(r"```toml\n(name = \"tiny-resnet\".*?)```", REFERENCE, re.DOTALL)


def conv(k: int = 4, **values: Any) -> Conv2d:
    return Conv2d(**{"k": k, "r": 3, "s": 3, "pad": 1, **values})


def net(*layers: Layer | dict[str, Any], shape: Any = (8, 8, 2)) -> Network:
    return Network(input_shape=shape, layers=layers)


# --- graphs --------------------------------------------------------------------------------------------------


def test_a_layer_reads_the_one_before_unless_told() -> None:
    """Without names and inputs layers are a chain, named by position."""
    chain = net(conv(), ReLU(), Flatten())
    assert [(node.name, node.inputs) for node in chain.nodes] == [
        ("layer1", ("input",)),
        ("layer2", ("layer1",)),
        ("layer3", ("layer2",)),
    ]


def test_extents_follow_branches() -> None:
    """Concatenation sums channels, addition keeps them, and each branch infers its own extents."""
    graph = net(
        conv(4, name="a"),
        conv(6, name="b", inputs=("input",)),
        Concat(name="ab", inputs=("a", "b")),
        conv(10, name="c"),
        Add(inputs=("ab", "c", "ab")),
    )
    assert [node.layer.output_shape[2] for node in graph.nodes] == [4, 6, 10, 10, 10]
    assert graph.nodes[2].layer.input_shapes == ((8, 8, 4), (8, 8, 6))
    assert len(graph.nodes[4].layer.input_shapes) == 3


def test_scale_takes_one_factor_per_channel() -> None:
    """Squeeze-and-excite multiplies (h, w, c) by (1, 1, c) and keeps the first shape."""
    graph = net(conv(name="x"), GlobalAvgPool(name="f"), Scale(inputs=("x", "f")))
    assert graph.output_shape == (8, 8, 4)


def test_parameters_and_flops_are_sums_over_layers() -> None:
    """The network's counts are those of its layers by hand: 3x3x2x4+4 and 4x10+10."""
    graph = net(conv(4), GlobalAvgPool(), Linear(k=10))
    assert graph.parameters == (9 * 2 * 4 + 4) + (4 * 10 + 10)
    assert graph.flops() == 2 * (64 * 9 * 2 * 4 + 4 * 10)


def test_training_skips_the_gradient_of_the_input() -> None:
    """Of two convolutions, the first does two products in training, the second all three."""
    graph = net(conv(4), conv(5))
    first, second = 2 * 64 * 9 * 2 * 4, 2 * 64 * 9 * 4 * 5
    assert graph.flops("training") == 2 * first + 3 * second
    assert [graph.wants_input_gradient(node) for node in graph.nodes] == [False, True]


def test_training_skips_what_was_counted_of_an_unpadded_filter() -> None:
    """6 x 6 outputs on 8 x 8 pixels: what the first filter would do for its input is as much as it does forward."""
    graph = net(conv(4, pad=0), conv(5, pad=0))
    first, second = 2 * 36 * 9 * 2 * 4, 2 * 16 * 9 * 4 * 5
    assert graph.flops("training") == 2 * first + 3 * second


def test_gradients_stop_where_nothing_below_is_trained() -> None:
    """A pool in front of the first filter needs no gradient, nor does the filter's input."""
    graph = net(MaxPool2d(r=2, s=2), ReLU(), conv(), ReLU())
    assert [graph.wants_input_gradient(node) for node in graph.nodes] == [False, False, False, True]


def test_a_single_layer_does_all_three_passes() -> None:
    """The contract: a layer by itself is counted with the gradient of its input."""
    layer = conv(4, h=8, w=8, c=2)
    assert layer.flops("training") == 3 * layer.flops()


def test_a_single_layer_becomes_a_network_of_its_own_type() -> None:
    """Reasons and tables name a lone layer by its type, or by its own name."""
    assert as_network(Linear(c=10, k=3)).nodes[0].name == "linear"
    assert as_network(Linear(c=10, k=3, name="head")).nodes[0].name == "head"
    assert as_network(Linear(c=10, k=3)).input_shape == (1, 1, 10)


def test_networks_are_hashable_and_survive_pickling() -> None:
    """Memory plans are cached by network and workers get them by pipe."""
    graph = net(conv(4), GlobalAvgPool(), Linear(k=10))
    again = pickle.loads(pickle.dumps(graph))
    assert again == graph
    assert hash(again) == hash(graph)
    assert again.wants_input_gradient(again.nodes[2])


def test_numpy_integers_are_integers() -> None:
    """Extents from array shapes are taken as they come, and stored as Python's."""
    graph = net(conv(np.int32(4)), shape=(np.int64(8), 8, 2))
    assert type(graph.input_shape[0]) is int
    assert type(graph.layers[0].k) is int


# --- files and mappings --------------------------------------------------------------------------------------


def test_the_contracts_toml_example_loads(tmp_path: Path) -> None:
    """The example in the reference is a network: two convolutions that an addition joins."""
    path = tmp_path / "net.toml"
    path.write_text(TINY_RESNET, encoding="utf-8")
    loaded = load_spec(path)
    assert isinstance(loaded, Network)
    assert (loaded.name, loaded.output_shape) == ("tiny-resnet", (32, 32, 16))
    assert [layer.type for layer in loaded.layers] == ["conv2d", "relu", "conv2d", "add"]
    assert loaded.parameters == (27 * 16 + 16) + (9 * 16 * 16 + 16)


def test_json_says_the_same_as_toml(tmp_path: Path) -> None:
    """One network, written both ways, loads equal; without a name it has the file's."""
    toml, text = tmp_path / "net.toml", tmp_path / "tiny-resnet.json"
    toml.write_text(TINY_RESNET, encoding="utf-8")
    mapping = load_spec(toml).to_mapping()
    del mapping["name"]
    text.write_text(json.dumps(mapping), encoding="utf-8")
    assert load_spec(str(text)) == load_spec(toml)


def test_a_file_may_hold_a_single_layer(tmp_path: Path) -> None:
    """A mapping with a type and extents of its own is that layer."""
    path = tmp_path / "layer.toml"
    path.write_text('type = "linear"\nc = 1000\nk = 100\n', encoding="utf-8")
    assert load_spec(path) == Linear(c=1000, k=100)


EXTENT = st.integers(1, 9)
PADS = st.one_of(
    st.integers(0, 3),
    st.lists(st.integers(0, 3), min_size=2, max_size=2),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
PAIRS = st.one_of(st.integers(1, 3), st.lists(st.integers(1, 3), min_size=2, max_size=2))
FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "conv2d": {
        "k": EXTENT,
        "r": EXTENT,
        "s": EXTENT,
        "stride": PAIRS,
        "pad": PADS,
        "dilation": PAIRS,
        "bias": st.booleans(),
    },
    "linear": {"k": EXTENT, "bias": st.booleans()},
    "max_pool2d": {"r": EXTENT, "s": EXTENT, "stride": PAIRS, "pad": PADS, "ceil": st.booleans()},
    "avg_pool2d": {"r": EXTENT, "s": EXTENT, "stride": PAIRS, "ceil": st.booleans(), "count_pad": st.booleans()},
    "batch_norm2d": {"eps": st.floats(1e-9, 1), "momentum": st.floats(0, 1)},
    "layer_norm": {"eps": st.floats(1e-9, 1)},
    "dropout": {"p": st.floats(0, 0.99)},
    "concat": {"channels": st.lists(st.integers(1, 4), min_size=2, max_size=4)},
    "slice": {"start": st.integers(0, 3), "end": st.integers(4, 9)},
    "add": {"count": st.integers(2, 5)},
    "attention": {"heads": EXTENT, "bias": st.booleans()},
    "opaque": {
        "operator": st.text("abc.:", min_size=1),
        "output": st.none() | st.tuples(EXTENT, EXTENT, EXTENT),
        "others": st.lists(st.tuples(EXTENT, EXTENT, EXTENT), max_size=2),
        "flop": st.integers(0, 9),
    },
}


@given(kind=st.sampled_from(sorted(LAYERS)), data=st.data())
def test_every_layer_survives_the_round_trip_through_json(kind: str, data: st.DataObject) -> None:
    """Whatever a layer was given, its mapping builds an equal one, also where all its numbers are the same."""
    values = {name: data.draw(strategy, label=name) for name, strategy in FIELDS.get(kind, {}).items()}
    layer = LAYERS[kind](**values, name=data.draw(st.none() | st.just("x")))
    again = from_mapping(json.loads(json.dumps(layer.to_mapping())))
    assert again == layer


# --- bad input -----------------------------------------------------------------------------------------------

BAD_NETWORKS: dict[str, tuple[dict[str, Any], str, str]] = {
    "zero": ({"layers": [{"type": "conv2d", "k": 0, "r": 3, "s": 3}]}, "layers[0] (conv2d).k", "0"),
    "negative pad": (
        {"layers": [{"type": "conv2d", "k": 4, "r": 3, "s": 3, "pad": [0, -1]}]},
        "layers[0] (conv2d).pad",
        "-1",
    ),
    "pad of three": (
        {"layers": [{"type": "conv2d", "k": 4, "r": 3, "s": 3, "pad": [0, 1, 2]}]},
        "layers[0] (conv2d).pad",
        "[top, bottom, left, right]",
    ),
    "huge output": ({"layers": [{"type": "linear", "k": 2**31 - 1}]}, "layers[0] (linear)", "outputs per sample"),
    "fraction": ({"layers": [{"type": "linear", "k": 2.5}]}, "layers[0] (linear).k", "2.5"),
    "bias of one": ({"layers": [{"type": "linear", "k": 4, "bias": 1}]}, "layers[0] (linear).bias", "true or false"),
    "filter too large": (
        {"layers": [{"type": "conv2d", "k": 4, "r": 11, "s": 3}]},
        "layers[0] (conv2d).r",
        "at most 8",
    ),
    "groups": (
        {"layers": [{"type": "conv2d", "k": 4, "r": 3, "s": 3, "groups": 3}]},
        "layers[0] (conv2d).groups",
        "c=2",
    ),
    "pad of a pool": (
        {"layers": [{"type": "max_pool2d", "r": 2, "s": 2, "pad": 2}]},
        "layers[0] (max_pool2d).pad",
        "smaller",
    ),
    "heads": ({"layers": [{"type": "attention", "heads": 3}]}, "layers[0] (attention).heads", "c=2"),
    "dropout": ({"layers": [{"type": "dropout", "p": 1.0}]}, "layers[0] (dropout).p", "below 1"),
    "eps": ({"layers": [{"type": "batch_norm2d", "eps": 0}]}, "layers[0] (batch_norm2d).eps", "above 0"),
    "missing": ({"layers": [{"type": "linear"}]}, "layers[0] (linear).k", "given"),
    "no type": ({"layers": [{"k": 3}]}, "layers[0].type", "conv2d"),
    "no mapping": ({"layers": ["relu"]}, "layers[0]", "mapping"),
    "empty": ({"layers": []}, "layers", "at least one layer"),
    "no layers": ({}, "layers", "given"),
    "cycle": (
        {"layers": [{"type": "add", "inputs": ["input", "b"]}, {"name": "b", "type": "relu"}]},
        "layers[0] (add).inputs",
        "'b' is at layers[1]",
    ),
    "twice": (
        {"layers": [{"name": "a", "type": "relu"}, {"name": "a", "type": "relu"}]},
        "layers[1] (relu).name",
        "layers[0]",
    ),
    "called input": ({"layers": [{"name": "input", "type": "relu"}]}, "layers[0] (relu).name", "network's input"),
    "unread": (
        {"layers": [{"name": "a", "type": "relu"}, {"type": "relu", "inputs": ["input"]}]},
        "layers[0] (relu)",
        "read by some layer",
    ),
    "add": (
        {"layers": [{"name": "a", "type": "flatten"}, {"type": "add", "inputs": ["a", "input"]}]},
        "layers[1] (add).inputs",
        "(8, 8, 2)",
    ),
    "concat": (
        {"layers": [{"name": "a", "type": "flatten"}, {"type": "concat", "inputs": ["a", "input"]}]},
        "layers[1] (concat).inputs",
        "(1, 1)",
    ),
    "slice": ({"layers": [{"type": "slice", "end": 3}]}, "layers[0] (slice).end", "at most 2"),
    "scale": ({"layers": [{"type": "scale", "inputs": ["input", "input"]}]}, "layers[0] (scale).inputs", "(1, 1, 2)"),
    "wrong extent": ({"layers": [{"type": "relu", "h": 9}]}, "layers[0] (relu).h", "inferred"),
}


@pytest.mark.parametrize("case", BAD_NETWORKS)
def test_bad_networks_name_place_value_and_what_would_do(case: str) -> None:
    """Whatever is wrong in a network is said with its path in the spec, and as a ValueError too."""
    changes, field, says = BAD_NETWORKS[case]
    with pytest.raises(InvalidSpec) as caught:
        from_mapping({"input_shape": [8, 8, 2], **changes})
    assert caught.value.field == field
    assert says in str(caught.value)
    assert caught.value.allowed
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("mapping", "near"),
    [
        ({"input_shape": [8, 8, 2], "layers": [{"type": "conv2", "k": 4}]}, "conv2d"),
        ({"input_shape": [8, 8, 2], "layers": [{"type": "conv2d", "k": 4, "r": 3, "s": 3, "strides": 2}]}, "stride"),
        ({"input_shape": [8, 8, 2], "layer": []}, "layers"),
        (
            {
                "input_shape": [8, 8, 2],
                "layers": [{"name": "stem", "type": "relu"}, {"type": "relu", "inputs": ["sten"]}],
            },
            "stem",
        ),
    ],
)
def test_typos_are_answered_with_near_names(mapping: dict[str, Any], near: str) -> None:
    """An unknown type, key or layer lists the one that was meant."""
    with pytest.raises(UnknownName) as caught:
        from_mapping({"layers": [{"type": "relu"}], **mapping})
    assert near in caught.value.near
    assert near in str(caught.value)


@pytest.mark.parametrize("shape", [(3, 224, 224), (1, 28, 28)])
def test_channels_first_draws_a_warning(shape: tuple[int, int, int]) -> None:
    """A shape that looks like (c, h, w) is taken as written, with a warning that shows the other order."""
    with pytest.warns(SuspiciousSpec, match=f"{shape[1]}, {shape[2]}, {shape[0]}"):
        net(ReLU(), shape=shape)


def test_a_forgotten_flatten_draws_a_warning() -> None:
    """A last linear layer that acts on each place of a map is taken as written, with a warning that says so."""
    with pytest.warns(SuspiciousSpec, match=r"10 numbers for each of 16x16 places; .* a flatten"):
        network = net(ReLU(), Linear(k=10), shape=(16, 16, 64))
    assert network.output_shape == (16, 16, 10)


@pytest.mark.filterwarnings("error")
def test_a_linear_layer_of_vectors_or_alone_draws_none() -> None:
    """One place is no map, nor is a row of tokens, and who measures a single layer means it."""
    net(ReLU(), Linear(k=10), shape=(1, 197, 192))
    net(Flatten(), Linear(k=10), shape=(16, 16, 64))
    net(Linear(k=10), shape=(16, 16, 64))


@pytest.mark.parametrize("shape", [(224, 224, 3), (3, 3, 3), (1, 1, 1000), (19, 19, 128), (1, 197, 192)])
def test_ordinary_shapes_draw_none(shape: tuple[int, int, int]) -> None:
    """Images, vectors, boards and token rows are not suspicious."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert net(ReLU(), shape=shape).output_shape == shape


def test_a_layer_that_stands_alone_needs_its_extents() -> None:
    """Without h, w, c a single layer cannot be counted, and the missing one is named."""
    with pytest.raises(InvalidSpec) as caught:
        conv(h=8, w=8).gemms(Pass.FPROP, 1)
    assert caught.value.field == "conv2d.c"


def test_several_inputs_need_a_network() -> None:
    """An add by itself has nothing to add."""
    with pytest.raises(InvalidSpec) as caught:
        as_network(Add(h=8, w=8, c=2))
    assert "network" in str(caught.value)


def test_mode_is_one_of_two() -> None:
    """A misspelt mode is refused wherever FLOP are counted."""
    with pytest.raises(InvalidArgument):
        net(conv()).flops("train")
