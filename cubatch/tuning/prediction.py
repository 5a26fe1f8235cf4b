"""
predict(): the recommended batch size for a GPU that is not in this machine.

It follows the steps of `autotune`, with a model of time instead of a clock. Request, candidates, memory plan and the
rules for recommendation and limit are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from cubatch.checks import check_optimizer
from cubatch.choices import Dtype, Mode, Modelled, ModuleOptimizer, Objective, Optimizer
from cubatch.errors import InvalidArgument
from cubatch.estimate.predictions import Z90
from cubatch.frameworks.torch_memory import Opaque
from cubatch.hardware.facts import Device
from cubatch.measure import goal as goals
from cubatch.measure.goal import Goal
from cubatch.network.models import SpecLike
from cubatch.search.state import CLOSED, is_closed
from cubatch.tuning import explain, step_memory
from cubatch.tuning.decision import Fate, decide
from cubatch.tuning.forecast_record import Forecast
from cubatch.tuning.notes import memory_notes, sentence
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from cubatch.tuning.sharpen import Sharpened
from cubatch.tuning.subjects import predicted_subject
from cubatch.tuning.subjects.predicted_subject import PredictedSubject
from cubatch.units import format_seconds


def predict(
    spec: SpecLike | Any,
    batches: Any = None,
    *,
    device: Device | str | None,
    mode: Mode = "inference",
    dtype: Dtype = "float32",
    batch_sizes: Iterable[int] | None = None,
    library: Modelled = "vendor",
    anchors: Iterable[TuningResult | str | Path] | None = None,
    objective: Objective = "throughput",
    tolerance: float = 0.03,
    max_batch_size: int | None = None,
    memory_limit: int | str | None = None,
    latency_limit: float | None = None,
    optimizer: Optimizer | ModuleOptimizer = "sgd",
    recompute: bool = False,
    experimental: Collection[str] = (),
    loss: Callable[..., Any] | None = None,
    autocast: str | None = None,
    accumulate: int = 1,
    constant_inputs: str | int | Sequence[str | int] = (),
    opaque: Mapping[str, Opaque] | None = None,
) -> Forecast:
    """
    Predict the best batch size of a layer, a network or a PyTorch module on a GPU that need not be present.

    Candidates are those of `candidates`, times those of a model fitted to published measurements (`predict_step`), and
    the recommendation follows the rule of `autotune`. The largest size is that of cubatch's own memory plan for every
    library: frameworks save more activations and workspace, and run out of memory earlier.

    The step of a module is traced on tensors without data, also one on the "meta" device: forward, loss, backward and
    optimizer. Each operator of the trace takes the time of the same model, and the host takes time to launch it. The
    largest size is that of the step's tensors. A module is on the CPU or "meta", with the `device` only predicted.

    Args:
        spec: A layer, a network, a mapping, a model's name or a path to a spec file. Or a torch.nn.Module; with
            `batches` also the name of a function that returns one, "package.module:build".
        batches: For a module only: its batches, as for `autotune_module`.
        device: A GPU's name in the catalogue, "v100-sxm2-16gb", or a Device; None or "cuda" is that of this machine.
        mode: "inference", or "training": forward and backward pass, of a module also loss and optimizer step.
        dtype: "float32", "tf32" (sm_80 on), "float16" or "bfloat16". A module has the types of its own parameters, and
            PyTorch's settings decide about TF32.
        batch_sizes: Predict exactly these; those that do not fit are marked `over_limit`.
        library: "vendor": cuDNN and cuBLAS as published; "torch": these, and the time that PyTorch takes to
            launch layers. "cubatch": cubatch kernels, by counts alone. A module always runs in PyTorch.
        anchors: Tuning results, or paths to their JSON, that correct the prediction (see `sharpen`). They were measured
            on this GPU or another.
        objective: "throughput" or "latency".
        tolerance: Share of the best value that may be given up for a smaller batch. The default is larger than that of
            `autotune`, because a model cannot tell apart sizes that differ by less.
        max_batch_size: Propose nothing larger.
        memory_limit: Bytes, "8GiB", or "80%" of the GPU's memory.
        latency_limit: Longest allowed step in seconds.
        optimizer: As for `autotune`; for a module as for `autotune_module`.
        recompute: As for `autotune`.
        experimental: For library "cubatch" only: names of kernels that no GPU has run yet, listed in
            docs/method/kernels.md. A name without effect on the network or GPU is ignored.
            So is "reversed_sums", since the time model has no cache.
        loss, autocast, accumulate, constant_inputs: For a module only: as for `autotune_module`.
        opaque: For a module only: as for `footprint`. A function takes the time of its operators.

    Returns:
        Forecast: `batch_size` is the recommendation, `reasons` explain it, `interval` has the uncertainty.

    Raises:
        InvalidArgument: If an argument is invalid, no batch size is within the limits, or the network computes nothing.
            Also if an anchor shares neither GPU nor library and dtype with the prediction. Also for a CPU, and for a
            GPU without facts that the model needs.
        InvalidData: If an anchor's file is no tuning result of this schema.
        DoesNotFit: If not even one sample fits (also a MemoryError).
        MissingDependency: If batches are given and PyTorch is not installed.

    Example:
        >>> forecast = predict("go-net", device="v100-sxm2-16gb", batch_sizes=[28, 56])
        >>> sorted(forecast.seconds) == [28, 56] and forecast.seconds[28] < forecast.seconds[56]
        True
        >>> predict(torch.nn.LSTM(64, 64), (100, 64), device="t4", mode="training")   # doctest: +SKIP
    """
    if objective == "energy":
        allowed = '"throughput" or "latency"'
        raise InvalidArgument("objective", objective, allowed, "Energy must be measured: autotune does.")
    check_optimizer(mode, optimizer)
    request = Request.of(
        objective=objective, tolerance=tolerance, latency_limit=latency_limit, batch_sizes=batch_sizes,
        max_batch_size=max_batch_size, memory_limit=memory_limit,
    )  # fmt: skip
    others = {
        "loss": loss, "autocast": autocast, "accumulate": accumulate, "constant_inputs": constant_inputs,
        "opaque": opaque,
    }  # fmt: skip
    kind: dict[str, Any] = {"mode": mode, "dtype": dtype, "optimizer": optimizer, "recompute": recompute}
    if step_memory.is_module(spec, batches):
        of_networks = ("library", library, "vendor"), ("anchors", anchors, None)
        for name, value, default in (*of_networks, ("experimental", experimental or (), ())):
            if value != default:
                raise InvalidArgument(name, value, "left out for a PyTorch module, to which it does not apply")
        module = predicted_subject.module(spec, batches, device, request, {**kind, **others})
        return _forecast(module, request, explain.MEMORY_OF_MODULE)
    step_memory.applicable(others, is_foreign=False)
    network = predicted_subject.network(
        spec, device, request, anchors=anchors, library=library, experimental=experimental, **kind
    )  # fmt: skip
    return _forecast(network, request, explain.MEMORY_OF_ENGINE)


def _forecast(subject: PredictedSubject, request: Request, about_memory: str) -> Forecast:
    """
    Return the forecast: the predicted steps of all candidates, and the recommended batch size.

    `about_memory` is a sentence on the memory limit, for the notes. InvalidArgument is raised if no candidate is
    within the memory and latency limits.
    """
    device, goal, ladder = subject.device, request.goal, subject.ladder
    sizes = [step.batch_size for step in ladder.candidates if not step.over_limit]
    if not sizes:
        wanted = f"at most {ladder.largest}, the largest that fits on {device}"
        raise InvalidArgument("batch_sizes", ladder.candidates[0].batch_size, wanted)
    steps = subject.steps(sizes)
    if more := _at_latency_limit(request, sizes, steps.sharpened.step.seconds, subject):
        rungs = [*ladder.candidates, *(subject.candidate(n) for n in more)]
        ladder = attrs.evolve(ladder, candidates=tuple(sorted(rungs, key=lambda rung: rung.batch_size)))
        sizes = sorted([*sizes, *more])
        steps = subject.steps(sizes)
    step = steps.sharpened.step
    seconds = dict(zip(sizes, map(float, step.seconds), strict=True))
    values = {n: s if goal.objective == "latency" else n / s for n, s in seconds.items()}
    limit = goal.latency_limit
    allowed = {n: value for n, value in values.items() if limit is None or seconds[n] <= limit}
    if not allowed:
        wanted = f"at least {format_seconds(min(seconds.values()))}, the shortest step predicted on {device}"
        raise InvalidArgument("latency_limit", limit, wanted)
    chosen, fastest = goals.pick(allowed, goal)
    ties = _ties(values, allowed, fastest, steps.sharpened)
    decision = decide(
        [_fate(rung.batch_size, seconds.get(rung.batch_size), goal) for rung in ladder.candidates], chosen=chosen,
        fastest=fastest, ties=ties, goal=goal, largest_batch_size=ladder.largest,
        max_batch_size=request.max_batch_size, is_listed=request.batch_sizes is not None,
    )  # fmt: skip
    draft = Forecast(
        **subject.facts,
        device=device,
        objective=goal.objective,
        tolerance=goal.tolerance,
        limits={
            "max_batch_size": request.max_batch_size,
            "memory_bytes": ladder.memory_bytes,
            "latency_seconds": limit,
        },
        candidates=tuple(
            attrs.evolve(rung, predicted_seconds=seconds.get(rung.batch_size)) for rung in ladder.candidates
        ),
        seconds=seconds,
        interval={n: (float(low), float(high)) for n, low, high in zip(sizes, step.low, step.high, strict=True)},
        peak_bytes={rung.batch_size: rung.predicted_peak_bytes or 0 for rung in ladder.candidates},
        roofline_seconds=steps.roofline_seconds,
        batch_size=chosen,
        fastest_batch_size=fastest,
        largest_batch_size=ladder.largest or chosen,
        tied_with=ties,
        decided_by=decision.limit,
        reasons=(),
        passes=steps.passes(sizes.index(chosen)),
        notes=(),
    )
    memory = [*map(sentence, memory_notes(subject.memory)), about_memory]
    notes = explain.forecast_notes(device, step.notes, memory, subject.anchors, experimental=draft.experimental)
    return attrs.evolve(draft, reasons=explain.predicted(draft, steps.sharpened), notes=notes)


def _at_latency_limit(
    request: Request, sizes: Sequence[int], seconds: Iterable[float], subject: PredictedSubject
) -> list[int]:  # fmt: skip
    """
    Return the largest batch size predicted to be within the latency limit and the next one, without those in `sizes`.

    `seconds` are the predicted seconds of a step at `sizes`, which ascend. The list is empty if no limit lies between
    two of these seconds, or if the user gave the batch sizes.
    """
    limit = math.inf if request.goal.latency_limit is None else request.goal.latency_limit
    last = max((place for place, took in enumerate(seconds) if took <= limit), default=-1)
    if request.batch_sizes is not None or last < 0 or last + 1 == len(sizes):
        return []
    low, high = sizes[last], sizes[last + 1]
    if is_closed(low, high):
        return []
    inside = range(low, high + 1, max(1, int(CLOSED * low)))
    predicted = subject.steps(inside).sharpened.step.seconds
    top = max((n for n, took in zip(inside, predicted, strict=True) if took <= limit), default=low)
    return [n for n in (top, top + inside.step) if low < n < high]


def _ties(values: Mapping[int, float], allowed: Iterable[int], fastest: int, sharpened: Sharpened) -> tuple[int, ...]:
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
