"""
Simulation of dynamic batching: requests wait in one queue until an idle instance takes a batch of them.

An idle instance takes a batch as soon as it is full or its oldest request has waited for the queue delay.  Triton's
dynamic batcher follows this rule.  Ray Serve closes batches while all instances are busy too.  Closed batches then wait
for an idle instance, and take no further requests.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence

import attrs
import numpy as np

_SETTLING_SHARE = 0.1
"""Share of the simulated requests that is left out: the queue begins empty."""
_STRETCHES = 10
"""Stretches of successive requests, each with a 99th percentile of its own."""


@attrs.frozen(kw_only=True)
class Load:
    """
    How a server with a batching queue responds to requests.

    Attributes:
        p50, p95, p99: Percentiles of the latency in seconds: waiting, the step, and the server's overhead.
        worst_p99: The largest of the 99th percentiles, in seconds, of ten stretches of successive requests.
        mean_batch_size: Requests per step.
        utilization: Share of the time during which an instance runs steps, 0 to 1; the mean over instances.
    """

    p50: float
    p95: float
    p99: float
    worst_p99: float
    mean_batch_size: float
    utilization: float


def simulate(
    arrivals: Sequence[float],  # time of each request in seconds, ascending
    # seconds of a step of 1, 2, ... requests; the last is the largest batch. Several times of one size are used in turn
    step_seconds: Sequence[Sequence[float]],
    *,
    instances: int = 1,  # instances that run steps independently of each other
    delay: float = 0.0,  # seconds for which the oldest request waits for others at most, while an instance is idle
    overhead: float = 0.0,  # seconds that are added to each latency
    closes_while_busy: bool = False,  # whether batches are closed while all instances are busy too
) -> Load:
    """
    Return latency and utilization of a simulated server that batches requests (at least one) in the order of arrival.

    Latencies of the first tenth of the requests do not count: the queue is empty at the start.
    """
    count, most = len(arrivals), len(step_seconds)
    free_at = [0.0] * instances
    ends: list[float] = []
    batches: list[int] = []
    busy, first = 0.0, 0
    while first < count:
        full = arrivals[first + most - 1] if first + most <= count else math.inf
        closes = min(full, arrivals[first] + delay)
        begins = max(free_at[0], closes)
        stop = bisect_right(arrivals, closes if closes_while_busy else begins, first, min(first + most, count))
        times = step_seconds[stop - first - 1]
        seconds = times[len(ends) % len(times)]
        heapq.heapreplace(free_at, begins + seconds)
        ends.append(begins + seconds)
        batches.append(stop - first)
        busy, first = busy + seconds, stop
    latencies = np.repeat(ends, batches) - np.asarray(arrivals) + overhead
    settled = latencies[int(_SETTLING_SHARE * count) :]
    p50, p95, p99 = map(float, np.percentile(settled, (50, 95, 99)))
    stretches = np.array_split(settled, min(_STRETCHES, len(settled)))
    return Load(
        p50=p50, p95=p95, p99=p99, worst_p99=max(float(np.percentile(stretch, 99)) for stretch in stretches),
        mean_batch_size=count / len(ends), utilization=busy / (instances * max(ends)),
    )  # fmt: skip
