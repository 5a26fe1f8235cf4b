"""Predicted seconds of passes by the vendor's libraries: an analytic model and its learned correction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cubatch.errors import InvalidArgument
from cubatch.estimate import cubatch_kernels
from cubatch.estimate.predictions import BYTES_SD, NEVER_SEEN_SD, ModelNote, Part, Scales, never_measured
from cubatch.estimate.vendor.algorithms import PASSES, Array, Places, Work
from cubatch.estimate.vendor.fitted import Fitted, kin_of, lanes, shipped
from cubatch.hardware import architectures, catalogue
from cubatch.hardware.arithmetic import has_tensor_cores, peak_flops_per_second
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.network.layer import Layer
from cubatch.network.passes import Gemm, Pass, linear_of

_OTHER_DTYPE_SD = 0.25
_STORED_CONVOLUTION_SD = 0.8  # DeepBench's convolutions with float16 storage on a P100; products err as in float32
_KNOWN_SD = 0.05  # a measured GPU: other boards, drivers and temperatures
FRAMEWORK_SD, FRAMEWORK_SD_16 = 0.17, 0.43
"""
Uncertainty of a framework's overhead: about 90 % of published whole networks lie inside the intervals.

See benchmarks/predictor/score_networks.py. Published networks in 16 bits used frameworks that stored channels first.
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


def vendor_parts(
    work: Sequence[tuple[Layer, Pass]], sizes: Array, device: Device, dtype: str, *, scales: Scales,
    notes: list[ModelNote],
) -> tuple[Part, float]:  # fmt: skip
    """Return the predictions of passes by published times, and the uncertainty of the GPU that all passes share."""
    tensor = bool(has_tensor_cores(device, dtype))
    models = [_model(layer, pass_, tensor=tensor) for layer, pass_ in work]
    seconds, blocks, sd = *np.zeros((2, len(work), len(sizes))), np.full(len(work), BYTES_SD)
    names: list[tuple[str, ...]] = [("bytes",) * len(sizes)] * len(work)
    unseen, unmeasured = [_KNOWN_SD], list[str]()
    rate = (device.peak_bytes_per_second or 0) * cubatch_kernels.MOVED_SHARE / BYTES_PER_ELEMENT[dtype] / scales.memory
    for i, (layer, pass_) in enumerate(work):
        if models[i] is None:
            elements = np.array([layer.traffic(pass_, int(n)) for n in sizes], float)
            seconds[i] = np.where(elements > 0, elements / rate + cubatch_kernels.LAUNCH_SECONDS, 0.0)
    if seconds.any():
        notes.append(ModelNote("bytes_only"))
    for name in (_NEUSIGHT, _CONV, _GEMM):
        chosen = [i for i, of in enumerate(models) if of == name]
        if not chosen:
            continue
        model = shipped(f"{name} tensor" if tensor else name)
        table, owner = _table([work[i] for i in chosen], sizes, _MULTIPLES[dtype] if tensor else 1)
        where, known = _places(model, device, dtype, len(table.n), scales)
        times, candidates, best = model.predict(table, where)
        grids = np.stack([each.blocks for each in candidates])
        for row, i in enumerate(chosen):
            cells = owner[row]  # products of the pass, each (sizes,) of the table
            seconds[i] = times[cells].sum(axis=0)
            names[i] = tuple(candidates[index].name for index in best[cells[0]])
            blocks[i] = grids[best[cells[0]], cells[0]]
            sd[i] = _error(model, work[i][0], dtype, device, notes)
        if not known:
            unseen.append(model.unseen_sd)
            unmeasured.append(_WHAT[name])
        if tensor and not architectures.like(device.compute_capability or (0, 0)).tensor_measured:
            unseen.append(_OTHER_DTYPE_SD)
            notes.append(ModelNote("tensor_cores_of_v100"))
    if unmeasured:
        notes.append(ModelNote("device_not_measured", ", ".join(unmeasured)))
    framework = FRAMEWORK_SD if dtype == "float32" else FRAMEWORK_SD_16
    return Part(seconds, names, blocks, sd), float(np.hypot(max(unseen), framework))


