"""The rate at which a data loader delivers samples, by itself and in the loop around a step."""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import attrs
import numpy as np

from cubatch import checks
from cubatch.errors import InvalidArgument
from cubatch.frameworks import garbage
from cubatch.frameworks.batch_sources import is_loader
from cubatch.frameworks.lazy_torch import torch
from cubatch.frameworks.torch_state import kept_random_state
from cubatch.hardware.cpu_load import process_seconds
from cubatch.hardware.host import ROOT, read_text

_FIRST_SIZE = 16  # samples of a batch that is always timed; larger ones of a slow loader may take too long
_BATCH_SHARE = 0.25  # of the seconds, that one batch may take
_MOST_WAITS = 3  # times the seconds, that start-ups and timings together take at most


def _rates(value: Mapping[Any, Any]) -> dict[int, float]:
    return {checks.size(int(n)): checks.positive(rate) for n, rate in value.items()}


@attrs.frozen(kw_only=True)
class LoaderRate:
    """
    Measured rate of a data loader alone, and properties that decide the rate of a loop of loader and step.

    Attributes:
        batch_size: Batch size of `samples_per_second`: the recommended size, or the nearest size that was timed.
        num_workers: Worker processes of the loader; 0: it works in the process that trains, between steps.
        samples_per_second: The loader's rate after start-up, the copy to the device included.
        num_samples: Samples of an epoch; None if unknown.
        drop_last: Whether an incomplete last batch is left out.
        delay_seconds: Seconds by which the workers delay a step on the same CPUs, for each sample. 0 on a GPU.
        rates: Samples per second by batch size that was timed; empty: `samples_per_second` at all sizes.
        loop_ratios: Measured rate / `rate_of_parts` of each loop that was run, by batch size; empty if none was run. On
            a CPU a loader is slower after a step than by itself. Its data has left the caches, and threads of the step
            still wait actively.
    """

    batch_size: int = attrs.field(converter=checks.size)
    num_workers: int = attrs.field(converter=checks.count)
    samples_per_second: float = attrs.field(converter=checks.positive)
    num_samples: int | None = attrs.field(default=None, converter=attrs.converters.optional(checks.count))
    drop_last: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    delay_seconds: float = attrs.field(default=0.0, converter=checks.number, validator=attrs.validators.ge(0.0))
    rates: Mapping[int, float] = attrs.field(factory=dict, converter=_rates, hash=False)
    loop_ratios: Mapping[int, float] = attrs.field(factory=dict, converter=_rates, hash=False)

    def rate_at(self, batch_size: int) -> float:
        """
        Return the loader's samples per second at a batch size, interpolated between the logarithms of the timed sizes.

        Example:
            >>> LoaderRate(
            ...     batch_size=4, num_workers=0, samples_per_second=300.0, rates={1: 100.0, 4: 300.0, 64: 240.0}
            ... ).rate_at(2)
            200.0
        """
        return _interpolate(self.rates or {self.batch_size: self.samples_per_second}, batch_size)

    def loop_rate(self, step_rate: float, batch_size: int) -> float:
        """
        Return the samples per second of a loop of this loader and a step, which takes `step_rate` samples per second.

        It is `rate_of_parts` times the ratio in `loop_ratios`, interpolated between the batch sizes of these loops.
        """
        return _interpolate(self.loop_ratios or {1: 1.0}, batch_size) * self.rate_of_parts(step_rate, batch_size)

    def rate_of_parts(self, step_rate: float, batch_size: int) -> float:
        """
        Return the samples per second of a loop of this loader and a step of `step_rate` samples per second.

        The rate is predicted. With worker processes loading and stepping overlap, without them they take turns. A step
        on the CPU is slower while workers use the same CPUs.

        Example:
            >>> LoaderRate(batch_size=8, num_workers=4, samples_per_second=300.0).rate_of_parts(600.0, 8)
            300.0
            >>> LoaderRate(batch_size=8, num_workers=0, samples_per_second=300.0).rate_of_parts(600.0, 8)
            200.0
        """
        own = self.rate_at(batch_size)
        if self.num_workers:
            return min(1 / (1 / step_rate + self.delay_seconds), own)
        return 1 / (1 / step_rate + 1 / own)

    def is_bottleneck(self, step_rate: float, batch_size: int, tolerance: float) -> bool:
        """
        Return whether the loader limits the loop around a step of `step_rate` samples per second.

        It does if the loop has at least 1 - `tolerance` times the rate that it has with an infinitely fast step.

        Example:
            >>> loader = LoaderRate(batch_size=8, num_workers=4, samples_per_second=300.0)
            >>> loader.is_bottleneck(600.0, 8, 0.01), loader.is_bottleneck(200.0, 8, 0.01)
            (True, False)
        """
        most = self.rate_of_parts(1e9 * step_rate, batch_size)
        return (1 - tolerance) * most <= self.rate_of_parts(step_rate, batch_size)

    def workers_for(self, step_rate: float) -> int:
        """Return the workers that load `step_rate` samples per second; at most as many as the process has CPUs."""
        each = self.samples_per_second / max(1, self.num_workers)
        return min(len(os.sched_getaffinity(0)), math.ceil(step_rate / each))

    def steps(self, batch_size: int) -> tuple[int, int] | None:
        """
        Return (steps of an epoch, samples of an incomplete last batch or 0); None if `num_samples` is unknown.

        Example:
            >>> LoaderRate(batch_size=8, num_workers=4, samples_per_second=300.0, num_samples=50).steps(16)
            (4, 2)
        """
        if self.num_samples is None:
            return None
        full, rest = divmod(self.num_samples, batch_size)
        rest = 0 if self.drop_last else rest
        return full + bool(rest), rest


