"""
Seconds of a step on a GPU that is not here: every pass of every layer, with an interval.

Convolutions and matrix products go by models fitted to published measurements (`fitted`), everything else by the bytes
it moves.  What was fitted is cuDNN and cuBLAS as published; for our own kernels see `kernel_seconds`.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from cubatch import catalogue, kernel_seconds
from cubatch.algorithms import PASSES, Array, Places, Work
from cubatch.errors import InvalidArgument
from cubatch.fitted import Fitted, kin_of, lanes, shipped
from cubatch.hardware import BYTES_PER_ELEMENT, Device
from cubatch.kinds import Attention, Conv2d
from cubatch.layer import Gemm, Layer, Pass, extents
from cubatch.spec import Spec
from cubatch.timing import has_tensor_cores, layer_passes, peak_flops_per_second
from cubatch.waves import check_whole

Z90 = 1.6448536269514722
"""Standard deviations either side of the middle that hold 90 of 100 normal draws."""

_BYTES_SD = 0.3
_NEVER_SEEN_SD = 0.6
_OTHER_DTYPE_SD = 0.25
_STORED_CONVOLUTION_SD = 0.8  # of DeepBench's float16 storage on a P100, whose products are as sure as in float32
_OURS_SD = 0.3
OURS_SCALE_SD = 0.5
"""Of our kernels, which no GPU has timed: more than of any published one."""
UNTIMED = "No time of our kernels was measured yet: theirs are clocks counted in the compiled code."
"""What a prediction of our kernels notes, unless anchors are of them."""
_KNOWN_SD = 0.05  # of a GPU that was measured: other boards, drivers and temperatures
FRAMEWORK_SD, FRAMEWORK_SD_16 = 0.17, 0.43
"""
What a framework loses between kernels and adds to them: chosen so that about 90 of 100 published whole networks lie
inside (benchmarks/score_networks.py). Those in 16 bits are of frameworks that still kept channels first.
"""
_COMMON = 0.2  # judgement: correlation of the errors of different passes

_MULTIPLES = {"float16": 8, "bfloat16": 8, "tf32": 4}
_MEASURED_TENSOR_CORES = (7, 0)

_NEUSIGHT = "neusight"
_CONV = "deepbench conv"
_GEMM = "deepbench gemm"


@attrs.frozen
class Scales:
    """
    What is known of one GPU beyond its data sheet and what was published of it.

    Attributes:
        compute: Factor on the time of arithmetic.
        memory: Factor on the time of bytes.
    """

    compute: float = 1.0
    memory: float = 1.0


@attrs.frozen(eq=False)
class PassPrediction:
    """
    One pass of one layer, at each batch size.

    Attributes:
        layer: Its name.
        pass_: Which of its passes.
        seconds: Predicted time, one for each batch size.
        algorithms: What should run, one for each batch size: "128x128", "winograd 2x2", a kernel of ours, "bytes".
        blocks: Of the grid of that; 0 of a layer that moves only.
    """

    layer: str
    pass_: Pass
    seconds: Array
    algorithms: tuple[str, ...]
    blocks: Array


@attrs.frozen(eq=False)
class StepPrediction:
    """
    One step of a network, at each batch size; nothing of it was measured.

    Attributes:
        batch_sizes: In the order asked for.
        seconds: Predicted time of a step.
        low, high: The interval that should hold 90 of 100 such steps.
        passes: What it is the sum of.
        notes: What the model has never seen of what was asked, in sentences.
        scale_sd: Of the interval, what is unknown of the GPU and the framework alike for all steps: standard deviation
            of the logarithm.
    """

    batch_sizes: tuple[int, ...]
    seconds: Array
    low: Array
    high: Array
    passes: tuple[PassPrediction, ...]
    notes: tuple[str, ...]
    scale_sd: float


@attrs.frozen(eq=False)
class _Part:
    """Passes that one model answers for: (passes, sizes), and the model's own error of each pass."""

    seconds: Array
    algorithms: Sequence[tuple[str, ...]]
    blocks: Array
    sd: Array


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

    The step is the sum of its passes; the loss and the optimiser are left out, which are small unless the batch is.
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
        >>> from cubatch.catalogue import find
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
    scales, passes = scales or Scales(), layer_passes(spec, mode)
    distinct: dict[tuple[Layer, Pass], int] = {}
    places = [distinct.setdefault((extents(n.layer), p), len(distinct)) for n, p in passes]
    work, notes = list(distinct), list[str]()
    if library == "cubatch":
        found, scale_sd = _ours(work, batch_sizes, device, dtype, scales, notes), OURS_SCALE_SD
    elif library == "vendor":
        found, scale_sd = _vendors(work, sizes, device, dtype, scales, notes)
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
            PassPrediction(node.name, pass_, found.seconds[i], found.algorithms[i], found.blocks[i])
            for (node, pass_), i in zip(passes, places, strict=True)
        ),
        notes=tuple(dict.fromkeys(notes)),
        scale_sd=scale_sd,
    )


