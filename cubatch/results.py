"""
What a tuning run is made of: candidates, timings, measurements, the result; JSON both ways.

The records hold what was measured and decided and compute nothing but views of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs import field

SCHEMA = 1

STATUSES = ("ok", "dropped", "out_of_memory", "over_limit", "not_run", "timeout", "error", "interrupted")


@attrs.frozen
class Candidate:
    """
    A batch size worth a measurement, and why.

    Attributes:
        batch_size: Samples per step.
        reasons: Every reason it was proposed for: ("coulom n=3", "power of two").
        predicted_peak_bytes: What the memory plan says it takes; None where there is no plan (callables).
        predicted_seconds: What the model of time says one step takes; None where there is none.
        over_limit: Planned above the memory limit: listed, never tried.
    """

    batch_size: int
    reasons: tuple[str, ...] = ()
    predicted_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    over_limit: bool = False


@attrs.frozen(kw_only=True)
class Timing:
    """
    One clock reading: the mean time of `repeats` back-to-back steps, in one round.

    Attributes:
        batch_size: Samples per step.
        round: Which round of the run it belongs to, from 0; rounds pair timings of different sizes.
        seconds: Time of one step.
        repeats: Steps the clock ran over.
        throttled: Taken while the clock was clearly below what it should be; kept, not used.
        sm_clock_mhz: SM clock right after the reading; None where it cannot be read.
        joules: Energy of one step; None where it cannot be read.
        peak_bytes: The engine's high water of device memory at that time.
        peak_device_bytes: What NVML says the process holds, context included; None without NVML.
    """

    batch_size: int
    round: int
    seconds: float
    repeats: int = 1
    throttled: bool = False
    sm_clock_mhz: float | None = None
    joules: float | None = None
    peak_bytes: int | None = None
    peak_device_bytes: int | None = None


@attrs.frozen(kw_only=True)
class Outcome:
    """
    How a candidate's measuring ended.

    Attributes:
        batch_size: Samples per step.
        status: One of STATUSES.
        stop_reason: Why measuring it ended, as a sentence.
        facts: What is known beyond that: {"needed_bytes": ...} of an out-of-memory error.
    """

    batch_size: int
    status: str = field(validator=attrs.validators.in_(STATUSES))
    stop_reason: str = ""
    facts: Mapping[str, Any] = field(factory=dict)
