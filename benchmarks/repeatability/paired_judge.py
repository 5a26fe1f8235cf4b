"""
The judge: batch sizes in shuffled rounds, compared within each round.

It does not divide by a reference step as the tuner does.  The steps of a large candidate evict the reference from the
caches.  A judge that divided found the largest sizes faster by up to 30 %.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.repeatability import workloads
from benchmarks.repeatability.finder_runs import LARGEST_OF_RIVALS, LIGHTNING, OURS, POWERS
from benchmarks.repeatability.workloads import Workload

CANDIDATE_SECONDS = 0.05  # shortest block
JUDGES, MIN_ROUNDS, MAX_SIZES = 4, 2, 12  # processes, rounds of each, sizes
LONGEST_STEP = 2.5  # seconds: no size with a longer step is added
RESAMPLES = 1000  # of the bootstrap


def sizes_to_judge(runs: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
    """
    Return the sizes of each round of the judge, and the slow sizes of rivals that only its first round runs.

    Recommended sizes and the references of results are always among them.  Powers of two and 1.5 times these lie from
    half of the smallest recommendation to twice the largest, without the answers of Lightning's rule.  Of
    more than MAX_SIZES those nearest to a recommendation remain, powers of two first.
    """
    own, timed, recommended = (
        {run["batch_size"] for run in runs if run["finder"] in finders and run["batch_size"]}
        for finders in ((OURS,), (OURS, POWERS), (OURS, POWERS, LIGHTNING))
    )
    rate = max((run["samples_per_second"] or 0.0 for run in runs), default=0.0) or math.inf
    slow = {size for size in recommended - own if size / rate > LONGEST_STEP}
    always = (recommended - slow) | {run["reference"]["batch_size"] for run in runs if run.get("reference")}
    if not timed:
        return sorted(always), sorted(slow)
    allowed = max((run.get("largest_allowed") or 0 for run in runs), default=0) or LARGEST_OF_RIVALS
    top = min(2 * max(timed), allowed, LONGEST_STEP * rate)
    steps = [2**i for i in range(allowed.bit_length())]
    extra = {n for power in steps for n in (power, power * 3 // 2) if min(timed) / 2 <= n <= top} - always - slow
    nearest = sorted(extra, key=lambda n: (n & (n - 1) != 0, min(abs(math.log(n / size)) for size in timed)))
    return sorted({*always, *nearest[: max(0, MAX_SIZES - len(always))]}), sorted(slow)


def judge(workload: Workload, sizes: Sequence[int], slow: Sequence[int], seconds: float) -> dict[str, Any]:
    """Measure sizes in shuffled rounds and return the seconds of a step in each round."""
    workloads.bound_memory()
    candidate, order = workload.build(), random.Random(0)
    remaining, rounds, began = [*sizes, *slow], 0, workloads.now()
    samples: dict[int, list[float]] = {size: [] for size in remaining}
    while remaining and (rounds < MIN_ROUNDS or workloads.now() - began < seconds):
        for size in order.sample(remaining, len(remaining)):
            try:
                candidate.prepare(size)
                warm = workloads.block_seconds(candidate, 1)
                if warm < CANDIDATE_SECONDS:  # the first step also touches new memory
                    warm = min(warm, workloads.block_seconds(candidate, 1))
                steps = max(1, math.ceil(CANDIDATE_SECONDS / max(warm, 1e-6)))
                samples[size].append(workloads.block_seconds(candidate, steps))
            except MemoryError:
                remaining.remove(size)
        rounds += 1
        remaining = [size for size in remaining if size not in slow]
    return {
        "rounds": rounds, "seconds": workloads.now() - began,
        "samples": {str(size): taken for size, taken in samples.items() if taken},
    }  # fmt: skip


def joined(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rounds of several judges as those of one."""
    samples: dict[str, list[float]] = {}
    for verdict in verdicts:
        for size, taken in verdict["samples"].items():
            samples[size] = samples.get(size, []) + taken
    sums = {name: sum(verdict[name] for verdict in verdicts) for name in ("rounds", "seconds")}
    return {"processes": len(verdicts), **sums, "samples": samples}


def judged_sizes(verdict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """
    Return the rate and the loss of each size by the samples of the judge.

    Samples of a slow round are corrected.  The slowdown of a round is the median over sizes of each sample divided by
    the median of its size.
    """
    logs = {int(size): np.log(taken) for size, taken in verdict["samples"].items()}
    if not logs:
        return []
    complete = sorted(n for n, values in logs.items() if len(values) == verdict["rounds"])
    if complete:
        table = np.array([logs[n] for n in complete])
        drift = np.median(table - np.median(table, axis=1, keepdims=True), axis=0)
        logs = {n: values - drift[: len(values)] for n, values in logs.items()}
    rates = {n: n / math.exp(np.median(values)) for n, values in logs.items()}
    best = max(rates[n] for n in complete or rates)
    intervals = _loss_intervals({n: logs[n] for n in complete})
    return [
        {
            "batch_size": n, "rounds": len(logs[n]), "samples_per_second": rates[n], "loss": 1 - rates[n] / best,
            "loss_interval": intervals.get(n),
        }
        for n in sorted(rates)
    ]  # fmt: skip


def _loss_intervals(logs: Mapping[int, NDArray[np.float64]]) -> dict[int, list[float]]:
    """Return the 90 % bootstrap interval of the loss of each size; rounds are drawn with replacement."""
    if not logs:
        return {}
    table, sizes = np.array(list(logs.values())), np.array(list(logs))
    draws = np.random.default_rng(0).integers(table.shape[1], size=(RESAMPLES, table.shape[1]))
    rates = sizes[:, None] / np.exp(np.median(table[:, draws], axis=2))
    low, high = np.quantile(1 - rates / rates.max(axis=0), [0.05, 0.95], axis=1)
    return {int(n): [float(a), float(b)] for n, a, b in zip(sizes, low, high, strict=True)}
