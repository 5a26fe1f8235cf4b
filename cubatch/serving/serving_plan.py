"""
serving_plan(): the largest batch, queue delay and number of instances with which a server keeps its latency limit.

The latency of a step comes from a tuning result; the queue before it is simulated (`batching_queue`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from cubatch import checks
from cubatch.errors import InvalidArgument
from cubatch.measure.records import TIMED
from cubatch.serving.batching_queue import Load, simulate
from cubatch.shown import Shown
from cubatch.tuning.results import BUSY_MACHINE, BatchSizeResult, Measurement, load
from cubatch.tuning.threads_result import ThreadsResult
from cubatch.units import format_count, format_counted, format_seconds

_REQUESTS = 20_000
"""Simulated requests at least: 200 of them are slower than the 99th percentile."""
_FULL_BATCHES = 20
"""Full batches of each instance that are simulated at least."""
_MOST_SIMULATED = 200_000
"""Simulated requests at most. More instances than these occupy are simulated in part: a larger pool waits less."""
_LEAST_RATE = 1e-6
"""Requests per second. Below it the simulated time is so long that a float does not resolve a latency any more."""
_MOST_INSTANCES = 1000
MOST_REQUESTS = 4096
"""Requests of the largest batch of a plan. A simulation needs several full batches, and a time for each smaller one."""
_DELAY_SHARES = (0.0, 0.05, 0.1, 0.2, 0.4)
"""Queue delays that are tried, as shares of the latency limit."""
_SELDOM = 1e-3
"""Share of the capacity at which hardly any request waits."""
_SAME_SHARE = 0.98
"""Settings that reach this share of the best rate are as good; the smallest batch and no delay are preferred."""
_SLOW_FIRST = 1.5
"""A first call that takes this many times as long as later ones is more than their scatter."""
_TORCHSERVE_QUEUE = 100
"""Requests that a TorchServe model queues by default; it rejects others."""
_RATE_STEPS = 8
"""Bisections of the highest arrival rate: to 0.4 % of the rate that the steps alone allow."""
_MOST_STEPS = 400
"""Times of single steps by which a size varies at most: four of them are slower than their 99th percentile."""
_MILLION, _SECONDS_PER_HOUR = 1e6, 3600.0


@attrs.frozen(kw_only=True)
class ServingOption:
    """
    The best setting of one maximum batch size, at the plan's arrival rate and number of instances.

    Attributes:
        max_batch_size: Requests per step at most.
        queue_delay: Seconds for which a request waits for others at most, while an instance is idle.
        load: Latency and utilization; None if the arrival rate is at least that of full batches without a pause.
        highest_rate: The highest arrival rate in requests per second that keeps the latency limit; 0 if none does.
    """

    max_batch_size: int
    queue_delay: float
    load: Load | None
    highest_rate: float


@attrs.frozen(kw_only=True)
class ServingPlan(Shown):
    """
    How to configure a server that batches requests, and the latency to expect.

    Attributes:
        name: The network or module.
        device: The device of each instance.
        on_cpu: Whether the device is a CPU, which instances share.
        predicted: Whether the step times are a prediction, not measured.
        on_busy_machine: Whether other processes used the machine while the steps were timed.
        arrival_rate: Requests per second, of one sample each, which arrive independently of each other.
        p99_limit: Limit of the 99th percentile of the latency in seconds.
        overhead: Seconds that server and network add to each request.
        closes_while_busy: Whether the server closes batches while all instances are busy too.
        instances: Copies of the model that run steps independently, each on a device of its own.
        threads: CPU threads of an instance; None if one instance had the whole device while the steps were timed.
        timed_instances: Instances that ran at the same time while the steps were timed; None as for `threads`.
        options: The best setting of each maximum batch size.
        max_batch_size: Requests per step at most, in this plan.
        first_calls: Seconds of the first call in a process, by batch size.  It has the sizes up to the maximum whose
            first call takes at least 1.5 times as long as later ones.
        timed_once: Batch sizes up to the maximum with a single timing, which shows little of the variation of steps.
        price_per_hour: Price of an instance for an hour, in any currency; None if it was not given.
    """

    name: str
    device: str
    on_cpu: bool = False
    predicted: bool
    on_busy_machine: bool
    arrival_rate: float
    p99_limit: float
    overhead: float
    closes_while_busy: bool = False
    instances: int
    threads: int | None = None
    timed_instances: int | None = None
    options: tuple[ServingOption, ...]
    max_batch_size: int
    first_calls: Mapping[int, float] = attrs.field(factory=dict, hash=False)
    timed_once: tuple[int, ...] = ()
    price_per_hour: float | None

    @property
    def chosen(self) -> ServingOption:
        """The option whose maximum batch size is `max_batch_size` of the plan."""
        return next(option for option in self.options if option.max_batch_size == self.max_batch_size)

    @property
    def queue_delay(self) -> float:
        """Seconds for which a request waits for others at most, while an instance is idle."""
        return self.chosen.queue_delay

    @property
    def load(self) -> Load:
        """Expected percentiles of the latency in seconds, requests per step, and utilization."""
        load = self.chosen.load
        assert load is not None  # noqa: S101 - a plan is only made of an option that keeps the limit
        return load

    @property
    def cost_per_million_requests(self) -> float | None:
        """Cost of a million requests at the arrival rate, in the currency of the price; None without a price."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour * self.instances / _SECONDS_PER_HOUR * _MILLION / self.arrival_rate

    @property
    def reasons(self) -> tuple[str, ...]:
        """Sentences for a user: the plan, its highest arrival rate, the gain from batching, and warnings, if any."""
        chosen, smallest = self.chosen, self.options[0]
        wait = f", queued for at most {format_seconds(chosen.queue_delay)}" if chosen.queue_delay else ""
        first = (
            f"{format_counted(self.instances, 'instance')}{self._of_threads} with batches of at most "
            f"{chosen.max_batch_size}{wait} can{', by the predicted times,' if self.predicted else ''} answer "
            f"{format_count(self.arrival_rate)} requests/s with a 99th percentile of {format_seconds(self.load.p99)}."
        )
        most = (
            f"The plan keeps the limit of {format_seconds(self.p99_limit)} up to "
            f"{format_count(chosen.highest_rate)} requests/s."
        )
        gain = "Larger batches do not raise that rate."
        if len(self.options) == 1:
            gain = "The result has no larger batch within the limit."
        if smallest.max_batch_size < chosen.max_batch_size and smallest.highest_rate:
            ratio = chosen.highest_rate / smallest.highest_rate
            gain = f"That is {ratio:.3g} times the rate of batches of at most {smallest.max_batch_size}."
        elif smallest.max_batch_size < chosen.max_batch_size:
            gain = f"Batches of at most {smallest.max_batch_size} do not keep it at any rate."
        sentences = [first, most, gain]
        if smallest.max_batch_size > 1:
            sentences.append(
                f"Fewer requests count as a step of {smallest.max_batch_size}, the smallest batch of the result: add "
                "batch size 1 for their own times."
            )
        if self.timed_instances is not None:
            more = ": more need another machine" if self.instances > self.timed_instances else ""
            sentences.append(f"Steps were timed with {self.timed_instances} such instances at the same time{more}.")
        if self.timed_once:
            count = sum(option.max_batch_size <= self.max_batch_size for option in self.options)
            sentences.append(
                f"Batch sizes with a single timing, which shows little variation: {len(self.timed_once)} of "
                f"the {count} up to {self.max_batch_size}. Tune with a larger budget."
            )
        slowest = max(self.first_calls, key=lambda n: self.first_calls[n], default=None)
        if slowest is not None:
            limit = ", longer than the limit" if self.first_calls[slowest] > self.p99_limit else ""
            sentences.append(
                f"The first call of a batch size took up to {format_seconds(self.first_calls[slowest])} (batch "
                f"{slowest}){limit}: call each size once before requests arrive."
            )
        if self.on_busy_machine:
            sentences.append(BUSY_MACHINE)
        return tuple(sentences)

    @property
    def _of_threads(self) -> str:
        return "" if self.threads is None else f" of {format_counted(self.threads, 'thread')}"

    def to_mapping(self) -> dict[str, Any]:
        """Return the plan as plain mappings and lists, for JSON."""
        plan = {"schema": 1} | attrs.asdict(self) | {
            "queue_delay": self.queue_delay, "cost_per_million_requests": self.cost_per_million_requests,
            "reasons": self.reasons,
        }  # fmt: skip
        mapping: dict[str, Any] = json.loads(json.dumps(plan, allow_nan=False))
        return mapping

    def to_triton(self) -> str:
        """
        Return the lines of a Triton `config.pbtxt` that hold the plan.

        `count` is the number of all instances on a CPU; on GPUs it is 1, the number on each GPU.
        """
        group = (
            f"instance_group [ {{ count: {self.instances} kind: KIND_CPU }} ]\n"
            if self.on_cpu
            else f"# {self.instances} in total, each on a GPU of its own\ninstance_group [ {{ count: 1 }} ]\n"
        )
        return (
            f"{group}"
            f"max_batch_size: {self.max_batch_size}\n"
            f"dynamic_batching {{ max_queue_delay_microseconds: {round(1e6 * self.queue_delay)} }}\n"
        )

    def to_ray_serve(self, deployment: str = "Model") -> str:
        """
        Return a deployment of a Ray Serve config file, as YAML; its class sets the batch in `reconfigure`.

        Args:
            deployment: Name of the class with the method that `@serve.batch` decorates.

        Raises:
            InvalidArgument: If `deployment` is no name of a class, or the plan's `closes_while_busy` is False.
        """
        if not self.closes_while_busy:
            remedy = "Plan with closes_while_busy=True: Ray Serve fills no batch while it waits for an instance."
            raise InvalidArgument("closes_while_busy", self.closes_while_busy, "True in a plan for Ray Serve", remedy)
        if not isinstance(deployment, str) or not deployment.isidentifier():
            raise InvalidArgument("deployment", deployment, "the name of a class")
        return (
            f"- name: {deployment}\n"
            f"  num_replicas: {self.instances}\n"
            f"  max_ongoing_requests: {self._most_waiting}  # those that the limit leaves time for\n"
            f"  user_config:\n"
            f"    max_batch_size: {self.max_batch_size}\n"
            f"    batch_wait_timeout_s: {self.queue_delay:.6g}\n"
        )

    def to_bentoml(self) -> str:
        """Return the decorators of a BentoML service and its batched method; BentoML chooses the queue delay."""
        batch = f"@bentoml.api(batchable=True, max_batch_size={self.max_batch_size})"
        return f"@bentoml.service(workers={self.instances})\n{batch}\n"

    def to_torchserve(self) -> str:
        """
        Return the lines of a TorchServe `model-config.yaml`.

        The delay is a whole number of milliseconds, at least 1: instead of 0, TorchServe 0.12 takes its default, 100.
        """
        return (
            f"minWorkers: {self.instances}\nmaxWorkers: {self.instances}\n"
            f"deviceType: {'cpu' if self.on_cpu else 'gpu'}\n"
            f"batchSize: {self.max_batch_size}\nmaxBatchDelay: {max(1, math.ceil(1e3 * self.queue_delay))}\n"
            f"jobQueueSize: {max(_TORCHSERVE_QUEUE, self.instances * self._most_waiting)}\n"
        )

    @property
    def _most_waiting(self) -> int:
        """Requests of an instance, in the queue or in a step, that the limit leaves time for, by Little's law."""
        most = math.ceil(self.chosen.highest_rate * self.p99_limit / self.instances)
        return max(2 * self.max_batch_size, most)


