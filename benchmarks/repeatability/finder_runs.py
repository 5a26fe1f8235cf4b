"""One run of the tuner or of a rival, as JSON can hold it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.repeatability import workloads
from benchmarks.repeatability.workloads import Stepper, Workload
from cubatch.errors import CubatchError

OURS, POWERS, LIGHTNING = "cubatch", "powers of two x 5", "Lightning power"
LARGEST_OF_RIVALS = 4096  # where the workload has no maximum
WITHIN = 0.01  # of the best median: the tolerance of the tuner
TIMINGS, TIMING_SECONDS = 5, 0.01  # of a size, by the rule "powers of two x 5"


def tune_once(workload: Workload, budget: float) -> dict[str, Any]:
    """Run the tuner once and return the figures of its result."""
    began = workloads.now()
    try:
        result = workload.tune(budget)
    except CubatchError as error:
        return _run(None, None, workloads.now() - began, error=f"{type(error).__name__}: {error}")
    wall_seconds = workloads.now() - began
    rates = {m.batch_size: m.samples_per_second for m in result.measurements}
    reference = getattr(result, "reference", None)  # older results have none
    return {
        **_run(result.batch_size, rates.get(result.batch_size), wall_seconds),
        "seconds_spent": result.seconds_spent, "decided_by": result.decided_by, "disturbed": result.disturbed,
        "largest_allowed": result.limits.get("max_batch_size") or result.largest_batch_size,
        "reference": None if reference is None else {name: reference[name] for name in ("batch_size", "seconds")},
        "measured": {str(n): rate for n, rate in rates.items() if rate},
    }  # fmt: skip


def powers_of_two(workload: Workload, budget: float) -> dict[str, Any]:
    """Time each power of two five times and return the smallest within 1 % of the best median."""
    rates: dict[int, float] = {}

    def visit(stepper: Stepper, size: int) -> None:
        steps = max(1, math.ceil(TIMING_SECONDS / max(workloads.block_seconds(stepper, 1), 1e-6)))
        rates[size] = size / statistics.median(workloads.block_seconds(stepper, steps) for _ in range(TIMINGS))

    seconds, stopped_by = _double(workload, budget, 1, visit)
    answer = min((n for n, rate in rates.items() if rate >= (1 - WITHIN) * max(rates.values())), default=None)
    measured = {str(n): rate for n, rate in rates.items()}
    return {**_run(answer, rates.get(answer or 0), seconds), "stopped_by": stopped_by, "measured": measured}


def lightning_power(workload: Workload, budget: float) -> dict[str, Any]:
    """Run three steps at 2, 4, 8 and so on and return the last size that ran."""
    sizes: list[int] = []

    def visit(stepper: Stepper, size: int) -> None:
        workloads.block_seconds(stepper, 3)
        sizes.append(size)

    seconds, stopped_by = _double(workload, budget, 2, visit)
    return {**_run(max(sizes, default=None), None, seconds), "stopped_by": stopped_by}


FINDERS: dict[str, Callable[[Workload, float], dict[str, Any]]] = {
    OURS: tune_once, POWERS: powers_of_two, LIGHTNING: lightning_power,
}  # fmt: skip


def _run(batch_size: int | None, rate: float | None, seconds: float, error: str = "") -> dict[str, Any]:
    return {
        "batch_size": batch_size, "samples_per_second": rate, "seconds_spent": seconds, "wall_seconds": seconds,
        "error": error,
    }  # fmt: skip


def _double(workload: Workload, budget: float, size: int, visit: Callable[[Stepper, int], None]) -> tuple[float, str]:
    """Run doubled sizes; return the seconds and the reason for the end: "maximum", "budget" or "memory"."""
    workloads.bound_memory()
    stepper, last = workload.build(), 0.0  # the budget of the tuner does not include this either
    began = workloads.now()
    while size <= (workload.max_batch_size or LARGEST_OF_RIVALS):
        visit_began = workloads.now()
        if visit_began - began + 2 * last > budget:
            return workloads.now() - began, "budget"
        try:
            stepper.prepare(size)
            visit(stepper, size)
        except MemoryError:
            return workloads.now() - began, "memory"
        size, last = 2 * size, workloads.now() - visit_began
    return workloads.now() - began, "maximum"
