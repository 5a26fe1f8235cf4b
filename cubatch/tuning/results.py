"""Results of a tuning run: the measurement of each batch size and the recommendation, with JSON in both directions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import attrs
from attrs import field, validators
from attrs.converters import optional

from cubatch import checks, files
from cubatch.errors import InvalidArgument, InvalidData
from cubatch.frameworks.loader_rate import LoaderRate
from cubatch.measure.goal import OBJECTIVES
from cubatch.measure.records import STATUSES, TIMED
from cubatch.shown import Shown
from cubatch.tuning.exchange_cost import DataParallel
from cubatch.units import shown, visible

SCHEMA = 1
NOISY_SHARE = 0.05
"""Half an interval beyond this share of its median is wide."""
BUSY_MACHINE = "Other processes used the machine while the steps were timed: measure again when it is quiet."
DECIDED_BY = ("peak", "plateau", "memory", "latency_limit", "max_batch_size", "batch_sizes", "budget", "loader")
_REWRITE = "Write it again with to_json(), or with --json of the command."
_TIED_SHARE = 0.9  # a tie below this share of the best is due to its noise alone
_APART = 1.25  # `choices` differ by this factor at least
_RATES = ("samples_per_second", "step_samples_per_second", "loader_samples_per_second")  # written, computed when read


_Record = TypeVar("_Record")
_LIMITS = {"max_batch_size": checks.size, "memory_bytes": checks.amount, "latency_seconds": checks.positive}
_DEVICE: Mapping[str, Callable[[Any], object]] = {
    "memory_bytes": checks.amount,
    "free_bytes": checks.amount,
    "compute_capability": checks.wholes,
}


def _maybe_positives(value: Any) -> tuple[float | None, ...]:
    return tuple(None if item is None else checks.positive(item) for item in checks.items(value))


def _limits(value: Any) -> dict[str, Any]:
    return checks.mapping_of(value, _LIMITS)


def _device(value: Any) -> dict[str, Any]:
    return checks.mapping_of(value, _DEVICE)


def _environment(value: Any) -> dict[str, Any]:
    return checks.mapping_of(value, {"launch": _launch})


def _launch(value: Any) -> None:
    if missing := {"launches", "graph", "refusal"} - checks.mapping(value).keys():
        raise ValueError(f"lacks {', '.join(sorted(missing))}")


@attrs.frozen(kw_only=True)
class Measurement:
    """
    Measured and predicted figures of one candidate; a figure that is unknown or was not measured is None.

    Attributes:
        batch_size: Samples per step; with accumulated gradients, samples of each batch of the step.
        status: One of STATUSES.
        reasons: Why it was a candidate.
        latency_seconds: Seconds of one step at the usual speed of the host in this run, from the posterior of all
            timings. A size with few timings is drawn towards its neighbors.
        latency_interval: 90 % interval (low, high) of `latency_seconds`, for comparing sizes of one run.
        samples_per_second: Samples of a step / latency_seconds. A step has `batch_size` samples in each of its batches.
        throughput_interval: 90 % interval (low, high) of `samples_per_second`.
        timings_seconds: Seconds of a step in each raw timing, by round; throttled timings only if there are no others.
        timings_rounds: Round of each timing. Each trial has PER_TRIAL rounds; trials of one pass over the sizes have
            equal rounds.
        timings_steps: Number of steps of each timing.
        longest_steps: For each timing, seconds of its longest step / its mean seconds of a step; None if steps are only
            enqueued, as on a GPU.
        reference_seconds: For each timing, the geometric mean of the reference step before and after it; None in a run
            without a reference.
        stop_reason: Why measuring ended, as a sentence.
        throttled: Number of timings taken under a clearly lowered SM clock.
        flops_per_second: FLOP of a step / latency_seconds.
        roofline_fraction: Seconds of the roofline / latency_seconds.
        sm_clock_mhz: Median SM clock of the timings in `timings_seconds`.
        joules_per_sample: Energy of a step (from the posterior if it is the objective, else the median) / its samples.
        temperature_celsius: Highest temperature of the GPU's die. This and the next three are None without NVML.
        power_watts, utilization_percent: Means over these timings: power of the board, and percentage of time in which
            a kernel ran.
        used_bytes: Largest amount of the GPU's memory in use by all processes.
        peak_bytes: Peak of the memory that the engine allocated on the device.
        peak_device_bytes: Memory of the process by the driver, context included. On a CPU, the largest growth of its
            resident set since before the network was made.
        predicted_peak_bytes, predicted_seconds: Figures of the memory plan and of the model of time.
        predicted_device_bytes: Memory plan plus process overhead, to compare with `peak_device_bytes`.
        `visits`: Number of trials of the size, in the run that ended its measuring.
        prepare_seconds, warmup_seconds, query_seconds: Seconds of these trials besides their timings, in total:
            preparing, steps until their times agree, and memory queries of the driver.
        first_seconds: Seconds of the very first step of the size in its process. Other sizes may have run before.
        occupancy, fill: Means over `layers`, weighted by predicted seconds; None where unknown.
        layers: For each layer and pass that a tiled cubatch kernel computes: layer, pass, kernel, slices, blocks,
            blocks_per_sm, occupancy, busiest_sm_blocks, fill, predicted_seconds. These are counted, not measured, for
            the cached fastest kernel variant, else for the one ranked first. Empty for a CPU, a callable and vendor
            kernels.
    """

    batch_size: int = field(converter=checks.size)
    status: str = field(validator=validators.in_(STATUSES))
    reasons: tuple[str, ...] = field(default=(), converter=checks.texts)
    latency_seconds: float | None = field(default=None, converter=optional(checks.positive))
    latency_interval: tuple[float, float] | None = field(default=None, converter=optional(checks.interval))
    samples_per_second: float | None = field(default=None, converter=optional(checks.positive))
    throughput_interval: tuple[float, float] | None = field(default=None, converter=optional(checks.interval))
    timings_seconds: tuple[float, ...] = field(default=(), converter=checks.positives)
    timings_rounds: tuple[int, ...] | None = field(default=None, converter=optional(checks.wholes))
    timings_steps: tuple[int, ...] | None = field(default=None, converter=optional(checks.wholes))
    longest_steps: tuple[float | None, ...] | None = field(default=None, converter=optional(_maybe_positives))
    reference_seconds: tuple[float | None, ...] | None = field(default=None, converter=optional(_maybe_positives))
    stop_reason: str = field(default="", converter=checks.text)
    throttled: int = field(default=0, converter=checks.count)
    flops_per_second: float | None = field(default=None, converter=optional(checks.amount))
    roofline_fraction: float | None = field(default=None, converter=optional(checks.amount))
    sm_clock_mhz: float | None = field(default=None, converter=optional(checks.amount))
    joules_per_sample: float | None = field(default=None, converter=optional(checks.amount))
    temperature_celsius: float | None = field(default=None, converter=optional(checks.amount))
    power_watts: float | None = field(default=None, converter=optional(checks.amount))
    utilization_percent: float | None = field(default=None, converter=optional(checks.amount))
    used_bytes: int | None = field(default=None, converter=optional(checks.count))
    peak_bytes: int | None = field(default=None, converter=optional(checks.count))
    peak_device_bytes: int | None = field(default=None, converter=optional(checks.count))
    predicted_peak_bytes: int | None = field(default=None, converter=optional(checks.count))
    predicted_seconds: float | None = field(default=None, converter=optional(checks.amount))
    predicted_device_bytes: int | None = field(default=None, converter=optional(checks.count))
    visits: int | None = field(default=None, converter=optional(checks.count))
    prepare_seconds: float | None = field(default=None, converter=optional(checks.amount))
    warmup_seconds: float | None = field(default=None, converter=optional(checks.amount))
    query_seconds: float | None = field(default=None, converter=optional(checks.amount))
    first_seconds: float | None = field(default=None, converter=optional(checks.amount))
    occupancy: float | None = field(default=None, converter=optional(checks.amount))
    fill: float | None = field(default=None, converter=optional(checks.amount))
    layers: tuple[dict[str, Any], ...] = field(default=(), hash=False, converter=checks.mappings)

    def value(self, objective: str) -> tuple[float, float, float] | None:
        """
        Return (value, low, high): the objective and its 90 % interval; None where it was not measured.

        Throughput is in samples per second, latency in seconds, energy in samples per joule (without an interval).
        """
        if objective == "energy":
            rate = 1 / self.joules_per_sample if self.joules_per_sample else None
            return None if rate is None else (rate, rate, rate)
        is_latency = objective == "latency"
        value = self.latency_seconds if is_latency else self.samples_per_second
        interval = self.latency_interval if is_latency else self.throughput_interval
        return None if value is None else (value, *(interval or (value, value)))

    @property
    def half_width(self) -> float | None:
        """Half the width of the throughput's 90 % interval, as a share of the throughput; None if not measured."""
        interval, rate = self.throughput_interval, self.samples_per_second
        return (interval[1] - interval[0]) / (2 * rate) if interval and rate else None

    @property
    def is_measured(self) -> bool:
        """Whether the batch size was timed and is within every limit."""
        return self.status in TIMED and self.latency_seconds is not None

    def exceeds(self, latency_limit: float | None) -> bool:
        """Return whether a step takes longer than the limit in seconds; False without a limit (None) or a timing."""
        return self.latency_seconds is not None and latency_limit is not None and self.latency_seconds > latency_limit


