"""The rivals that measure follow the published rules: which sizes, how often each, when they end, and what wins."""

from __future__ import annotations

import attrs
import pytest

from benchmarks.rivals import GIB, RIVALS, Task
from benchmarks.search import timed_rivals
from benchmarks.search.timed_rivals import KNOW_LATENCY, TIMED
from cubatch.measure.goal import Goal
from cubatch.tuning import ladder
from tests.fakes import Curve, FakeDevice, FakeRunner, affine

LINE = affine(1e-3, 1e-5)


def session(limit: int = 10**6, curve: Curve = LINE) -> FakeRunner:
    """Open a session on which a sample takes 1 MiB and exactly the sizes up to `limit` fit."""
    return FakeDevice(curve, bytes_needed=lambda n: n * 2**20, memory_bytes=limit * 2**20)()


def task(max_batch_size: int = 512, **facts: object) -> Task:
    """Describe a device of 8 GiB on which a sample takes 1 MiB."""
    known = {"total_bytes": 8 * GIB, "fixed_bytes": 0, "bytes_per_sample": 2.0**20} | facts
    return Task(max_batch_size=max_batch_size, **known)


def test_every_rival_has_a_name_of_its_own() -> None:
    """No rival that measures hides one of the older rules, and those that know latency are among them."""
    assert not TIMED.keys() & RIVALS.keys()
    assert TIMED.keys() >= KNOW_LATENCY


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


def test_aitune_compares_with_the_last_gain() -> None:
    """Gains of 4 % a doubling are none each, but add up: at the second 1.04**2 is a gain again."""
    runner = session(curve=lambda n: n / 1.04 ** (n.bit_length() - 1))
    assert timed_rivals.aitune(runner, task()) == 512
    assert runner.prepared == [2**i for i in range(10)]


def test_aitune_ends_its_list_at_the_first_failure() -> None:
    """With room for 100 it prepares 128, which fails, and answers with 64."""
    runner = session(100)
    assert timed_rivals.aitune(runner, task()) == 64
    assert runner.prepared[-1] == 128
    assert timed_rivals.aitune(session(0), task()) is None


def test_batchtune_foretells_memory_and_verifies_below_it() -> None:
    """With 1 GiB of which 90 % may be taken, 512 and 921 lie on either side; the largest multiple of 64 is 896."""
    runner = session(10**6)
    timed_rivals.batchtune(runner, task(8192, total_bytes=GIB))
    assert runner.prepared[:10] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 896]
    assert max(runner.prepared) == 896


def test_batchtune_answers_with_a_multiple_of_64() -> None:
    """Its coarse sizes are ten multiples of 64, the fine ones those within four of the best, the last three thrice."""
    runner = session()
    answer = timed_rivals.batchtune(runner, task(1024))
    visits = runner.prepared[10:]
    assert answer == 1024
    assert visits[:8] == [1024, 896, 768, 704, *[1024, 960, 896, 832]]
    assert visits[8:] == [768, *[1024, 960, 896], *[960, 896, 1024], *[896, 1024, 960]]


@pytest.mark.parametrize("facts", [{"max_batch_size": 50}, {"total_bytes": 32 * 2**20}])
def test_batchtune_has_no_answer_below_its_step(facts: dict[str, int]) -> None:
    """Neither under 64 samples, nor where memory holds less than 64 of them."""
    assert timed_rivals.batchtune(session(), task(**facts)) is None


def test_batchtune_dies_of_memory_that_its_line_did_not_foretell() -> None:
    """What runs out while it probes is caught by nobody."""
    assert timed_rivals.batchtune(session(100), task()) is None


def test_powers_of_two_end_where_memory_does() -> None:
    """Five readings each, up to the first that does not fit."""
    runner = session(100)
    assert timed_rivals.powers_of_two(runner, task()) == 64
    assert runner.prepared == [1, 2, 4, 8, 16, 32, 64, 128]


def test_five_readings_each_visit_every_rung_once() -> None:
    """Sizes that do not fit are passed over, and the smallest within the tolerance wins."""
    runner = session(100, curve=lambda n: max(24.0, float(n)))
    assert timed_rivals.five_readings_each(runner, task(128)) == 24
    assert runner.prepared == [rung.batch_size for rung in ladder.plain_candidates(128)]
    slow = session(curve=lambda n: n + 1.0)
    timed_rivals.five_readings_each(slow, task(8))
    assert slow.steps == len(slow.prepared) * (timed_rivals.WARMUPS + 5)


def test_halving_keeps_the_better_half_and_reads_it_twice_as_often() -> None:
    """Of eight sizes four, then two are read again: 5, 10 and 20 readings of one step, each after two discarded."""
    runner = session(curve=lambda n: n + 10.0)
    assert timed_rivals.successive_halving(runner, task(12)) == 12
    assert runner.prepared == [1, 2, 3, 4, 6, 8, 12, 4, 6, 8, 12, 8, 12]
    assert runner.steps == 7 * 7 + 4 * 12 + 2 * 22


@pytest.mark.parametrize("name", sorted(KNOW_LATENCY))
def test_plain_rules_know_latency(name: str) -> None:
    """By latency the largest of the shortest steps wins, and under a limit the largest that keeps it."""
    flat = session(curve=lambda n: max(16.0, float(n)))
    assert TIMED[name](flat, task(64, goal=Goal(objective="latency"))) == 16
    rising = session(curve=lambda n: 10.0 + n)
    assert TIMED[name](rising, task(64, goal=Goal(latency_limit=20.0))) == 8


@pytest.mark.parametrize("name", TIMED)
def test_all_of_them_answer_what_ran(name: str) -> None:
    """On a smooth curve every answer was run, keeps to the maximum, and loses less than a tenth."""
    runner = session()
    asked = attrs.evolve(task(1024))
    answer = TIMED[name](runner, asked)
    assert answer in runner.ran
    assert runner.device.throughput(answer) >= 0.9 * runner.device.throughput(1024)
