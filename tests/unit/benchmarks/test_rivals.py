"""The rivals follow the published rules of the finders they stand for: trials, failures and answers."""

from __future__ import annotations

import pytest

from benchmarks.search import finders
from benchmarks.search.finders import GIB, RIVALS, Task
from tests.fakes import Curve, FakeDevice, FakeRunner, affine, sawtooth

LIMITS = (13, 50, 100, 300, 700, 1500)


def session(limit: int, curve: Curve = affine(1e-3, 1e-5)) -> FakeRunner:  # noqa: B008 - a pure function
    """Open a session on which exactly the sizes up to `limit` fit."""
    return FakeDevice(curve, bytes_needed=lambda n: n, memory_bytes=limit)()


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


@pytest.mark.parametrize(("maximum", "expected"), [(100, 128), (1000, 1024)])
def test_lightning_power_exceeds_the_maximum(maximum: int, expected: int) -> None:
    """The original handed back 128 for a maximum of 100, and 1024 for 1000, without running either."""
    runner = session(10**6)
    assert finders.lightning_power(runner, task(maximum)) == expected
    assert expected not in runner.ran


def test_lightning_power_hands_back_what_it_never_ran() -> None:
    """With room for 5000 the original tried 2 to 4096 and handed back 8192, which does not fit."""
    runner = session(5000)
    assert finders.lightning_power(runner, task()) == 8192
    assert runner.prepared == [2**i for i in range(1, 13)]


def test_lightning_binsearch_keeps_to_the_maximum() -> None:
    """With room for everything the bisection ends at the maximum, less its margin of a twentieth."""
    assert finders.lightning_binsearch(session(10**6), task(1000)) == 950


def test_accelerate_gives_up_at_zero() -> None:
    """When not even one sample fits, no size is left."""
    assert finders.accelerate(session(0), task()) is None


def test_ludwig_stops_at_the_first_drop() -> None:
    """Where 64 is slower per sample than 32 and 128 the fastest of all, 128 stays unseen."""
    runner = session(10**6, lambda n: (1.0 + 0.1 * n) * (1.5 if n == 64 else 1.0))
    assert finders.ludwig(runner, task()) == 32
    assert runner.prepared == [1, 2, 4, 8, 16, 32, 64]


def test_dorado_tries_every_multiple_of_32_below_its_memory_bound() -> None:
    """With 4 GiB of which one stays free and 8 MiB a sample it tries 32 to 384 and takes the fastest per sample."""
    runner = session(10**6, sawtooth(0.0, 1.0, 160))
    answer = finders.dorado(runner, task(total_bytes=4 * GIB, bytes_per_sample=8 * 2**20))
    assert runner.prepared == list(range(32, 385, 32))
    assert answer == 160


def test_dorado_has_no_answer_where_its_table_is_wrong() -> None:
    """A size that its table lets through and that does not fit ends the search."""
    assert finders.dorado(session(100), task()) is None


@pytest.mark.parametrize(
    ("total_gib", "expected"),
    [
        (7.55, 5),  # 60 % is 4.53 GiB, rounded to 5
        (3.55, 2),  # 60 % is 2.13 GiB, rounded to 2
        (2.40, 1),  # 60 % is 1.44 GiB, rounded to 1
    ],
)
def test_ultralytics_rounds_its_target_to_whole_gib(total_gib: float, expected: int) -> None:
    """The rule solves a straight line, here 0.99 GiB a sample, for 60 % of the free memory, rounded to whole GiB."""
    total = round(total_gib * GIB)
    runner = FakeDevice(affine(1e-3, 1e-5), bytes_needed=lambda n: n * GIB * 99 // 100)()
    assert finders.ultralytics(runner, task(total_bytes=total)) == expected


def test_ultralytics_falls_back_to_16() -> None:
    """A fit that says more than 1024, and a device on which nothing fits, both end at 16."""
    small = FakeDevice(affine(1e-3, 1e-5), bytes_needed=lambda n: n * 2**20)()
    assert finders.ultralytics(small, task(total_bytes=141 * GIB)) == 16
    assert finders.ultralytics(session(0), task()) == 16


def test_ultralytics_lowers_its_answer_below_a_failure() -> None:
    """When 16 failed and the line says 24, the answer is the largest size below 16 that ran."""
    runner = FakeDevice(affine(1e-3, 1e-5), bytes_needed=lambda n: n * GIB // 5, memory_bytes=2 * GIB)()
    assert finders.ultralytics(runner, task()) == 8


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
