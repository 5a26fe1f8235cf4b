"""
Searches on virtual time: steps run for real, but last as long as a formula says.

A search then takes the same decisions on a busy host as on an idle one, and ends after few steps.
"""

from __future__ import annotations

from types import SimpleNamespace

import attrs

from cubatch.frameworks import module_runner, pinned_instances
from cubatch.measure import clocks, remote

COMPILE_SECONDS = 1.0  # of a graph that PyTorch compiles


def step_seconds(batch_size):
    """Return the virtual seconds of a step: a fixed cost, and a cost per sample that equals it at 32 samples."""
    return 0.01 * (1 + batch_size / 32)


def install(monkeypatch):
    """Have all searches of this process measure virtual seconds, also those whose steps run in a worker."""
    now, graphs, time_host, time_remote = 0.0, None, clocks.HostClock._time_steps, remote._RemoteClock.time

    def let_pass(seconds):
        nonlocal now
        now += seconds

    def compile_clock():
        nonlocal graphs
        before, graphs = graphs, module_runner.num_graphs()
        let_pass(COMPILE_SECONDS * max(0, graphs - (graphs if before is None else before)))
        return now

    def on_host(clock, step, repeats):
        time_host(clock, step, repeats)
        seconds = step_seconds(getattr(getattr(step, "__self__", None), "_batch_size", 0))  # 0: the reference
        let_pass(repeats * seconds)
        return seconds

    def in_worker(clock, step, repeats):
        reading = time_remote(clock, step, repeats)
        seconds = {"seconds": step_seconds(clock._runner._batch_size)}
        if reading.reference_before_seconds is not None:
            seconds |= dict.fromkeys(("reference_before_seconds", "reference_after_seconds"), step_seconds(0))
        let_pass(repeats * sum(seconds.values()))
        return attrs.evolve(reading, **seconds)

    monkeypatch.setattr(clocks.HostClock, "_time_steps", on_host)
    monkeypatch.setattr(remote._RemoteClock, "time", in_worker)
    monkeypatch.setattr(pinned_instances, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(module_runner, "time", SimpleNamespace(monotonic=compile_clock))
    for clock in (clocks.HostClock, remote._RemoteClock):
        monkeypatch.setattr(clock, "now", lambda _: now)
        monkeypatch.setattr(clock, "sleep", lambda _, seconds: let_pass(seconds))
