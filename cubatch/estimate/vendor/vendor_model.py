"""Predicted seconds of passes by the vendor's libraries: an analytic model and its learned correction."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from cubatch.errors import InvalidArgument
from cubatch.estimate import cubatch_kernels
from cubatch.estimate.predictions import BYTES_SD, NEVER_SEEN_SD, ModelNote, Part, Scales, never_measured
from cubatch.estimate.vendor import vendor_calls
from cubatch.estimate.vendor.algorithms import PASSES, Array, Places, Work
from cubatch.estimate.vendor.fitted import Fitted, kin_of, lanes, shipped
from cubatch.estimate.vendor.vendor_calls import Call
from cubatch.hardware import architectures, catalogue
from cubatch.hardware.arithmetic import has_tensor_cores, peak_flops_per_second
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.network.passes import Pass

_OTHER_DTYPE_SD = 0.25
_STORED_CONVOLUTION_SD = 0.8  # DeepBench's convolutions with float16 storage on a P100; products err as in float32
_KNOWN_SD = 0.05  # a measured GPU: other boards, drivers and temperatures
FRAMEWORK_SD = 0.1
"""
Standard deviation of the logarithm of a step's time that the overhead of a framework adds.

Chosen on every other network of `benchmarks/predictor/score_networks.py`, of which 89 % in float32 and 91 % in float16
are inside the intervals.  Of the other networks 92 and 90 % are.
"""

_MULTIPLES = {"float16": 8, "bfloat16": 8, "tf32": 4}

_NEUSIGHT = "neusight"
_CONV = "deepbench conv"
_GEMM = "deepbench gemm"


def l2_of(device: Device) -> float:
    """Return a GPU's L2 cache in bytes; if unknown, the median for its compute capability, or of all GPUs."""
    if device.l2_bytes is not None:
        return float(device.l2_bytes)
    known = [each for each in catalogue.all_devices() if each.l2_bytes is not None]
    alike = [each for each in known if each.compute_capability == device.compute_capability] or known
    return float(np.median([each.l2_bytes or 0 for each in alike]))


@functools.lru_cache(maxsize=256)
def dtype_on(dtype: str, device: Device) -> str:
    """Return the type of a device's arithmetic: `dtype`, or "float32" instead of TF32 without TF32 or its rate."""
    if dtype != "tf32":
        return dtype
    has_tf32 = has_tensor_cores(device, dtype) and peak_flops_per_second(device, dtype) is not None
    return dtype if has_tf32 else "float32"


