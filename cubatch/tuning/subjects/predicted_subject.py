"""The subjects of `predict`: steps of a network, or of a PyTorch module, on a GPU that need not be present."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

from cubatch.errors import InvalidArgument
from cubatch.estimate import roofline
from cubatch.estimate.expected import missing_facts, takes_time
from cubatch.estimate.operators import dtypes_on, predict_operators
from cubatch.estimate.predictions import StepPrediction
from cubatch.estimate.step import LIBRARIES
from cubatch.frameworks import optimizers
from cubatch.hardware import device_file, probe
from cubatch.hardware.arithmetic import check_kernels
from cubatch.hardware.facts import Device
from cubatch.hardware.memory_limit import MemoryLimit, memory_limit as memory_limit_of
from cubatch.measure.records import Candidate
from cubatch.memory import fit
from cubatch.network.graph import as_network
from cubatch.network.models import SpecLike
from cubatch.tuning import anchors as anchored, ladder as ladders, step_memory
from cubatch.tuning.anchors import Anchor
from cubatch.tuning.forecast_record import PassShare
from cubatch.tuning.ladder import Ladder
from cubatch.tuning.request import Request
from cubatch.tuning.sharpen import Sharpened, sharpen, unanchored
from cubatch.workload import Workload


@attrs.frozen(eq=False)
class PredictedSteps:
    """The predicted steps of several batch sizes."""

    sharpened: Sharpened  # their seconds, corrected by anchors if there are any, with intervals and covariance
    roofline_seconds: Mapping[int, float]  # lower bounds by batch size, where known
    # function from the position of a batch size to the passes of its step, the longest first
    passes: Callable[[int], tuple[PassShare, ...]]


@attrs.frozen(kw_only=True)
class PredictedSubject:
    """A network or module whose steps are predicted on a GPU."""

    device: Device  # the GPU
    memory: MemoryLimit  # how much memory a step may take
    facts: Mapping[str, Any]  # the fields of the forecast that describe the workload
    ladder: Ladder  # the batch sizes to predict
    candidate: Callable[[int], Candidate]  # makes a candidate of a size between those of `ladder`
    steps: Callable[[Sequence[int]], PredictedSteps]  # predicts a step of each of the given sizes
    anchors: Sequence[Anchor] = ()  # measurements that correct the prediction


def network(
    spec: SpecLike, device: Device | str | None, request: Request, *, anchors: Any, mode: str, dtype: str,
    library: str, optimizer: str, recompute: bool, experimental: Collection[str],
) -> PredictedSubject:  # fmt: skip
    """
    Return a network with its candidate batch sizes, after checking the arguments of `predict`.

    `device` None is the GPU of this machine.

    Raises:
        InvalidArgument: If an argument is invalid, or facts of the GPU that the model needs are unknown.
        DoesNotFit: If not even one sample fits.
    """
    if library not in LIBRARIES:
        raise InvalidArgument("library", library, "one of " + ", ".join(LIBRARIES))
    if experimental and library != "cubatch":
        remedy = "The names are of cubatch kernels."
        raise InvalidArgument("experimental", experimental, f'left out for library="{library}"', remedy)
    gpu = _gpu_of(device)
    if library == "cubatch":
        check_kernels(gpu)
    planned = Workload.of(spec, gpu, mode=mode, dtype=dtype, optimizer=optimizer, recompute=recompute)
    planned = attrs.evolve(planned, experimental=experimental)
    # The memory plan of cubatch kernels, which counts for every library, needs SMs and compute capability too.
    _check_facts(gpu, missing_facts(gpu, dtype, library))
    work, planned = attrs.evolve(planned, library=library), attrs.evolve(planned, library="cubatch")
    known = anchored.read(() if anchors is None else anchors, work)
    memory = memory_limit_of(gpu, request.memory_limit)
    largest = fit.largest(planned, max(1, memory.bytes))
    tiles_of = attrs.evolve(work, library="im2col") if library != "cubatch" else planned
    ladder = ladders.propose(planned, request, memory, largest, tiles_of=tiles_of)
    if not takes_time(work):
        remedy = "All of its layers only rename memory, which takes no time."
        raise InvalidArgument("spec", work.name, "a layer or network that computes or moves data", remedy)
    layers = {node.name: node.layer for node in as_network(work.spec).nodes}

    def steps(sizes: Sequence[int]) -> PredictedSteps:
        sharpened = sharpen(work, sizes, known)
        floor = functools.partial(roofline.roofline_seconds, work.spec, library=work.library)
        floors = {n: floor(n, gpu, mode, dtype) for n in sizes}

        def passes(place: int) -> tuple[PassShare, ...]:
            step = sharpened.step
            bounds = [roofline.bound(layers[each.layer], each.pass_, sizes[place], gpu, dtype) for each in step.passes]
            names = [each.pass_.value for each in step.passes]
            return _passes(step, place, float(step.seconds[place]), names, bounds)

        return PredictedSteps(sharpened, {n: floor for n, floor in floors.items() if floor is not None}, passes)

    return PredictedSubject(
        device=gpu, memory=memory, ladder=ladder, candidate=lambda n: ladders.added(planned, ladder, n), steps=steps,
        anchors=known,
        facts={
            "spec_name": work.name, "spec": work.spec.to_mapping(), "input_shape": work.input_shape,
            "anchors": tuple(anchor.origin for anchor in known), "experimental": tuple(sorted(work.experimental)),
            **work.settings,
        },
    )  # fmt: skip


def module(
    spec: Any, batches: Any, device: Device | str | None, request: Request, kind: Mapping[str, Any]
) -> PredictedSubject:  # fmt: skip
    """
    Return a traced PyTorch module with its candidate batch sizes.

    `device` None is the GPU of this machine; `kind` has the options of the module's step.

    Raises:
        InvalidArgument: If an argument is invalid, or the module's step cannot be traced or computes nothing.
        DoesNotFit: If not even one sample fits.
    """
    gpu = _gpu_of(device)
    memory = memory_limit_of(gpu, request.memory_limit)
    options = {**step_memory.applicable(kind, is_foreign=True), "records": True}
    with step_memory.traced(spec, batches, options) as traced:
        largest = step_memory.ModuleStep(traced, only_tensors=True).largest(memory.bytes, gpu)
        operators = traced.operators(largest)
        name, dtype, peak_bytes = traced.name, traced.dtype, traced.peak_bytes
    for each in sorted({"float32", *(each for step in operators.values() for each in dtypes_on(step, gpu))}):
        _check_facts(gpu, missing_facts(gpu, each, "vendor"))
    ladder = ladders.of_memory(request, memory, largest, peak_bytes)

    def candidate(n: int) -> Candidate:
        return attrs.evolve(ladders.between(n, ladder.candidates), predicted_peak_bytes=peak_bytes(n))

    def steps(sizes: Sequence[int]) -> PredictedSteps:
        predicted = predict_operators(operators, sizes, gpu)
        if not predicted.step.seconds.all():
            raise InvalidArgument("module", name, "one whose step computes something")

        def passes(place: int) -> tuple[PassShare, ...]:
            step = predicted.step
            pairs = zip(step.passes, predicted.phases, strict=True)
            names = [each.pass_.value if each.blocks[place] else phase for each, phase in pairs]
            kernels = sum(float(each.seconds[place]) for each in step.passes)
            return _passes(step, place, kernels, names, predicted.bounds)

        sharpened = unanchored(
            predicted.step, lambda some, scales: predict_operators(operators, some, gpu, scales=scales).step
        )
        return PredictedSteps(sharpened, dict(zip(sizes, map(float, predicted.roofline_seconds), strict=True)), passes)

    return PredictedSubject(
        device=gpu, memory=memory, ladder=ladder, candidate=candidate, steps=steps,
        facts={
            "spec_name": name, "spec": {"name": spec if isinstance(spec, str) else name}, "input_shape": None,
            "anchors": (), "mode": kind["mode"], "dtype": dtype, "library": "torch", "recompute": None,
            "optimizer": optimizers.name_of(kind["optimizer"]),
            "accumulate": kind["accumulate"],
        },
    )  # fmt: skip


def _passes(
    step: StepPrediction, place: int, whole: float, names: Sequence[str], bounds: Sequence[str | None]
) -> tuple[PassShare, ...]:
    passes = [
        PassShare(
            layer=item.layer,
            pass_=name,
            seconds=float(item.seconds[place]),
            share=float(item.seconds[place]) / whole,
            algorithm=item.algorithms[place],
            bound=bound,
            blocks=int(item.blocks[place]) or None,
        )
        for item, name, bound in zip(step.passes, names, bounds, strict=True)
        if item.seconds[place] > 0
    ]
    return tuple(sorted(passes, key=lambda each: -each.seconds))


def _gpu_of(device: Device | str | None) -> Device:
    gpu = probe.resolve(device, live=False)
    if gpu.kind == "cpu":
        remedy = "The model of time knows GPUs only; name one of the catalogue, or measure on the CPU with autotune."
        raise InvalidArgument("device", str(gpu), "a GPU", remedy)
    return gpu


def _check_facts(gpu: Device, missing: Sequence[str]) -> None:
    """Raise InvalidArgument if any facts of a GPU that the time model needs are missing."""
    if not missing:
        return
    if remedy := device_file.lacks(gpu, missing):
        raise InvalidArgument("device", str(gpu), "a GPU whose speed is known", remedy)
    remedy = "The catalogue has no such figure for it; build a Device that has." if gpu.slug else ""
    raise InvalidArgument("device", str(gpu), f"a GPU of which {', '.join(missing)} are known", remedy)
