"""A batch cut into steps: the cut that takes the least time, and what it says of itself."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from cubatch.errors import InvalidArgument
from cubatch.tuning.accumulation import cut
from cubatch.tuning.results import TuningResult
from tests.unit.tuned import measurement, tuned


def result(seconds, dropped=()):
    """A result in which batches of these sizes took so long, some of which were not measured to their end."""
    measurements = [measurement(size, took, "dropped" if size in dropped else "ok") for size, took in seconds.items()]
    return TuningResult.from_json(json.dumps(tuned(measurements=measurements)))


@given(
    seconds=st.dictionaries(st.integers(1, 60), st.floats(1e-4, 1.0), min_size=1, max_size=6),
    target=st.integers(1, 240),
    fitting=st.none() | st.sets(st.integers(1, 80)),
    dropped=st.sets(st.integers(1, 60)),
)
def test_no_other_cut_takes_less_time(seconds, target, fitting, dropped):
    """Of all sizes that divide the target, were measured or lie between such, and fit, else the largest; by trying."""
    allowed = {n for n in range(1, target + 1) if target % n == 0 and n <= max(seconds)}
    allowed &= allowed if fitting is None else fitting
    allowed = {n for n in allowed if n >= min(seconds)} or set(sorted(allowed)[-1:])
    if not allowed:
        with pytest.raises(InvalidArgument, match="target_batch_size"):
            cut(result(seconds, dropped), target, fitting=fitting)
        return
    found = cut(result(seconds, dropped), target, fitting=fitting)
    assert found.batch_size * found.steps == target
    assert found.batch_size in allowed
    assert found.is_measured == (found.batch_size in seconds)
    for size in allowed.intersection(seconds):
        assert found.steps * found.seconds <= target // size * seconds[size] * (1 + 1e-12)


@pytest.mark.parametrize(
    ("target", "fitting", "text"),
    [
        (
            256,
            None,
            "divide 256, up to the largest measured, 64, 64 takes the least time for all of it: 4 x 10.0 ms, measured.",
        ),
        (256, {16, 32, 96}, "32 takes the least time for all of it: 8 x 8.00 ms, measured."),
        (20, None, "20 takes the least time for all of it: 1 x 7.25 ms, between sizes that were measured."),
        (20, {2, 4, 5}, "20 and fit, all below what was measured, 5 is the largest: 4 x 2.19 ms in proportion."),
        (96, None, "48 takes the least time for all of it: 2 x 9.00 ms, between sizes that were measured."),
    ],
)
def test_a_cut_says_why(target, fitting, text):
    """The size, the time of the whole, and whether it was measured."""
    assert text in str(cut(result({16: 0.007, 32: 0.008, 64: 0.010}), target, fitting=fitting))


def test_sizes_below_what_was_measured_are_left_out_where_others_remain():
    """Steps of 30 had the time of 32, 2 x 10 ms, less than the one of 60 between two sizes that were measured."""
    found = cut(result({32: 0.010, 64: 0.100}), 60)
    assert (found.batch_size, found.is_measured, found.is_below) == (60, False, False)
    assert found.seconds == pytest.approx(0.08875)  # 10 ms and 28 of 32 parts of 90 ms


def test_a_size_that_was_measured_and_dropped_is_not_drawn_over():
    """Between 64 and 256 a line says 33 ms for 128, which took 200."""
    found = cut(result({64: 0.020, 128: 0.200, 256: 0.060}, dropped={128}), 128)
    assert (found.batch_size, found.steps, found.seconds) == (64, 2, 0.020)
