"""
Records of a run: candidates, timings, outcomes.

Each record checks its fields by the converters of `checks`, because it may come from a store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import attrs
from attrs import field
from attrs.converters import optional
from attrs.validators import in_

from cubatch import checks

STATUSES = ("ok", "dropped", "out_of_memory", "over_limit", "not_run", "timeout", "error", "interrupted")
TIMED = ("ok", "dropped")
"""Statuses of measured sizes within every limit."""

_KNOWN_FACTS: Mapping[str, Callable[[Any], object]] = {
    **dict.fromkeys(("visits", "needed_bytes", "available_bytes", "memory_bytes"), checks.count),
    **dict.fromkeys(
        ("prepare_seconds", "warmup_seconds", "query_seconds", "needed_seconds", "left_seconds", "first_seconds"),
        checks.amount,
    ),
    **dict.fromkeys(("type", "message", "limit"), checks.text),
    "could_gain": checks.number,
    "cut_short": checks.flag,
}


def _facts(value: Mapping[str, Any]) -> dict[str, Any]:
    return checks.mapping_of(value, _KNOWN_FACTS)


@attrs.frozen
class Candidate:
    """
    A batch size that may be measured, with its reasons.

    Attributes:
        batch_size: Samples per step.
        reasons: Reasons for which it was proposed, as text: ("coulom n=3", "power of two").
        predicted_peak_bytes: Peak memory by the memory plan; None without a plan (callables).
        predicted_seconds: Predicted seconds of a step; None without a prediction.
        over_limit: Whether the plan is above the memory limit: the size is listed, but never tried.
    """

    batch_size: int = field(converter=checks.size)
    reasons: tuple[str, ...] = field(default=(), converter=checks.texts)
    predicted_peak_bytes: int | None = field(default=None, converter=optional(checks.count))
    predicted_seconds: float | None = field(default=None, converter=optional(checks.amount))
    over_limit: bool = field(default=False, converter=checks.flag)


@attrs.frozen(kw_only=True)
class Timing:
    """The mean seconds of `repeats` back-to-back steps.  Fields that default to None are None if unavailable."""

    batch_size: int = field(converter=checks.size)  # samples per step
    # number of its round, from 0; rounds pair timings of different sizes. The timings of one trial have consecutive
    # numbers: see PER_TRIAL
    round: int = field(converter=checks.count)
    seconds: float = field(converter=checks.positive)  # seconds of a step
    repeats: int = field(default=1, converter=checks.size)  # steps between two reads of the clock
    # whether the SM clock was clearly lowered; such timings are used only if a size has no others
    throttled: bool = field(default=False, converter=checks.flag)
    # SM clock right after the steps
    sm_clock_mhz: float | None = field(default=None, converter=optional(checks.amount))
    joules: float | None = field(default=None, converter=optional(checks.positive))  # energy of a step
    # peak bytes of device memory that the engine allocated
    peak_bytes: int | None = field(default=None, converter=optional(checks.count))
    # bytes of device memory that the process holds by NVML, context included
    peak_device_bytes: int | None = field(default=None, converter=optional(checks.count))
    # all reasons for the SM clock, the power cap included, as bits of nvml.h
    event_reasons: int | None = field(default=None, converter=optional(checks.count))
    # temperature of the GPU right after the steps
    temperature_celsius: float | None = field(default=None, converter=optional(checks.amount))
    power_watts: float | None = field(default=None, converter=optional(checks.amount))  # power of its board
    # share of its last sample period in which some kernel ran, 0 to 100
    utilization_percent: float | None = field(default=None, converter=optional(checks.amount))
    used_bytes: int | None = field(
        default=None, converter=optional(checks.count)
    )  # its memory in use, by all processes
    # batch size of the reference step
    reference_batch_size: int | None = field(default=None, converter=optional(checks.size))
    # reference_before_seconds, reference_after_seconds: seconds of a reference step right before and right after
    reference_before_seconds: float | None = field(default=None, converter=optional(checks.positive))
    reference_after_seconds: float | None = field(default=None, converter=optional(checks.positive))
    # seconds of the longest of its steps / `seconds`
    longest_step: float | None = field(default=None, converter=optional(checks.positive))

    @property
    def reference_seconds(self) -> float | None:
        """Geometric mean of the seconds of a reference step before and after; None without a reference."""
        before, after = self.reference_before_seconds, self.reference_after_seconds
        return None if before is None or after is None else math.sqrt(before * after)


@attrs.frozen
class Outcome:
    """How the measuring of a candidate ended."""

    batch_size: int = field(converter=checks.size)  # samples per step
    status: str = field(validator=in_(STATUSES))  # one of STATUSES
    stop_reason: str = field(default="", converter=checks.text)  # why it ended, as a sentence
    # further values for programs, such as {"needed_bytes": ...} of an out-of-memory error or {"limit": "memory"} of
    # over_limit. "cut_short" is True if the budget allowed no more timings
    facts: Mapping[str, Any] = field(factory=dict, converter=_facts)


@attrs.frozen(kw_only=True)
class Measured:
    """The timings and outcomes of a run, and the candidates that the search added."""

    timings: tuple[Timing, ...] = ()  # in the order in which they were taken; at most one per batch size and round
    outcomes: tuple[Outcome, ...] = ()  # at most one per batch size
    added: tuple[Candidate, ...] = ()  # sizes that the search added to the candidates
    seconds_spent: float = 0.0  # seconds of measuring, over all resumed runs
    # how steps were launched, as `NetworkRunner.launch`; None if unknown, as for cached results
    launch: Mapping[str, Any] | None = None

    def of(self, batch_size: int) -> tuple[Timing, ...]:
        """Return the timings of one size in order of their rounds; empty if it has none."""
        return tuple(sorted((t for t in self.timings if t.batch_size == batch_size), key=lambda timing: timing.round))


PER_TRIAL = 16
"""Round numbers of a trial: its timings have the numbers r, r + 1, ... below the next multiple of this."""


def by_trial(timings: Iterable[Timing]) -> dict[int, list[Timing]]:
    """Return the timings of one batch size grouped by trial number: round // PER_TRIAL."""
    trials: dict[int, list[Timing]] = {}
    for timing in timings:
        trials.setdefault(timing.round // PER_TRIAL, []).append(timing)
    return trials


class Keeper(Protocol):
    """Receives every result as soon as it exists, so that a killed run loses none; the store implements it."""

    def candidate(self, candidate: Candidate) -> None:
        """Store a candidate that the search added."""

    def timing(self, timing: Timing) -> None:
        """Store a timing."""

    def outcome(self, outcome: Outcome) -> None:
        """Store the outcome of a candidate, in place of an earlier outcome."""

    def spent(self, seconds: float) -> None:
        """Store the seconds of measuring so far, over all resumed runs."""


class Recorder:
    """
    Holds every result of a run in memory, and passes each new result to another Keeper.

    Args:
        earlier: Results of an earlier run; None: there is none.
        keeper: Also receives every new result; None: no other keeper does.

    Attributes:
        launch: How steps were launched, for `Measured`; None until it is set.
    """

    def __init__(self, earlier: Measured | None = None, keeper: Keeper | None = None) -> None:
        earlier = earlier or Measured()
        self._timings, self._added = list(earlier.timings), list(earlier.added)
        self._outcomes = {outcome.batch_size: outcome for outcome in earlier.outcomes}
        self._seconds_spent = earlier.seconds_spent
        self._keeper = keeper
        self.launch: Mapping[str, Any] | None = None

    def candidate(self, candidate: Candidate) -> None:
        """Add a candidate, and pass it to the keeper."""
        self._added.append(candidate)
        if self._keeper:
            self._keeper.candidate(candidate)

    def timing(self, timing: Timing) -> None:
        """Add a timing, and pass it to the keeper."""
        self._timings.append(timing)
        if self._keeper:
            self._keeper.timing(timing)

    def outcome(self, outcome: Outcome) -> None:
        """Set the outcome of a batch size, and pass it to the keeper."""
        self._outcomes[outcome.batch_size] = outcome
        if self._keeper:
            self._keeper.outcome(outcome)

    def spent(self, seconds: float) -> None:
        """Set the total seconds of measuring, and pass them to the keeper."""
        self._seconds_spent = seconds
        if self._keeper:
            self._keeper.spent(seconds)

    @property
    def measured(self) -> Measured:
        """All results, earlier and new."""
        return Measured(
            timings=tuple(self._timings),
            outcomes=tuple(sorted(self._outcomes.values(), key=lambda outcome: outcome.batch_size)),
            added=tuple(self._added),
            seconds_spent=self._seconds_spent,
            launch=self.launch,
        )
