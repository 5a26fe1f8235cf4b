"""A world of NumPy kernels."""

from __future__ import annotations

import pytest

from cubatch.bench import bench_results, rivals
from cubatch.kernels.toolchain import nvrtc
from tests.unit.bench_fakes import World, enter

EVERYBODY = dict(rivals.RIVALS)
"""All rivals there are, by name."""


@pytest.fixture(autouse=True)
def only_the_vendor(monkeypatch):
    """Tests here list who takes part: another rival must not change them."""
    for name in EVERYBODY.keys() - {rivals.VENDOR}:
        monkeypatch.delitem(rivals.RIVALS, name)


@pytest.fixture
def recorded(monkeypatch):
    """Plans have the figures recorded with the sources; compiling hundreds of kernels takes minutes."""
    monkeypatch.setattr(nvrtc, "candidates", lambda: ())
    bench_results._figures.cache_clear()


@pytest.fixture
def world(monkeypatch):
    """A world of NumPy kernels in the place of ours."""
    return enter(World(), monkeypatch)
