"""
What a tuning run is made of: candidates, timings, measurements, the result; JSON both ways.

The records hold what was measured and decided and compute nothing but views of it.  They check
themselves when they are made, so that a result read from a file is as good as one just measured.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import attrs
from attrs import field, validators

from cubatch import fields
from cubatch.errors import InvalidArgument, InvalidData

SCHEMA = 1

STATUSES = ("ok", "dropped", "out_of_memory", "over_limit", "not_run", "timeout", "error", "interrupted")
OBJECTIVES = ("throughput", "latency", "energy")
DECIDED_BY = ("peak", "plateau", "memory", "latency_limit", "max_batch_size", "batch_sizes", "budget")


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
        round: Which round of the run it belongs to, from 0; rounds pair timings of different sizes. A visit of several
            readings takes several rounds: see PER_VISIT.
        seconds: Time of one step.
        repeats: Steps the clock ran over.
        throttled: Taken while the clock was clearly below what it should be; kept, and used where there is no other.
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

    batch_size: int
    status: str = field(validator=validators.in_(STATUSES))
    stop_reason: str = ""
    facts: Mapping[str, Any] = field(factory=dict)


@attrs.frozen(kw_only=True)
class Measured:
    """
    All that is known of a run: what was kept before, and what measuring gives back.

    Attributes:
        timings: In the order they were taken; at most one per batch size and round.
        outcomes: At most one per batch size.
        added: Sizes that the search looked at beside those of the ladder.
        seconds_spent: Seconds of measuring so far, over all resumes.
    """

    timings: tuple[Timing, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    added: tuple[Candidate, ...] = ()
    seconds_spent: float = 0.0

    def of(self, batch_size: int) -> tuple[Timing, ...]:
        """Give the timings of one size, by round."""
        return tuple(sorted((t for t in self.timings if t.batch_size == batch_size), key=lambda timing: timing.round))


PER_VISIT = 16
"""Round numbers of a visit: a visit of round r takes its readings in rounds r, r + 1, ... below the next multiple."""

DISTURBED = 0.1
"""A visit whose median is so much above that of the best visit to its size was disturbed."""


def counting(timings: Sequence[Timing]) -> tuple[Timing, ...]:
    """
    Give the timings of one size that count: those of a full clock and of visits that nothing disturbed.

    Throttled ones count where there are no others.  A visit that took clearly longer than another one to the same
    size met another process, a cold cache or a compiler; what is compared is what sizes do undisturbed.

    Example:
        >>> seconds = [0.7, 0.7, 0.024, 0.025]
        >>> read = [Timing(batch_size=1, round=r, seconds=s) for r, s in zip((0, 1, 16, 17), seconds)]
        >>> [timing.seconds for timing in counting(read)]
        [0.024, 0.025]
    """
    clear = [timing for timing in timings if not timing.throttled] or list(timings)
    visits: dict[int, list[float]] = {}
    for timing in clear:
        visits.setdefault(timing.round // PER_VISIT, []).append(timing.seconds)
    medians = {visit: statistics.median(seconds) for visit, seconds in visits.items()}
    most = min(medians.values(), default=0.0) * (1 + DISTURBED)
    return tuple(timing for timing in clear if medians[timing.round // PER_VISIT] <= most)


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
    """

    def __init__(self, kept: Measured | None = None, keep: Keeper | None = None) -> None:
        kept = kept or Measured()
        self._timings, self._added = list(kept.timings), list(kept.added)
        self._outcomes = {outcome.batch_size: outcome for outcome in kept.outcomes}
        self._seconds_spent = kept.seconds_spent
        self._keep: Keeper = keep or NullKeeper()

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
        """All of it."""
        outcomes = sorted(self._outcomes.values(), key=lambda outcome: outcome.batch_size)
        return Measured(
            timings=tuple(self._timings),
            outcomes=tuple(outcomes),
            added=tuple(self._added),
            seconds_spent=self._seconds_spent,
        )


