"""The kinds of layers as they are listed."""

from __future__ import annotations

import tomllib

import pytest

from cubatch.errors import UnknownName
from cubatch.network import kinds
from cubatch.network.graph import Network
from cubatch.network.layers import LAYERS

NAMES = [kind.type for kind in kinds.kinds()]


def test_every_kind_is_listed_with_a_line_and_a_meaning_of_each_key() -> None:
    """Nobody has to learn a key from an error."""
    assert list(LAYERS) == NAMES
    for kind in kinds.kinds():
        assert kind.does
        assert all(key.meaning for key in kind.keys), kind


@pytest.mark.filterwarnings("ignore::cubatch.network.graph.SuspiciousSpec")  # a linear layer on a map
@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_a_layer(name: str) -> None:
    """It reads as TOML, and a network takes it as it stands; without any of its keys it would not."""
    example = tomllib.loads(kinds.kind(name).example)["layers"][0]
    before = [{"type": "relu"}, {"type": "global_avg_pool" if name == "scale" else "relu"}]
    assert isinstance(Network(input_shape=(8, 8, 64), layers=[*before, example]).layers[-1], LAYERS[name])
    for key in set(example) - {"type", "inputs"}:
        with pytest.raises(ValueError, match=key):
            Network(input_shape=(8, 8, 64), layers=[{k: v for k, v in example.items() if k != key}])


def test_defaults_are_those_of_the_records() -> None:
    """By name, as a spec file would write them, and None where a key must be given."""
    keys = {key.name: key.default for key in kinds.kind("conv2d").keys}
    assert keys == {
        "k": None, "r": None, "s": None, "stride": "1", "pad": "0", "dilation": "1", "groups": "1", "bias": "true",
    }  # fmt: skip
    assert {key.name: key.default for key in kinds.kind("max_pool2d").keys}["stride"] == "the window"


def test_an_unknown_kind_names_the_near_one() -> None:
    """A type that does not exist."""
    with pytest.raises(UnknownName) as caught:
        kinds.kind("conv2")
    assert "conv2d" in caught.value.near
