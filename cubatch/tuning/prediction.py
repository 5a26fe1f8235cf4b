"""
predict(): the recommended batch size for a GPU that is not in this machine.

It follows the steps of `autotune`, with a model of time instead of a clock. Request, candidates, memory plan and the
rules for recommendation and limit are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from cubatch.choices import Dtype, Mode, Modelled, Objective, Optimizer
from cubatch.errors import InvalidArgument
from cubatch.estimate import roofline
from cubatch.estimate.expected import missing_facts, takes_time
from cubatch.estimate.predictions import StepPrediction
from cubatch.hardware.arithmetic import check_kernels
from cubatch.hardware.facts import Device
from cubatch.hardware.memory_limit import MemoryLimit
from cubatch.hardware.memory_limit import memory_limit as memory_limit_of
from cubatch.memory import fit
from cubatch.network.graph import as_network
from cubatch.network.models import SpecLike
from cubatch.tuning import anchors as anchored
from cubatch.tuning import explain, forecast_rule, module_prediction, step_memory
from cubatch.tuning.forecast_record import Forecast, PassShare
from cubatch.tuning.ladder import Ladder, added, propose
from cubatch.tuning.notes import memory_notes, sentence
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from cubatch.tuning.sharpen import sharpen
from cubatch.workload import Workload

LIBRARIES = ("vendor", "cubatch")
_IDLE = "All of its layers only rename memory, which takes no time."


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
    optimizer: Optimizer | str | Callable[[Iterable[Any]], Any] = "sgd",
    recompute: bool = False,
    loss: Callable[..., Any] | None = None,
    autocast: str | None = None,
    accumulate: int = 1,
    constant_inputs: str | int | Sequence[str | int] = (),
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
        mode: "inference", or "training": forward, backward and optimizer step.
        dtype: "float32", "tf32" (sm_80 on), "float16" or "bfloat16". A module has the types of its own parameters, and
            PyTorch's settings decide about TF32.
        batch_sizes: Predict exactly these; those that do not fit are marked `over_limit`.
        library: "vendor": cuDNN and cuBLAS as published; "cubatch": cubatch kernels, by counts alone.
        anchors: Tuning results, or paths to their JSON, that correct the prediction (see `sharpen`). They were measured
            on this GPU or another. At most 100, with 1000 measured batch sizes in total.
        objective: "throughput" or "latency".
        tolerance: Share of the best value that may be given up for a smaller batch. The default is larger than that of
            `autotune`, because a model cannot tell apart sizes that differ by less.
        max_batch_size: Propose nothing larger.
        memory_limit: Bytes, "8GiB", or "80%" of the GPU's memory.
        latency_limit: Longest allowed step in seconds.
        optimizer: As for `autotune`; for a module as for `autotune_module`.
        recompute: As for `autotune`.
        loss, autocast, accumulate, constant_inputs: For a module only: as for `autotune_module`.

    Returns:
        Forecast: `batch_size` is the recommendation, `reasons` explain it, `interval` has the uncertainty.

    Raises:
        InvalidArgument: If an argument makes no sense, no batch size is within the limits, the network does nothing, or
            an anchor is unrelated. Also for a CPU, and for a GPU without facts that the model needs.
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
    request = Request.of(
        objective=objective, tolerance=tolerance, latency_limit=latency_limit, batch_sizes=batch_sizes,
        max_batch_size=max_batch_size, memory_limit=memory_limit,
    )  # fmt: skip
    others = {"loss": loss, "autocast": autocast, "accumulate": accumulate, "constant_inputs": constant_inputs}
    if step_memory.is_module(spec, batches):
        for name, value, default in (("library", library, "vendor"), ("anchors", anchors, None)):
            if value != default:
                raise InvalidArgument(name, value, "left out for a PyTorch module, to which it does not apply")
        options = {"mode": mode, "optimizer": optimizer, "dtype": dtype, "recompute": recompute, **others}
        return module_prediction.predict_module(spec, batches, device, options, request)
    step_memory.applicable(others, is_foreign=False)
    chosen: Any = {"mode": mode, "dtype": dtype, "library": library, "optimizer": optimizer, "recompute": recompute}
    work = _workload(spec, device, **chosen)
    known = anchored.read(() if anchors is None else anchors, work)
    memory = memory_limit_of(work.device, memory_limit)
    ladder = _ladder(work, request, memory)
    sizes = forecast_rule.sizes_that_fit(ladder, str(work.device))
    if not takes_time(work):
        raise InvalidArgument("spec", work.name, "a layer or network that does something", _IDLE)
    sharpened = sharpen(work, sizes, known)
    if more := forecast_rule.at_latency_limit(
        request, sharpened.step, lambda inside: sharpen(work, inside, known).step.seconds
    ):
        rungs = [*ladder.candidates, *(added(attrs.evolve(work, library="cubatch"), ladder, n) for n in more)]
        ladder = attrs.evolve(ladder, candidates=tuple(sorted(rungs, key=lambda rung: rung.batch_size)))
        sizes = sorted([*sizes, *more])
        sharpened = sharpen(work, sizes, known)
    rooflines = {n: roofline.roofline_seconds(work.spec, n, work.device, work.mode, work.dtype) for n in sizes}
    facts = {
        "spec_name": work.name, "spec": work.spec.to_mapping(), "input_shape": work.input_shape, "device": work.device,
        "anchors": tuple(anchor.origin for anchor in known), **work.settings,
    }  # fmt: skip
    draft = forecast_rule.draft(
        facts, request, ladder, sharpened, shares=lambda place: _shares(sharpened.step, place, work),
        roofline_seconds={n: floor for n, floor in rooflines.items() if floor is not None},
    )  # fmt: skip
    about_memory = [*map(sentence, memory_notes(memory)), explain.MEMORY_OF_ENGINE]
    notes = explain.forecast_notes(work.device, sharpened.step.notes, about_memory, known)
    layers = {node.name: node.layer for node in as_network(work.spec).nodes}
    return attrs.evolve(draft, reasons=explain.predicted(draft, layers, sharpened), notes=notes)


def _workload(
    spec: SpecLike, device: Device | str | None, *, mode: str, dtype: str, library: str, optimizer: str, recompute: bool
) -> Workload:
    """Resolve and check the workload; reject a device or library that the model does not know."""
    if library not in LIBRARIES:
        raise InvalidArgument("library", library, "one of " + ", ".join(LIBRARIES))
    gpu = module_prediction.gpu_of(device)
    if library == "cubatch":
        check_kernels(gpu)
    work = Workload.of(spec, gpu, mode=mode, dtype=dtype, optimizer=optimizer, recompute=recompute)
    # The memory plan of cubatch kernels needs SMs and compute capability too.
    module_prediction.check_facts(gpu, missing_facts(gpu, dtype, library))
    return attrs.evolve(work, library=library)


def _ladder(work: Workload, request: Request, memory: MemoryLimit) -> Ladder:
    """Propose sizes by the memory plan of cubatch's engine and the tiles of the predicted library."""
    planned = attrs.evolve(work, library="cubatch")
    largest = fit.largest(planned, max(1, memory.bytes))
    tiles_of = attrs.evolve(work, library="im2col") if work.library == "vendor" else planned
    return propose(planned, request.limits, memory, largest, tiles_of=tiles_of)


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