def _interpolate(values: Mapping[int, float], batch_size: int) -> float:
    known = sorted(values.items())
    return float(np.interp(math.log(batch_size), [math.log(n) for n, _ in known], [value for _, value in known]))


def check_loader(loader: Any) -> None:
    """
    Raise an error unless the argument is a data loader that can make batches of any size.

    Raises:
        InvalidArgument: If `loader` is no data loader, or a batch sampler other than PyTorch's makes its batches.
    """
    allowed = "a torch.utils.data.DataLoader"
    if not is_loader(loader):
        remedy = "Call the function, or name one without required parameters." if callable(loader) else ""
        raise InvalidArgument("loader", loader, allowed, remedy)
    if _sampler(loader) is None and not _is_iterable(loader):
        given = "a data loader without a batch size"
        raise InvalidArgument("loader", given, f"{allowed} with a batch_size", "A batch_sampler fixes its batches.")


def measurable(loader: Any) -> Any:
    """Return the loader if it can make batches of any size, else None."""
    try:
        check_loader(loader)
    except InvalidArgument:
        return None
    return loader


@garbage.collected_as_usual()
def measure(
    loader: Any,  # a torch.utils.data.DataLoader
    batch_size: int,
    *,
    seconds: float,  # time limit, apart from start-up
    others: Collection[int] = (),
    copy: Callable[[Any], None] | None = None,  # called with each batch, as to copy it to a GPU; None: not copied
    shares_cpus: bool = False,  # whether steps use all CPUs of this process
    now: Callable[[], float] = time.perf_counter,  # a clock in seconds
) -> LoaderRate:
    """
    Return the measured rate of a data loader with its own workers, at `batch_size` and the sizes in `others`.

    Start-up is excluded: the first batch of each worker does not count. A size of which one batch would take more than
    a quarter of `seconds` is left out. So is one at which the loader raises an error: a `collate_fn` may take only some
    numbers of samples. Waiting for batches may take three times as long. An error of the user's data set at all sizes
    passes through.
    """
    check_loader(loader)
    sizes = sorted({min(batch_size, _FIRST_SIZE), batch_size, *others})
    rates, cpu_seconds, began = dict[int, float](), dict[int, float](), math.inf
    raised: Exception | None = None
    with _random_state(loader):
        for n in sizes:
            if rates and (n / max(rates.values()) > _BATCH_SHARE * seconds or now() - began > _MOST_WAITS * seconds):
                break
            try:
                size, rate, cpu = _rate(loader, n, seconds / len(sizes), copy, now)
            except Exception as error:  # noqa: BLE001 - any error of the user's data set
                raised = error
                continue
            rates[size], cpu_seconds[size] = rate, cpu
            began = min(began, now())  # the first start-up may be the only one
    if raised is not None and not rates:
        raise raised
    size = min(rates, key=lambda n: abs(math.log(n / batch_size)))
    batches: Any = getattr(loader, "batch_sampler", None)
    return LoaderRate(
        batch_size=size, num_workers=loader.num_workers, samples_per_second=rates[size],
        num_samples=num_samples(loader), drop_last=bool(getattr(batches, "drop_last", loader.drop_last)),
        delay_seconds=cpu_seconds[size] / len(os.sched_getaffinity(0)) if shares_cpus else 0.0, rates=rates,
    )  # fmt: skip