def parts_by_dtype(
    calls: Sequence[Call], dtypes: Sequence[str], sizes: Array, device: Device, *, scales: Scales,
    notes: list[ModelNote],
) -> tuple[Part, float]:  # fmt: skip
    """
    Return the result of `vendor_parts` for calls in several types of arithmetic.

    The standard deviation of the common error is the mean over all types, by their seconds. `dtypes` has the type of
    each call, and the other arguments are those of `vendor_parts`.
    """
    seconds, blocks, sd = *np.zeros((2, len(calls), len(sizes))), np.zeros(len(calls))
    names: list[tuple[str, ...]] = [()] * len(calls)
    by_dtype: dict[str, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        by_dtype.setdefault(dtype, []).append(i)
    shares: list[tuple[float, float]] = []
    for dtype, chosen in by_dtype.items():
        own, unseen = vendor_parts([calls[i] for i in chosen], sizes, device, dtype, scales=scales, notes=notes)
        seconds[chosen], blocks[chosen], sd[chosen] = own.seconds, own.blocks, own.sd
        for row, i in enumerate(chosen):
            names[i] = own.algorithms[row]
        shares.append((float(own.seconds.sum()), unseen))
    whole = sum(share for share, _ in shares) or 1.0
    return Part(seconds, names, blocks, sd), sum(share * unseen for share, unseen in shares) / whole


def vendor_parts(
    calls: Sequence[Call], sizes: Array, device: Device, dtype: str, *, scales: Scales, notes: list[ModelNote]
) -> tuple[Part, float]:
    """
    Return the predicted seconds of calls of the vendor's library, and the standard deviation of their common error.

    The latter is that of the logarithm of seconds on this GPU; it is larger for a GPU that was not measured.

    Args:
        calls: The calls, each with an entry per batch size.
        sizes: The batch sizes.
        scales: Factors on the predicted seconds of arithmetic and of bytes, from the GPU's measurements.
        notes: Notes on the accuracy are appended.
    """
    tensor = bool(has_tensor_cores(device, dtype))
    models = [_model(call, tensor=tensor) for call in calls]
    seconds, blocks, sd = *np.zeros((2, len(calls), len(sizes))), np.full(len(calls), BYTES_SD)
    names: list[tuple[str, ...]] = [("bytes",) * len(sizes)] * len(calls)
    unseen, unmeasured = [_KNOWN_SD], list[str]()
    rate = (device.peak_bytes_per_second or 0) / scales.memory
    peak, lanes_peak = ((peak_flops_per_second(device, each) or np.inf) / scales.compute for each in (dtype, "float32"))
    for i, call in enumerate(calls):
        if models[i] is None:
            arithmetic = _direct_flops(call) / (lanes_peak if call.is_depthwise else peak)
            floor = np.maximum(call.num_bytes / rate, arithmetic) / cubatch_kernels.MOVED_SHARE
            sd[i] = never_measured(notes, is_unusual=call.is_depthwise, is_attention=False) or BYTES_SD
            seconds[i] = np.where(floor > 0, floor + call.launches * cubatch_kernels.LAUNCH_SECONDS, 0.0)
    if seconds.any():
        notes.append(ModelNote("bytes_only"))
    for name in (_NEUSIGHT, _CONV, _GEMM):
        chosen = [i for i, of in enumerate(models) if of == name]
        if not chosen:
            continue
        model = shipped(f"{name} tensor" if tensor else name)
        columns, owner, rows = vendor_calls.table([calls[i] for i in chosen], _MULTIPLES[dtype] if tensor else 1)
        passes = np.array([PASSES.index(calls[i].pass_) for i in chosen])
        work = Work.of(passes[owner], **columns)
        where, known = _places(model, device, dtype, len(work.n), scales)
        times, candidates, best = model.predict(work, where)
        grids = np.stack([each.blocks for each in candidates])
        for row, i in enumerate(chosen):
            cells = rows[row]  # products of the call, each (sizes,) of the table
            seconds[i] = times[cells].sum(axis=0)
            names[i] = tuple(candidates[index].name for index in best[cells[0]])
            blocks[i] = grids[best[cells[0]], cells[0]]
            sd[i] = _error(model, calls[i], dtype, device, notes)
        if not known:
            unseen.append(model.unseen_sd)
            unmeasured.append(_WHAT[name])
        if tensor and not architectures.like(device.compute_capability or (0, 0)).tensor_measured:
            unseen.append(_OTHER_DTYPE_SD)
            notes.append(ModelNote("tensor_cores_of_v100"))
    if unmeasured:
        notes.append(ModelNote("device_not_measured", ", ".join(unmeasured)))
    return Part(seconds, names, blocks, sd), max(unseen)


_WHAT = {_NEUSIGHT: "3x3 convolutions", _CONV: "other convolutions", _GEMM: "matrix products"}


def _model(call: Call, *, tensor: bool) -> str | None:
    """
    Return the name of the fitted model that predicts a call; None for a call that is bound by its bytes.

    `tensor` is whether Tensor Cores compute it.
    """
    if not len(call.extents) or call.is_depthwise:
        return None
    if not call.is_convolution:
        return _GEMM
    return _NEUSIGHT if call.is_plain_3x3 and call.pass_ is Pass.FPROP and not tensor else _CONV


def _direct_flops(call: Call) -> Array | float:
    """Return the FLOP of a call without a fitted model; those of a depthwise convolution run on float32 lanes."""
    return vendor_calls.direct_flops(call.extents[0]) if call.is_depthwise else call.flops


def _error(model: Fitted, call: Call, dtype: str, device: Device, notes: list[ModelNote]) -> float:
    """Return the relative standard deviation of a call's predicted seconds; append notes on missing measurements."""
    never = never_measured(notes, is_unusual=call.is_grouped_or_dilated, is_attention=call.is_attention)
    if never is not None or dtype == "float32":
        return never or model.sd
    if not has_tensor_cores(device, dtype):
        notes.append(ModelNote("float32_arithmetic", dtype))
        return _STORED_CONVOLUTION_SD if call.is_convolution else model.sd
    if dtype != "float16":
        notes.append(ModelNote("dtype_not_measured", dtype))
    multiple = _MULTIPLES[dtype]
    if any(extent % multiple for extent in call.channels):
        notes.append(ModelNote("channels_padded", multiple))
        return NEVER_SEEN_SD
    return model.sd if dtype == "float16" else float(np.hypot(model.sd, _OTHER_DTYPE_SD))


def _places(model: Fitted, device: Device, dtype: str, size: int, scales: Scales) -> tuple[Places, bool]:
    """Return the GPU as `size` equal entries, and whether the model was fitted to measurements of that GPU."""
    peak = peak_flops_per_second(device, dtype)
    facts = {
        "num_sms": device.num_sms,
        "peak_flops_per_second": peak,
        "peak_bytes_per_second": device.peak_bytes_per_second,
    }
    for name, value in facts.items():
        if value is None:
            raise InvalidArgument("device", str(device), f"a GPU whose {name} is known")
    compute, memory, known = model.scale(device)
    columns = {
        "peak": peak, "bandwidth": device.peak_bytes_per_second, "num_sms": device.num_sms, "l2_bytes": l2_of(device),
        "lanes": lanes(device), "element_bytes": BYTES_PER_ELEMENT[dtype], "compute": compute * scales.compute,
        "memory": memory * scales.memory,
    }  # fmt: skip
    if model.name != _GEMM and not has_tensor_cores(device, dtype):
        columns["element_bytes"] = BYTES_PER_ELEMENT["float32"]  # convolutions in 16 bits are converted
    names = {"gpu": np.full(size, device.slug or ""), "kin": np.full(size, kin_of(device))}
    return Places(**names, **{name: np.full(size, float(value or 0)) for name, value in columns.items()}), known