@attrs.frozen(kw_only=True)
class Goal:
    """
    What is to be as good as possible, and how much of it may be given up for a smaller batch.

    Everything that compares does so by `cost`, of which less is better: seconds per sample
    (throughput), seconds (latency), joules per sample (energy).

    Attributes:
        objective: One of OBJECTIVES.
        tolerance: Share of the best that may be given up, in [0, 1).
        latency_limit: Seconds that a step may take at most; None for no limit.

    Example:
        >>> Goal(objective="throughput", tolerance=0.01).cost(32, seconds=0.5, joules=None)
        0.015625
    """

    objective: str = "throughput"
    tolerance: float = 0.01
    latency_limit: float | None = None

    def __attrs_post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InvalidArgument("objective", self.objective, "one of " + ", ".join(OBJECTIVES))
        if not 0 <= self.tolerance < 1:
            raise InvalidArgument("tolerance", self.tolerance, "at least 0 and below 1", "0.01 is 1 %.")
        if self.latency_limit is not None and not 0 < self.latency_limit < math.inf:
            raise InvalidArgument("latency_limit", self.latency_limit, "a positive number of seconds, or None")

    def cost(self, batch_size: int, *, seconds: float, joules: float | None) -> float | None:
        """Give what a step costs in the terms of the objective; None for energy that was not read."""
        if self.objective == "latency":
            return seconds
        if self.objective == "energy":
            return None if joules is None else joules / batch_size
        return seconds / batch_size

    def allowed(self, best_cost: float) -> float:
        """Give the highest cost that still counts as good as the best: the contract's tolerance, as a cost."""
        if self.objective == "latency":
            return best_cost * (1 + self.tolerance)
        return best_cost / (1 - self.tolerance)


_ADDED = {"added": True}  # a key that older files of the same schema do not have

# --- after measuring -----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Measurement:
    """
    All that is known of one candidate; what is unknown or was not measured is None.

    Attributes:
        batch_size: Samples per step.
        status: One of STATUSES.
        reasons: Why it was a candidate.
        latency_seconds: Time of one step: the median of `timings_seconds`.
        latency_interval: Where the true median lies, with 90 % confidence or more; None under 5 timings.
        samples_per_second: batch_size / latency_seconds.
        throughput_interval: The same of the latency interval.
        timings_seconds: The timings that count, by round: see `counting`.
        stop_reason: Why measuring ended, as a sentence.
        throttled: Timings taken under a clearly lowered clock.
        disturbed: Timings of visits that took clearly longer than others to the same size, which do not count.
        flops_per_second: FLOP of a step / latency_seconds.
        roofline_fraction: Seconds of the roofline / latency_seconds.
        sm_clock_mhz: Median SM clock of the timings that count.
        joules_per_sample: Median energy of a step / batch_size.
        peak_bytes: High water of what the engine took from the device.
        peak_device_bytes: What the driver says the process held, context included.
        predicted_peak_bytes, predicted_seconds: What the plan and the model of time say.
        visits: How often the size was prepared and read, in the run that ended its measuring.
        prepare_seconds, warmup_seconds, query_seconds: What those visits took besides their timings, in all: preparing;
            steps until steps agreed; asking the driver for memory.
        occupancy, fill: Means over `layers`, weighted by their predicted time; None where that is not known.
        layers: Per layer and pass that a tiled kernel of ours computes: layer, pass, kernel, slices, blocks,
            blocks_per_sm, occupancy, busiest_sm_blocks, fill, predicted_seconds. Counted, not measured: of the variant
            that won when they were timed, where that is kept, else of the one ranked first. Empty for a CPU, a
            callable and the vendor's products.
    """

    batch_size: int = field(converter=fields.required_whole)
    status: str = field(validator=validators.in_(STATUSES))
    reasons: tuple[str, ...] = field(default=(), converter=fields.texts)
    latency_seconds: float | None = field(default=None, converter=fields.number)
    latency_interval: tuple[float, float] | None = field(default=None, converter=fields.interval)
    samples_per_second: float | None = field(default=None, converter=fields.number)
    throughput_interval: tuple[float, float] | None = field(default=None, converter=fields.interval)
    timings_seconds: tuple[float, ...] = field(default=(), converter=fields.numbers)
    stop_reason: str = field(default="", converter=fields.required_text)
    throttled: int = field(default=0, converter=fields.required_whole)
    disturbed: int | None = field(default=None, converter=fields.whole, metadata=_ADDED)
    flops_per_second: float | None = field(default=None, converter=fields.number)
    roofline_fraction: float | None = field(default=None, converter=fields.number)
    sm_clock_mhz: float | None = field(default=None, converter=fields.number)
    joules_per_sample: float | None = field(default=None, converter=fields.number)
    peak_bytes: int | None = field(default=None, converter=fields.whole)
    peak_device_bytes: int | None = field(default=None, converter=fields.whole)
    predicted_peak_bytes: int | None = field(default=None, converter=fields.whole)
    predicted_seconds: float | None = field(default=None, converter=fields.number)
    visits: int | None = field(default=None, converter=fields.whole, metadata=_ADDED)
    prepare_seconds: float | None = field(default=None, converter=fields.number, metadata=_ADDED)
    warmup_seconds: float | None = field(default=None, converter=fields.number, metadata=_ADDED)
    query_seconds: float | None = field(default=None, converter=fields.number, metadata=_ADDED)
    occupancy: float | None = field(default=None, converter=fields.number)
    fill: float | None = field(default=None, converter=fields.number)
    layers: tuple[dict[str, Any], ...] = field(default=(), converter=fields.mappings)


