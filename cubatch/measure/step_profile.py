"""
Profile a step: seconds by layer and pass, by cause, and the resource that limits each.

Plain steps take turns with steps of which each call is timed (`tracing`).  On a CPU the overhead is the time of the
same call on a single element, and the time between calls.  A larger batch spreads this overhead over more samples.  On
a GPU the overhead is the time of a step beyond the sum of its kernels.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from cubatch.checks import check_number, check_whole
from cubatch.engine import backend, functional
from cubatch.engine.conditions import environment
from cubatch.engine.native.operations import operations as on_kernels
from cubatch.engine.network import Model
from cubatch.estimate import roofline
from cubatch.hardware import gpu_library
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.measure import clocks, kernel_context, tracing
from cubatch.measure.profile_records import CAUSES, OVERHEAD, LayerTime, StepProfile
from cubatch.measure.tracing import COPIES, ELEMENTWISE, PRODUCTS, WAITING, Call
from cubatch.memory.plan import schedule_for
from cubatch.memory.schedule_records import Op
from cubatch.network.models import SpecLike
from cubatch.network.passes import Pass
from cubatch.workload import Workload

_BOUNDS = {PRODUCTS: "compute", COPIES: "copies", ELEMENTWISE: "memory", OVERHEAD: "overhead", WAITING: "waiting"}
_LEAST_STEPS, _MOST_STEPS = 3, 50
_SMALL_CALLS, _SMALL_ROUNDS = 200, 7


def profile(
    layer_spec: SpecLike,
    batch_size: int,
    *,
    device: Device | str | None = None,
    mode: str = "inference",
    dtype: str = "float32",
    optimizer: str = "sgd",
    library: str = "auto",
    recompute: bool = False,
    seed: int = 0,
    budget: float = 5.0,
) -> StepProfile:
    """
    Profile a step: measure the seconds of each layer and pass.

    Args:
        layer_spec: As for `autotune`.
        batch_size: Samples per step.
        device: A device of this machine; None: its first GPU, else its CPU.
        mode, dtype, optimizer, library, recompute, seed: As for `autotune`.
        budget: Most seconds of the steps; at least three plain and three traced steps run in any case.

    Returns:
        StepProfile: Seconds, share and limiting resource of each layer and pass, and seconds by cause.

    Raises:
        InvalidArgument: If an argument is not valid.
        UnsupportedLayer: If the engine does not support a layer.
        OutOfMemory: If the batch does not fit.
        DeviceFailed: If the GPU reports an error.

    Example:
        >>> step = profile("mlp", 8, device="cpu", budget=0.1)
        >>> sorted(row.layer for row in step.rows if row.flops)
        ['fc1', 'fc2', 'fc3', 'fc4', 'fc5']
        >>> abs(sum(step.causes.values()) / step.traced_seconds - 1) < 1e-6
        True
    """
    check_whole("batch_size", batch_size)
    check_whole("seed", seed, least=0)
    check_number("budget", budget, above=0.0, unit="seconds")
    work = Workload.of(
        layer_spec, device, mode=mode, dtype=dtype, optimizer=optimizer, library=library, recompute=recompute,
        present=True,
    )  # fmt: skip
    ops = _operations(work)
    what = f"profiling {work.name} at batch size {batch_size}"
    with gpu_library.translating(what), _model(work, seed) as model:
        with backend.whole_recordings():
            model.prepare(batch_size)
        model.load_random()
        clock = clocks.HostClock() if work.device.kind == "cpu" else clocks.cupy_clock(work.device.uuid)
        watch = _on_host if work.device.kind == "cpu" else _on_gpu
        plain, traced, calls = watch(model, clock, ops, budget)
        threads = 1 if model.plan is None else model.plan.members
    times = {key: {cause: statistics.median(of[key][cause] for of in traced) for cause in CAUSES} for key in traced[-1]}
    return StepProfile(
        work=work,
        batch_size=batch_size,
        step_seconds=statistics.median(plain),
        traced_seconds=sum(sum(causes.values()) for causes in times.values()),
        steps=len(traced),
        threads=threads,
        rows=_rows(work, batch_size, ops, times, calls),
        operations=tuple(_title(op) for op in ops),
        calls=tuple(calls),
        environment=environment(work.device),
    )


def _model(work: Workload, seed: int) -> Model:
    context = None
    if work.library == "cubatch":
        usual = kernel_context.usual_context(work.device, work.dtype, overlaps=work.mode == "inference")
        context = None if usual is None else tracing.add_names(usual)
    functions = functional if context is None else on_kernels(context)
    return Model(
        work.spec, device=work.device, mode=work.mode, dtype=work.dtype, optimizer=work.optimizer, learning_rate=0.0,
        recompute=work.recompute, seed=seed, context=context, operations=tracing.NamedOperations(functions),
    )  # fmt: skip


def _operations(work: Workload) -> tuple[Op, ...]:
    return schedule_for(work).ops


Key = tuple[int | None, str]
"""An operation and its pass; None without an operation."""
Times = dict[Key, dict[str, float]]
Watched = tuple[list[float], list[Times], list[Call]]
"""Seconds of plain steps, times of traced steps, calls of the last traced step."""


def _on_host(model: Model, clock: clocks.HostClock, ops: Sequence[Op], budget: float) -> Watched:
    """
    Run steps without and with tracing in turns on the CPU, for about `budget` seconds.

    `ops` are the operations of the schedule.

    Returns:
        The seconds of each step without tracing, those of each traced step by pass and cause, and the function calls of
        the last step.
    """
    members = 1 if model.plan is None else model.plan.members
    small = _small_calls()
    for _ in range(2):  # warm caches and memory pages
        model.step()
    plain, traced, calls, began = list[float](), list[Times](), list[Call](), clock.now()
    while len(plain) < _LEAST_STEPS or (len(plain) < _MOST_STEPS and clock.now() - began < budget):
        plain.append(clock.time(model.step, 1).seconds)
        trace, begun = tracing.HostTrace(members), time.perf_counter()
        model.step(trace)
        calls = list(trace.calls(begun))
        traced.append(_host_times(trace, calls, ops, small))
    return plain, traced, calls


def _on_gpu(model: Model, clock: clocks.HostClock, ops: Sequence[Op], budget: float) -> Watched:
    """
    Run steps without and with tracing in turns on the GPU, for about `budget` seconds.

    `ops` are the operations of the schedule.

    Returns:
        The seconds of each step without tracing, those of each traced step by pass and cause, and the launches of the
        last step.
    """
    xp = gpu_library.cupy()
    begun = time.perf_counter()
    list(_traced_on_gpu(model, xp, 0.0))  # the first step also loads code: an upper bound of enqueueing
    head_start = time.perf_counter() - begun
    for _ in range(2):
        model.step()
    plain, traced, calls, began = list[float](), list[Times](), list[Call](), clock.now()
    while len(plain) < _LEAST_STEPS or (len(plain) < _MOST_STEPS and clock.now() - began < budget):
        plain.append(clock.time(model.step, 1).seconds)
        calls = list(_traced_on_gpu(model, xp, head_start))
        times: Times = defaultdict(lambda: dict.fromkeys(CAUSES, 0.0))
        for call in calls:
            times[call.operation, _pass_of(ops[call.operation], call)][call.what] += call.seconds
        traced.append(times)
    seconds = statistics.median(plain)
    for times in traced:  # the rest is launches, and Python before them
        rest = max(0.0, seconds - sum(sum(causes.values()) for causes in times.values()))
        times[None, "launches"][OVERHEAD] = rest
    return plain, traced, calls


def _traced_on_gpu(model: Model, xp: Any, head_start: float) -> Iterator[Call]:
    trace = tracing.DeviceTrace(xp, head_start)
    model.step(trace)
    return trace.calls()


@attrs.frozen
class _Small:
    """Seconds that calls of array functions take on a single element, which is their overhead."""

    calls: Mapping[str, float]  # seconds of a call by the kind of its work
    inside: float  # inside, around: seconds that tracing adds within the times of a call and outside
    around: float


def _small_calls() -> _Small:
    """
    Measure and return the overhead of a call in seconds, by kind of call, and the overhead of tracing it.

    NumPy calls on single elements, and of a function that does nothing, are traced like those of a step. Each figure is
    the least of several rounds.
    """
    single, square = np.zeros(1, np.float32), np.zeros((1, 1), np.float32)
    tried: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "": (_nothing, ()),
        PRODUCTS: (np.matmul, (square, square, square)),
        COPIES: (np.copyto, (single, single)),
        ELEMENTWISE: (np.add, (single, single, single)),
    }
    inside, around = {}, 0.0
    for name, recorded in tried.items():
        work = backend.Replay([recorded] * _SMALL_CALLS)
        rounds = []
        for _ in range(_SMALL_ROUNDS):
            trace = tracing.HostTrace(1)
            trace.run(0, 0, work)
            within = [call.end - call.begin for call in trace.calls(0.0)]
            ((_, begin, end),) = trace.operations[0]
            rounds.append((statistics.median(within), (end - begin - sum(within)) / _SMALL_CALLS))
        inside[name] = min(seconds for seconds, _ in rounds)
        if not name:
            around = min(seconds for _, seconds in rounds)
    return _Small(inside, inside.pop(""), around)


def _nothing() -> None: ...


def _host_times(trace: tracing.HostTrace, calls: Sequence[Call], ops: Sequence[Op], small: _Small) -> Times:
    """
    Return the seconds of a traced step by pass and cause, as means over the threads.

    `calls` are those of `trace`, and `small` has the overhead of a call, which counts as a cause of its own.
    """
    members = len(trace.operations)
    times: Times = defaultdict(lambda: dict.fromkeys(CAUSES, 0.0))
    accounted: dict[tuple[int, int], float] = defaultdict(float)  # of an operation, by thread
    last: dict[tuple[int, int], Key] = {}
    for call in calls:
        key = call.operation, _pass_of(ops[call.operation], call)
        if call.what == WAITING:
            times[key][WAITING] += call.seconds / members
            continue
        seconds = max(0.0, call.seconds - small.inside)
        overhead = min(seconds, max(0.0, small.calls[call.what] - small.inside))
        times[key][OVERHEAD] += overhead / members
        times[key][call.what] += (seconds - overhead) / members
        accounted[call.rank, call.operation] += call.end - call.begin + small.around
        last[call.rank, call.operation] = key
    for rank, operations in enumerate(trace.operations):
        for number, begin, end in operations:
            if (rank, number) in last:
                between = max(0.0, end - begin - accounted[rank, number])
                times[last[rank, number]][OVERHEAD] += between / members
    ends = [operations[-1][2] for operations in trace.operations if operations]
    times[None, "meeting"][WAITING] = sum(max(ends) - end for end in ends) / members
    return times


def _pass_of(op: Op, call: Call) -> str:
    if op.kind == "forward":
        return "recompute" if op.replay else Pass.FPROP.value
    if op.kind != "backward":
        return op.kind
    is_of_filter = "wgrad" in call.function
    return Pass.WGRAD.value if is_of_filter else Pass.DGRAD.value


def _rows(
    work: Workload, batch_size: int, ops: Sequence[Op], times: Times, calls: Sequence[Call]
) -> tuple[LayerTime, ...]:
    counts: Counter[Key] = Counter(
        (call.operation, _pass_of(ops[call.operation], call))
        for call in calls
        if call.rank == 0 and call.what != WAITING
    )
    total = sum(sum(causes.values()) for causes in times.values())
    rows = []
    for key in sorted(times, key=lambda key: (math.inf if key[0] is None else key[0], key[1])):
        causes, (number, pass_) = times[key], key
        op = None if number is None else ops[number]
        layer = None if op is None or op.node is None else op.node.layer
        passes = [each for each in Pass if each.value == pass_] if layer else []
        by_one = pass_ == Pass.DGRAD.value and (number, Pass.WGRAD.value) not in times
        if by_one and layer and layer.pass_flops(Pass.WGRAD, batch_size):  # attention has one for both gradients
            pass_, passes = "backward", [Pass.DGRAD, Pass.WGRAD]
        flops = sum(layer.pass_flops(each, batch_size) for each in passes) if layer else 0
        moved = sum(layer.traffic(each, batch_size) for each in passes) if layer else 0
        seconds = sum(causes.values())
        bound_by = _BOUNDS[max(CAUSES, key=lambda cause: causes[cause])]
        if work.device.kind != "cpu" and layer and passes and bound_by in {"compute", "memory"}:
            bound_by = roofline.bound(layer, passes[0], batch_size, work.device, work.dtype) or bound_by
        rows.append(
            LayerTime(
                layer=op.node.name if op and op.node else "step" if op is None else "",
                type=layer.type if layer else "",
                then=tuple(node.name for node in op.then) if op and pass_ != Pass.WGRAD.value else (),
                pass_=pass_,
                seconds=seconds,
                causes=dict(causes),
                share=seconds / total if total else 0.0,
                calls=counts[key],
                flops=flops,
                bytes=moved * BYTES_PER_ELEMENT[work.dtype],
                bound_by=bound_by,
            )
        )
    return tuple(rows)


def _title(op: Op) -> str:
    return f"{op.node.name} {op.kind}" if op.node else op.kind
