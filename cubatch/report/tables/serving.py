"""The table of a serving plan: each maximum batch size at the plan's arrival rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cubatch.report.grid import Grid
from cubatch.report.tables.common import written
from cubatch.serving.serving_plan import ServingPlan
from cubatch.units import format_count, format_counted, format_percent, format_seconds


def plan(plan: ServingPlan) -> Grid:
    """Return the table of a serving plan, a row of queue delay, latencies and load per maximum batch size."""

    def of_load(name: str, write: Callable[[float], str] = format_seconds) -> Callable[[Any], str | None]:
        return lambda option: written(write, getattr(option.load, name, None))

    columns = {
        "batch at most": lambda option: format_count(option.max_batch_size),
        "delay": lambda option: format_seconds(option.queue_delay),
        "p50": of_load("p50"),
        "p95": of_load("p95"),
        "p99": of_load("p99"),
        "mean batch": of_load("mean_batch_size", format_count),
        "busy": of_load("utilization", format_percent),
        "requests/s at most": lambda option: format_count(option.highest_rate),
        "status": lambda o: (
            "plan" if o is plan.chosen else "over the limit" if o.highest_rate < plan.arrival_rate else None
        ),
    }
    rate = format_count(plan.arrival_rate)
    cost = plan.cost_per_million_requests
    is_overloaded = any(option.load is None for option in plan.options)
    notes = [
        *plan.reasons,
        *(["No latency: requests arrive faster than such steps can take them."] if is_overloaded else []),
        *([] if cost is None else [f"A million requests cost {format_count(cost)}, at {rate} requests/s."]),
    ]
    title = f"{plan.name} on {plan.device}: {format_counted(plan.instances, 'instance')}, {rate} requests/s"
    marked = [n for n, option in enumerate(plan.options) if option is plan.chosen]
    title += ", predicted" if plan.predicted else ""
    return Grid.of(plan.options, columns, title=title, marked=marked, notes=notes)
