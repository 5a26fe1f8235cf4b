"""The words of arguments as types."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

import cubatch
from cubatch import choices
from cubatch.errors import InvalidArgument
from cubatch.hardware.facts import BYTES_PER_ELEMENT
from cubatch.workload import OPTIMIZERS

FUNCTIONS = (
    cubatch.autotune, cubatch.predict, cubatch.candidates, cubatch.footprint, cubatch.max_batch_size,
    cubatch.rules_of_thumb,
)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_has_the_words_in_its_types(function):
    """A checker knows the words that an argument takes, and the default is one of them."""
    found = inspect.signature(function).parameters
    for name in ("mode", "dtype", "optimizer"):
        assert found[name].annotation.split(" | ")[0] == name.title()
        assert found[name].default in get_args(getattr(choices, name.title()))


def test_the_words_are_those_that_are_taken():
    """One that is in the type is taken, and one that is not is refused."""
    for mode in get_args(choices.Mode):
        assert cubatch.footprint("mlp", mode=mode, device="t4").total
    for optimizer in get_args(choices.Optimizer):
        assert cubatch.footprint("mlp", mode="training", optimizer=optimizer, device="t4").total
    with pytest.raises(InvalidArgument):
        cubatch.footprint("mlp", mode="traning", device="t4")
    assert set(get_args(choices.Dtype)) <= set(BYTES_PER_ELEMENT)
    assert set(get_args(choices.Optimizer)) == set(OPTIMIZERS)
