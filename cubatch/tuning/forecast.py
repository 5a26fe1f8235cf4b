"""
predict(): the answer of a tuning run for a GPU that is not here, from what is known beforehand.

The walk is that of `autotune` with the model of time in the place of the clock: candidates, memory plan,
predicted seconds, and the same rule for the answer.  Nothing here was measured, and every form says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from cubatch import checks
from cubatch.errors import InvalidArgument
from cubatch.estimate import roofline
from cubatch.estimate.expected import missing_facts
from cubatch.estimate.parts import Z90, StepPrediction
from cubatch.hardware import arithmetic, probe, room
from cubatch.hardware.facts import Device
from cubatch.measure import goal as goals
from cubatch.measure.goal import Goal
from cubatch.network import models
from cubatch.network.graph import Spec, as_network
from cubatch.network.layer import check_mode
from cubatch.network.models import SpecLike
from cubatch.tuning import anchors as anchored
from cubatch.tuning import answer, forecast_wording, ladder
from cubatch.tuning.anchors import Question
from cubatch.tuning.forecast_record import Forecast, PassShare
from cubatch.tuning.results import TuningResult
from cubatch.tuning.sharpen import Sharpened, sharpen
from cubatch.units import format_seconds

LIBRARIES = ("vendor", "cubatch")


def predict(
    spec: SpecLike,
    *,
    device: Device | str | None,
    mode: str = "inference",
    dtype: str = "float32",
    batch_sizes: Iterable[int] | None = None,
    library: str = "vendor",
    anchors: Iterable[TuningResult | str | Path] | None = None,
    objective: str = "throughput",
    tolerance: float = 0.01,
    max_batch_size: int | None = None,
    memory_limit: int | str | None = None,
    latency_limit: float | None = None,
    optimizer: str = "sgd",
    recompute: bool = False,
) -> Forecast:
    """
    Predict the best batch size of a layer or network on a GPU that need not be here.

    Candidates are those of `candidates`, times those of the model of published measurements (`predict_step`), and the
    answer follows the rule of `autotune`.  What fits is the plan of cubatch's own engine, whatever the library:
    frameworks save more activations and hold more workspace, and run out of memory earlier.

    Args:
        spec: A layer, a network, a mapping, a model's name or a path to a spec file.
        device: A GPU's name in the catalogue, "v100-sxm2-16gb", or a Device; None or "cuda" is the one here.
        mode: "inference", or "training": forward, backward and optimiser step.
        dtype: "float32", "tf32" (sm_80 on), "float16" or "bfloat16".
        batch_sizes: Predict exactly these; those that do not fit are marked `over_limit`.
        library: "vendor": cuDNN and cuBLAS as published; "cubatch": our kernels, counted and never timed.
        anchors: Tuning results, or paths to their JSON, measured on that GPU or another: see `kriging`.
        objective: "throughput" or "latency".
        tolerance: Share of the best that may be given up for a smaller batch.
        max_batch_size: Propose nothing larger.
        memory_limit: Bytes, "8GiB", or "80%" of the GPU's memory.
        latency_limit: Seconds that a step may take.
        optimizer, recompute: As for `autotune`.

    Returns:
        Forecast: `batch_size` is the answer, `reasons` say why, `interval` how sure it is.

    Raises:
        InvalidArgument: If an argument makes no sense, the device is a CPU or a GPU without the facts that the model
            needs (they are named), no batch size is within the limits, or an anchor says nothing about it.
        InvalidData: If an anchor's file is no tuning result of this schema, or holds times that no step takes.
        DoesNotFit: If not even one sample fits (also a MemoryError).

    Example:
        >>> found = predict("go-net", device="v100-sxm2-16gb", batch_sizes=[28, 56])
        >>> sorted(found.seconds) == [28, 56] and found.seconds[28] < found.seconds[56]
        True
    """
    resolved, found = models.resolve(spec), probe.resolve(device, live=False)
    check_mode(mode)
    goal = _goal(objective, tolerance, latency_limit)
    _check(found, dtype, library, recompute)
    asked = Question(spec=resolved, device=found, mode=mode, dtype=dtype, library=library, recompute=recompute)
    known = anchored.read(() if anchors is None else anchors, asked)
    limit = room.memory_limit(found, memory_limit)
    steps, largest = ladder.within(
        resolved, found, room=limit.bytes, mode=mode, dtype=dtype, max_batch_size=max_batch_size,
        batch_sizes=batch_sizes, optimizer=optimizer, library="cubatch", recompute=recompute,
        crests_of="im2col" if library == "vendor" else None,
    )  # fmt: skip
    sizes = [step.batch_size for step in steps if not step.over_limit]
    if not sizes:
        raise InvalidArgument(
            "batch_sizes", steps[0].batch_size, f"at most {largest}, the largest that fits on {found}"
        )
    sharpened = sharpen(asked, sizes, known)
    seconds = dict(zip(sizes, map(float, sharpened.step.seconds), strict=True))
    values = {n: s if objective == "latency" else n / s for n, s in seconds.items()}
    allowed = {n: value for n, value in values.items() if seconds[n] <= (latency_limit or seconds[n])}
    if not allowed:
        wanted = f"at least {format_seconds(min(seconds.values()))}, the shortest step predicted on {found}"
        raise InvalidArgument("latency_limit", latency_limit, wanted)
    chosen, fastest = goals.pick(allowed, goal)
    step, ties = sharpened.step, _ties(values, allowed, fastest, sharpened)
    rooflines = {n: roofline.roofline_seconds(resolved, n, found, mode, dtype) for n in sizes}
    draft = Forecast(
        spec_name=_name(resolved),
        spec=resolved.to_mapping(),
        input_shape=tuple(as_network(resolved).input_shape),
        device=found,
        mode=mode,
        dtype=dtype,
        objective=objective,
        tolerance=tolerance,
        library=library,
        optimizer=optimizer,
        recompute=recompute,
        limits={"max_batch_size": max_batch_size, "memory_bytes": limit.bytes, "latency_seconds": latency_limit},
        candidates=tuple(attrs.evolve(step, predicted_seconds=seconds.get(step.batch_size)) for step in steps),
        seconds=seconds,
        interval={n: (float(low), float(high)) for n, low, high in zip(sizes, step.low, step.high, strict=True)},
        peak_bytes={step.batch_size: step.predicted_peak_bytes or 0 for step in steps},
        roofline_seconds={n: floor for n, floor in rooflines.items() if floor is not None},
        anchors=tuple(anchor.origin for anchor in known),
        batch_size=chosen,
        fastest_batch_size=fastest,
        largest_batch_size=largest,
        tied_with=ties,
        decided_by=_decided_by(values, allowed, ties, goal, chosen, fastest)
        or _end(goal, chosen, fastest, largest, max_batch_size, listed=batch_sizes is not None),
        reasons=(),
        passes=_shares(step, sizes.index(chosen), resolved, found, dtype),
        notes=(*step.notes, *limit.told()),
    )
    sentences = forecast_wording.sentences(draft, as_network(resolved), sharpened)
    return attrs.evolve(draft, reasons=sentences, notes=forecast_wording.notes(draft, known))


def _goal(objective: str, tolerance: float, latency_limit: float | None) -> Goal:
    """Check what is to be as good as possible."""
    if objective == "energy":
        raise InvalidArgument(
            "objective", objective, '"throughput" or "latency"', "Energy must be measured: autotune does."
        )
    numbers: dict[str, Any] = {"tolerance": tolerance, "latency_limit": latency_limit}
    for name, value in numbers.items():
        try:
            (checks.number if name == "latency_limit" else checks.required_number)(value)
        except (TypeError, ValueError):
            raise InvalidArgument(name, value, "a number") from None
    return Goal(objective=objective, tolerance=tolerance, latency_limit=latency_limit)


def _check(device: Device, dtype: str, library: str, recompute: object) -> None:
    """Refuse what the model knows nothing of."""
    if library not in LIBRARIES:
        raise InvalidArgument("library", library, "one of " + ", ".join(LIBRARIES))
    if not isinstance(recompute, bool):
        raise InvalidArgument("recompute", recompute, "True or False")
    if device.kind == "cpu":
        remedy = "The model of time knows GPUs only; name one of the catalogue, or measure on the CPU with autotune."
        raise InvalidArgument("device", str(device), "a GPU", remedy)
    arithmetic.check_dtype(device, dtype)
    # The memory plan is that of our kernels, which asks for SMs and compute capability too.
    if missing := missing_facts(device, dtype, library):
        remedy = "The catalogue has no such figure for it; build a Device that has."
        raise InvalidArgument("device", str(device), f"a GPU of which {', '.join(missing)} are known", remedy)


def _ties(values: Mapping[int, float], allowed: Iterable[int], fastest: int, sharpened: Sharpened) -> tuple[int, ...]:
    """Name the sizes whose difference from the fastest lies within the model's 90 % interval of their ratio."""
    place, covariance = {n: index for index, n in enumerate(values)}, sharpened.covariance
    best, tied = place[fastest], []
    for n in allowed:
        own = place[n]
        variance = covariance[own, own] + covariance[best, best] - 2 * covariance[own, best]
        if n != fastest and abs(np.log(values[n] / values[fastest])) <= Z90 * np.sqrt(max(variance, 0.0)):
            tied.append(n)
    return tuple(tied)


