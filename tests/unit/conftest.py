"""Searches on virtual time, a machine without other load, kernels that are not compiled, and others."""

from __future__ import annotations

import pytest

from cubatch.bench import bench_results
from cubatch.hardware import cpu_load
from cubatch.kernels.toolchain import nvrtc
from cubatch.measure import clocks
from tests import virtual_time
from tests.unit.bench_fakes import World, enter


@pytest.fixture
def quiet(monkeypatch):
    """No other process uses the CPUs, even if tests run at the same time."""
    monkeypatch.setattr(cpu_load, "snapshot", lambda *_: None)


@pytest.fixture
def virtual(monkeypatch):
    """Searches measure virtual seconds, without a reference step: a step takes 1 ms, and 10 us a sample."""
    monkeypatch.setattr(clocks.HostClock, "hold_reference", lambda *_: None)
    virtual_time.install(monkeypatch, lambda batch_size: 1e-3 + 1e-5 * batch_size)


@pytest.fixture
def recorded(monkeypatch):
    """Plans have the figures recorded with the sources; compiling hundreds of kernels takes minutes."""
    monkeypatch.setattr(nvrtc, "candidates", lambda: ())
    bench_results._figures.cache_clear()


@pytest.fixture
def world(monkeypatch):
    """A module of kernels by NumPy instead of cubatch's."""
    return enter(World(), monkeypatch)
