"""Predicted time of a step on a device: by the model of `predict` if the device's facts suffice, else the roofline."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import attrs
import numpy as np

from cubatch.estimate import roofline
from cubatch.estimate.predictions import UNSCALED, Scales, StepPrediction
from cubatch.estimate.step import predict_step
from cubatch.hardware import arithmetic
from cubatch.hardware.facts import Device
from cubatch.memory.plan import schedule_of
from cubatch.network.graph import Spec, layer_passes
from cubatch.network.passes import Pass
from cubatch.workload import Workload


def missing_facts(device: Device, dtype: str, library: str) -> tuple[str, ...]:
    """Return the names of the fields of a GPU's `Device` that the time model needs and that are unknown."""
    rate = arithmetic.peak_flops_per_second(device, dtype)
    known = {
        "num_sms": device.num_sms,
        "compute_capability": device.compute_capability,
        **({"clock_hz": device.clock_hz} if library == "cubatch" else {f"peak_flops_per_second[{dtype!r}]": rate}),
        "peak_bytes_per_second": device.peak_bytes_per_second,
        "tensor_cores": arithmetic.has_tensor_cores(device, dtype),
    }
    return tuple(name for name, value in known.items() if value is None)


def step_seconds(work: Workload, batch_sizes: Sequence[int]) -> list[float | None]:
    """
    Return the predicted seconds of one step at each batch size; the roofline's if `missing_facts` is not empty.

    They are None if not even the roofline is known, as on a CPU. The roofline ignores recomputation. "im2col" counts as
    the vendor's products.
    """
    step = predicted(work, batch_sizes)
    if step is None:
        at = functools.partial(roofline.roofline_seconds, work.spec, library=work.library)
        return [at(n, work.device, work.mode, work.dtype) for n in batch_sizes]
    return [float(seconds) for seconds in step.seconds]


def predicted(work: Workload, batch_sizes: Sequence[int]) -> StepPrediction | None:
    """Return the predicted seconds of a step and its passes at each batch size; None if `missing_facts` has any."""
    if missing_facts(work.device, work.dtype, _model(work.library)):
        return None
    return step_of(work, batch_sizes)


def step_of(work: Workload, batch_sizes: Sequence[int], scales: Scales = UNSCALED) -> StepPrediction:
    """
    Return the predicted seconds of a step and its passes at each batch size.

    Predicted seconds of arithmetic and of bytes on the GPU are multiplied by the factors in `scales`.
    """
    step = predict_step(
        work.spec, batch_sizes, work.device, mode=work.mode, dtype=work.dtype, library=_model(work.library),
        scales=scales, experimental=work.experimental,
    )  # fmt: skip
    return recomputed(step, work.spec) if work.is_recomputed else step


def takes_time(work: Workload) -> bool:
    """Return whether a step of the workload moves or computes anything; a flatten layer alone does neither."""
    passes = layer_passes(work.spec, work.mode)
    return any(node.layer.traffic(pass_, 1) or node.layer.pass_flops(pass_, 1) for node, pass_ in passes)


def _model(library: str) -> str:
    return library if library in {"cubatch", "torch"} else "vendor"


def recomputed(step: StepPrediction, spec: Spec) -> StepPrediction:
    """Return a predicted training step with the time of forward passes that are repeated in the backward pass."""
    ops = schedule_of(spec, "training", recompute=True, library="im2col").ops
    # Fused layers are calls of their own in the vendor's libraries and take no time in cubatch kernels.
    again = Counter(node.name for op in ops if op.replay for node in (op.node, *op.then) if node is not None)
    passes = tuple(
        attrs.evolve(item, seconds=item.seconds * (1 + again[item.layer])) if item.pass_ is Pass.FPROP else item
        for item in step.passes
    )
    more = np.sum([new.seconds - old.seconds for new, old in zip(passes, step.passes, strict=True)], axis=0)
    factor = 1 + more / np.where(step.seconds > 0, step.seconds, 1.0)
    return attrs.evolve(
        step, seconds=step.seconds * factor, low=step.low * factor, high=step.high * factor, passes=passes
    )
