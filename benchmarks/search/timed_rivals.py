"""
Rivals that measure throughput, reimplemented from their published behavior, and three plain rules.

`finders` lists the facts that they get for free.  The three plain rules belong to no product:
they are what a careful person would write in an afternoon, and the yardstick of a search.

    rival               sizes                           a size is measured by
    aitune              powers of two, ascending        10 steps to warm up, 20 timed, their mean
    batchtune           multiples of 64 by memory       3 steps to warm up, 8 or 10 timed together, host clock
    powers of two x 5   powers of two, ascending        the median of 5 timings
    5 timings each      powers of two and 1.5 times     the median of 5 timings
    successive halving  the same                        5 timings, then twice as many for the better half
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.search.finders import Rival, Task
from cubatch.measure.goal import Goal
from cubatch.measure.runner import Runner
from cubatch.tuning import ladder
from cubatch.tuning.request import Request

SPAN_SECONDS = 0.01  # of a timing of the plain rules
WARMUPS = 2  # their discarded steps


def aitune(
    runner: Runner,
    task: Task,
    *,
    warmups: int = 10,
    timings: int = 20,
    gain: float = 0.05,
    patience: int = 2,
) -> int | None:
    """
    NVIDIA AITune's search for the batch size of the highest throughput.

    The user gives the sizes; powers of two are what its examples give.  Ascending, each is warmed up and
    timed step by step.  A size counts as a gain if 95 % of its throughput is not below that of the last gain.
    The third size in a row without a gain is the last one, and any error of a size ends the list.  The highest
    mean throughput wins. Return None if no size runs.
    """
    throughputs: dict[int, float] = {}
    last_gain, without = 0.0, 0
    for size in _powers(task.max_batch_size):
        try:
            runner.prepare(size)
            for _ in range(warmups):
                runner.clock.time(runner.step, 1)
            seconds = statistics.fmean(runner.clock.time(runner.step, 1).seconds for _ in range(timings))
        except MemoryError:
            runner.release()
            break
        throughputs[size] = size / seconds
        if (1.0 - gain) * throughputs[size] >= last_gain:
            last_gain, without = throughputs[size], 0
        elif without >= patience:
            break
        else:
            without += 1
    return max(throughputs, key=lambda size: throughputs[size], default=None)


def batchtune(
    runner: Runner,
    task: Task,
    *,
    step: int = 64,
    memory_share: float = 0.9,
    bins: int = 10,
    patience: int = 3,
    radius: int = 4,
    finalists: int = 3,
    rounds: int = 3,
) -> int | None:
    """
    Search multiples of 64 below a memory limit that small batches foretell (batchtune 0.1.1).

    Sizes double from 2 until a straight line through their memory predicts more than 90 % for the next one.  The line's
    limit is verified, 64 less each time.  Ten sizes spread below it are timed, the largest first, until three in a row
    are no better.  Then every multiple of 64 within four of the best is timed, and the best three, three times.
    A data set as large as five times the maximum is assumed; under 64 samples it has no answer: None.
    """
    try:
        largest = _foretold(runner, task.max_batch_size // step * step, memory_share * task.total_bytes, step)
    except MemoryError:  # nothing catches it while it probes
        return None
    if not largest:
        return None
    best, best_throughput, without = step, 0.0, 0
    for size in sorted({int(size) // step * step for size in np.linspace(step, largest, bins)}, reverse=True):
        if without >= patience:
            break
        throughput = _by_host(runner, size, steps=8)
        if throughput > best_throughput:
            best, best_throughput, without = size, throughput, 0
        else:
            without += 1
    around = range(min(largest, best + radius * step), max(step, best - radius * step) - 1, -step)
    fine = {size: _by_host(runner, size, steps=10) for size in around}
    chosen = sorted(fine, key=lambda size: -fine[size])[:finalists]
    again: dict[int, list[float]] = {size: [] for size in chosen}
    for turn in range(rounds):
        for size in chosen[turn % len(chosen) :] + chosen[: turn % len(chosen)]:
            again[size].append(_by_host(runner, size, steps=10))
    return max(again, key=lambda size: statistics.median(again[size]))


def powers_of_two(runner: Runner, task: Task) -> int | None:
    """Time powers of two five times each, until one fails; return the smallest within the tolerance, or None."""
    timings: dict[int, list[float]] = {}
    for size in _powers(task.max_batch_size):
        if not _visit(runner, size, 5, timings):
            break
    return _choose(timings, task.goal)


def five_timings_each(runner: Runner, task: Task) -> int | None:
    """Time every size of the plain ladder five times; return the smallest within the tolerance, or None."""
    timings: dict[int, list[float]] = {}
    for size in _ladder(task):
        _visit(runner, size, 5, timings)
    return _choose(timings, task.goal)


def successive_halving(runner: Runner, task: Task) -> int | None:
    """Time each size of the plain ladder five times, the better half ten times more, down to two; None if none runs."""
    timings: dict[int, list[float]] = {}
    count, sizes = 5, _ladder(task)
    while True:
        sizes = [size for size in sizes if _visit(runner, size, count, timings)]
        able = _keeping_limit({size: timings[size] for size in sizes}, task.goal)
        if len(able) <= 2:
            return _choose(able, task.goal)
        larger = -1 if task.goal.objective == "latency" else 1  # of equals what the goal prefers
        ranked = sorted(able, key=lambda size: (_cost(size, timings[size], task.goal), larger * size))
        sizes, count = sorted(ranked[: math.ceil(len(ranked) / 2)]), 2 * count


TIMED: dict[str, Rival] = {
    "aitune": aitune,
    "batchtune": batchtune,
    "powers of two x 5": powers_of_two,
    "5 timings each": five_timings_each,
    "successive halving": successive_halving,
}
KNOW_LATENCY = frozenset({"powers of two x 5", "5 timings each", "successive halving"})
"""Rules that know latency as an objective or a limit."""


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length())]


def _ladder(task: Task) -> list[int]:
    return [candidate.batch_size for candidate in ladder.plain(Request(max_batch_size=task.max_batch_size))]


def _visit(runner: Runner, size: int, count: int, timings: dict[int, list[float]]) -> bool:
    """Prepare a size, warm it up, and take timings of 10 ms or one step."""
    try:
        runner.prepare(size)
        for _ in range(WARMUPS):
            seconds = runner.clock.time(runner.step, 1).seconds
        repeats = max(1, math.ceil(SPAN_SECONDS / seconds))
        new = [runner.clock.time(runner.step, repeats).seconds for _ in range(count)]
    except MemoryError:
        runner.release()
        return False
    timings.setdefault(size, []).extend(new)
    return True


def _cost(size: int, seconds: Sequence[float], goal: Goal) -> float:
    return statistics.median(seconds) / (1 if goal.objective == "latency" else size)


def _keeping_limit(timings: Mapping[int, list[float]], goal: Goal) -> dict[int, list[float]]:
    limit = goal.latency_limit or math.inf
    return {size: seconds for size, seconds in timings.items() if statistics.median(seconds) <= limit}


def _choose(timings: Mapping[int, list[float]], goal: Goal) -> int | None:
    costs = {size: _cost(size, seconds, goal) for size, seconds in _keeping_limit(timings, goal).items()}
    if not costs:
        return None
    good = [size for size, cost in costs.items() if cost <= goal.allowed(min(costs.values()))]
    return max(good) if goal.objective == "latency" else min(good)


def _foretold(runner: Runner, most: int, limit: float, step: int) -> int:
    """Extrapolate the memory of small batches to the largest that takes no more than the limit, and verify it."""
    sizes: list[int] = []
    taken: list[int] = []
    slope = intercept = 0.0
    for exponent in range(1, 32):
        size = min(2**exponent, most)
        if not size:
            return 0
        sizes.append(size)
        taken.append(_peak_bytes(runner, size))
        if size == most and taken[-1] < limit:
            return most
        if len(sizes) > 1:
            slope, intercept = np.polyfit(sizes, taken, deg=1)
        if size == most or (slope > 0 and intercept + slope * min(2 * size, most) >= limit):
            break
    if slope <= 0:
        return 0
    size = min(int((limit - intercept) / slope), most) // step * step
    while size > 0:
        try:
            if _peak_bytes(runner, size) < limit:
                return size
        except MemoryError:
            runner.release()
        size -= step
    return 0


def _peak_bytes(runner: Runner, size: int) -> int:
    runner.prepare(size)
    for _ in range(5):
        runner.step()
    return runner.peak_bytes or 0


def _by_host(runner: Runner, size: int, *, steps: int) -> float:
    """Return samples per second by the host's clock; None for a size that does not fit."""
    try:
        runner.prepare(size)
        for _ in range(3):
            runner.step()
        began = runner.clock.now()
        for _ in range(steps):
            runner.step()
    except MemoryError:
        runner.release()
        return 0.0
    return steps * size / (runner.clock.now() - began)
