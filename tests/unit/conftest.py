"""A clock that only measurements advance, and a machine without other load."""

from __future__ import annotations

import pytest

from cubatch.hardware import cpu_load, host
from cubatch.measure import clocks
from cubatch.measure.callable_runner import CallableRunner
from cubatch.measure.network_runner import NetworkRunner
from cubatch.measure.runner import Reading


class VirtualClock(clocks.HostClock):
    """Time that only measurements advance: a step of n samples takes 1 ms and 10 us a sample on any machine."""

    passed = 0.0
    batch_size = 0

    def now(self):
        return VirtualClock.passed

    def sleep(self, seconds):
        VirtualClock.passed += seconds

    def time(self, step, repeats):
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
    """Runners of this process use a VirtualClock; each step really runs, once."""

    def noting(prepare):
        def note(self, batch_size):
            VirtualClock.batch_size = batch_size
            prepare(self, batch_size)

        return note

    monkeypatch.setattr(clocks, "HostClock", VirtualClock)
    for runner in (NetworkRunner, CallableRunner):
        monkeypatch.setattr(runner, "prepare", noting(runner.prepare))
