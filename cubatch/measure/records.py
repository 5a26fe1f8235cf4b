"""
What is kept of a run: candidates, timings, outcomes.

Each of them checks itself, wherever it comes from: the search, a worker process, a store.  What no measuring gives is
refused with an InvalidArgument that names the field.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import attrs
from attrs import field
from attrs.validators import optional

from cubatch import checks
from cubatch.errors import InvalidArgument

STATUSES = ("ok", "dropped", "out_of_memory", "over_limit", "not_run", "timeout", "error", "interrupted")
TIMED = ("ok", "dropped")
"""Statuses of sizes that the search looked at and that are within every limit."""

_ALL_PERCENT = 100

_Check = Callable[[str, Any], object]

_size: _Check = functools.partial(checks.check_whole, least=1, most=checks.MAX_BATCH_SIZE)
_count: _Check = functools.partial(checks.check_whole, least=0, most=2**63 - 1)  # the most that SQLite holds
_positive: _Check = functools.partial(checks.check_number, above=0.0)
_flag: _Check = functools.partial(checks.check_kind, kind=bool, allowed="True or False")
_text: _Check = functools.partial(checks.check_kind, kind=str, allowed="text")
_KNOWN_FACTS: Mapping[str, _Check] = {
    **dict.fromkeys(("visits", "needed_bytes", "available_bytes", "memory_bytes"), _count),
    **dict.fromkeys(
        ("prepare_seconds", "warmup_seconds", "query_seconds", "needed_seconds", "left_seconds"), checks.check_number
    ),
    **dict.fromkeys(("type", "message", "limit"), _text),
    "could_gain": functools.partial(checks.check_number, least=-1.0),
    "cut_short": _flag,
}


def _is(check: _Check) -> Callable[[object, Any, Any], None]:
    """Make a field's validator of a check, which raises InvalidArgument."""

    def validate(_: object, attribute: Any, value: object) -> None:
        check(attribute.name, value)

    return validate


def _percent(name: str, value: Any) -> None:
    if checks.check_number(name, value) > _ALL_PERCENT:
        raise InvalidArgument(name, value, "a share from 0 to 100")


def _check_reasons(name: str, value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(reason, str) for reason in value):
        raise InvalidArgument(name, value, "a tuple of text")


def _check_status(name: str, value: object) -> None:
    if value not in STATUSES:
        raise InvalidArgument(name, value, f"one of {', '.join(STATUSES)}")


def _check_facts(name: str, value: Mapping[str, Any]) -> None:
    if not isinstance(value, Mapping):
        raise InvalidArgument(name, value, "a mapping")
    for fact, check in _KNOWN_FACTS.items():
        if value.get(fact) is not None:
            check(f"{name}[{fact!r}]", value[fact])


# --- before and while measuring ------------------------------------------------------------------------------


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

    batch_size: int = field(validator=_is(_size))
    reasons: tuple[str, ...] = field(default=(), validator=_is(_check_reasons))
    predicted_peak_bytes: int | None = field(default=None, validator=optional(_is(_count)))
    predicted_seconds: float | None = field(default=None, validator=optional(_is(checks.check_number)))
    over_limit: bool = field(default=False, validator=_is(_flag))


@attrs.frozen(kw_only=True)
class Timing:
    """
    One clock reading: the mean time of `repeats` back-to-back steps, in one round.

    Attributes:
        batch_size: Samples per step.
        round: Which round of the run it belongs to, from 0; rounds pair timings of different sizes. A visit of several
            readings takes several rounds: see PER_VISIT.
        seconds: Time of one step.
        repeats: Steps the clock ran over.
        throttled: Taken while the clock was clearly below what it should be; kept, and used where there is no other.
        sm_clock_mhz: SM clock right after the reading; None where it cannot be read.
        joules: Energy of one step; None where it cannot be read.
        peak_bytes: The engine's high water of device memory at that time.
        peak_device_bytes: What NVML says the process holds, context included; None without NVML.
        event_reasons: All reasons for that clock, the power cap too, as bits of nvml.h; None where they cannot be read.
        temperature_celsius: Of the GPU's die, right after the reading; this and the next three are None where NVML does
            not tell.
        power_watts: Drawn by its board.
        utilization_percent: Share of its last sample period in which some kernel ran, 0 to 100.
        used_bytes: Its memory in use, by whomever.
        reference_batch_size: Batch size of the reference step; None, as the next two, where no reference was held.
        reference_before_seconds, reference_after_seconds: Time of one reference step right before and after.
    """

    batch_size: int = field(validator=_is(_size))
    round: int = field(validator=_is(_count))
    seconds: float = field(validator=_is(_positive))
    repeats: int = field(default=1, validator=_is(_size))
    throttled: bool = field(default=False, validator=_is(_flag))
    sm_clock_mhz: float | None = field(default=None, validator=optional(_is(checks.check_number)))
    joules: float | None = field(default=None, validator=optional(_is(_positive)))
    peak_bytes: int | None = field(default=None, validator=optional(_is(_count)))
    peak_device_bytes: int | None = field(default=None, validator=optional(_is(_count)))
    event_reasons: int | None = field(default=None, validator=optional(_is(_count)))
    temperature_celsius: float | None = field(default=None, validator=optional(_is(checks.check_number)))
    power_watts: float | None = field(default=None, validator=optional(_is(checks.check_number)))
    utilization_percent: float | None = field(default=None, validator=optional(_is(_percent)))
    used_bytes: int | None = field(default=None, validator=optional(_is(_count)))
    reference_batch_size: int | None = field(default=None, validator=optional(_is(_size)))
    reference_before_seconds: float | None = field(default=None, validator=optional(_is(_positive)))
    reference_after_seconds: float | None = field(default=None, validator=optional(_is(_positive)))

    @property
    def reference_seconds(self) -> float | None:
        """Geometric mean of the reference step before and after; None where no reference was held."""
        before, after = self.reference_before_seconds, self.reference_after_seconds
        return None if before is None or after is None else math.sqrt(before * after)