def _data_parallel(value: object) -> DataParallel:
    return checks.read(DataParallel, value)


def _loader(value: object) -> LoaderRate:
    return checks.read(LoaderRate, value)


class BatchSizeResult(Shown):
    """
    Common base of measured results and predictions: a recommended batch size, and how it is shown.

    Attributes:
        predicted: Whether the result is a prediction, so that nothing was measured.
        The others are those of `TuningResult`, and None in the same cases.
    """

    __slots__ = ()
    predicted: ClassVar[bool] = False
    spec: Mapping[str, Any] | None
    objective: str
    tolerance: float | None
    limits: Mapping[str, Any]
    batch_size: int | None
    fastest_batch_size: int | None
    largest_batch_size: int | None
    tied_with: tuple[int, ...]
    decided_by: str | None
    reasons: tuple[str, ...]

    @property
    def sizes(self) -> Mapping[int, Measurement]:
        """The measurement of each batch size, ascending."""
        raise NotImplementedError

    @property
    def device_facts(self) -> Mapping[str, Any]:
        """Facts of the device by name: "name", "kind" ("cpu" or "cuda"), and others such as "memory_bytes"."""
        raise NotImplementedError

    @property
    def subject(self) -> str:
        """The network's name, else the kind of layer, else "a callable"."""
        spec = self.spec or {}
        return visible(str(spec.get("name") or spec.get("type") or "a callable"), keep="")

    @property
    def recommended(self) -> bool:
        """Whether there is a recommended batch size; else the first of `reasons` states why not."""
        return self.batch_size is not None

    @property
    def shares(self) -> dict[int, float]:
        """By batch size within the limits, its share of the objective's best value; 1 is the best. May be empty."""
        is_latency = self.objective == "latency"
        within = {n: m.value(self.objective) for n, m in self.sizes.items() if m.status != "over_limit"}
        values = {n: value[0] for n, value in within.items() if value is not None and value[0] > 0}
        if not values:
            return {}
        best = values.get(self.fastest_batch_size or 0) or (min if is_latency else max)(values.values())
        return {n: best / value if is_latency else value / best for n, value in values.items()}

    @property
    def noisy_ties(self) -> tuple[int, ...]:
        """
        Batch sizes tied with the fastest only because their timings vary widely; none in a prediction.

        They reach less than 90 % of the best value, and half their 90 % interval is wider than 5 % of the throughput.
        """
        if self.predicted:
            return ()
        sizes, shares = self.sizes, self.shares
        wide = {n for n, m in sizes.items() if m.half_width is None or m.half_width > NOISY_SHARE}
        return tuple(n for n in self.tied_with if shares.get(n, 1.0) < _TIED_SHARE and n in wide)

    @property
    def ties(self) -> tuple[int, ...]:
        """Sizes that are tied with the fastest, without `noisy_ties`."""
        noisy = set(self.noisy_ties)
        return tuple(n for n in self.tied_with if n not in noisy)

    def plot(self, path: str | Path) -> None:
        """
        Draw the objective against batch size into a .png, .svg or .pdf file.

        Raises:
            MissingDependency: If Matplotlib is not installed.
            InvalidArgument: If `path` is no path, has another ending, or the file cannot be written.
        """
        from cubatch.report import plot

        checks.check_path(path)
        plot.tuning_curve(self, path)

    def report(self, path: str | Path) -> None:
        """
        Write the result as one self-contained HTML page.

        Raises:
            InvalidArgument: If `path` is no path, or no file can be written there.
        """
        from cubatch.report import page

        checks.check_path(path)
        try:
            Path(path).write_text(page.html(self), encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            remedy = f"{files.reason(error)}."
            raise InvalidArgument("path", str(path), "a file that can be written", remedy) from error


@attrs.frozen(kw_only=True)
class TuningResult(BatchSizeResult):
    """
    The recommendation of a tuning run, all measurements, and the reasons; as JSON see docs/reference/api.md.

    Attributes:
        batch_size: The recommendation. Throughput or energy: the smallest size whose posterior mean is at least
            (1 - tolerance) times the best. Latency: the largest within (1 + tolerance) times the lowest. See
            `search.posterior.Posterior.recommend`. None without a recommendation: the step or an input did not grow
            with the batch, nothing could be compared, or nothing was measured yet.
        fastest_batch_size: The size with the best posterior mean of the objective; None if no size ran within the
            limits, or the recommendation is withheld.
        loader: The rate of the data loader, see `LoaderRate`; None if none was given. `decided_by` is "loader" if it
            is the bottleneck, so that larger batches gain nothing, also if another limit is reached.
        accumulate: Batches of a step. `batch_size` is the samples of one batch; `latency_seconds` the seconds of all
            batches and one optimizer step.
        current_batch_size: The size that the user has now; None if it was not given. It is the recommendation if no
            other size is better by more than the tolerance and the noise.
        largest_batch_size: The largest batch size that fits by the memory plan; None without a plan. Also None if
            the sizes that ran took too little memory to check the plan.
        largest_measured: The largest batch size that was timed; None if none was.
        tied_with: Sizes whose difference from the fastest may be zero, by its 90 % interval.
        decided_by: One of DECIDED_BY, see `decision.decide`. None in a partial result, and if only failures lie above
            the recommended size.
        reasons: Sentences for a user.
        measurements: One per candidate, ascending, also of those that did not run.
        limits: {"max_batch_size", "memory_bytes", "latency_seconds"}: the limits of the run; None: no limit.
        reference: {"batch_size", "seconds"} of the reference step; these are its median seconds over the run. Times are
            normalized to it. None without a reference step, as on a GPU.
        `disturbed`: Whether other processes used the machine while timings were taken; None if unknown.
        data_parallel: The cost of sharing a step among devices; None for one device.
        l2: "cold" if the working set is evicted from the L2 cache between steps, "warm" if not; None if unknown.
        created: UTC time at which measuring began, of cached timings that of the first call. None if unknown.
        spec, input_shape, mode, dtype, objective, tolerance, optimizer, library, recompute, budget_seconds,
            seconds_spent, seed, device, environment: The request and its conditions. None if unknown, or if the
            subject has no such property, as a callable has no `input_shape`.
    """

    created: str | None = field(default=None, converter=optional(checks.text))
    spec: dict[str, Any] | None = field(default=None, hash=False, converter=optional(checks.mapping))
    input_shape: tuple[int, ...] | None = field(default=None, converter=optional(checks.wholes))
    mode: str | None = field(default=None, converter=optional(checks.text))
    dtype: str | None = field(default=None, converter=optional(checks.text))
    objective: str = field(validator=validators.in_(OBJECTIVES))
    tolerance: float | None = field(converter=optional(checks.number))
    optimizer: str | None = field(default=None, converter=optional(checks.text))
    library: str | None = field(default=None, converter=optional(checks.text))
    recompute: bool | None = field(default=None, converter=optional(checks.flag))
    limits: dict[str, Any] = field(hash=False, converter=_limits)
    budget_seconds: float | None = field(default=None, converter=optional(checks.amount))
    seconds_spent: float | None = field(default=None, converter=optional(checks.amount))
    seed: int | None = field(default=None, converter=optional(checks.whole))
    l2: str | None = field(default=None, validator=validators.in_(("cold", "warm", None)))
    device: dict[str, Any] = field(hash=False, converter=_device)
    environment: dict[str, Any] = field(hash=False, converter=_environment)
    batch_size: int | None = field(converter=optional(checks.size))
    fastest_batch_size: int | None = field(converter=optional(checks.size))
    largest_batch_size: int | None = field(converter=optional(checks.size))
    largest_measured: int | None = field(converter=optional(checks.size))
    tied_with: tuple[int, ...] = field(converter=checks.wholes)
    decided_by: str | None = field(validator=validators.in_((*DECIDED_BY, None)))
    reasons: tuple[str, ...] = field(converter=checks.texts)
    measurements: tuple[Measurement, ...] = field(converter=checks.items)
    data_parallel: DataParallel | None = field(default=None, converter=optional(_data_parallel))
    disturbed: bool | None = field(default=None, converter=optional(checks.flag))
    reference: dict[str, Any] | None = field(default=None, hash=False, converter=optional(checks.mapping))
    loader: LoaderRate | None = field(default=None, converter=optional(_loader))
    accumulate: int = field(default=1, converter=checks.size)
    current_batch_size: int | None = field(default=None, converter=optional(checks.size))

    @property
    def sizes(self) -> Mapping[int, Measurement]:
        """The measurement of each batch size, ascending."""
        return {m.batch_size: m for m in sorted(self.measurements, key=lambda m: m.batch_size)}

    @property
    def device_facts(self) -> Mapping[str, Any]:
        """Facts of the device by name: "name", "kind" ("cpu" or "cuda"), and others such as "memory_bytes"."""
        return self.device

    @property
    def step_samples_per_second(self) -> float | None:
        """Samples per second of the step alone, at the recommended batch size; None without a recommendation."""
        size = self.sizes.get(self.batch_size or 0)
        return None if size is None else size.samples_per_second

    @property
    def loader_samples_per_second(self) -> float | None:
        """Samples per second of the data loader alone, at the recommended batch size; None if no loader was given."""
        return None if self.loader is None else self.loader.rate_at(self.batch_size or self.loader.batch_size)

    @property
    def samples_per_second(self) -> float | None:
        """
        Samples per second at the recommended batch size; None without a recommendation.

        They are those of the step, or of the loop with the data loader if one was given.
        """
        return self.loop_rates.get(self.batch_size or 0)

    @property
    def loop_rates(self) -> dict[int, float]:
        """Samples per second by measured batch size: of the step, or of the loop with the data loader if given."""
        rates = {m.batch_size: m.samples_per_second for m in self.comparable if m.samples_per_second}
        return rates if self.loader is None else {n: self.loader.loop_rate(rate, n) for n, rate in rates.items()}

    def is_slowed(self, batch_size: int) -> bool:
        """Return whether the data loader makes the loop of a size slower than its step by more than the tolerance."""
        step = self.sizes[batch_size].samples_per_second or 0.0
        return self.loop_rates.get(batch_size, step) < (1 - (self.tolerance or 0.0)) * step

    @property
    def comparison(self) -> float | None:
        """Value of the recommended size / that of `current_batch_size` (latency: inverse); None without both values."""
        values = self.loop_rates if self.loader is not None and self.objective == "throughput" else self.shares
        current, recommended = values.get(self.current_batch_size or 0), values.get(self.batch_size or 0)
        return recommended / current if current and recommended else None

    @property
    def exchange_seconds(self) -> float | None:
        """Seconds of a step at `batch_size` in which gradients are summed over the devices; None for one device."""
        return None if self.data_parallel is None else self.data_parallel.exchange_seconds

    @property
    def scaling_efficiency(self) -> float | None:
        """Seconds of a step on one device / seconds of a shared step; 1 is perfect. None for one device."""
        return None if self.data_parallel is None else self.data_parallel.scaling_efficiency

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the result as JSON text of schema 1, without NaN and infinity; `indent` None: on one line."""
        rates = {name: getattr(self, name) for name in _RATES}
        mapping = {"schema": SCHEMA} | attrs.asdict(self) | rates
        return json.dumps(mapping, allow_nan=False, ensure_ascii=False, indent=indent)

    def to_mapping(self) -> dict[str, Any]:
        """Return the result as plain mappings and lists, in the form of `to_json`."""
        mapping: dict[str, Any] = json.loads(self.to_json())
        return mapping

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "tuning result") -> TuningResult:
        """
        Return the result that `to_json` wrote; unknown keys are ignored.

        Args:
            text: JSON of `to_json`, schema 1.
            source: Path of the file, for errors.

        Raises:
            InvalidData: If `text` is no JSON, has another schema, or lacks a field or has an invalid one.
        """
        return cls.from_mapping(_parse(text, source), source=source)

    @classmethod
    def from_mapping(cls, data: object, *, source: str = "tuning result") -> TuningResult:
        """
        Return the result that `to_mapping` wrote; unknown keys are ignored.

        `source` and the errors are those of `from_json`.
        """
        if not isinstance(data, dict):
            raise InvalidData(source, f"holds {type(data).__name__}, not a tuning result", _REWRITE)
        if data.get("schema") != SCHEMA:
            remedy = "Read it with the cubatch that wrote it, or tune again."
            raise InvalidData(source, f"schema must be {SCHEMA}, got {shown(data.get('schema'))}", remedy)
        if data.get("predicted") and not cls.predicted:
            raise InvalidData(source, "holds a prediction, not measurements", "Tune on the device to measure.")
        listed = data.get("measurements")
        if isinstance(listed, list):
            measurements = [
                _read(Measurement, item, source, f"measurements[{place}].") for place, item in enumerate(listed)
            ]
            data = data | {"measurements": measurements}
        return _read(cls, data, source, "")

    @property
    def comparable(self) -> list[Measurement]:
        """Measurements with the status "ok" or "dropped", thus within every limit; a dropped size may have no time."""
        return [m for m in self.measurements if m.status in TIMED]

    def choices(self, within: float = 0.05) -> dict[int, float]:
        """
        Return the batch sizes worth trying as a hyperparameter, ascending, each with the share of throughput it costs.

        The recommended size is always included, regardless of its cost. The other sizes are added from the fastest
        down. A size within a factor of 1.25 of one already included is left out, because training can hardly
        distinguish them. Measured sizes with the status "dropped" count too. Empty if the result has no recommendation.

        Args:
            within: Largest share of the best throughput that a size other than the recommended one may cost.

        Raises:
            InvalidArgument: If `within` is no share from 0 to below 1.

        Example:
            >>> from cubatch.tuning.tune import autotune
            >>> sizes = autotune("mlp", device="cpu", batch_sizes=[8, 64], budget=5.0, store=False).choices(within=0.9)
            >>> set(sizes) <= {8, 64}, min(sizes.values())     # trial.suggest_categorical("batch_size", list(sizes))
            (True, 0.0)
        """
        if not checks.is_number(within) or not 0 <= within < 1:
            raise InvalidArgument("within", within, "a share from 0 to below 1")
        if not self.recommended:
            return {}
        rates = self.loop_rates
        best = max(rates.values(), default=0.0)
        costs = {n: 1 - rate / best for n, rate in rates.items()}
        able = {n: cost for n, cost in costs.items() if cost <= within or n == self.batch_size}
        chosen: list[int] = []
        for n in sorted(able, key=lambda n: (n != self.batch_size, able[n])):
            if all(max(n, other) >= _APART * min(n, other) for other in chosen):
                chosen.append(n)
        return {n: able[n] for n in sorted(chosen)}


@attrs.frozen(kw_only=True)
class WrittenForecast(TuningResult):
    """A prediction from its JSON, in the form of a tuning result; nothing was measured."""

    predicted: ClassVar[bool] = True


def load(path: str | Path, field: str, *, predictions: bool = False) -> TuningResult:
    """
    Read a tuning result from a file.

    Args:
        path: The file, as `--json` writes it.
        field: The argument with the path, for errors.
        predictions: Whether the JSON of `cubatch predict --device` is accepted too, and that of `cubatch tune
            --threads`, of which the best result counts.

    Raises:
        InvalidArgument: If `path` is no path.
        InvalidData: If the file cannot be read, or is no tuning result of this schema.
    """
    if not isinstance(path, str | Path):
        raise InvalidArgument(field, path, "a tuning result or a path to its JSON")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidData(str(path), f"cannot be read: {files.reason(error)}") from error
    data = _parse(text, str(path))
    if isinstance(data, dict) and "axis" in data:
        raise InvalidData(str(path), "holds results at several extents", "Tune at one extent: --dim NAME=N.")
    if predictions and isinstance(data, dict) and isinstance(data.get("results"), dict) and "threads" in data:
        data = data["results"].get(str(data["threads"]))
        if data is None:
            problem = "recommends no number of threads"
            raise InvalidData(str(path), problem, "Tune again with a larger budget, or one number of threads.")
    if predictions and isinstance(data, dict) and data.get("predicted"):
        return WrittenForecast.from_mapping(_as_measured(data, str(path)), source=str(path))
    return TuningResult.from_mapping(data, source=str(path))


def _as_measured(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a prediction's JSON with the keys and statuses of a measured result; reject a comparison of GPUs."""
    if "forecasts" in data:
        raise InvalidData(source, "holds predictions for several devices", "Predict for one of them, with --device.")
    written = {"environment": {}, "largest_measured": None, **data}
    if isinstance(rows := data.get("measurements"), list):  # else `from_mapping` names what is wrong
        written["measurements"] = [
            row | {"status": "ok"} if isinstance(row, dict) and row.get("status") == "predicted" else row
            for row in rows
        ]
    return written


def _parse(text: str | bytes, source: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (TypeError, ValueError, RecursionError) as error:  # TypeError: no text
        raise InvalidData(source, f"not JSON: {error}", _REWRITE) from error


def _read(cls: type[_Record], data: object, source: str, path: str) -> _Record:
    """
    Return a record made of a mapping; raise InvalidData with the path of a missing or wrong field.

    `source` is the file, and `path` the place of the mapping in it, for the error.
    """
    if not isinstance(data, Mapping):
        raise InvalidData(source, f"{path.rstrip('.')} must be a mapping, got {shown(data)}", _REWRITE)
    try:
        return checks.read(cls, data)
    except ValueError as error:
        raise InvalidData(source, f"{path}{error}", _REWRITE) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