@attrs.frozen(kw_only=True, slots=False)
class _Server:
    """A simulated server, to compare maximum batch sizes, queue delays and arrival rates."""

    # seconds of a step of 1, 2, ... requests; several times of one size are used in turn
    steps: Sequence[Sequence[float]]
    overhead: float  # seconds that are added to each request
    closes_while_busy: bool  # as for `simulate`
    limit: float  # limit of the 99th percentile of the latency
    instances: int  # copies of the model
    seed: int  # seed of the random arrivals

    @cached_property
    def _gaps(self) -> np.ndarray:
        """Random times between arrivals, in units of their mean."""
        return np.random.default_rng(self.seed).exponential(size=_MOST_SIMULATED)

    @property
    def delays(self) -> list[float]:
        """The queue delays to compare, in seconds."""
        return [share * self.limit for share in _DELAY_SHARES]

    def capacity(self, batch_size: int) -> float:
        """Return the requests per second that all instances serve together, in full batches without a pause."""
        return self.instances * batch_size / float(np.mean(self.steps[batch_size - 1]))

    def load(self, batch_size: int, delay: float, rate: float) -> Load | None:
        """Return the load at a maximum batch size, queue delay and arrival rate; None for a queue that would grow."""
        if rate >= self.capacity(batch_size):
            return None
        full = _FULL_BATCHES * batch_size  # requests of an instance
        instances = max(1, min(self.instances, _MOST_SIMULATED // full))
        gaps = self._gaps[: max(_REQUESTS, full * instances)] / (rate * instances / self.instances)
        return simulate(
            np.cumsum(gaps).tolist(), self.steps[:batch_size], instances=instances, delay=delay,
            overhead=self.overhead, closes_while_busy=self.closes_while_busy,
        )  # fmt: skip

    def keeps_limit(self, batch_size: int, delay: float, rate: float) -> bool:
        """
        Return whether the 99th percentile of latency is within the limit in each of ten stretches of requests.

        The server has this maximum batch size and queue delay, and requests arrive at this rate.
        """
        load = self.load(batch_size, delay, rate)
        return load is not None and load.worst_p99 <= self.limit

    def highest_rate(self, batch_size: int, delay: float, rate: float) -> float:
        """
        Return the highest arrival rate that keeps the limit at a maximum batch size and queue delay; 0 if none does.

        Bisection starts at `rate`.
        """
        capacity = self.capacity(batch_size)
        low, high = (rate, capacity) if self.keeps_limit(batch_size, delay, rate) else (0.0, min(rate, capacity))
        for _ in range(_RATE_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.keeps_limit(batch_size, delay, middle) else (low, middle)
        return low

    def option(self, batch_size: int, rate: float) -> ServingOption:
        """Return the option of a maximum batch size, with the queue delay that allows the highest arrival rate."""
        delays = self.delays if batch_size > 1 else self.delays[:1]
        rates = {delay: self.highest_rate(batch_size, delay, rate) for delay in delays}
        delay = _smallest_as_good(rates, rate)
        return ServingOption(
            max_batch_size=batch_size, queue_delay=delay, load=self.load(batch_size, delay, rate),
            highest_rate=rates[delay],
        )  # fmt: skip


def _smallest_as_good(rates: Mapping[Any, float], rate: float) -> Any:
    """Return the smallest setting with nearly the highest arrival rate; settings that reach `rate` take precedence."""
    able = {key: highest for key, highest in rates.items() if highest >= rate} or rates
    best = max(able.values())
    return min(key for key, highest in able.items() if highest >= _SAME_SHARE * best)


def serving_plan(
    result: BatchSizeResult | ThreadsResult | str | Path,
    *,
    arrival_rate: float,
    p99: float,
    instances: int | None = None,
    overhead: float = 0.0,
    closes_while_busy: bool = False,
    price_per_hour: float | None = None,
    seed: int = 0,
) -> ServingPlan:
    """
    Return the maximum batch size, queue delay and instances that keep a latency limit at an arrival rate.

    Requests of one sample each arrive independently of each other (a Poisson process) in one queue.  An idle instance
    takes up to the maximum batch size of them, at the latest when the oldest has waited for the queue delay.  This is
    simulated with the step times of the result and their variation, up to batches of 4096.  Each instance needs a
    device of its own: instances that share one slow each other down.

    Args:
        result: A TuningResult, Forecast or ThreadsResult of inference, or the path of the JSON of one. Of a
            ThreadsResult the best number of threads counts.
        arrival_rate: Requests per second, at least 1e-6.
        p99: Limit of the 99th percentile of the latency in seconds.
        instances: Copies of the model. None: as many as ran at the same time in a result of `autotune_threads`, else
            as few as keep the limit.
        overhead: Seconds that server and network add to each request.
        closes_while_busy: Whether the server closes a batch after the delay even if all instances are busy, as
            `@serve.batch` of Ray 2.60 does.  A closed batch takes no further requests while it waits.
        price_per_hour: Price of an instance for an hour, in any currency.
        seed: Seed of the simulated arrivals.

    Returns:
        ServingPlan: The plan, each maximum batch size in comparison, and the lines for common servers.

    Raises:
        InvalidArgument: If an argument is out of range, or no setting keeps the limit. Also if the result is of
            training, recommends no number of threads, or has no step time.
        InvalidData: If the file is neither a tuning result nor the prediction for one device.

    Example:
        >>> from cubatch.tuning.tune import autotune
        >>> result = autotune("mlp", device="cpu", batch_sizes=[1, 8, 64], budget=3.0, store=False)
        >>> plan = serving_plan(result, arrival_rate=50.0, p99=0.5)
        >>> plan.instances, plan.load.p99 <= 0.5
        (1, True)
    """
    if isinstance(result, ThreadsResult):
        if result.best is None:
            allowed = "a result that recommends a number of threads"
            raise InvalidArgument("result", None, allowed, "Tune again with a larger budget.")
        result = result.best
    elif not isinstance(result, BatchSizeResult):
        result = load(result, "result", predictions=True)
    rate = float(checks.check_number("arrival_rate", arrival_rate, least=_LEAST_RATE))
    limit = float(checks.check_number("p99", p99, above=0.0, unit="seconds"))
    overhead = float(checks.check_number("overhead", overhead, unit="seconds"))
    if price_per_hour is not None:
        price_per_hour = float(checks.check_number("price_per_hour", price_per_hour, above=0.0))
    together = getattr(result, "environment", {})  # of a prediction none
    timed_instances = together.get("instances")
    instances = timed_instances if instances is None else instances
    if instances is not None:
        instances = checks.check_whole("instances", instances, most=_MOST_INSTANCES)
    seed = checks.check_whole("seed", seed, least=0)
    checks.check_kind("closes_while_busy", closes_while_busy, bool, "True or False")
    measured = _measured(result)
    server = _Server(
        steps=_steps(measured), overhead=overhead, closes_while_busy=closes_while_busy, limit=limit,
        instances=instances or 1, seed=seed,
    )  # fmt: skip
    sizes = [n for n, m in measured.items() if (m.latency_seconds or 0.0) + overhead <= limit]
    smallest = min(measured)
    alone = server.load(smallest, 0.0, server.capacity(smallest) * _SELDOM)
    if not sizes or alone is None or alone.worst_p99 > limit:
        least = format_seconds(alone.worst_p99 if alone else 0.0)
        allowed, lower = f"at least {least}, the 99th percentile of a request that waits for no other", ""
        if overhead:
            allowed, lower = f"{allowed}, of which {format_seconds(overhead)} are `overhead`", " lower the overhead,"
        raise InvalidArgument("p99", p99, allowed, f"Raise the limit,{lower} or use a faster device.")
    if instances is None:
        server = attrs.evolve(server, instances=_fewest(server, sizes, rate))
    options = tuple(server.option(n, rate) for n in sizes)
    able = {option.max_batch_size: option.highest_rate for option in options if option.highest_rate >= rate}
    if not able:
        most = format_count(max(option.highest_rate for option in options))
        other = "Leave `instances` out to compute the number" if timed_instances is None else "Use more machines"
        remedy = f"That many keep `p99` up to {most} requests/s. {other}."
        raise InvalidArgument("instances", server.instances, f"enough for {format_count(rate)} requests/s", remedy)
    largest = _smallest_as_good(able, rate)
    first_calls = {
        n: m.first_seconds
        for n, m in measured.items()
        if n <= largest and m.first_seconds is not None and m.first_seconds > _SLOW_FIRST * (m.latency_seconds or 0.0)
    }
    return ServingPlan(
        name=result.subject, device=str(result.device_facts.get("name") or ""),
        on_cpu=result.device_facts.get("kind") == "cpu", predicted=result.predicted,
        on_busy_machine=bool(getattr(result, "disturbed", False)), arrival_rate=rate, p99_limit=limit,
        overhead=overhead, closes_while_busy=closes_while_busy, instances=server.instances,
        threads=None if timed_instances is None else together.get("threads"), timed_instances=timed_instances,
        options=options,
        max_batch_size=largest, first_calls=first_calls,
        timed_once=tuple(n for n in sizes if n <= largest and len(measured[n].timings_seconds) == 1),
        price_per_hour=price_per_hour,
    )  # fmt: skip


def _measured(result: BatchSizeResult) -> dict[int, Measurement]:
    mode = getattr(result, "mode", None)
    if mode == "training":
        raise InvalidArgument("result", mode, "a result of inference", 'Tune with mode="inference".')
    measured = {n: m for n, m in result.sizes.items() if m.latency_seconds and (result.predicted or m.status in TIMED)}
    planned = {n: m for n, m in measured.items() if n <= MOST_REQUESTS}
    if not planned:
        remedy = "Tune or predict smaller sizes." if measured else "Tune with a larger budget."
        allowed = f"a result with a time of at most {MOST_REQUESTS} samples"
        raise InvalidArgument("result", result.subject, allowed, remedy)
    return planned


def _steps(measured: Mapping[int, Measurement]) -> list[list[float]]:
    """
    Return for each number of samples 1, 2, ..., up to the largest measured one, a list of seconds of a step.

    The time of a step is interpolated between measured sizes.  It varies as the single steps of the nearest size that
    has several.  Their mean is at least that time: otherwise a few fast timings raise the rate above the measured one.
    Batches below the smallest measured size take as long as that, as a server pads them.
    """
    sizes = sorted(measured)
    factors = {n: _step_factors(measured[n]) for n in sizes}
    several = [n for n in sizes if len(factors[n]) > 1] or sizes
    usual = np.interp(range(1, sizes[-1] + 1), sizes, [measured[n].latency_seconds or 0.0 for n in sizes])
    nearest = [min(several, key=lambda size: abs(math.log(size / n))) for n in range(1, sizes[-1] + 1)]
    return [(seconds * factors[size]).tolist() for seconds, size in zip(usual, nearest, strict=True)]


def _step_factors(measurement: Measurement) -> NDArray[np.float64]:
    """
    Return seconds of single steps relative to the usual step, in random order; [1] without timings, as in a prediction.

    They are the longest step of each timing, and the mean of its other steps.  Where the longest is unknown, the timing
    counts as one step.  More than MOST_STEPS are replaced by the means of as many equal shares of the sorted seconds.
    The mean of the result is at least 1.
    """
    timings = measurement.timings_seconds or (1.0,)
    counts = measurement.timings_steps or [1] * len(timings)
    longest = measurement.longest_steps or [None] * len(timings)
    steps: list[float] = []
    for mean, count, slow in zip(timings, counts, longest, strict=True):
        if slow is None or count == 1:
            steps.append(mean)
        else:
            steps += [mean * max(count - slow, 0.0) / (count - 1)] * (count - 1) + [mean * slow]
    if len(steps) > _MOST_STEPS:
        sums = np.concatenate(([0.0], np.cumsum(np.sort(steps))))  # of the fastest 0, 1, 2, ... steps
        share = len(steps) / _MOST_STEPS
        steps = (np.diff(np.interp(share * np.arange(_MOST_STEPS + 1), np.arange(len(sums)), sums)) / share).tolist()
    return np.random.default_rng(0).permutation(steps) / min(median(timings), fmean(steps))


def _fewest(server: _Server, sizes: Sequence[int], rate: float) -> int:
    """
    Return the smallest number of instances that keeps the latency limit at `rate` requests per second.

    Some of `sizes` must keep it as the maximum batch size, with some delay; raise InvalidArgument if none does.
    """

    def keeps(instances: int) -> bool:
        tried = attrs.evolve(server, instances=instances)
        return any(tried.keeps_limit(n, delay, rate) for delay in server.delays for n in reversed(sizes))

    least = most = math.ceil(rate / max(server.capacity(n) for n in sizes))
    while most > _MOST_INSTANCES or not keeps(most):
        if most >= _MOST_INSTANCES:
            allowed = f"a rate that at most {_MOST_INSTANCES} instances can serve"
            raise InvalidArgument("arrival_rate", rate, allowed, "Use a faster device, or allow a longer latency.")
        least, most = most + 1, min(2 * most, _MOST_INSTANCES)
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if keeps(middle) else (middle + 1, most)
    return most
