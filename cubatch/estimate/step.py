"""Seconds of a step on a GPU that is not here: every pass of every layer, with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cubatch.checks import check_whole
from cubatch.errors import InvalidArgument
from cubatch.estimate import ours
from cubatch.estimate.predictions import (
    BYTES_SD,
    MOVED,
    NEVER_SEEN_SD,
    STORED,
    Z90,
    Part,
    PassPrediction,
    Scales,
    StepPrediction,
    never_seen,
)
from cubatch.estimate.scheduled import Scheduled, scheduled_passes
from cubatch.estimate.vendor.vendor_model import vendor_parts
from cubatch.hardware.arithmetic import has_tensor_cores, peak_flops_per_second
from cubatch.hardware.facts import Device
from cubatch.network.graph import Spec, layer_passes
from cubatch.network.layer import Layer, extents
from cubatch.network.passes import Pass

_OURS_SD = 0.3
OURS_SCALE_SD = 0.5
"""Of our kernels where nothing was fitted to their times: more than of any published one."""
OURS_TIMED_SCALE_SD = 0.25
"""Where it was: on an H100, to which it was not, ResNets took 0.68 to 1.22 times as long as predicted."""
COUNTED = {
    False: "Hardly anything was fitted to times of our kernels here: theirs are clocks counted in the compiled code.",
    True: "Times of our kernels are clocks counted in the compiled code, of products times what an H200 took more.",
}
"""What a prediction of our kernels notes, unless anchors are of them: by whether such a GPU was timed."""
FUSED = "fused"
"""What runs where a neighbour's operation does a layer, or there is nothing to do."""
Work = tuple[Layer, Pass, bool, int]
"""A pass, whether it runs, and what more it moves: see `Scheduled`."""
_COMMON = 0.2  # judgement: correlation of the errors of different passes


def predict_step(
    spec: Spec,
    batch_sizes: Sequence[int],
    device: Device,
    *,
    mode: str = "inference",
    dtype: str = "float32",
    library: str = "vendor",
    scales: Scales | None = None,
) -> StepPrediction:
    """
    Predict the time of a step at each batch size.

    The step is the sum of its passes, on our kernels of those that the schedule runs; the loss and the optimiser are
    left out, which are small unless the batch is.
    Convolutions of 3x3 and stride 1 computed in float32 go by what NeuSight measured with cuDNN 8.9, others and their
    gradients by DeepBench (cuDNN 5 to 7), products by DeepBench's.  Of Tensor Cores only DeepBench's V100 is known,
    of bfloat16 and tf32 nothing: their intervals are wider, and a note says so.

    Args:
        spec: A layer or network.
        batch_sizes: Samples, at least one size.
        device: A GPU of which SMs, compute capability, peak rate and bandwidth are known.
        mode: "inference" or "training".
        dtype: Of storage and arithmetic.
        library: "vendor": cuDNN and cuBLAS; "cubatch": our kernels.
        scales: Further factors on the GPU's times; see `anchors`.

    Raises:
        InvalidArgument: If there is no batch size or one is not a whole number of at least 1, a fact of the device is
            missing, or the library is neither.

    Example:
        >>> from cubatch.hardware.catalogue import find
        >>> from cubatch.network.layers import Conv2d
        >>> conv = Conv2d(h=28, w=28, c=256, k=256, r=3, s=3, pad=1)
        >>> step = predict_step(conv, [32, 64], find("v100-pcie-32gb"))
        >>> bool(1.5 < step.seconds[1] / step.seconds[0] < 2.5)
        True
    """
    sizes = np.array([check_whole("batch_sizes", n) for n in batch_sizes], float)
    if not len(sizes):
        raise InvalidArgument("batch_sizes", [], "at least one batch size")
    if device.peak_bytes_per_second is None:
        raise InvalidArgument("device", str(device), "a GPU whose peak_bytes_per_second is known")
    if has_tensor_cores(device, dtype) is None:
        raise InvalidArgument("device", str(device), f"a GPU of which is known whether its Tensor Cores take {dtype}")
    scales, passes = scales or Scales(), scheduled_passes(spec, mode)
    if library != "cubatch":  # every layer is a call of its own
        passes = tuple(Scheduled(node, pass_, runs=True, more=0) for node, pass_ in layer_passes(spec, mode))
    distinct: dict[Work, int] = {}
    places = [distinct.setdefault((extents(at.node.layer), at.pass_, at.runs, at.more), len(distinct)) for at in passes]
    work, notes = list(distinct), list[str]()
    if library == "cubatch":
        found = _ours(work, batch_sizes, device, dtype, scales, notes, mode == "training")
        scale_sd = OURS_TIMED_SCALE_SD if ours.was_timed(device) else OURS_SCALE_SD
    elif library == "vendor":
        found, scale_sd = vendor_parts(
            [(layer, pass_) for layer, pass_, *_ in work], sizes, device, dtype, scales, notes
        )
    else:
        raise InvalidArgument("library", library, '"vendor" or "cubatch"')
    total = found.seconds[places].sum(axis=0)
    # Equal layers err alike; of what different ones do wrong, _COMMON is the same.
    errors = found.seconds * np.bincount(places, minlength=len(work))[:, None] * found.sd[:, None]
    own, together = (errors**2).sum(axis=0), errors.sum(axis=0) ** 2
    spread = np.sqrt((1 - _COMMON) * own + _COMMON * together) / np.where(total > 0, total, 1.0)
    factor = np.exp(Z90 * np.hypot(spread, scale_sd))
    return StepPrediction(
        batch_sizes=tuple(int(n) for n in sizes),
        seconds=total,
        low=total / factor,
        high=total * factor,
        passes=tuple(
            PassPrediction(at.node.name, at.pass_, found.seconds[i], found.algorithms[i], found.blocks[i])
            for at, i in zip(passes, places, strict=True)
        ),
        notes=tuple(dict.fromkeys(notes)),
        scale_sd=scale_sd,
    )


