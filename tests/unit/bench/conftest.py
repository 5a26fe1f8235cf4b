"""A world of NumPy kernels."""

from __future__ import annotations

import pytest

from cubatch.bench import rivals
from tests.unit.bench_fakes import World, enter

EVERYBODY = dict(rivals.RIVALS)
"""All rivals there are, by name."""


@pytest.fixture(autouse=True)
def only_the_vendor(monkeypatch):
    """Tests here list who takes part: another rival must not change them."""
    for name in EVERYBODY.keys() - {rivals.VENDOR}:
        monkeypatch.delitem(rivals.RIVALS, name)


@pytest.fixture
def world(monkeypatch):
    """A world of NumPy kernels in the place of ours."""
    return enter(World(), monkeypatch)
