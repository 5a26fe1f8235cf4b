"""Predicted seconds of a step on a GPU that is not in this machine: every pass of every layer, with an interval."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import attrs
import numpy as np

from cubatch.checks import check_experimental, check_whole
from cubatch.errors import InvalidArgument
from cubatch.estimate import cubatch_kernels
from cubatch.estimate.host_launches import HOST_SECONDS, launched
from cubatch.estimate.predictions import (
    BYTES_SD,
    NEVER_SEEN_SD,
    UNSCALED,
    ModelNote,
    Part,
    PassPrediction,
    Scales,
    StepPrediction,
    never_measured,
    step_sd,
)
from cubatch.estimate.scheduled import Scheduled, scheduled_passes
from cubatch.estimate.vendor.algorithms import Array
from cubatch.estimate.vendor.vendor_calls import EXTENTS, Call
from cubatch.estimate.vendor.vendor_model import FRAMEWORK_SD, dtype_on, parts_by_dtype
from cubatch.hardware.arithmetic import check_dtype, has_tensor_cores, peak_flops_per_second
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.kernels.experimental import runnable
from cubatch.network.graph import Spec, layer_passes
from cubatch.network.layer import Layer, extents
from cubatch.network.passes import Pass

_CUBATCH_SD = 0.3
CUBATCH_SCALE_SD = 0.5
"""Uncertainty of cubatch kernels whose times were not fitted: larger than for published times."""
CUBATCH_FITTED_SCALE_SD = 0.25
"""Uncertainty if they were: on an H100, which was not fitted, ResNets took 0.68 to 1.22 times the prediction."""
LIBRARIES = ("vendor", "torch", "cubatch")
FUSED = "fused"
"""Algorithm of a fused layer, and of a pass that does nothing."""
Work = tuple[Layer, Pass, bool, int, bool, bool]
"""A pass, whether it runs, what more it moves, whether sums are shared, and whether it is curved: see `Scheduled`."""


def predict_step(
    spec: Spec,
    batch_sizes: Sequence[int],  # samples, at least one size
    device: Device,  # a GPU of known SMs, compute capability, peak rate and bandwidth
    *,
    mode: str = "inference",  # "inference" or "training"
    dtype: str = "float32",
    # "vendor" (cuDNN and cuBLAS), "torch" (the same, launched by PyTorch layer by layer) or "cubatch"
    library: str = "vendor",
    scales: Scales = UNSCALED,  # factors on the GPU's times, from anchors
    experimental: Collection[str] = (),  # experimental ways to run cubatch kernels: see `Model`
) -> StepPrediction:
    """
    Return the predicted seconds of a step and its passes at each batch size.

    The step is the sum of its passes; layers fused by cubatch kernels take no time.  Loss and optimizer, which take a
    small share of the time of a large batch, are left out.

    The vendor's 3x3 convolutions of stride 1 in float32 use NeuSight's measurements of cuDNN 8.9.  Other convolutions,
    gradients and matrix products use DeepBench (cuDNN 5 to 7).  Of Tensor Cores only DeepBench's V100 was published, in
    float16.  Where nothing was published, intervals are wider, with a note.

    Raises:
        InvalidArgument: If a batch size is not an integer of at least 1, or a fact of the device is missing. Also if
            the mode, the dtype or the library is unknown.
    """
    check_dtype(device, dtype)
    if library not in LIBRARIES:
        raise InvalidArgument("library", library, "one of " + ", ".join(LIBRARIES))
    sizes = np.array([check_whole("batch_sizes", n) for n in batch_sizes], float)
    if not len(sizes):
        raise InvalidArgument("batch_sizes", [], "at least one batch size")
    if device.peak_bytes_per_second is None:
        raise InvalidArgument("device", str(device), "a GPU whose peak_bytes_per_second is known")
    if has_tensor_cores(device, dtype) is None:
        raise InvalidArgument("device", str(device), f"a GPU of which is known whether its Tensor Cores take {dtype}")
    names = runnable(check_experimental(experimental), dtype, device)
    passes = scheduled_passes(spec, mode, "cubatch", names)
    if library != "cubatch":  # each layer is a separate call
        passes = tuple(Scheduled(node, pass_, runs=True, more=0) for node, pass_ in layer_passes(spec, mode))
    distinct: dict[Work, int] = {}
    places = [
        distinct.setdefault((extents(at.layer), at.pass_, at.runs, at.more, at.summed, at.curved), len(distinct))
        for at in passes
    ]
    work, notes = list(distinct), list[ModelNote]()
    if library == "cubatch":
        part = _cubatch_part(work, batch_sizes, device, dtype, scales=scales, notes=notes, saves=mode == "training")
        scale_sd = CUBATCH_FITTED_SCALE_SD if cubatch_kernels.was_timed(device) else CUBATCH_SCALE_SD
    else:
        calls = [Call.of_layer(layer, pass_, sizes, dtype) for layer, pass_, *_ in work]
        # PyTorch computes float32 convolutions in TF32 where it can, but no matrix products.
        conv_dtype = dtype_on("tf32", device) if library == "torch" and dtype == "float32" else dtype
        is_tensor = bool(has_tensor_cores(device, conv_dtype))
        others = _others(work, calls, sizes, dtype, is_tensor=is_tensor, mode=mode) if library == "torch" else {}
        dtypes = [conv_dtype if call.is_convolution and len(call.extents) else dtype for call in calls]
        dtypes += [dtype] * len(others)
        every = [*calls, *others.values()]
        part, unseen_sd = parts_by_dtype(every, dtypes, sizes, device, scales=scales, notes=notes)
        part.seconds[list(others)] += part.seconds[len(calls) :]
        part = attrs.evolve(part, seconds=part.seconds[: len(calls)], sd=part.sd[: len(calls)])
        scale_sd = float(np.hypot(unseen_sd, FRAMEWORK_SD))
    total = part.seconds[places].sum(axis=0)
    sd = np.hypot(step_sd(part, np.bincount(places, minlength=len(work)).astype(float), total), scale_sd)
    host = np.zeros(len(sizes))
    if library == "torch":
        # The gradients of a layer are one operator; a layer that moves nothing is none.
        runs = [at for at, i in zip(passes, places, strict=True) if part.seconds[i].any()]
        operators = {(at.node.name, "forward" if at.pass_ is Pass.FPROP else "backward") for at in runs}
        host += sum(HOST_SECONDS[phase] for _, phase in operators)
        if (host > total).any():
            notes.append(ModelNote("host_bound", f"{HOST_SECONDS['forward'] * 1e6:g}"))
    seconds, low, high = launched(total, host, sd)
    return StepPrediction(
        batch_sizes=tuple(int(n) for n in sizes),
        seconds=seconds,
        low=low,
        high=high,
        passes=tuple(
            PassPrediction(at.node.name, at.pass_, part.seconds[i], part.algorithms[i], part.blocks[i])
            for at, i in zip(passes, places, strict=True)
        ),
        notes=tuple(dict.fromkeys(notes)),
        scale_sd=scale_sd,
    )


def _others(
    work: Sequence[Work], calls: Sequence[Call], sizes: Array, dtype: str, *, is_tensor: bool, mode: str
) -> dict[int, Call]:
    """
    Return by position in `work` what kernels of PyTorch move in addition to the call of the vendor's library.

    Around a convolution on Tensor Cores (`is_tensor`) images are converted from NCHW.  A kernel of its own adds the
    bias, or sums its gradient.  In training a batch norm reads its input twice.  cuDNN takes none whose parameters have
    16 bits.  PyTorch's kernels for it load single elements, which takes as long as in float32
    (`ATen/native/cuda/Normalization.cuh`).  Positions of maxima have 8 bytes, in inference too.
    """
    others: dict[int, Call] = {}
    for place, ((layer, pass_, *_), call) in enumerate(zip(work, calls, strict=True)):
        x, y = math.prod(layer.input_shape), math.prod(layer.output_shape)
        elements, launches = 0.0, 0
        if call.is_convolution and len(call.extents):
            if is_tensor and not call.is_depthwise:  # depthwise kernels take NCHW
                elements, launches = 2.0 * (x + y), 2
            if "b" in layer.parameter_shapes and pass_ is not Pass.DGRAD:
                elements += 2 * y if pass_ is Pass.FPROP else y
                launches += 1
        elif layer.has_statistics and mode == "training":
            again, wider = x * (pass_ is Pass.FPROP), BYTES_PER_ELEMENT["float32"] / BYTES_PER_ELEMENT[dtype]
            elements = again * wider + (layer.traffic(pass_, 1) - layer.parameters) * (wider - 1)
            launches = int(pass_ is Pass.FPROP)
        elif "argmax" in layer.saved_elements():
            elements = 8 * y / BYTES_PER_ELEMENT[dtype]
        if elements:
            moved = elements * BYTES_PER_ELEMENT[dtype] * sizes
            others[place] = Call(pass_, np.zeros((0, len(sizes), len(EXTENTS))), moved, launches=launches)
    return others


def _cubatch_part(
    work: Sequence[Work], batch_sizes: Sequence[int], device: Device, dtype: str, *, scales: Scales,
    notes: list[ModelNote], saves: bool,
) -> Part:  # fmt: skip
    nothing = np.zeros(len(batch_sizes)), (FUSED,) * len(batch_sizes), np.zeros(len(batch_sizes))
    facts: dict[str, Any] = {"scales": scales, "saves": saves}
    rows = [
        cubatch_kernels.pass_seconds(
            layer, pass_, batch_sizes, device, dtype, **facts, more=more, summed=summed, curved=curved
        )
        if runs
        else cubatch_kernels.moved_seconds(more, batch_sizes, device, dtype, scales=scales)
        if more
        else nothing
        for layer, pass_, runs, more, summed, curved in work
    ]
    notes.append(ModelNote("fitted_on_h200" if cubatch_kernels.was_timed(device) else "counted_clocks"))
    shape = len(rows), len(batch_sizes)  # of no rows too
    seconds, blocks = (np.array([row[i] for row in rows]).reshape(shape) for i in (0, 2))
    if any("bytes" in names and times.any() for times, names, _ in rows):
        notes.append(ModelNote("bytes_only"))
    known = _CUBATCH_SD
    if dtype in {"float16", "bfloat16"} and not has_tensor_cores(device, dtype):
        notes.append(ModelNote("float32_arithmetic", dtype))
    if has_tensor_cores(device, dtype) and peak_flops_per_second(device, dtype) is None:
        known = NEVER_SEEN_SD
        notes.append(ModelNote("tensor_core_rate"))
    sd = [
        BYTES_SD if not layer.gemms(pass_, 1) else _never_measured(layer, notes) or known for layer, pass_, *_ in work
    ]
    return Part(seconds, [row[1] for row in rows], blocks, np.array(sd))


def _never_measured(layer: Layer, notes: list[ModelNote]) -> float | None:
    shape = layer.convolution
    is_unusual = shape is not None and (shape.groups > 1 or (shape.vertical.step, shape.horizontal.step) != (1, 1))
    return never_measured(notes, is_unusual=is_unusual, is_attention=layer.products_in_turn)
