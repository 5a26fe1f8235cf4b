"""The table of a serving plan: each maximum batch size at the plan's arrival rate."""

from __future__ import annotations

from cubatch.report.grid import Grid
from cubatch.report.tables.common import written
from cubatch.serving.serving_plan import ServingPlan
from cubatch.units import format_count, format_percent, format_seconds


def plan(plan: ServingPlan) -> Grid:
    """Return the table of a serving plan, one line per maximum batch size."""
    rows = [
        [
            format_count(option.max_batch_size),
            format_seconds(option.queue_delay),
            *(written(format_seconds, getattr(option.load, name, None)) for name in ("p50", "p95", "p99")),
            written(format_count, getattr(option.load, "mean_batch_size", None)),
            written(format_percent, getattr(option.load, "utilization", None)),
            format_count(option.highest_rate),
            "plan" if option is plan.chosen else "over the limit" if option.highest_rate < plan.arrival_rate else None,
        ]
        for option in plan.options
    ]
    rate = format_count(plan.arrival_rate)
    cost = plan.cost_per_million_requests
    is_overloaded = any(option.load is None for option in plan.options)
    notes = [
        *plan.reasons,
        *(["No latency: requests arrive faster than such steps can take them."] if is_overloaded else []),
        *([] if cost is None else [f"A million requests cost {format_count(cost)}, at {rate} requests/s."]),
    ]
    return Grid(
        title=f"{plan.name} on {plan.device}: {plan.instances} instance{'s' * (plan.instances > 1)}, {rate} requests/s"
        + (", predicted" if plan.predicted else ""),
        columns=["batch at most", "delay", "p50", "p95", "p99", "mean batch", "busy", "requests/s at most", "status"],
        rows=rows,
        marked=[n for n, option in enumerate(plan.options) if option is plan.chosen],
        notes=notes,
    )