@garbage.collected_as_usual()
def run_loops(
    loader: Any,  # as for `measure`
    batch_sizes: Sequence[int],  # samples of a batch of each loop, the most important first
    # function that prepares a batch size and returns a function that runs a step on a batch of the loader
    step_of: Callable[[int], Callable[[Any], object]],
    *,
    seconds: float,  # time limit of each of the three rounds
    accumulate: int = 1,  # batches that are loaded after each step
    now: Callable[[], float] = time.perf_counter,  # a clock in seconds
) -> dict[int, list[float]]:
    """
    Return the samples per second of loops on the CPU, in which a step and a data loader take turns, by batch size.

    The loops run one after the other, in the given order, back, and once more.  A steady change of the host's speed is
    then nearly the same for all of them. No loop begins after three times `seconds`. A size is missing without a full
    batch or time for it.
    """
    until, rates = now() + _MOST_WAITS * seconds, {n: list[float]() for n in batch_sizes}
    for n in (*batch_sizes, *reversed(batch_sizes), *batch_sizes):
        if now() < until:
            turn = _run_loop(
                loader, n, step_of(n), seconds=seconds / len(batch_sizes), until=until, accumulate=accumulate, now=now
            )
            rates[n] += [] if turn is None else [turn]
    return {n: taken for n, taken in rates.items() if taken}


def loop_ratios(measured: Mapping[int, Sequence[float]], predicted: Mapping[int, float]) -> dict[int, float]:
    """
    Return measured / predicted rate of loops by batch size, with less scatter than single measurements.

    Each ratio is the median over the runs of a loop, shrunk towards the geometric mean of all sizes.  It is shrunk by
    the share of the variance between sizes that the scatter of the runs explains.  See Morris, "Parametric Empirical
    Bayes Inference", JASA 78 (1983).

    Example:
        >>> parts = {8: 100.0, 64: 100.0}
        >>> {n: round(ratio, 2) for n, ratio in loop_ratios({8: [79.0, 81.0], 64: [124.0, 126.0]}, parts).items()}
        {8: 0.8, 64: 1.25}
        >>> {n: round(ratio, 2) for n, ratio in loop_ratios({8: [50.0, 128.0], 64: [78.125, 200.0]}, parts).items()}
        {8: 1.0, 64: 1.0}
    """
    logs = {n: [math.log(rate / predicted[n]) for rate in turns] for n, turns in measured.items()}
    middles = {n: median(values) for n, values in logs.items()}
    mean = fmean(middles.values()) if middles else 0.0
    scatter = [(value - middles[n]) ** 2 for n, values in logs.items() for value in values]
    within = sum(scatter) / max(1, len(scatter) - len(logs))  # variance of one turn
    between = sum(len(logs[n]) * (middle - mean) ** 2 for n, middle in middles.items()) / max(1, len(logs) - 1)
    share = max(0.0, 1.0 - within / between) if between else 0.0
    return {n: math.exp(mean + share * (middle - mean)) for n, middle in middles.items()}


def _run_loop(
    loader: Any,
    batch_size: int,
    step: Callable[[Any], object],
    *,
    seconds: float,
    until: float,
    accumulate: int,
    now: Callable[[], float],
) -> float | None:
    """
    Return the samples per second of one loop; None without a full batch, or if its first turn ends after `until`.

    It runs for about `seconds`; `until` is a time on the clock `now`. A turn loads `accumulate` batches and calls
    `step` once, with the last of them. The clock starts and stops when a batch arrives, so that loading has no head
    start. Before, workers start, and one step warms up.
    """
    count = 0
    with _random_state(loader):
        batches = _epochs(_resized(loader, batch_size))

        def draw() -> list[Any]:
            """Return the last batch of a turn, in a list; an empty list if the loader has too few."""
            last = list[Any]()
            for place, batch in enumerate(itertools.islice(batches, accumulate), start=1):
                last = [batch] * (place == accumulate)
            return last

        if not (drawn := draw()):
            return None
        step(*drawn)
        if not (drawn := draw()) or now() > until:
            return None
        began = now()
        # Workers may deliver in step with each other: only whole rounds of them are counted.
        while (spent := now() - began) < seconds or count % max(1, loader.num_workers):
            step(*drawn)
            if not (drawn := draw()):
                return None
            count += 1
    return count * accumulate * batch_size / spent


def _epochs(loader: Any) -> Iterator[Any]:
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch


def copy_to(place: str) -> Callable[[Any], None]:
    """Return a function that copies the tensors of a batch to the GPU "cuda:N" and waits until that is done."""
    from torch.utils import _pytree

    def copy(batch: Any) -> None:
        for leaf in _pytree.tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                leaf.to(place, non_blocking=True)
        torch.cuda.synchronize(place)

    return copy


