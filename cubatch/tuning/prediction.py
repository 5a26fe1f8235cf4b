"""
predict(): the recommended batch size for a GPU that is not in this machine.

It follows the steps of `autotune`, with a model of time instead of a clock. Request, candidates, memory plan and the
rules for recommendation and limit are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np

from cubatch.choices import Dtype, Mode, Modelled, Objective, Optimizer
from cubatch.errors import InvalidArgument
from cubatch.estimate import roofline
from cubatch.estimate.expected import missing_facts, takes_time
from cubatch.estimate.predictions import Z90, StepPrediction
from cubatch.hardware import device_file, probe
from cubatch.hardware.arithmetic import check_kernels
from cubatch.hardware.facts import Device
from cubatch.hardware.memory_limit import MemoryLimit
from cubatch.hardware.memory_limit import memory_limit as memory_limit_of
from cubatch.measure import goal as goals
from cubatch.measure.goal import Goal
from cubatch.memory import fit
from cubatch.network.graph import as_network
from cubatch.network.models import SpecLike
from cubatch.search import bisection
from cubatch.tuning import anchors as anchored
from cubatch.tuning import explain
from cubatch.tuning.anchors import Anchor
from cubatch.tuning.decision import Fate, decide
from cubatch.tuning.forecast_record import Forecast, PassShare
from cubatch.tuning.ladder import Ladder, added, propose
from cubatch.tuning.notes import memory_notes, sentence
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from cubatch.tuning.sharpen import Sharpened, sharpen
from cubatch.units import format_seconds
from cubatch.workload import Workload

LIBRARIES = ("vendor", "cubatch")
_IDLE = "All of its layers only rename memory, which takes no time."


def predict(
    spec: SpecLike,
    *,
    device: Device | str | None,
    mode: Mode = "inference",
    dtype: Dtype = "float32",
    batch_sizes: Iterable[int] | None = None,
    library: Modelled = "vendor",
    anchors: Iterable[TuningResult | str | Path] | None = None,
    objective: Objective = "throughput",
    tolerance: float = 0.01,
    max_batch_size: int | None = None,
    memory_limit: int | str | None = None,
    latency_limit: float | None = None,
    optimizer: Optimizer = "sgd",
    recompute: bool = False,
) -> Forecast:
    """
    Predict the best batch size of a layer or network on a GPU that need not be present.

    Candidates are those of `candidates`, times those of a model fitted to published measurements (`predict_step`), and
    the recommendation follows the rule of `autotune`. The largest size is that of cubatch's own memory plan for every
    library: frameworks save more activations and workspace, and run out of memory earlier.

    Args:
        spec: A layer, a network, a mapping, a model's name or a path to a spec file.
        device: A GPU's name in the catalogue, "v100-sxm2-16gb", or a Device; None or "cuda" is that of this machine.
        mode: "inference", or "training": forward, backward and optimizer step.
        dtype: "float32", "tf32" (sm_80 on), "float16" or "bfloat16".
        batch_sizes: Predict exactly these; those that do not fit are marked `over_limit`.
        library: "vendor": cuDNN and cuBLAS as published; "cubatch": cubatch kernels, by counts alone.
        anchors: Tuning results, or paths to their JSON, that correct the prediction (see `sharpen`). They were measured
            on this GPU or another. At most 100, with 1000 measured batch sizes in total.
        objective: "throughput" or "latency".
        tolerance: Share of the best value that may be given up for a smaller batch.
        max_batch_size: Propose nothing larger.
        memory_limit: Bytes, "8GiB", or "80%" of the GPU's memory.
        latency_limit: Longest allowed step in seconds.
        optimizer, recompute: As for `autotune`.

    Returns:
        Forecast: `batch_size` is the recommendation, `reasons` explain it, `interval` has the uncertainty.

    Raises:
        InvalidArgument: If an argument makes no sense, no batch size is within the limits, the network does nothing, or
            an anchor is unrelated. Also for a CPU, and for a GPU without facts that the model needs.
        InvalidData: If an anchor's file is no tuning result of this schema.
        DoesNotFit: If not even one sample fits (also a MemoryError).

    Example:
        >>> forecast = predict("go-net", device="v100-sxm2-16gb", batch_sizes=[28, 56])
        >>> sorted(forecast.seconds) == [28, 56] and forecast.seconds[28] < forecast.seconds[56]
        True
    """
    work = _workload(spec, device, mode=mode, dtype=dtype, library=library, optimizer=optimizer, recompute=recompute)
    if objective == "energy":
        allowed = '"throughput" or "latency"'
        raise InvalidArgument("objective", objective, allowed, "Energy must be measured: autotune does.")
    request = Request.of(
        objective=objective, tolerance=tolerance, latency_limit=latency_limit, batch_sizes=batch_sizes,
        max_batch_size=max_batch_size, memory_limit=memory_limit,
    )  # fmt: skip
    known = anchored.read(() if anchors is None else anchors, work)
    memory = memory_limit_of(work.device, memory_limit)
    ladder = _ladder(work, request, memory)
    sizes = [step.batch_size for step in ladder.candidates if not step.over_limit]
    if not sizes:
        wanted = f"at most {ladder.largest}, the largest that fits on {work.device}"
        raise InvalidArgument("batch_sizes", ladder.candidates[0].batch_size, wanted)
    if not takes_time(work):
        raise InvalidArgument("spec", work.name, "a layer or network that does something", _IDLE)
    sharpened = sharpen(work, sizes, known)
    if more := _at_latency_limit(work, request, sharpened, known):
        rungs = [*ladder.candidates, *(added(attrs.evolve(work, library="cubatch"), ladder, n) for n in more)]
        ladder = attrs.evolve(ladder, candidates=tuple(sorted(rungs, key=lambda rung: rung.batch_size)))
        sharpened = sharpen(work, sorted([*sizes, *more]), known)
    draft = _draft(work, request, ladder, sharpened, known)
    about_memory = [sentence(each) for each in memory_notes(memory)]
    notes = explain.forecast_notes(work.device, sharpened.step.notes, about_memory, known)
    return attrs.evolve(draft, reasons=explain.predicted(draft, as_network(work.spec), sharpened), notes=notes)


def _workload(
    spec: SpecLike, device: Device | str | None, *, mode: str, dtype: str, library: str, optimizer: str, recompute: bool
) -> Workload:
    """Resolve and check the workload; reject a device or library that the model does not know."""
    if library not in LIBRARIES:
        raise InvalidArgument("library", library, "one of " + ", ".join(LIBRARIES))
    gpu = probe.resolve(device, live=False)
    if gpu.kind == "cpu":
        remedy = "The model of time knows GPUs only; name one of the catalogue, or measure on the CPU with autotune."
        raise InvalidArgument("device", str(gpu), "a GPU", remedy)
    if library == "cubatch":
        check_kernels(gpu)
    work = Workload.of(spec, gpu, mode=mode, dtype=dtype, optimizer=optimizer, recompute=recompute)
    # The memory plan of cubatch kernels needs SMs and compute capability too.
    if missing := missing_facts(gpu, dtype, library):
        if remedy := device_file.lacks(gpu, missing):
            raise InvalidArgument("device", str(gpu), "a GPU whose speed is known", remedy)
        remedy = "The catalogue has no such figure for it; build a Device that has." if gpu.slug else ""
        raise InvalidArgument("device", str(gpu), f"a GPU of which {', '.join(missing)} are known", remedy)
    return attrs.evolve(work, library=library)


def _ladder(work: Workload, request: Request, memory: MemoryLimit) -> Ladder:
    """Propose sizes by the memory plan of cubatch's engine and the tiles of the predicted library."""
    planned = attrs.evolve(work, library="cubatch")
    largest = fit.largest(planned, max(1, memory.bytes))
    tiles_of = attrs.evolve(work, library="im2col") if work.library == "vendor" else planned
    return propose(planned, request.limits, memory, largest, tiles_of=tiles_of)