def _ours(
    work: Sequence[Work],
    batch_sizes: Sequence[int],
    device: Device,
    dtype: str,
    scales: Scales,
    notes: list[str],
    saves: bool,  # noqa: FBT001 - see `ours.pass_seconds`
) -> Part:
    """Predict what our kernels take."""
    nothing = np.zeros(len(batch_sizes)), (FUSED,) * len(batch_sizes), np.zeros(len(batch_sizes))
    facts: dict[str, Any] = {"compute": scales.compute, "memory": scales.memory, "saves": saves}
    rows = [
        ours.pass_seconds(layer, pass_, batch_sizes, device, dtype, **facts, more=more)
        if runs
        else ours.moved_seconds(more, batch_sizes, device, dtype, memory=scales.memory)
        if more
        else nothing
        for layer, pass_, runs, more in work
    ]
    notes.append(COUNTED[ours.was_timed(device)])
    shape = len(rows), len(batch_sizes)  # of no rows too
    seconds, blocks = (np.array([row[i] for row in rows]).reshape(shape) for i in (0, 2))
    if any("bytes" in names and times.any() for times, names, _ in rows):
        notes.append(MOVED)
    known = _OURS_SD
    if dtype in {"float16", "bfloat16"} and not has_tensor_cores(device, dtype):
        notes.append(STORED.format(dtype))
    if has_tensor_cores(device, dtype) and peak_flops_per_second(device, dtype) is None:
        known = NEVER_SEEN_SD
        notes.append(
            f"No rate of the Tensor Cores of {device} is known: they are taken to do what their architecture's can, of "
            "which some boards do half."
        )
    sd = [BYTES_SD if not layer.gemms(pass_, 1) else never_seen(layer, notes) or known for layer, pass_, *_ in work]
    return Part(seconds, [row[1] for row in rows], blocks, np.array(sd))
