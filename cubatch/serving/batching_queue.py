"""
Simulation of dynamic batching: requests wait in one queue until an idle instance takes up to a number of them.

An instance takes a batch as soon as it is full or its oldest request has waited for the queue delay.  Triton's
dynamic batcher and the `batch_wait_timeout_s` of Ray Serve follow this rule.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

_SETTLING_SHARE = 0.1
"""Share of the simulated requests that is left out: the queue begins empty."""
_BLOCKS = 10
"""Blocks of successive requests whose percentiles give the standard error (method of batch means)."""
_STANDARD_ERRORS = 1.645
"""One-sided 95 % of a normal distribution."""


@attrs.frozen(kw_only=True)
class Load:
    """
    How a server with a batching queue responds to requests.

    Attributes:
        p50, p95, p99: Percentiles of the latency in seconds: waiting, the step, and what the server adds.
        p99_bound: Upper 95 % confidence bound of the 99th percentile.
        mean_batch_size: Requests per step.
        utilization: Share of the time during which an instance runs a step.
    """

    p50: float
    p95: float
    p99: float
    p99_bound: float
    mean_batch_size: float
    utilization: float


def interpolate(latencies: Mapping[int, float], batch_size: int) -> list[float]:
    """
    Return the seconds of a step of 1, 2, ... up to `batch_size` samples: linear between the measured sizes.

    Batches below the smallest measured size take as long as that size, as a server pads them.
    """
    sizes = sorted(latencies)
    return list(map(float, np.interp(range(1, batch_size + 1), sizes, [latencies[n] for n in sizes])))


def simulate(
    arrivals: Sequence[float],
    step_seconds: Sequence[float],
    *,
    instances: int = 1,
    delay: float = 0.0,
    factors: Sequence[float] = (1.0,),
    overhead: float = 0.0,
) -> Load:
    """
    Serve requests in the order of their arrival.

    Args:
        arrivals: Time of each request in seconds, ascending.
        step_seconds: Seconds of a step of 1, 2, ... requests; the last is the largest batch.
        instances: Instances that run steps independently of each other.
        delay: Seconds for which the oldest request waits for others at most, while an instance is idle.
        factors: Multiples of the time of a step, applied in turn: how much the time of equal steps varies.
        overhead: Seconds that are added to each latency.

    Example:
        >>> simulate([0.0, 0.1, 0.2, 5.0], [1.0, 1.0], delay=0.0).mean_batch_size
        1.3333333333333333
    """
    count, most = len(arrivals), len(step_seconds)
    free_at = [0.0] * instances
    ends: list[float] = []
    taken: list[int] = []
    busy, first = 0.0, 0
    while first < count:
        full = arrivals[first + most - 1] if first + most <= count else math.inf
        begins = max(free_at[0], min(full, arrivals[first] + delay))
        stop = bisect_right(arrivals, begins, first, min(first + most, count))
        seconds = step_seconds[stop - first - 1] * factors[len(ends) % len(factors)]
        heapq.heapreplace(free_at, begins + seconds)
        ends.append(begins + seconds)
        taken.append(stop - first)
        busy, first = busy + seconds, stop
    latencies = np.repeat(ends, taken) - np.asarray(arrivals) + overhead
    settled = latencies[int(_SETTLING_SHARE * count) :]
    p50, p95, p99 = map(float, np.percentile(settled, (50, 95, 99)))
    blocks = [np.percentile(block, 99) for block in np.array_split(settled, min(_BLOCKS, len(settled)))]
    error = float(np.std(blocks, ddof=1)) / math.sqrt(len(blocks)) if len(blocks) > 1 else 0.0
    return Load(
        p50=p50, p95=p95, p99=p99, p99_bound=p99 + _STANDARD_ERRORS * error,
        mean_batch_size=count / len(ends), utilization=float(busy / (instances * max(ends))),
    )  # fmt: skip
