"""Records check themselves: what no measuring gives is refused by the name of its field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from cubatch import checks
from cubatch.checks import MAX_BATCH_SIZE
from cubatch.measure.records import Candidate, Outcome, Timing

NOT_FINITE = (math.nan, math.inf, -math.inf, 10**400)
NO_NUMBERS = ("1", b"1", True, None, [1.0])
NO_TIMES = (*NOT_FINITE, "1", True, 0.0, -1.0)
NO_SIZES = (0, -1, 1.5, 8.0, MAX_BATCH_SIZE + 1, math.nan, "8", True, None)
NO_COUNTS = (-1, 0.5, 2**64, "8", False)
TIMING: dict[str, Any] = {"batch_size": 8, "round": 0, "seconds": 1.0}
OUTCOME: dict[str, Any] = {"batch_size": 8, "status": "ok"}
CANDIDATE: dict[str, Any] = {"batch_size": 8}
WRONG: tuple[tuple[type, dict[str, Any], dict[str, tuple[Any, ...]]], ...] = (
    (Timing, TIMING, {
        "batch_size": NO_SIZES, "round": NO_COUNTS, "seconds": (*NOT_FINITE, *NO_NUMBERS, 0.0, -1.0),
        "repeats": NO_SIZES, "throttled": (0, 1, "no", None), "sm_clock_mhz": (*NOT_FINITE, "1", -1.0),
        "joules": (*NOT_FINITE, "1", 0.0, -1.0), "peak_bytes": NO_COUNTS, "peak_device_bytes": NO_COUNTS,
        "event_reasons": NO_COUNTS, "temperature_celsius": (*NOT_FINITE, "1", True, -1.0),
        "power_watts": (*NOT_FINITE, "1", True, -1.0), "utilization_percent": (*NOT_FINITE, "1", -1.0),
        "used_bytes": NO_COUNTS, "reference_batch_size": NO_SIZES[:-1], "reference_before_seconds": NO_TIMES,
        "reference_after_seconds": NO_TIMES,
    }),
    (Outcome, OUTCOME, {
        "batch_size": NO_SIZES, "status": ("fine", "", None, 3), "stop_reason": (None, 3, b"why"),
        "facts": (None, [], "{}"),
    }),
    (Candidate, CANDIDATE, {
        "batch_size": NO_SIZES, "reasons": ("power of two", (1,), None),
        "predicted_peak_bytes": NO_COUNTS, "predicted_seconds": (*NOT_FINITE, "1", -1.0), "over_limit": (0, "no", None),
    }),
)  # fmt: skip


@pytest.mark.parametrize(
    ("record", "others", "name", "value"),
    [
        (record, others, name, value)
        for record, others, fields in WRONG
        for name, values in fields.items()
        for value in values
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_value_that_no_measuring_gives_is_refused(record, others, name, value):
    """Not finite, not whole, out of range or of another type: the error begins with the name of the field."""
    with pytest.raises((TypeError, ValueError)):
        record(**others | {name: value})
    with pytest.raises(ValueError, match=rf"^'?{name}'? "):
        checks.read(record, others | {name: value})


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("visits", -1), ("visits", 0.5), ("prepare_seconds", -1.0), ("needed_seconds", "many"),
        ("could_gain", "much"), ("cut_short", 1), ("limit", 3), ("type", 3), ("needed_bytes", "5"),
        ("memory_bytes", -1),
    ],
)  # fmt: skip
def test_a_fact_that_others_read_is_checked_too(fact, value):
    """Facts beyond those are free, and None is unknown."""
    with pytest.raises(ValueError, match=fact):
        Outcome(8, "ok", facts={fact: value})
    assert Outcome(8, "ok", facts={fact: None, "another": 1}).facts["another"] == 1


@given(
    st.integers(1, MAX_BATCH_SIZE),
    st.floats(min_value=1e-30, max_value=1e30),
    st.none() | st.integers(0, 2**63 - 1),
)
def test_what_a_clock_can_read_is_taken_as_it_is(batch_size, seconds, num_bytes):
    """Any time from 1e-30 to 1e30 seconds."""
    timing = Timing(batch_size=batch_size, round=0, seconds=seconds, peak_bytes=num_bytes)
    assert (timing.batch_size, timing.seconds, timing.peak_bytes) == (batch_size, seconds, num_bytes)
