"""The rivals that measure follow the published rules: which sizes, how often each, when they end, and what wins."""

from __future__ import annotations

import attrs
import pytest

from benchmarks.search import timed_rivals
from benchmarks.search.finders import GIB, Task
from benchmarks.search.timed_rivals import TIMED
from tests.fakes import Curve, FakeDevice, FakeRunner, affine

LINE = affine(1e-3, 1e-5)


def session(limit: int = 10**6, curve: Curve = LINE) -> FakeRunner:
    """Open a session on which a sample takes 1 MiB and exactly the sizes up to `limit` fit."""
    return FakeDevice(curve, bytes_needed=lambda n: n * 2**20, memory_bytes=limit * 2**20)()


def task(max_batch_size: int = 512, **facts: object) -> Task:
    """Describe a device of 8 GiB on which a sample takes 1 MiB."""
    known = {"total_bytes": 8 * GIB, "fixed_bytes": 0, "bytes_per_sample": 2.0**20} | facts
    return Task(max_batch_size=max_batch_size, **known)


def test_aitune_warms_up_ten_steps_and_times_twenty() -> None:
    """With throughput doubling at every size it visits all powers of two up to the maximum, 30 steps each."""
    runner = session(curve=lambda n: 1e-3)
    assert timed_rivals.aitune(runner, task(200)) == 128
    assert runner.prepared == [1, 2, 4, 8, 16, 32, 64, 128]
    assert runner.steps == 30 * len(runner.prepared)


def test_aitune_ends_at_the_third_size_in_a_row_without_a_gain() -> None:
    """From 8 on nothing gains 5 %: 16, 32 and 64 are read, 128 is not, and the highest wins, not the smallest."""
    runner = session(curve=lambda n: max(8.0, n * (1.0 if n < 64 else 0.99)))
    assert timed_rivals.aitune(runner, task()) == 64
    assert runner.prepared == [1, 2, 4, 8, 16, 32, 64]


def test_batchtune_foretells_memory_and_verifies_below_it() -> None:
    """With 1 GiB of which 90 % may be taken, 512 and 921 lie on either side; the largest multiple of 64 is 896."""
    runner = session(10**6)
    timed_rivals.batchtune(runner, task(8192, total_bytes=GIB))
    assert runner.prepared[:10] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 896]
    assert max(runner.prepared) == 896


@pytest.mark.parametrize("name", TIMED)
def test_all_of_them_answer_what_ran(name: str) -> None:
    """On a smooth curve every answer was run, keeps to the maximum, and loses less than a tenth."""
    runner = session()
    asked = attrs.evolve(task(1024))
    answer = TIMED[name](runner, asked)
    assert answer in runner.ran
    assert runner.device.throughput(answer) >= 0.9 * runner.device.throughput(1024)
