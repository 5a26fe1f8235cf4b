"""
Searches on virtual time: one step of each timing runs for real, but lasts as long as a formula says.

A search then takes the same decisions on a busy host as on an idle one, and ends after few steps.
"""

from __future__ import annotations

from types import SimpleNamespace

import attrs

from cubatch.frameworks import module_runner, pinned_instances
from cubatch.measure import clocks, remote
from cubatch.measure.runner import Reading
from cubatch.measure.stopwatch import Stopwatch

COMPILE_SECONDS = 1.0  # of a graph that PyTorch compiles


def step_seconds(batch_size):
    """Return the virtual seconds of a step: a fixed cost, and a cost per sample that equals it at 32 samples."""
    return 0.01 * (1 + batch_size / 32)


def install(monkeypatch, seconds=step_seconds, *, all_steps=False):
    """
    Have all searches of this process measure virtual seconds, also those whose steps run in a worker.

    `seconds` returns those of a step by its batch size; a reference step takes those of size 0. `all_steps` runs every
    step of a timing: in a job of ranks, those that rank 0 does not run would wait for it.
    """
    now, graphs, prepared = 0.0, None, 0
    prepare, time_host, time_remote = Stopwatch._prepare, clocks.HostClock._time_steps, remote._RemoteClock.time

    def let_pass(passed):
        nonlocal now
        now += passed

    def compile_clock():
        nonlocal graphs
        before, graphs = graphs, module_runner.num_graphs()
        let_pass(COMPILE_SECONDS * max(0, graphs - (graphs if before is None else before)))
        return now

    def preparing(stopwatch, batch_size):
        nonlocal prepared
        prepared = batch_size
        prepare(stopwatch, batch_size)

    def on_host(clock, step, repeats):
        is_one = prepared and not all_steps  # a test that times by itself counts its steps
        time_host(clock, step, 1 if is_one else repeats)
        is_reference = clock._reference is not None and step == clock._reference[0]
        taken = seconds(0 if is_reference else prepared)
        let_pass(repeats * taken)
        return Reading(seconds=taken, longest_step=1.0)

    def in_worker(clock, step, repeats):
        reading = time_remote(clock, step, 1)
        taken = {"seconds": seconds(prepared)}
        if reading.reference_before_seconds is not None:
            taken |= dict.fromkeys(("reference_before_seconds", "reference_after_seconds"), seconds(0))
        let_pass(repeats * sum(taken.values()))
        return attrs.evolve(reading, **taken, longest_step=1.0)

    monkeypatch.setattr(Stopwatch, "_prepare", preparing)
    monkeypatch.setattr(clocks.HostClock, "_time_steps", on_host)
    monkeypatch.setattr(remote._RemoteClock, "time", in_worker)
    monkeypatch.setattr(pinned_instances, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(module_runner, "time", SimpleNamespace(monotonic=compile_clock))
    for clock in (clocks.HostClock, remote._RemoteClock):
        monkeypatch.setattr(clock, "now", lambda _: now)
        monkeypatch.setattr(clock, "sleep", lambda _, passed: let_pass(passed))
