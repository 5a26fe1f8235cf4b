"""`package.module:name`: what is imported, called and taken for a network, and what each failure says."""

from __future__ import annotations

import sys

import pytest

from cubatch.errors import InvalidArgument, InvalidSpec
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import Linear

SOURCE = """
import cubatch as cb

class Small:
    @staticmethod
    def build():
        return build()

def build():
    return cb.Network(input_shape=(1, 1, 3), layers=[cb.Linear(k=2)], name="mine")

ready = build()
layer = cb.Linear(c=3, k=2)
number = lambda: 3

def fails():
    raise RuntimeError("no data")

def refuses():
    return cb.Linear(k=0)

def takes(argument):
    return argument
"""
MINE = Network(input_shape=(1, 1, 3), layers=[Linear(k=2)], name="mine")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Stand in a folder with a module of factories, which no other test has imported."""
    (tmp_path / "of_users.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    yield tmp_path
    sys.modules.pop("of_users", None)


@pytest.mark.parametrize("name", ["build", "ready", "Small.build"])
def test_what_builds_a_network_stands_for_it(here, name):
    """A function, a network as it is, a name within a class; from the current folder, which is not left on the path."""
    found = models.resolve(f"of_users:{name}")
    assert (found, found.name) == (MINE, "mine")
    assert str(here) not in sys.path


def test_what_is_installed_goes_before_the_current_folder(here):
    """As for a module that a worker imports: a file of that name would be one thing here and another there."""
    (here / "colorsys.py").write_text(SOURCE)
    with pytest.raises(InvalidArgument, match=r"a name of .*colorsys\.py") as caught:
        models.resolve("colorsys:build")
    assert str(here) not in str(caught.value)


def test_a_layer_will_do(here):
    """As everywhere."""
    assert models.resolve("of_users:layer") == Linear(c=3, k=2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("of_users:biuld", "Did you mean 'build'?"),
        ("of_users:Small.biuld", "Did you mean 'build'?"),
        ("of_users:nothing_like_it", "model must be a name of"),
        ("of_users:fails", "RuntimeError: no data"),
        ("of_users:takes", "missing 1 required positional argument"),
        ("of_users:number", "not int"),
    ],
)
def test_what_builds_none_is_named_with_the_reason(here, text, told):
    """The text as it was given, and what Python said."""
    with pytest.raises(InvalidArgument) as caught:
        models.resolve(text)
    assert caught.value.field == "model"
    assert caught.value.value == text
    assert told in str(caught.value)


def test_our_own_errors_are_passed_on(here):
    """They say more than that building failed."""
    with pytest.raises(InvalidSpec, match="k must be from 1"):
        models.resolve("of_users:refuses")


@pytest.mark.parametrize("more", [{"input_shape": (8, 8, 3)}, {"classes": 3}])
def test_a_network_has_a_shape_and_classes_of_its_own(here, more):
    """They are for models by name, and a shape for PyTorch modules and ONNX files."""
    with pytest.raises(InvalidArgument, match="left out"):
        models.resolve("of_users:build", **more)
