"""Rates of sizes that were timed in rounds, on a host whose speed changes."""

from __future__ import annotations

import pytest

from benchmarks.modules.paired_rounds import reached, samples_per_second
from cubatch.measure.records import Timing

STEPS = {8: 1.0, 16: 1.9}  # seconds at full speed: 8 and 8.42 samples a second


def rounds(**slowdowns: list[float]) -> dict[int, list[Timing]]:
    """Timings of both sizes, by the slowdown of the host in each of their rounds."""
    return {
        n: [
            Timing(
                batch_size=n, round=number, seconds=STEPS[n] * times, reference_batch_size=1,
                reference_before_seconds=0.01 * times, reference_after_seconds=0.01 * times,
            )
            for number, times in enumerate(slowdowns[f"of_{n}"])
        ]
        for n in STEPS
    }  # fmt: skip


def test_a_slowdown_of_one_size_alone_does_not_change_the_ratio():
    """A round in which the host was half as fast for one size gives the same ratio, since its reference is slower."""
    assert reached(rounds(of_8=[1.0, 2.0], of_16=[1.0, 1.0]), 8, 16) == pytest.approx([8 / (16 / 1.9)] * 2)


def test_rates_are_those_at_the_usual_speed():
    """The larger size was timed on a slow host twice of three times, and is not held to be slower for it."""
    rates = samples_per_second(rounds(of_8=[1.0, 1.0, 1.0], of_16=[1.5, 1.5, 1.0]))
    assert rates == pytest.approx({8: 8.0, 16: 16 / 1.9})