def _decided_by(
    values: Mapping[int, float],
    allowed: Mapping[int, float],
    ties: Sequence[int],
    goal: Goal,
    chosen: int,
    fastest: int,
) -> str | None:
    """Say what kept the answer from being larger, as `choose.answer` does; None if the larger ones do not tell."""
    larger = [n for n in values if n > chosen]
    beyond = [n for n in larger if n in allowed]
    if beyond and goal.objective == "latency":
        return "peak" if chosen == fastest and not set(beyond) <= set(ties) else "plateau"
    if beyond and max(beyond) >= answer.SPAN * chosen:
        last = max(beyond)
        return "peak" if values[last] < (1 - goal.tolerance) * values[fastest] and last not in ties else "plateau"
    return "latency_limit" if len(beyond) < len(larger) else None


def _end(goal: Goal, chosen: int, fastest: int, largest: int, max_batch_size: int | None, *, listed: bool) -> str:
    """Say what ended the sizes near the answer: memory only where the list, if there is one, left nothing out."""
    latency = goal.objective == "latency"
    if listed:
        return "batch_sizes" if latency or chosen < largest else "memory"
    if max_batch_size is not None and max_batch_size <= largest:
        return "max_batch_size"
    # More memory lets no step take less time.
    return "memory" if not latency else "peak" if chosen == fastest else "plateau"


def _shares(step: StepPrediction, place: int, spec: Spec, device: Device, dtype: str) -> tuple[PassShare, ...]:
    """Give the passes of the step at one batch size, the one that takes longest first."""
    layers = {node.name: node.layer for node in as_network(spec).nodes}
    whole = float(step.seconds[place])
    shares = [
        PassShare(
            layer=item.layer,
            pass_=item.pass_.value,
            seconds=float(item.seconds[place]),
            share=float(item.seconds[place]) / whole,
            algorithm=item.algorithms[place],
            bound=roofline.bound(layers[item.layer], item.pass_, step.batch_sizes[place], device, dtype),
            blocks=int(item.blocks[place]) or None,
        )
        for item in step.passes
        if item.seconds[place] > 0
    ]
    return tuple(sorted(shares, key=lambda share: -share.seconds))


def _name(spec: Spec) -> str:
    mapping = spec.to_mapping()
    return str(mapping.get("name") or mapping.get("type") or "a network")
