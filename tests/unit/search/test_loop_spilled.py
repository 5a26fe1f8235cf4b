"""Sizes that run though the device has not the memory: told by their time and what is free, and refused."""

from __future__ import annotations

import attrs
import pytest

from cubatch.errors import OutOfMemory
from cubatch.measure.records import Measured, Timing
from cubatch.measure.stopwatch import SPILLED
from tests.fakes import Curve, FakeClock, FakeDevice, FakeRunner, affine
from tests.unit.search.walking import Sessions, given, go, outcome_of, seek, statuses

KIB = 1024
ROOM = 40  # samples of 1 KiB


def slower_above(size: int, times: float) -> Curve:
    """Steps of an ordinary curve, and of so many times that above a size."""
    ordinary = affine(1e-2, 1e-4)
    return lambda n: ordinary(n) * (times if n > size else 1.0)


def spilling(times: float = 9.0, **more: object) -> FakeDevice:
    """A device whose driver gives what is not there, and is slower for it."""
    fields = {"memory_bytes": ROOM * KIB, "memory_fails_at": "never", **more}
    return FakeDevice(slower_above(ROOM, times), **fields)  # type: ignore[arg-type]


def test_a_size_whose_memory_is_not_there_is_out_of_memory() -> None:
    """128 KiB of 40: nothing of it is timed, and the outcome says what was held, what was there, and by which sign."""
    measured = go(spilling(), given())
    assert [n for n, status in statuses(measured).items() if status == "out_of_memory"][-1] == 128
    assert not [timing for timing in measured.timings if timing.batch_size > ROOM]
    facts = outcome_of(measured, 128).facts
    assert (facts["type"], facts["needed_bytes"], facts["available_bytes"]) == (
        OutOfMemory.__name__,
        128 * KIB,
        ROOM * KIB,
    )
    assert "times slower than expected from smaller sizes" in outcome_of(measured, 128).stop_reason


def test_the_answer_is_found_below() -> None:
    """On a curve that rises up to the end of memory the answer is the largest that is there, to the tolerance."""
    _, result = seek(spilling(), 512)
    assert 0.98 * ROOM <= result.batch_size <= ROOM
    assert result.decided_by == "memory"


@pytest.mark.parametrize(("memory", "visits"), [(1024 * KIB, 2), (None, 1)], ids=["there is enough", "nobody tells"])
def test_slowness_alone_refuses_nothing(memory: int | None, visits: int) -> None:
    """A curve that jumps for another reason is measured as it is, prepared once more where memory was looked at."""
    sessions = Sessions(spilling(memory_bytes=memory))
    measured = go(sessions, given())
    assert "out_of_memory" not in statuses(measured).values()
    assert {timing.batch_size for timing in measured.timings} >= {1, 128}
    assert sessions.opened[0].prepared.count(128) == visits


def test_memory_alone_refuses_nothing() -> None:
    """What is held beyond what is free costs nothing where it is not touched: the size is measured."""
    measured = go(spilling(0.99 * SPILLED / 2), given())
    assert "out_of_memory" not in statuses(measured).values()


def test_what_a_runner_keeps_for_all_sizes_is_not_missed() -> None:
    """Parameters stay when a batch is released: free memory is then less by them, which a size must not be charged."""

    class Keeps(FakeRunner):
        @property
        def peak_bytes(self) -> int | None:
            return 600 * KIB + (super().peak_bytes or 0)

    measured = go(lambda: Keeps(spilling(memory_bytes=(600 + 140) * KIB)), given())
    assert "out_of_memory" not in statuses(measured).values()


def test_a_clock_that_cannot_say_what_is_free_is_not_asked() -> None:
    """A runner of somebody else's has the methods of the protocol, and no more."""

    class Bare:
        def __init__(self, clock: FakeClock) -> None:
            self.now, self.time, self.sleep = clock.now, clock.time, clock.sleep

    class Plain(FakeRunner):
        @property
        def clock(self) -> Bare:  # type: ignore[override]
            return Bare(super().clock)

    measured = go(lambda: Plain(spilling()), given())
    assert "out_of_memory" not in statuses(measured).values()


def test_readings_from_when_memory_was_there_are_kept() -> None:
    """Of an earlier run: the size is judged by them, as any that fails after it has run."""
    before = [Timing(batch_size=n, round=0, seconds=affine(1e-2, 1e-4)(n)) for n in (1, 128)]
    measured = go(spilling(), given(), earlier=Measured(timings=tuple(before)))
    assert outcome_of(measured, 128).status in {"ok", "dropped"}
    assert before[1] in measured.timings


def test_a_device_with_more_memory_is_tried_again() -> None:
    """What was refused is an out-of-memory like any other: with twice the memory the store reopens it."""
    measured = go(attrs.evolve(spilling(), memory_bytes=256 * KIB, curve=affine(1e-2, 1e-4)), given())
    assert statuses(measured)[128] == "ok"