def l2_of(device: Device) -> float:
    """Give a GPU's L2 cache, or the median of those of its compute capability, or of all, where it is not known."""
    if device.l2_bytes is not None:
        return float(device.l2_bytes)
    known = [one for one in catalogue.all_devices() if one.l2_bytes is not None]
    alike = [one for one in known if one.compute_capability == device.compute_capability] or known
    return float(np.median([one.l2_bytes or 0 for one in alike]))


def _ours(
    work: Sequence[tuple[Layer, Pass]],
    batch_sizes: Sequence[int],
    device: Device,
    dtype: str,
    scales: Scales,
    notes: list[str],
) -> _Part:
    """Predict what our kernels take, of which nothing was measured yet."""
    rows = [
        kernel_seconds.pass_seconds(
            layer, pass_, batch_sizes, device, dtype, compute=scales.compute, memory=scales.memory
        )
        for layer, pass_ in work
    ]
    notes.append(UNTIMED)
    seconds, blocks = (np.array([row[i] for row in rows]) for i in (0, 2))
    if any("bytes" in names and times.any() for times, names, _ in rows):
        notes.append(_MOVED)
    sd = [_BYTES_SD if not layer.gemms(pass_, 1) else _never_seen(layer, notes) or _OURS_SD for layer, pass_ in work]
    return _Part(seconds, [row[1] for row in rows], blocks, np.array(sd))


def _vendors(
    work: Sequence[tuple[Layer, Pass]], sizes: Array, device: Device, dtype: str, scales: Scales, notes: list[str]
) -> tuple[_Part, float]:
    """Predict by what was published of the vendor's libraries, and give what is unknown of the GPU alike for all."""
    tensor = bool(has_tensor_cores(device, dtype))
    models = [_model(layer, pass_, tensor=tensor) for layer, pass_ in work]
    seconds, blocks, sd = *np.zeros((2, len(work), len(sizes))), np.full(len(work), _BYTES_SD)
    names: list[tuple[str, ...]] = [("bytes",) * len(sizes)] * len(work)
    unseen, strange = [_KNOWN_SD], list[str]()
    rate = (device.peak_bytes_per_second or 0) * kernel_seconds.MOVED_SHARE / BYTES_PER_ELEMENT[dtype] / scales.memory
    for i, (layer, pass_) in enumerate(work):
        if models[i] is None:
            elements = np.array([layer.traffic(pass_, int(n)) for n in sizes], float)
            seconds[i] = np.where(elements > 0, elements / rate + kernel_seconds.LAUNCH_SECONDS, 0.0)
    if seconds.any():
        notes.append(_MOVED)
    for name in (_NEUSIGHT, _CONV, _GEMM):
        chosen = [i for i, of in enumerate(models) if of == name]
        if not chosen:
            continue
        model = shipped(f"{name} tensor" if tensor else name)
        table, owner = _table([work[i] for i in chosen], sizes, _MULTIPLES[dtype] if tensor else 1)
        where, known = _places(model, device, dtype, len(table.n), scales)
        times, found, best = model.predict(table, where)
        grids = np.stack([one.blocks for one in found])
        for row, i in enumerate(chosen):
            cells = owner[row]  # products of the pass, each (sizes,) of the table
            seconds[i] = times[cells].sum(axis=0)
            names[i] = tuple(found[index].name for index in best[cells[0]])
            blocks[i] = grids[best[cells[0]], cells[0]]
            sd[i] = _error(model, work[i][0], dtype, device, notes)
        if not known:
            unseen.append(model.unseen_sd)
            strange.append(_WHAT[name])
        if tensor and device.compute_capability != _MEASURED_TENSOR_CORES:
            unseen.append(_OTHER_DTYPE_SD)
            notes.append(
                f"Tensor Cores were measured on a V100 only: those of {device} are taken to reach as much of their "
                "rate."
            )
    if strange:
        notes.append(
            f"No measurement of {device} was among those that the model of {' and of '.join(strange)} was fitted to: "
            "it goes by the data sheet and by related GPUs."
        )
    framework = FRAMEWORK_SD if dtype == "float32" else FRAMEWORK_SD_16
    return _Part(seconds, names, blocks, sd), float(np.hypot(max(unseen), framework))