@attrs.frozen
class Outcome:
    """
    How a candidate's measuring ended.

    Attributes:
        batch_size: Samples per step.
        status: One of STATUSES.
        stop_reason: Why measuring it ended, as a sentence.
        facts: What is known beyond that, for programs: {"needed_bytes": ...} of an out-of-memory error,
            {"limit": "memory" | "latency"} of over_limit, with "cut_short" where the budget allowed no more timings.
    """

    batch_size: int = field(validator=_is(_size))
    status: str = field(validator=_is(_check_status))
    stop_reason: str = field(default="", validator=_is(_text))
    facts: Mapping[str, Any] = field(factory=dict, validator=_is(_check_facts))


@attrs.frozen(kw_only=True)
class Measured:
    """
    All that is known of a run: what was kept before, and what measuring gives back.

    Attributes:
        timings: In the order they were taken; at most one per batch size and round.
        outcomes: At most one per batch size.
        added: Sizes that the search looked at beside those of the ladder.
        seconds_spent: Seconds of measuring so far, over all resumes.
        launch: How the runner says that it launched steps, as `NetworkRunner.launch`; None where it says nothing, and
            of what was kept.
    """

    timings: tuple[Timing, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    added: tuple[Candidate, ...] = ()
    seconds_spent: float = 0.0
    launch: Mapping[str, Any] | None = None

    def of(self, batch_size: int) -> tuple[Timing, ...]:
        """Return the timings of one size, by round."""
        return tuple(sorted((t for t in self.timings if t.batch_size == batch_size), key=lambda timing: timing.round))


PER_VISIT = 16
"""Round numbers of a visit: a visit of round r takes its readings in rounds r, r + 1, ... below the next multiple."""


def by_trial(timings: Iterable[Timing]) -> dict[int, list[Timing]]:
    """Return the timings of one size grouped by trial number, which counts from 0."""
    trials: dict[int, list[Timing]] = {}
    for timing in timings:
        trials.setdefault(timing.round // PER_VISIT, []).append(timing)
    return trials


class Keeper(Protocol):
    """Who is told of everything as it happens, so that a kill loses nothing; the store is one."""

    def candidate(self, candidate: Candidate) -> None:
        """Keep a size that the search added."""
        ...

    def timing(self, timing: Timing) -> None:
        """Keep a timing that was just taken."""
        ...

    def outcome(self, outcome: Outcome) -> None:
        """Keep how a candidate ended, in place of what was said of it before."""
        ...

    def spent(self, seconds: float) -> None:
        """Keep the seconds of measuring that the run took so far, over all resumes."""
        ...


class NullKeeper:
    """A Keeper that keeps nothing."""

    def candidate(self, candidate: Candidate) -> None:
        """Forget a size."""

    def timing(self, timing: Timing) -> None:
        """Forget a timing."""

    def outcome(self, outcome: Outcome) -> None:
        """Forget an outcome."""

    def spent(self, seconds: float) -> None:
        """Forget the time."""


class Recorder:
    """
    A Keeper that remembers everything and passes it on: what there is when a run is interrupted.

    Args:
        kept: What is known already.
        keep: Who is told too; None tells nobody.

    Attributes:
        launch: As of `Measured`.
    """

    def __init__(self, kept: Measured | None = None, keep: Keeper | None = None) -> None:
        kept = kept or Measured()
        self._timings, self._added = list(kept.timings), list(kept.added)
        self._outcomes = {outcome.batch_size: outcome for outcome in kept.outcomes}
        self._seconds_spent = kept.seconds_spent
        self._keep: Keeper = keep or NullKeeper()
        self.launch: Mapping[str, Any] | None = None

    def candidate(self, candidate: Candidate) -> None:
        """Remember a size that the search added and pass it on."""
        self._added.append(candidate)
        self._keep.candidate(candidate)

    def timing(self, timing: Timing) -> None:
        """Remember a timing and pass it on."""
        self._timings.append(timing)
        self._keep.timing(timing)

    def outcome(self, outcome: Outcome) -> None:
        """Remember an outcome and pass it on."""
        self._outcomes[outcome.batch_size] = outcome
        self._keep.outcome(outcome)

    def spent(self, seconds: float) -> None:
        """Remember the time and pass it on."""
        self._seconds_spent = seconds
        self._keep.spent(seconds)

    @property
    def measured(self) -> Measured:
        """All timings and outcomes, kept and new."""
        outcomes = sorted(self._outcomes.values(), key=lambda outcome: outcome.batch_size)
        return Measured(
            timings=tuple(self._timings),
            outcomes=tuple(outcomes),
            added=tuple(self._added),
            seconds_spent=self._seconds_spent,
            launch=self.launch,
        )
