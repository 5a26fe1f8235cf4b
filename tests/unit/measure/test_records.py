"""Records check themselves: what no measuring gives is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from cubatch.checks import MAX_BATCH_SIZE, MOST
from cubatch.measure.records import Candidate, Outcome, Timing

NOT_FINITE = (math.nan, math.inf, -math.inf, 10**400)
NO_SIZES = (0, -1, 1.5, 8.0, MAX_BATCH_SIZE + 1, math.nan, "8", True, None)
NO_COUNTS = (-1, 0.5, 2**64, "8", False)
TIMING: dict[str, Any] = {"batch_size": 8, "round": 0, "seconds": 1.0}
WRONG: tuple[tuple[type, dict[str, Any], str, tuple[Any, ...]], ...] = (
    (Timing, TIMING, "batch_size", NO_SIZES),
    (Timing, TIMING, "round", NO_COUNTS),
    (Timing, TIMING, "seconds", (*NOT_FINITE, "1", True, None, 0.0, -1.0)),
    *(
        (Timing, TIMING, name, (*NOT_FINITE, "1", True, 0.0, -1.0))
        for name in ("joules", "reference_before_seconds", "reference_after_seconds")
    ),
    (Timing, TIMING, "repeats", NO_SIZES),
    (Timing, TIMING, "peak_bytes", NO_COUNTS),
    (Timing, TIMING, "peak_device_bytes", NO_COUNTS),
    (Timing, TIMING, "reference_batch_size", NO_SIZES[:-1]),
    (Outcome, {"batch_size": 8, "status": "ok"}, "batch_size", NO_SIZES),
    (Outcome, {"batch_size": 8, "status": "ok"}, "status", ("fine", "", None, 3)),
    (Outcome, {"batch_size": 8, "status": "ok"}, "stop_reason", (None, 3, b"why")),
    (Outcome, {"batch_size": 8, "status": "ok"}, "facts", (None, [], "{}")),
    (Candidate, {"batch_size": 8}, "batch_size", NO_SIZES),
    (Candidate, {"batch_size": 8}, "reasons", ("power of two", (1,), None)),
    (Candidate, {"batch_size": 8}, "predicted_peak_bytes", NO_COUNTS),
    (Candidate, {"batch_size": 8}, "predicted_seconds", (*NOT_FINITE, "1", -1.0)),
    (Candidate, {"batch_size": 8}, "over_limit", (0, "no", None)),
)


@pytest.mark.parametrize(
    ("record", "others", "name", "value"),
    [(record, others, name, value) for record, others, name, values in WRONG for value in values],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_value_that_no_measuring_gives_is_refused(record, others, name, value):
    """Not finite, not whole, out of range or of another type."""
    with pytest.raises((TypeError, ValueError)):
        record(**others | {name: value})


@given(st.integers(1, MAX_BATCH_SIZE), st.floats(1 / MOST, MOST), st.none() | st.integers(0, 2**63 - 1))
def test_what_a_clock_can_read_is_taken_as_it_is(batch_size, seconds, num_bytes):
    """Any time that a clock can tell from zero."""
    timing = Timing(batch_size=batch_size, round=0, seconds=seconds, peak_bytes=num_bytes)
    assert (timing.batch_size, timing.seconds, timing.peak_bytes) == (batch_size, seconds, num_bytes)
