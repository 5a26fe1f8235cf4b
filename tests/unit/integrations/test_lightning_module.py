"""The module of the callback for Lightning where there is no Lightning."""

from __future__ import annotations

import sys

import pytest

from cubatch.errors import MissingDependency
from cubatch.integrations import lightning


def test_without_lightning_the_callback_says_what_to_install(monkeypatch):
    """The module itself can be imported anywhere; asking for another name is what it is in any module."""
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch.callbacks", None)
    vars(lightning).pop("CubatchBatchSizeFinder", None)
    with pytest.raises(MissingDependency, match=r"pip install '\.\[lightning\]'"):
        lightning.CubatchBatchSizeFinder  # noqa: B018 - getting it is the test
    with pytest.raises(AttributeError, match="no attribute 'Finder'"):
        lightning.Finder  # noqa: B018 - as above
