"""The note about CPU time that other processes or the hypervisor took."""

from __future__ import annotations

import os

import pytest

from cubatch.hardware.cpu_load import CpuLoad
from cubatch.tuning.notes import interference, sentence


@pytest.mark.parametrize(
    ("others", "steal", "num_cpus", "threads", "words"),
    [
        (1.02, 0.0, 2, 2, ["1.0 of 2 CPUs", "1 CPU (start the command with taskset --cpu-list 2)"]),
        (1.02, 0.0, 2, 1, ["1.0 of 2 CPUs"]),  # one CPU is left for one thread
        (3.02, 0.05, 8, 8, ["3.0 of 8 CPUs", "took 5 %", "5 CPUs (start", "--cpu-list 2,3,5,6,7)"]),
        (0.5, 0.0, 1, 1, ["0.5 of 1 CPU busy"]),
        (0.0, 0.05, 2, 2, ["took 5 %"]),
    ],
)
def test_it_has_the_numbers_and_the_cpus_that_are_left(monkeypatch, others, steal, num_cpus, threads, words):
    """Fewer CPUs are a way out only where some are left, and fewer than the step used."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 6, 7, 8})
    text = sentence(interference(CpuLoad(others=others, steal=steal, num_cpus=num_cpus), threads))
    assert all(each in text for each in words)
    assert ("taskset" in text) == any("cpu-list" in each for each in words)
    assert ("hypervisor" in text) == (steal > 0)


@pytest.mark.parametrize(("others", "steal"), [(0.19, 0.0), (0.0, 0.019), (0.0, 0.0)])
def test_too_little_has_no_note(others, steal):
    """A fifth of a CPU, or a fiftieth of the CPU time, is what moves a median that is known to 1 %."""
    assert interference(CpuLoad(others=others, steal=steal, num_cpus=2), 2) is None
