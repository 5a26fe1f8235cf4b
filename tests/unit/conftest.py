"""A clock that only measurements advance, a machine without other load, kernels that are not compiled, and others."""

from __future__ import annotations

import math

import pytest

from cubatch.bench import bench_results
from cubatch.hardware import cpu_load, host
from cubatch.kernels.toolchain import nvrtc
from cubatch.measure import clocks
from cubatch.measure.callable_runner import CallableRunner
from cubatch.measure.network_runner import NetworkRunner
from cubatch.measure.runner import Reading
from tests.unit.bench_fakes import World, enter


class VirtualClock(clocks.HostClock):
    """Time that only measurements advance: a step of n samples takes 1 ms and 10 us a sample on any machine."""

    passed = 0.0
    batch_size = 0
    num_real = 0  # further steps that really run

    def now(self):
        return VirtualClock.passed

    def sleep(self, seconds):
        VirtualClock.passed += seconds

    def time(self, step, repeats):
        if VirtualClock.num_real:
            VirtualClock.num_real -= 1
            step()
        seconds = 1e-3 + 1e-5 * VirtualClock.batch_size
        VirtualClock.passed += repeats * seconds
        return Reading(seconds=seconds)


@pytest.fixture
def quiet(monkeypatch):
    """No other process uses the CPUs, even if tests run at the same time."""
    monkeypatch.setattr(cpu_load, "snapshot", lambda *_: None)
    monkeypatch.setattr(host, "cpu_periods", dict)


@pytest.fixture
def virtual(monkeypatch):
    """Runners of this process use a VirtualClock; of a network the first step of each prepared size really runs."""

    def noting(prepare, num_real):
        def note(self, batch_size):
            VirtualClock.batch_size, VirtualClock.num_real = batch_size, num_real
            prepare(self, batch_size)

        return note

    monkeypatch.setattr(clocks, "HostClock", VirtualClock)
    for runner, num_real in ((NetworkRunner, 1), (CallableRunner, math.inf)):
        monkeypatch.setattr(runner, "prepare", noting(runner.prepare, num_real))


@pytest.fixture
def recorded(monkeypatch):
    """Plans have the figures recorded with the sources; compiling hundreds of kernels takes minutes."""
    monkeypatch.setattr(nvrtc, "candidates", lambda: ())
    bench_results._figures.cache_clear()


@pytest.fixture
def world(monkeypatch):
    """A module of kernels by NumPy instead of cubatch's."""
    return enter(World(), monkeypatch)
