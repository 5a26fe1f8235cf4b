"""predict() of a PyTorch module: candidates by its traced memory, times by its traced operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from cubatch.errors import InvalidArgument
from cubatch.estimate.expected import missing_facts
from cubatch.estimate.operators import TracedPrediction, dtypes_on, predict_operators
from cubatch.hardware import device_file, probe
from cubatch.hardware.facts import Device
from cubatch.hardware.memory_limit import memory_limit as memory_limit_of
from cubatch.measure.records import Candidate
from cubatch.tuning import explain, forecast_rule, ladder, step_memory
from cubatch.tuning.forecast_record import Forecast, PassShare
from cubatch.tuning.notes import memory_notes, sentence
from cubatch.tuning.request import Request
from cubatch.tuning.sharpen import unanchored


def predict_module(
    spec: Any, batches: Any, device: Device | str | None, kind: Mapping[str, Any], request: Request
) -> Forecast:  # fmt: skip
    """
    Predict the best batch size of a module on a GPU.

    Args:
        spec, batches: As for `predict`.
        device: The GPU.
        kind: The other arguments of `predict` about the step: mode, optimizer, loss, ...
        request: Objective and limits.

    Raises:
        InvalidArgument: If an argument makes no sense, or the module's step cannot be traced.
        DoesNotFit: If not even one sample fits.
    """
    gpu = gpu_of(device)
    memory = memory_limit_of(gpu, request.memory_limit)
    with step_memory.traced(spec, batches, step_memory.applicable(kind, is_foreign=True)) as module:
        largest = step_memory.ModuleStep(module, only_tensors=True).largest(memory.bytes, gpu)
        operators = module.operators(largest)
        name, dtype, peak_bytes = module.name, module.dtype, module.peak_bytes
    for each in sorted({"float32", *(each for step in operators.values() for each in dtypes_on(step, gpu))}):
        check_facts(gpu, missing_facts(gpu, each, "vendor"))
    rungs = ladder.of_memory(request.limits, memory, largest, peak_bytes)
    sizes = forecast_rule.sizes_that_fit(rungs, str(gpu))
    predicted = predict_operators(operators, sizes, gpu)
    if not predicted.step.seconds.all():
        raise InvalidArgument("module", name, "one whose step computes something")

    def seconds_at(inside: Sequence[int]) -> list[float]:
        return [float(each) for each in predict_operators(operators, inside, gpu).step.seconds]

    if more := forecast_rule.at_latency_limit(request, predicted.step, seconds_at):
        new = (attrs.evolve(ladder.between(n, rungs.candidates), predicted_peak_bytes=peak_bytes(n)) for n in more)
        rungs = attrs.evolve(rungs, candidates=tuple(sorted([*rungs.candidates, *new], key=_size)))
        sizes = sorted([*sizes, *more])
        predicted = predict_operators(operators, sizes, gpu)
    sharpened = unanchored(lambda scales: predict_operators(operators, sizes, gpu, scales=scales).step)
    optimizer = kind["optimizer"]
    facts = {
        "spec_name": name, "spec": {"name": spec if isinstance(spec, str) else name}, "input_shape": None,
        "device": gpu, "anchors": (), "mode": kind["mode"], "dtype": dtype, "library": "torch", "recompute": None,
        "optimizer": optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "a function"),
        "accumulate": kind["accumulate"],
    }  # fmt: skip
    draft = forecast_rule.draft(
        facts, request, rungs, sharpened, shares=lambda place: _shares(predicted, place),
        roofline_seconds=dict(zip(sizes, map(float, predicted.roofline_seconds), strict=True)),
    )  # fmt: skip
    about_memory = [*map(sentence, memory_notes(memory)), explain.MEMORY_OF_MODULE]
    notes = explain.forecast_notes(gpu, predicted.step.notes, about_memory, ())
    return attrs.evolve(draft, reasons=explain.predicted(draft, {}, sharpened), notes=notes)


def gpu_of(device: Device | str | None) -> Device:
    """Return the GPU that is to be predicted; reject a CPU."""
    gpu = probe.resolve(device, live=False)
    if gpu.kind == "cpu":
        remedy = "The model of time knows GPUs only; name one of the catalogue, or measure on the CPU with autotune."
        raise InvalidArgument("device", str(gpu), "a GPU", remedy)
    return gpu


def check_facts(gpu: Device, missing: Sequence[str]) -> None:
    """Raise InvalidArgument if facts of a GPU are missing that the model needs."""
    if not missing:
        return
    if remedy := device_file.lacks(gpu, missing):
        raise InvalidArgument("device", str(gpu), "a GPU whose speed is known", remedy)
    remedy = "The catalogue has no such figure for it; build a Device that has." if gpu.slug else ""
    raise InvalidArgument("device", str(gpu), f"a GPU of which {', '.join(missing)} are known", remedy)


def _size(candidate: Candidate) -> int:
    return candidate.batch_size


def _shares(predicted: TracedPrediction, place: int) -> tuple[PassShare, ...]:
    """Return the operators of the step at one batch size, longest first; shares are of the kernels' time."""
    step = predicted.step
    whole = sum(float(item.seconds[place]) for item in step.passes)
    shares = [
        PassShare(
            layer=item.layer,
            pass_=item.pass_.value if item.blocks[place] else phase,
            seconds=float(item.seconds[place]),
            share=float(item.seconds[place]) / whole,
            algorithm=item.algorithms[place],
            bound=bound,
            blocks=int(item.blocks[place]) or None,
        )
        for item, phase, bound in zip(step.passes, predicted.phases, predicted.bounds, strict=True)
        if item.seconds[place] > 0
    ]
    return tuple(sorted(shares, key=lambda share: -share.seconds))
