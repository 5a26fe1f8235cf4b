"""Judging rates of sizes on a host that has two states."""

from __future__ import annotations

import pytest

from benchmarks.modules.same_state import reached, samples_per_second
from cubatch.measure.records import Timing

MET = {"q": (4e-6, 1.0), "s": (7e-6, 1.5), "h": (7e-3, 9.0)}  # seconds of the reference, times as long a step
STEPS = {8: 1.0, 16: 1.9}  # seconds where the host is quick: 8 and 8.4 samples a second


def rounds(**met: str) -> dict[int, list[Timing]]:
    """Timings of both sizes, by what each of their rounds met: a quick host, a slow one, or another process."""
    return {
        n: [
            Timing(batch_size=n, round=number, seconds=STEPS[n] * times, reference_seconds=reference)
            for number, (reference, times) in enumerate(MET[letter] for letter in met[f"of_{n}"])
        ]
        for n in STEPS
    }  # fmt: skip


def test_only_rounds_that_read_both_in_one_state_are_compared():
    """Of four rounds two met the same state for both sizes, and both give the true ratio."""
    assert reached(rounds(of_8="qqss", of_16="qssq"), 8, 16) == pytest.approx([8 / (16 / 1.9)] * 2)


def test_what_was_held_up_is_compared_with_nothing():
    """Two of three rounds were, for one size or both; where no round has both in one state, all count."""
    assert reached(rounds(of_8="qhh", of_16="qsh"), 8, 16) == pytest.approx([8 / (16 / 1.9)])
    assert len(reached(rounds(of_8="qh", of_16="sh"), 8, 16)) == 2


def test_every_round_is_compared_where_the_host_stays():
    """Nothing is left out where all met one state."""
    assert len(reached(rounds(of_8="sss", of_16="sss"), 8, 16)) == 3


def test_a_size_that_never_ran_reached_nothing():
    """A size that is out of memory has no timing, and no share; nor has any beside a best size that is."""
    assert reached(rounds(of_8="qq", of_16="qq"), 12, 16) == []
    assert reached(rounds(of_8="qq", of_16="qq"), 8, 12) == []


def test_rates_are_those_of_one_state():
    """The larger size, read in the slow state twice and once in the quick one, is not held to be slower for it."""
    rates = samples_per_second(rounds(of_8="qqq", of_16="ssq"))
    assert rates == pytest.approx({8: 8.0, 16: 16 / 1.9})
