"""A world of NumPy kernels."""

from __future__ import annotations

import pytest

from tests.unit.bench_fakes import World, enter


@pytest.fixture
def world(monkeypatch):
    """A world of NumPy kernels in the place of ours."""
    return enter(World(), monkeypatch)