_MOVED = (
    "Of layers that only move bytes, such as norms and activations, no time was published to us: theirs are predicted "
    f"from {100 * kernel_seconds.MOVED_SHARE:g} % of the data sheet's bandwidth."
)
_WHAT = {_NEUSIGHT: "3x3 convolutions", _CONV: "convolutions", _GEMM: "matrix products"}


def _model(layer: Layer, pass_: Pass, *, tensor: bool) -> str | None:
    """Name the model that answers for a pass; None for one that only moves bytes."""
    if not layer.gemms(pass_, 1):
        return None
    if not isinstance(layer, Conv2d):
        return _GEMM
    plain = (layer.r, layer.s, layer.stride, layer.dilation, layer.groups) == (3, 3, (1, 1), (1, 1), 1)
    return _NEUSIGHT if plain and pass_ is Pass.FPROP and not tensor else _CONV


def _never_seen(layer: Layer, notes: list[str]) -> float | None:
    """Give the standard deviation of a kind that no measurement is of, and note it; None for others."""
    if isinstance(layer, Conv2d) and (layer.groups > 1 or layer.dilation != (1, 1)):
        notes.append("Grouped, depthwise and dilated convolutions were never seen by the model: their times are rough.")
        return _NEVER_SEEN_SD
    if isinstance(layer, Attention):
        notes.append("Attention was never seen by the model: it is the sum of its matrix products.")
        return _NEVER_SEEN_SD
    return None


def _error(model: Fitted, layer: Layer, dtype: str, device: Device, notes: list[str]) -> float:
    """Give the standard deviation of a pass's error, and note what was never seen."""
    never = _never_seen(layer, notes)
    if never is not None or dtype == "float32":
        return never or model.sd
    if not has_tensor_cores(device, dtype):
        notes.append(f"{dtype} without Tensor Cores is computed in float32, with half the bytes.")
        return _STORED_CONVOLUTION_SD if isinstance(layer, Conv2d) else model.sd
    if dtype != "float16":
        notes.append(
            f"No measurement in {dtype} was published to us: the times are those of float16 at {dtype}'s rate."
        )
    multiple = _MULTIPLES[dtype]
    if any(extent % multiple for extent in (layer.input_shape[2], layer.output_shape[2])):
        notes.append(
            f"Channels that are no multiple of {multiple} are taken to be padded to it; measured as they are, such "
            "layers took up to ten times as long."
        )
        return _NEVER_SEEN_SD
    return model.sd if dtype == "float16" else float(np.hypot(model.sd, _OTHER_DTYPE_SD))


def _table(work: Sequence[tuple[Layer, Pass]], sizes: Array, multiple: int) -> tuple[Work, list[np.ndarray]]:
    """Lay passes at all batch sizes in one table, channels padded; of each pass, its rows: (products, sizes)."""
    names = ("n", "h", "w", "c", "k", "r", "s", "p", "q", "stride_h", "stride_w", "dilation", "groups")
    rows: list[tuple[float, ...]] = []
    kinds: list[int] = []
    owners = []
    for layer, pass_ in work:
        begun = len(rows)
        if isinstance(layer, Conv2d):
            (h, w, c), (p, q, k) = layer.input_shape, layer.output_shape
            extents = (h, w, c, k, layer.r, layer.s, p, q, *layer.stride, max(layer.dilation), layer.groups)
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
    """Give a product the extents of the linear layer (a group for each of several) of which it is that pass."""
    m, n, k = gemm.m, gemm.n * gemm.count, gemm.k * gemm.count
    batch, c, filters = {
        Pass.FPROP: (m, k, n),
        Pass.DGRAD: (m, n, k),
        Pass.WGRAD: (gemm.k, n, gemm.m * gemm.count),
    }[pass_]
    return (batch, 1, 1, c, filters, 1, 1, 1, 1, 1, 1, 1, gemm.count)


def _places(model: Fitted, device: Device, dtype: str, size: int, scales: Scales) -> tuple[Places, bool]:
    """Give the GPU of every row, and whether the model was fitted to measurements of it."""
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
