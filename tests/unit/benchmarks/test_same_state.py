"""Judging rates of sizes on a host that has two states."""

from __future__ import annotations

import pytest

from benchmarks.modules.same_state import reached, samples_per_second
from cubatch.measure.records import Timing

QUICK, SLOW = 4e-6, 7e-6  # seconds of the reference
STEPS = {8: 1.0, 16: 1.9}  # seconds where the host is quick: 8 and 8.4 samples a second


def rounds(**met: str) -> dict[int, list[Timing]]:
    """Timings of both sizes, by the state that each of their rounds met: q, or s, which takes a half longer."""
    return {
        n: [
            Timing(
                batch_size=n, round=number, seconds=STEPS[n] * (1.5 if state == "s" else 1.0),
                reference_seconds=SLOW if state == "s" else QUICK,
            )
            for number, state in enumerate(met[f"of_{n}"])
        ]
        for n in STEPS
    }  # fmt: skip


def test_only_rounds_that_read_both_in_one_state_are_compared():
    """Of four rounds two met the same state for both sizes, and both give the true ratio."""
    assert reached(rounds(of_8="qqss", of_16="qssq"), 8, 16) == pytest.approx([8 / (16 / 1.9)] * 2)


def test_every_round_is_compared_where_the_host_stays():
    """Nothing is left out where all met one state."""
    assert len(reached(rounds(of_8="sss", of_16="sss"), 8, 16)) == 3


def test_a_size_that_never_ran_reached_nothing():
    """A size that is out of memory has no timing, and no share."""
    assert reached(rounds(of_8="qq", of_16="qq"), 12, 16) == []


def test_rates_are_those_of_one_state():
    """The larger size, read in the slow state twice and once in the quick one, is not held to be slower for it."""
    rates = samples_per_second(rounds(of_8="qqq", of_16="ssq"))
    assert rates == pytest.approx({8: 8.0, 16: 16 / 1.9})
