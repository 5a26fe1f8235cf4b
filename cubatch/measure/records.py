"""
Records of a run: candidates, timings, outcomes.

They may come from a worker process or a store.  A size, number of bytes, status or time that nothing measures raises
TypeError or ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import attrs
from attrs import field
from attrs.validators import deep_iterable, in_, instance_of

from cubatch import checks
from cubatch.measure.runner import Reading

STATUSES = ("ok", "dropped", "out_of_memory", "over_limit", "not_run", "timeout", "error", "interrupted")
TIMED = ("ok", "dropped")
"""Statuses of measured sizes within every limit."""


@attrs.frozen
class Candidate:
    """
    A batch size that may be measured, with its reasons.

    Attributes:
        batch_size: Samples per step.
        reasons: Reasons for which it was proposed: ("coulom n=3", "power of two").
        predicted_peak_bytes: Peak memory by the memory plan; None without a plan (callables).
        predicted_seconds: Predicted seconds of a step; None without a prediction.
        over_limit: Whether the plan is above the memory limit: the size is listed, but never tried.
    """

    batch_size: int = field(converter=checks.required_size)
    reasons: tuple[str, ...] = field(default=(), validator=deep_iterable(instance_of(str), instance_of(tuple)))
    predicted_peak_bytes: int | None = field(default=None, converter=checks.count)
    predicted_seconds: float | None = field(default=None, converter=checks.amount)
    over_limit: bool = field(default=False, validator=instance_of(bool))


@attrs.frozen(kw_only=True)
class Timing(Reading):
    """
    The mean time of `repeats` back-to-back steps of a batch size.

    `throttled` is whether the SM clock was clearly lowered; such timings are used only if a size has no others.
    """

    batch_size: int = field(converter=checks.required_size)  # samples per step
    # number of its round, from 0; rounds pair timings of different sizes. The timings of one trial have consecutive
    # numbers: see PER_TRIAL
    round: int = field(converter=checks.required_count)
    seconds: float = field(converter=checks.required_positive)  # seconds of a step
    joules: float | None = field(default=None, converter=checks.positive)  # energy of a step; None if unknown
    repeats: int = field(default=1, converter=checks.required_size)  # steps between two reads of the clock
    # peak bytes of device memory that the engine allocated; None if unknown
    peak_bytes: int | None = field(default=None, converter=checks.count)
    # bytes of device memory that the process holds by NVML, context included; None if unknown
    peak_device_bytes: int | None = field(default=None, converter=checks.count)
    # batch size of the reference step; None without one
    reference_batch_size: int | None = field(default=None, converter=checks.size)
    # seconds of a reference step right before; None without one
    reference_before_seconds: float | None = field(default=None, converter=checks.positive)
    # seconds of a reference step right after; None without one
    reference_after_seconds: float | None = field(default=None, converter=checks.positive)

    @property
    def reference_seconds(self) -> float | None:
        """Geometric mean of the seconds of a reference step before and after; None without a reference."""
        before, after = self.reference_before_seconds, self.reference_after_seconds
        return None if before is None or after is None else math.sqrt(before * after)


@attrs.frozen
class Outcome:
    """How the measuring of a candidate ended."""

    batch_size: int = field(converter=checks.required_size)  # samples per step
    status: str = field(validator=in_(STATUSES))  # one of STATUSES
    stop_reason: str = field(default="", converter=checks.required_text)  # why it ended, as a sentence
    # further values for programs, such as {"needed_bytes": ...} of an out-of-memory error or {"limit": "memory"} of
    # over_limit. "cut_short" is True if the budget allowed no more timings
    facts: Mapping[str, Any] = field(factory=dict, validator=instance_of(Mapping))  # type: ignore[type-abstract]


@attrs.frozen(kw_only=True)
class Measured:
    """The results of a run."""

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
    """Return the timings of one batch size grouped by trial number, which counts from 0."""
    trials: dict[int, list[Timing]] = {}
    for timing in timings:
        trials.setdefault(timing.round // PER_TRIAL, []).append(timing)
    return trials


class Keeper(Protocol):
    """Receives every result as soon as it exists, so that a killed run loses none; the store implements it."""

    def candidate(self, candidate: Candidate) -> None:
        """Store a batch size that the search added."""

    def timing(self, timing: Timing) -> None:
        """Store a timing."""

    def outcome(self, outcome: Outcome) -> None:
        """Store the outcome of a candidate, in place of an earlier outcome."""

    def spent(self, seconds: float) -> None:
        """Store the seconds of measuring so far, over all resumed runs."""


class Recorder:
    """
    Keeps every result of a run in memory, and passes it on to another Keeper.

    Args:
        earlier: Results of an earlier run.
        keeper: Also receives every result; None: no other keeper does.

    Attributes:
        launch: As of `Measured`.
    """

    def __init__(self, earlier: Measured | None = None, keeper: Keeper | None = None) -> None:
        earlier = earlier or Measured()
        self._timings, self._added = list(earlier.timings), list(earlier.added)
        self._outcomes = {outcome.batch_size: outcome for outcome in earlier.outcomes}
        self._seconds_spent = earlier.seconds_spent
        self._keeper = keeper
        self.launch: Mapping[str, Any] | None = None

    def candidate(self, candidate: Candidate) -> None:
        """Add a batch size and pass it on."""
        self._added.append(candidate)
        if self._keeper:
            self._keeper.candidate(candidate)

    def timing(self, timing: Timing) -> None:
        """Add a timing and pass it on."""
        self._timings.append(timing)
        if self._keeper:
            self._keeper.timing(timing)

    def outcome(self, outcome: Outcome) -> None:
        """Set the outcome of a batch size and pass it on."""
        self._outcomes[outcome.batch_size] = outcome
        if self._keeper:
            self._keeper.outcome(outcome)

    def spent(self, seconds: float) -> None:
        """Set the seconds of measuring and pass them on."""
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