def _at_latency_limit(work: Workload, request: Request, sharpened: Sharpened, known: Sequence[Anchor]) -> list[int]:
    """Return the largest size within the latency limit and the next one, if they lie in a gap of the ladder."""
    sizes, seconds = sharpened.step.batch_sizes, sharpened.step.seconds
    limit = math.inf if request.goal.latency_limit is None else request.goal.latency_limit
    last = max((place for place, took in enumerate(seconds) if took <= limit), default=-1)
    if request.limits.batch_sizes is not None or last < 0 or last + 1 == len(sizes):
        return []
    low, high = sizes[last], sizes[last + 1]
    inside = range(low, high + 1, max(1, int(bisection.CLOSED * low)))
    if bisection.is_closed(low, high):
        return []
    within = [n for n, took in zip(inside, sharpen(work, inside, known).step.seconds, strict=True) if took <= limit]
    top = max(within, default=low)
    return [n for n in (top, top + inside.step) if low < n < high]


def _draft(
    work: Workload, request: Request, ladder: Ladder, sharpened: Sharpened, known: Sequence[Anchor]
) -> Forecast:  # fmt: skip
    """Apply the rule of the recommendation to predicted seconds; reasons and notes are added later."""
    goal, limits = request.goal, request.limits
    step, sizes = sharpened.step, sharpened.step.batch_sizes
    seconds = dict(zip(sizes, map(float, step.seconds), strict=True))
    values = {n: s if goal.objective == "latency" else n / s for n, s in seconds.items()}
    limit = goal.latency_limit
    allowed = {n: value for n, value in values.items() if limit is None or seconds[n] <= limit}
    if not allowed:
        wanted = f"at least {format_seconds(min(seconds.values()))}, the shortest step predicted on {work.device}"
        raise InvalidArgument("latency_limit", limit, wanted)
    chosen, fastest = goals.pick(allowed, goal)
    ties = _ties(values, allowed, fastest, sharpened)
    decision = decide(
        [_fate(rung.batch_size, seconds.get(rung.batch_size), goal) for rung in ladder.candidates], chosen=chosen,
        fastest=fastest, ties=ties, goal=goal, largest_batch_size=ladder.largest,
        max_batch_size=limits.max_batch_size, is_listed=limits.batch_sizes is not None,
    )  # fmt: skip
    rooflines = {n: roofline.roofline_seconds(work.spec, n, work.device, work.mode, work.dtype) for n in sizes}
    return Forecast(
        spec_name=work.name,
        spec=work.spec.to_mapping(),
        input_shape=work.input_shape,
        device=work.device,
        objective=goal.objective,
        tolerance=goal.tolerance,
        **work.settings,
        limits={
            "max_batch_size": limits.max_batch_size,
            "memory_bytes": ladder.memory_bytes,
            "latency_seconds": limit,
        },
        candidates=tuple(
            attrs.evolve(rung, predicted_seconds=seconds.get(rung.batch_size)) for rung in ladder.candidates
        ),
        seconds=seconds,
        interval={n: (float(low), float(high)) for n, low, high in zip(sizes, step.low, step.high, strict=True)},
        peak_bytes={rung.batch_size: rung.predicted_peak_bytes or 0 for rung in ladder.candidates},
        roofline_seconds={n: floor for n, floor in rooflines.items() if floor is not None},
        anchors=tuple(anchor.origin for anchor in known),
        batch_size=chosen,
        fastest_batch_size=fastest,
        largest_batch_size=ladder.largest or chosen,
        tied_with=ties,
        decided_by=decision.limit,
        reasons=(),
        passes=_shares(step, sizes.index(chosen), work),
        notes=(),
    )


