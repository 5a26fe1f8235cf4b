"""A batch cut into steps: the cut that takes the least time, and what it says of itself."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubatch.tuning.accumulation import cut
from cubatch.tuning.results import TuningResult
from tests.unit.tuned import measurement, tuned


def result(seconds):
    """A result in which batches of these sizes took so long."""
    measurements = [measurement(size, took) for size, took in seconds.items()]
    return TuningResult.from_json(json.dumps(tuned(measurements=measurements)))


@given(
    seconds=st.dictionaries(st.integers(1, 60), st.floats(1e-4, 1.0), min_size=1, max_size=6),
    target=st.integers(1, 240),
    most=st.none() | st.integers(1, 80),
)
def test_no_other_cut_takes_less_time(seconds, target, most):
    """Of all sizes that divide the target, were measured or lie between such, and fit; by trying each."""
    found = cut(result(seconds), target, most=most)
    assert found.batch_size * found.steps == target
    if found.batch_size > 1:
        assert found.batch_size <= min(max(seconds), most or target)
    assert found.is_measured == (found.batch_size in seconds)
    for size, took in seconds.items():
        if target % size == 0 and size <= min(target, most or target):
            assert found.steps * found.seconds <= target // size * took * (1 + 1e-12)


@pytest.mark.parametrize(
    ("target", "most", "text"),
    [
        (256, None, "Of the sizes that divide 256, 64 takes the least time for all of it: 4 x 10.0 ms, measured."),
        (256, 63, "32 takes the least time for all of it: 8 x 8.00 ms, measured."),
        (96, None, "48 takes the least time for all of it: 2 x 9.00 ms, between sizes that were measured."),
    ],
)
def test_a_cut_says_why(target, most, text):
    """The size, the time of the whole, and whether it was measured."""
    assert text in str(cut(result({16: 0.007, 32: 0.008, 64: 0.010}), target, most=most))
