"""Records of a step profile, for tables, figures, JSON and trace viewers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from cubatch.measure.tracing import COPIES, ELEMENTWISE, PRODUCTS, WAITING, Call
from cubatch.workload import Workload

OVERHEAD = "overhead"
CAUSES = (PRODUCTS, COPIES, ELEMENTWISE, OVERHEAD, WAITING)
"""Causes of time: the kinds of `tracing`, and the overhead of all calls."""


@attrs.frozen(kw_only=True)
class LayerTime:
    """
    The seconds of one pass of one layer in a step, by cause.

    Attributes:
        layer: Name of the layer; empty for the loss and the optimizer, "step" for the step as a whole.
        type: Type of the layer; empty without a layer.
        then: Names of the layers that are fused into the pass: batch norms, sums, activations.
        pass_: "fprop", "dgrad", "wgrad", or "backward" if one function computes both gradients. "recompute" is a
            repeated forward pass.  Else the kind of the operation: "fold", "loss", "accumulate" (of gradients) or
            "update".  Of "step" it is "launches" on a GPU, and "meeting" (of threads) on a CPU.
        seconds: Seconds in a step, as the mean over the threads.
        causes: The part of `seconds` of each of CAUSES.
        share: Share of the step's seconds, in [0, 1].
        calls: Calls of array functions by one thread, or launches of kernels.
        flops: FLOP of the pass, two for each multiply-add; 0 without products.
        bytes: Bytes of its arrays, each counted once; 0 if unknown.
        bound_by: "compute", "memory", "copies", "overhead" or "waiting": the largest cause. For kernels of a layer on a
            GPU, "compute" or "memory" by `roofline.bound`.
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
        """Return the attributes as a plain mapping, for JSON; `pass_` is "pass" there."""
        content = attrs.asdict(self)
        return {"pass" if name == "pass_" else name: value for name, value in content.items()}


@attrs.frozen(kw_only=True)
class StepProfile:
    """
    The seconds of a step by layer, pass and cause.

    Attributes:
        work: The network, device and settings.
        batch_size: Samples per step.
        step_seconds: Median seconds of a step without tracing.
        traced_seconds: Seconds of a traced step: the sum over `rows`, each of which is a median over the steps.
        steps: Number of traced steps.
        threads: Threads that share the batch.
        rows: Passes in the order of the schedule.
        operations: Names of the operations of the schedule.
        calls: Calls of array functions, or launches of kernels, in the last traced step.
        environment: Versions and conditions by name, as in a TuningResult.
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
        """Seconds of a traced step by cause, one of CAUSES, over all rows."""
        return {cause: sum(row.causes[cause] for row in self.rows) for cause in CAUSES}

    @property
    def samples_per_second(self) -> float:
        """Samples per second of steps without tracing."""
        return self.batch_size / self.step_seconds

    def to_mapping(self) -> dict[str, Any]:
        """Return sizes, seconds, causes and rows for JSON; not `work`, `operations`, `calls` and `environment`."""
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
        """Return the calls of one step in Google's Trace Event Format, the JSON form that Chrome and Perfetto open."""
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
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    for call in calls:
        begin, end = spans.get((call.rank, call.operation), (call.begin, call.end))
        spans[call.rank, call.operation] = min(begin, call.begin), max(end, call.end)
    return spans
