"""
The judge: batch sizes in shuffled rounds, each sample between two reference blocks.

The reference is the same workload at a small fixed size, in a separate instance.  The ratio to it cancels host drift.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.repeatability import workloads
from benchmarks.repeatability.finder_runs import LARGEST_OF_RIVALS, LIGHTNING, OURS, POWERS
from benchmarks.repeatability.workloads import Workload

CANDIDATE_SECONDS, REFERENCE_SECONDS = 0.05, 0.02  # shortest blocks
MIN_ROUNDS, MAX_SIZES = 5, 16
LONGEST_STEP = 2.5  # seconds: no size with a longer step is added
RESAMPLES = 1000  # of the bootstrap


def sizes_to_judge(runs: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
    """
    Return the sizes of each round of the judge, and the slow sizes of rivals that only its first round visits.

    Recommended sizes and the references of results are always among them.  Powers of two and 1.5 times these lie from
    a quarter of the smallest recommendation to four times the largest, without the answers of Lightning's rule.  Of
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
    top = min(4 * max(timed), allowed, LONGEST_STEP * rate)
    steps = [2**i for i in range(allowed.bit_length())]
    extra = {n for power in steps for n in (power, power * 3 // 2) if min(timed) / 4 <= n <= top} - always - slow
    nearest = sorted(extra, key=lambda n: (n & (n - 1) != 0, min(abs(math.log(n / size)) for size in timed)))
    return sorted({*always, *nearest[: max(0, MAX_SIZES - len(always))]}), sorted(slow)


def judge(workload: Workload, sizes: Sequence[int], slow: Sequence[int], seconds: float) -> dict[str, Any]:
    """Measure sizes in shuffled rounds between reference blocks and return every sample."""
    workloads.bound_memory()
    reference, candidate, order = workload.build(), workload.build(), random.Random(0)
    reference.prepare(workload.reference_size)
    step_seconds = min(workloads.block_seconds(reference, 1) for _ in range(3))
    reference_steps = max(1, math.ceil(REFERENCE_SECONDS / max(step_seconds, 1e-6)))
    remaining, rounds, began = [*sizes, *slow], 0, workloads.now()
    samples: dict[int, list[dict[str, Any]]] = {size: [] for size in remaining}
    while remaining and (rounds < MIN_ROUNDS or workloads.now() - began < seconds):
        for size in order.sample(remaining, len(remaining)):
            try:
                candidate.prepare(size)
                warm = workloads.block_seconds(candidate, 1)
                if warm < CANDIDATE_SECONDS:  # the first step also touches new memory
                    warm = min(warm, workloads.block_seconds(candidate, 1))
                steps = max(1, math.ceil(CANDIDATE_SECONDS / max(warm, 1e-6)))
                before = workloads.block_seconds(reference, reference_steps)
                block = workloads.block_seconds(candidate, steps)
                after = workloads.block_seconds(reference, reference_steps)
            except MemoryError:
                remaining.remove(size)
                continue
            sample = {"round": rounds, "before": before, "seconds": block, "after": after, "steps": steps}
            samples[size].append(sample)
        rounds += 1
        remaining = [size for size in remaining if size not in slow]
    return {
        "reference_size": workload.reference_size, "reference_steps": reference_steps, "rounds": rounds,
        "seconds": workloads.now() - began, "samples": {str(size): taken for size, taken in samples.items() if taken},
    }  # fmt: skip


def judged_sizes(verdict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rate and the loss of each size by the samples of the judge."""
    samples = {int(size): taken for size, taken in verdict["samples"].items()}
    pooled = [sample for taken in samples.values() for sample in taken]
    if not pooled:
        return []
    reference_seconds = statistics.median([s[side] for s in pooled for side in ("before", "after")])
    logs = {
        n: [math.log(s["seconds"] / math.sqrt(s["before"] * s["after"])) for s in taken] for n, taken in samples.items()
    }
    rates = {n: n / math.exp(statistics.median(values)) / reference_seconds for n, values in logs.items()}
    raw = {n: n / statistics.median(s["seconds"] for s in taken) for n, taken in samples.items()}
    complete = sorted(n for n, values in logs.items() if len(values) == verdict["rounds"]) or sorted(logs)
    best, best_raw = max(rates[n] for n in complete), max(raw[n] for n in complete)
    intervals = _loss_intervals({n: logs[n] for n in complete if len(logs[n]) == verdict["rounds"]})
    return [
        {
            "batch_size": n, "rounds": len(logs[n]), "samples_per_second": rates[n], "loss": 1 - rates[n] / best,
            "loss_interval": intervals.get(n), "raw_samples_per_second": raw[n], "raw_loss": 1 - raw[n] / best_raw,
        }
        for n in sorted(samples)
    ]  # fmt: skip


def _loss_intervals(logs: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """Return the 90 % bootstrap interval of the loss of each size; rounds are drawn with replacement."""
    if not logs:
        return {}
    table, sizes = np.array(list(logs.values())), np.array(list(logs))
    draws = np.random.default_rng(0).integers(table.shape[1], size=(RESAMPLES, table.shape[1]))
    rates = sizes[:, None] / np.exp(np.median(table[:, draws], axis=2))
    low, high = np.quantile(1 - rates / rates.max(axis=0), [0.05, 0.95], axis=1)
    return {int(n): [float(a), float(b)] for n, a, b in zip(sizes, low, high, strict=True)}
