"""What is known of where a step's time goes: records, for tables, pictures, JSON and trace viewers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from cubatch.measure.tracing import COPIES, ELEMENTWISE, PRODUCTS, WAITING, Call
from cubatch.workload import Workload

OVERHEAD = "overhead"
CAUSES = (PRODUCTS, COPIES, ELEMENTWISE, OVERHEAD, WAITING)
"""What a step's time goes to: see `tracing`; overhead is of calls, whatever they do."""


@attrs.frozen(kw_only=True)
class LayerTime:
    """
    One pass of one layer in a step.

    Attributes:
        layer: Its name; empty for the loss and the optimiser, "step" for what is of the step as a whole.
        type: The kind of layer; empty where there is none.
        then: Layers that its pass does on the way: batch norms, sums, ReLUs.
        pass_: "fprop", "dgrad", "wgrad", or "backward" where one function gives both gradients; "recompute",
            "accumulate" (of gradients), "update", ...
        seconds: Of a step, the mean over the threads.
        causes: The same by CAUSES.
        share: Of the step.
        calls: Of array functions, or launches, of one thread.
        flops: 2 for a multiply-add; 0 where there are no products.
        bytes: Of its arrays, each once; 0 where that is not known.
        bound_by: "compute", "memory", "copies", "overhead" or "waiting": what most of its time is spent on; of kernels
            the higher roof of `roofline.bound`.
    """

    layer: str
    type: str
    then: tuple[str, ...]
    pass_: str
    seconds: float
    causes: Mapping[str, float]
    share: float
    calls: int
    flops: int
    bytes: int
    bound_by: str

    def to_mapping(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        content = attrs.asdict(self)
        return {"pass" if name == "pass_" else name: value for name, value in content.items()}


@attrs.frozen(kw_only=True)
class StepProfile:
    """
    Where the time of a step goes.

    Attributes:
        work: What was run.
        batch_size: Samples.
        step_seconds: Median of steps whose calls were not looked at.
        traced_seconds: Sum of the rows, which were.
        steps: That were traced.
        threads: That share the batch.
        rows: In the order of the schedule.
        operations: Names of the schedule's operations.
        calls: Of the last traced step.
        environment: Versions and conditions, as a result has them.
    """

    work: Workload
    batch_size: int
    step_seconds: float
    traced_seconds: float
    steps: int
    threads: int
    rows: tuple[LayerTime, ...]
    operations: tuple[str, ...] = attrs.field(repr=False)
    calls: tuple[Call, ...] = attrs.field(repr=False)
    environment: Mapping[str, Any] = attrs.field(repr=False)

    @property
    def causes(self) -> dict[str, float]:
        """Seconds of a step by CAUSES."""
        return {cause: sum(row.causes[cause] for row in self.rows) for cause in CAUSES}

    @property
    def samples_per_second(self) -> float:
        """Of steps whose calls were not looked at."""
        return self.batch_size / self.step_seconds

    def to_mapping(self) -> dict[str, Any]:
        """Return all but the single calls, for JSON."""
        return {
            "batch_size": self.batch_size,
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "traced_seconds": self.traced_seconds,
            "steps": self.steps,
            "threads": self.threads,
            "causes": self.causes,
            "layers": [row.to_mapping() for row in self.rows],
        }

    def to_trace(self) -> dict[str, Any]:
        """
        Return the calls of one step as Chrome's trace events, which Perfetto opens.

        Source of the format: Google, "Trace Event Format", of the Catapult project.
        """
        names = self.operations
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"thread {rank}"}}
            for rank in range(self.threads)
        ]
        for call in self.calls:
            where = {"pid": 0, "tid": call.rank, "ts": 1e6 * call.begin, "dur": 1e6 * (call.end - call.begin)}
            more = {"layer": names[call.operation], "function": call.function}
            events.append({"name": call.name, "cat": call.what, "ph": "X", **where, "args": more})
        for (rank, operation), (begin, end) in _spans(self.calls).items():
            where = {"pid": 0, "tid": rank, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
            events.append({"name": names[operation], "cat": "operation", "ph": "X", **where, "args": {}})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _spans(calls: Sequence[Call]) -> dict[tuple[int, int], tuple[float, float]]:
    """Return from when to when each operation was at work, by thread and operation."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for call in calls:
        begin, end = found.get((call.rank, call.operation), (call.begin, call.end))
        found[call.rank, call.operation] = min(begin, call.begin), max(end, call.end)
    return found
