"""The rivals follow the published rules of the finders they stand for: trials, failures and answers."""

from __future__ import annotations

import pytest

from benchmarks.search import finders
from benchmarks.search.finders import GIB, RIVALS, Task
from tests.fakes import FakeDevice, FakeRunner, affine

LIMITS = (13, 50, 100, 300, 700, 1500)


def session(limit: int) -> FakeRunner:
    """Open a session on which exactly the sizes up to `limit` fit."""
    return FakeDevice(affine(1e-3, 1e-5), bytes_needed=lambda n: n, memory_bytes=limit)()


def task(max_batch_size: int = 8192, **facts: int) -> Task:
    """Describe a device of 8 GiB on which a sample takes 1 MiB."""
    known = {"total_bytes": 8 * GIB, "fixed_bytes": 0, "bytes_per_sample": 2**20} | facts
    return Task(max_batch_size=max_batch_size, **known)


def failures(runner: FakeRunner) -> int:
    """Count the trials that ran out of memory."""
    return sum(size not in runner.ran for size in runner.prepared)


# Trials / failures -> answer of the real functions under an ideal memory limit, one column per limit.
EXECUTED = {
    "lightning power": ((4, 1, 8), (6, 1, 32), (7, 1, 64), (9, 1, 256), (10, 1, 512), (11, 1, 1024)),
    "lightning binsearch": ((7, 2, 12), (11, 4, 47), (13, 5, 95), (17, 6, 285), (19, 5, 665), (21, 5, 1425)),
    "accelerate 128": ((20, 19, 13), (10, 9, 46), (4, 3, 92), (1, 0, 128), (1, 0, 128), (1, 0, 128)),
    "accelerate 2048": ((47, 46, 12), (36, 35, 47), (30, 29, 93), (20, 19, 273), (12, 11, 639), (4, 3, 1492)),
    "ludwig": ((5, 1, 8), (7, 1, 32), (8, 1, 64), (10, 1, 256), (11, 1, 512), (12, 1, 1024)),
}


@pytest.mark.parametrize("name", EXECUTED)
def test_a_rival_repeats_the_trials_of_the_original(name: str) -> None:
    """Under an ideal memory limit each rule makes as many trials, as many of them failing, as the original did."""
    for limit, expected in zip(LIMITS, EXECUTED[name], strict=True):
        runner = session(limit)
        answer = RIVALS[name](runner, task())
        assert (len(runner.prepared), failures(runner), answer) == expected, f"limit {limit}"


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
    runner = session(1)
    assert finders.heuristic_finder(runner, task(**facts)) == expected
    assert runner.prepared == []