def _ties(values: Mapping[int, float], allowed: Iterable[int], fastest: int, sharpened: Sharpened) -> tuple[int, ...]:
    """Return the sizes whose ratio to the fastest is 1 within the model's 90 % interval."""
    place, covariance = {n: index for index, n in enumerate(values)}, sharpened.covariance
    best, tied = place[fastest], []
    for n in allowed:
        own = place[n]
        variance = covariance[own, own] + covariance[best, best] - 2 * covariance[own, best]
        if n != fastest and abs(np.log(values[n] / values[fastest])) <= Z90 * np.sqrt(max(variance, 0.0)):
            tied.append(n)
    return tuple(tied)


def _fate(batch_size: int, seconds: float | None, goal: Goal) -> Fate:
    if seconds is None:  # it does not fit
        return Fate(batch_size, "over_limit")
    cost = goal.cost(batch_size, seconds=seconds, joules=None)
    is_slow = goal.latency_limit is not None and seconds > goal.latency_limit
    interval = None if cost is None else (cost, cost)
    return Fate(batch_size, "over_limit" if is_slow else "ok", interval, breaks_latency=is_slow)


def _shares(step: StepPrediction, place: int, work: Workload) -> tuple[PassShare, ...]:
    """Return the passes of the step at one batch size, longest first."""
    layers = {node.name: node.layer for node in as_network(work.spec).nodes}
    whole = float(step.seconds[place])
    shares = [
        PassShare(
            layer=item.layer,
            pass_=item.pass_.value,
            seconds=float(item.seconds[place]),
            share=float(item.seconds[place]) / whole,
            algorithm=item.algorithms[place],
            bound=roofline.bound(layers[item.layer], item.pass_, step.batch_sizes[place], work.device, work.dtype),
            blocks=int(item.blocks[place]) or None,
        )
        for item in step.passes
        if item.seconds[place] > 0
    ]
    return tuple(sorted(shares, key=lambda share: -share.seconds))
