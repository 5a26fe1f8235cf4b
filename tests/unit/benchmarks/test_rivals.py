"""The finders that others use: their trials, and a guess from three numbers."""

from __future__ import annotations

import pytest

from benchmarks.search import finders
from benchmarks.search.finders import GIB, RIVALS, Task
from tests.fakes import FakeDevice, affine


def task(**facts: int) -> Task:
    """Describe a device of 8 GiB on which a sample takes 1 MiB."""
    known = {"total_bytes": 8 * GIB, "fixed_bytes": 0, "bytes_per_sample": 2**20} | facts
    return Task(max_batch_size=8192, **known)


@pytest.mark.parametrize(
    ("name", "trials", "answer"),
    [("lightning power", 10, 512), ("lightning binsearch", 19, 665), ("accelerate 2048", 12, 639), ("ludwig", 11, 512)],
)
def test_a_rival_repeats_the_trials_of_the_original(name: str, trials: int, answer: int) -> None:
    """The originals, run where exactly the sizes up to 700 fit, made as many trials and gave these answers."""
    runner = FakeDevice(affine(1e-3, 1e-5), bytes_needed=lambda n: n, memory_bytes=700)()
    assert RIVALS[name](runner, task()) == answer
    assert len(runner.prepared) == trials


@pytest.mark.case("heuristic-finder")
@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, 64),
        ({"parameters": 2 * 10**7}, 32),
        ({"parameters": 2 * 10**8}, 16),
        ({"parameters": 2 * 10**8, "cores": 2}, 8),
        ({"parameters": 2 * 10**8, "cores": 2, "fixed_bytes": 7 * GIB}, 1),
    ],
)
def test_the_heuristic_finder_looks_at_three_numbers_and_never_runs(facts: dict[str, int], expected: int) -> None:
    """Each of the five answers comes from parameters, cores and memory in use, and nothing is tried."""
    runner = FakeDevice(affine(1e-3, 1e-5))()
    assert finders.heuristic_finder(runner, task(**facts)) == expected
    assert runner.prepared == []