def _rate(
    loader: Any, batch_size: int, seconds: float, copy: Callable[[Any], None] | None, now: Callable[[], float]
) -> tuple[int, float, float]:
    """
    Time epochs of a loader for `seconds`, without the first batch of each worker; `now` is the clock.

    `copy` is called with each batch; None: not copied. Too few batches raise InvalidArgument.

    Returns:
        tuple[int, float, float]: The batch size, lowered if the data set is small; its samples per second; CPU seconds
        of the workers per sample.
    """
    skipped = max(1, loader.num_workers)
    if (epoch := num_samples(loader)) is not None:  # an epoch of a small data set still has batches that count
        batch_size = max(1, min(batch_size, epoch // (2 * skipped + 1)))
    resized, count, spent, start = _resized(loader, batch_size), 0, 0.0, now()
    workers, loaded = _WorkerSeconds(), 0
    while spent < seconds and (not count or now() - start < _MOST_WAITS * seconds):
        before, began = count, None
        for place, batch in enumerate(resized, start=1):
            loaded += batch_size
            if copy is not None:
                copy(batch)
            if began is not None:
                count += batch_size
                if spent + now() - began >= seconds:
                    break
            elif place == skipped:
                workers.begin(loaded)
                began = now()
        if began is None or count == before:
            break
        spent += now() - began
    if not count or spent <= 0:
        allowed = f"one with more than {skipped} batches of {batch_size}: the first of each worker is not timed"
        restart = " An iterable data set has to start over with each iteration." * (epoch is None)
        remedy = f"Use more samples or fewer workers.{restart}"
        raise InvalidArgument("loader", "a data loader with too few samples", allowed, remedy)
    return batch_size, count / spent, workers.per_sample(loaded)


class _WorkerSeconds:
    """Counts the CPU seconds of processes that a loader starts after this object is made."""

    def __init__(self) -> None:
        self._others = set(multiprocessing.active_children())
        self._start: tuple[float, int] | None = None

    def begin(self, loaded: int) -> None:
        """Start counting at the first call; `loaded` is the number of samples loaded so far."""
        self._start = self._start or (self._seconds(), loaded)

    def per_sample(self, loaded: int) -> float:
        """Return the CPU seconds per sample since counting started; `loaded` is the number of samples loaded so far."""
        seconds, first = self._start or (0.0, 0)
        return (self._seconds() - seconds) / max(1, loaded - first)

    def _seconds(self) -> float:
        ticks, workers = os.sysconf("SC_CLK_TCK"), set(multiprocessing.active_children()) - self._others
        return sum(process_seconds(read_text(ROOT / f"proc/{worker.pid}/stat"), ticks) for worker in workers)


def _resized(loader: Any, batch_size: int) -> Any:
    """Return a loader of the same data set and settings with another batch size; incomplete batches are left out."""
    names = (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
        "prefetch_factor",
    )  # fmt: skip
    settings = {name: getattr(loader, name) for name in names}
    return torch.utils.data.DataLoader(
        loader.dataset, batch_size=batch_size, sampler=_sampler(loader), drop_last=True,
        persistent_workers=loader.num_workers > 0, **settings,
    )  # fmt: skip


def _is_iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, torch.utils.data.IterableDataset) and loader.batch_size is not None


def _sampler(loader: Any) -> Any:
    """Return the sampler of single samples; None for an iterable data set, or if a batch sampler makes the batches."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return None
    if getattr(loader, "batch_size", None) is not None:
        return loader.sampler
    batches: Any = getattr(loader, "batch_sampler", None)
    return batches.sampler if type(batches) is torch.utils.data.BatchSampler else None


def num_samples(loader: Any) -> int | None:
    """Return the samples of an epoch of a data loader; None if unknown."""
    source = loader.dataset if (sampler := _sampler(loader)) is None else sampler
    return len(source) if hasattr(source, "__len__") else None


@contextlib.contextmanager
def _random_state(loader: Any) -> Iterator[None]:
    """Restore random generators at the end of the block: those of the loader and its sampler, and the global ones."""
    owners = (loader, _sampler(loader))
    generators = {id(g): g for owner in owners if (g := getattr(owner, "generator", None)) is not None}
    states = {key: generator.get_state() for key, generator in generators.items()}
    with kept_random_state():
        try:
            yield
        finally:
            for key, generator in generators.items():
                generator.set_state(states[key])
