"""Specs that nobody means well with: each is refused by an error of ours, soon, and in a message that can be read."""

from __future__ import annotations

import json
import os

import pytest

from cubatch import models
from cubatch.errors import CubatchError, InvalidSpec
from cubatch.network.extents import printable
from cubatch.network.graph import Network
from cubatch.network.layers import Add, Concat, Flatten, Linear, Opaque, ReLU
from cubatch.network.specfile import from_mapping, load_spec

LINEAR = {"type": "linear", "k": 4}


def network(*layers, **given):
    return {"input_shape": [1, 1, 16], "layers": list(layers) or [LINEAR], **given}


SPECS = {
    "name with an escape": network(name="\x1b]0;mine\x07"),
    "input with an escape": network(LINEAR, {**LINEAR, "inputs": ["\x1b[2J"]}),
    "many sums": {"type": "add", "h": 1, "w": 1, "c": 28, "count": 2**31 - 1},
    "many parts": {"type": "concat", "h": 1, "w": 1, "c": 2000, "channels": [1] * 2000},
    "no mapping": [network()],
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_spec_that_makes_no_sense_is_refused_in_a_line(spec):
    """Only errors of ours, whose text is short and safe to print."""
    with pytest.raises(CubatchError) as caught:
        models.resolve(spec)
    text = str(caught.value)
    assert len(text) < 1500
    assert text.isprintable()


@pytest.mark.parametrize("make", [lambda n: Add(h=1, w=1, c=2, count=n), lambda n: ["x"] * n])
def test_as_many_inputs_as_are_allowed_are_allowed(make):
    """1024 summands on their own, and 1024 readers of one layer joined by a sum or a concatenation."""
    alone = make(1024)
    if isinstance(alone, Add):
        assert len(alone.input_shapes) == 1024
        return
    for join in (Add, Concat, Opaque):
        Network(input_shape=(1, 1, 2), layers=[ReLU(name="x"), join(inputs=alone)])
        with pytest.raises(InvalidSpec, match="1024 layers"):
            Network(input_shape=(1, 1, 2), layers=[ReLU(name="x"), join(inputs=[*alone, "x"])])


def test_a_spec_file_must_be_readable(tmp_path):
    """A folder, a pipe, and no file."""
    os.mkfifo(tmp_path / "pipe.json")
    folder = tmp_path / "folder.json"
    folder.mkdir()
    for path in (folder, tmp_path / "pipe.json", tmp_path / "none.json"):
        with pytest.raises(InvalidSpec, match="a text file that can be read") as caught:
            load_spec(path)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("suffix", [".toml", ".json"])
@pytest.mark.parametrize(
    "text",
    ["input_shape = [", "[1, 2]", "", '{"a":' * 100_000, '{"layers": 1, "layers": 2}'],
    ids=lambda text: text[:12],
)
def test_a_spec_file_of_nonsense_is_refused(tmp_path, suffix, text):
    """What is neither TOML nor JSON nor a spec, 100 000 levels, and a key that stands twice."""
    path = tmp_path / f"net{suffix}"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidSpec) as caught:
        load_spec(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("path", [3, None])
def test_what_is_no_path_is_refused_as_such(path):
    """By an error of cubatch, not of pathlib."""
    with pytest.raises(InvalidSpec) as caught:
        load_spec(path)
    assert caught.value.field == "spec file"


def test_a_file_whose_name_is_no_text_still_names_its_network(tmp_path):
    """Control characters and bytes that are not UTF-8 are legal in file names, and are written out."""
    for name, title in ((b"a\x1b[2J.json", r"a\x1b[2J"), (b"\xff.json", "\ufffd")):
        path = os.fsencode(tmp_path) + b"/" + name
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123 - a path of bytes
            json.dump(network(), file)
        assert load_spec(os.fsdecode(path)).name == title


def test_what_imports_call_layers_is_made_printable():
    """A foreign file's names are not refused, but written out."""
    assert printable("a\x1b\n\ud800") == r"a\x1b\n\ud800"
    assert printable("") == "unnamed"
    spec = from_mapping(network(name="ok"), name="other")
    assert spec.name == "ok"
    assert Flatten(name="größe 1").name == Linear(name="größe 1", k=1).name