def _measurements(value: Iterable[Measurement]) -> tuple[Measurement, ...]:
    return fields.items(value)


@attrs.frozen(kw_only=True)
class TuningResult:
    """
    The answer of a tuning run, everything it rests on, and why; in JSON it is the contract's schema 1.

    Attributes:
        batch_size: The answer.  Throughput or energy: the smallest size whose median is at least
            (1 - tolerance) x the best; latency: the largest whose median is at most (1 + tolerance) x
            the lowest.  None only in the partial result of an interrupted run.
        fastest_batch_size: The best median of the objective.
        largest_batch_size: The largest that fits by the plan; None where there is no plan.
        largest_measured: The largest that really ran.
        tied_with: Sizes that paired per-round differences cannot tell from the fastest.
        decided_by: One of DECIDED_BY; `choose.answer` defines them.  None in a partial result, and where nothing but
            failures lies above the answer.
        reasons: Sentences for a person.
        measurements: One per candidate, ascending, also of those that did not run.
        limits: {"max_batch_size", "memory_bytes", "latency_seconds"}: what the user set, or what held; None: none.
        l2: "cold" where the working set is kept out of the L2 cache between steps, else "warm".
        created, spec, input_shape, mode, dtype, objective, tolerance, optimizer, library, recompute,
        budget_seconds, seconds_spent, seed, device, environment: What was tuned, and under what.
    """

    created: str | None = field(default=None, converter=fields.text)
    spec: dict[str, Any] | None = field(default=None, converter=attrs.converters.optional(fields.mapping))
    input_shape: tuple[int, ...] | None = field(default=None, converter=attrs.converters.optional(fields.wholes))
    mode: str | None = field(default=None, converter=fields.text)
    dtype: str | None = field(default=None, converter=fields.text)
    objective: str = field(validator=validators.in_(OBJECTIVES))
    tolerance: float | None = field(converter=fields.number)
    optimizer: str | None = field(default=None, converter=fields.text)
    library: str | None = field(default=None, converter=fields.text)
    recompute: bool | None = field(default=None, validator=validators.optional(validators.instance_of(bool)))
    limits: dict[str, Any] = field(converter=fields.mapping)
    budget_seconds: float | None = field(default=None, converter=fields.number)
    seconds_spent: float | None = field(default=None, converter=fields.number)
    seed: int | None = field(default=None, converter=fields.whole)
    l2: str | None = field(default=None, validator=validators.in_(("cold", "warm", None)))
    device: dict[str, Any] = field(converter=fields.mapping)
    environment: dict[str, Any] = field(converter=fields.mapping)
    batch_size: int | None = field(converter=fields.whole)
    fastest_batch_size: int | None = field(converter=fields.whole)
    largest_batch_size: int | None = field(converter=fields.whole)
    largest_measured: int | None = field(converter=fields.whole)
    tied_with: tuple[int, ...] = field(converter=fields.wholes)
    decided_by: str | None = field(validator=validators.in_((*DECIDED_BY, None)))
    reasons: tuple[str, ...] = field(converter=fields.texts)
    measurements: tuple[Measurement, ...] = field(converter=_measurements)

    def to_json(self, *, indent: int | None = None) -> str:
        """Write the result as JSON of schema 1; no NaN or infinity can be in it."""
        facts = {"schema": SCHEMA} | attrs.asdict(self)
        return json.dumps(facts, allow_nan=False, ensure_ascii=False, indent=indent)

    def to_mapping(self) -> dict[str, Any]:
        """Give what `to_json` writes as plain mappings and lists."""
        mapping: dict[str, Any] = json.loads(self.to_json())
        return mapping

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "tuning result") -> TuningResult:
        """
        Read what `to_json` wrote; keys that this version does not know are passed over.

        Args:
            text: The JSON.
            source: What an error calls it: the path of the file.

        Raises:
            InvalidData: If it is no JSON, of another schema, or a field is missing or not what it should be.
        """
        try:
            data = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidData(source, f"not JSON: {error}") from error
        if not isinstance(data, dict):
            raise InvalidData(source, f"holds {type(data).__name__}, not a tuning result")
        if data.get("schema") != SCHEMA or isinstance(data["schema"], bool):
            found, remedy = data.get("schema"), "Read it with the cubatch that wrote it, or tune again."
            raise InvalidData(source, f"schema must be {SCHEMA}, got {found!r}", remedy)
        listed = data.get("measurements")
        if isinstance(listed, list):
            measurements = [
                _read(Measurement, item, source, f"measurements[{place}].") for place, item in enumerate(listed)
            ]
            data = data | {"measurements": measurements}
        return _read(cls, data, source, "")

    def __str__(self) -> str:
        """Give the table, so that print shows what a person wants to know."""
        return self.table()

    def table(self) -> str:
        """Give the result as a table for a terminal, with the answer and why beneath."""
        from cubatch import report

        return report.table(self.to_mapping())

    def plot(self, path: str | Path) -> None:
        """
        Draw the objective against batch size into a .png, .svg or .pdf file.

        Raises:
            MissingDependency: If Matplotlib is not installed.
        """
        from cubatch import plot

        plot.tuning_curve(self.to_mapping(), path)

    def report(self, path: str | Path) -> None:
        """Write one self-contained HTML page."""
        from cubatch import report

        Path(path).write_text(report.html(self.to_mapping()), encoding="utf-8")


_Record = TypeVar("_Record")


def _read(cls: type[_Record], data: object, source: str, path: str) -> _Record:
    """Make a record of a mapping, naming the field that is missing or wrong."""
    if not isinstance(data, Mapping):
        raise InvalidData(source, f"{path.rstrip('.')} must be a mapping, got {data!r}")
    values = {}
    for attribute in attrs.fields(cls):  # type: ignore[arg-type]
        name = attribute.name
        if name not in data:
            if attribute.metadata == _ADDED:
                continue
            raise InvalidData(source, f"{path}{name} is missing")
        try:
            values[name] = attribute.converter(data[name]) if attribute.converter else data[name]
        except (TypeError, ValueError) as error:
            raise InvalidData(source, f"{path}{name} {error}") from error
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise InvalidData(source, f"{path}{error.args[0]}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