_WHAT = {_NEUSIGHT: "3x3 convolutions", _CONV: "other convolutions", _GEMM: "matrix products"}


def _model(layer: Layer, pass_: Pass, *, tensor: bool) -> str | None:
    """Return the model of a pass; None for a pass that only moves bytes."""
    if not layer.gemms(pass_, 1):
        return None
    if (shape := layer.convolution) is None:
        return _GEMM
    return _NEUSIGHT if shape.is_plain_3x3 and pass_ is Pass.FPROP and not tensor else _CONV


def _error(model: Fitted, layer: Layer, dtype: str, device: Device, notes: list[ModelNote]) -> float:
    """Return the standard deviation of a pass's prediction, and note what was not measured."""
    never = never_measured(layer, notes)
    if never is not None or dtype == "float32":
        return never or model.sd
    if not has_tensor_cores(device, dtype):
        notes.append(ModelNote("float32_arithmetic", dtype))
        return _STORED_CONVOLUTION_SD if layer.convolution else model.sd
    if dtype != "float16":
        notes.append(ModelNote("dtype_not_measured", dtype))
    multiple = _MULTIPLES[dtype]
    if any(extent % multiple for extent in (layer.input_shape[2], layer.output_shape[2])):
        notes.append(ModelNote("channels_padded", multiple))
        return NEVER_SEEN_SD
    return model.sd if dtype == "float16" else float(np.hypot(model.sd, _OTHER_DTYPE_SD))


def _table(work: Sequence[tuple[Layer, Pass]], sizes: Array, multiple: int) -> tuple[Work, list[np.ndarray]]:
    """Return a table of passes at all batch sizes, channels padded, and the rows of each pass: (products, sizes)."""
    names = ("n", "h", "w", "c", "k", "r", "s", "p", "q", "stride_h", "stride_w", "dilation", "groups")
    rows: list[tuple[float, ...]] = []
    kinds: list[int] = []
    owners = []
    for layer, pass_ in work:
        begun = len(rows)
        if (shape := layer.convolution) is not None:
            v, u = shape.vertical, shape.horizontal
            dilation = max(v.step, u.step)
            extents = (
                v.size, u.size, shape.c, shape.k, v.taps, u.taps, v.out, u.out, v.stride, u.stride, dilation,
                shape.groups,
            )  # fmt: skip
            rows += [(n, *extents) for n in sizes]
            kinds += [PASSES.index(pass_)] * len(sizes)
            products = 1
        else:
            shaped = [layer.gemms(pass_, int(n)) for n in sizes]
            products = len(shaped[0])
            for index in range(products):
                for gemms in shaped:
                    rows.append(_as_linear(gemms[index], pass_))
                    kinds.append(PASSES.index(pass_))
        owners.append(np.arange(begun, len(rows)).reshape(products, len(sizes)))
    columns = np.array(rows, float).T
    for place in (names.index("c"), names.index("k")):
        columns[place] = np.ceil(columns[place] / multiple) * multiple
    return Work.of(np.array(kinds), **dict(zip(names, columns, strict=True))), owners


def _as_linear(gemm: Gemm, pass_: Pass) -> tuple[float, ...]:
    """Return the extents of a linear layer with this product as its pass; several products are its groups."""
    batch, c, filters = linear_of(pass_, gemm.m, gemm.n, gemm.k)
    return (batch, 1, 1, c * gemm.count, filters * gemm.count, 1, 1, 1, 1, 1, 1, 1, gemm.count)


def _places(model: Fitted, device: Device, dtype: str, size: int, scales: Scales) -> tuple[Places, bool]:
    """Return the GPU of each row, and whether the model was fitted to measurements of that GPU."""
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
    names = {"gpu": np.full(size, device.slug or ""), "kin": np.full(size, kin_of(device))}
    return Places(**names, **{name: np.full(size, float(value or 0)) for name, value in columns.items()}), known
