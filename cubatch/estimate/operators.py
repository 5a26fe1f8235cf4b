"""Predicted time of a traced step: the sum of the operators of a framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from cubatch.estimate.host_launches import HOST_SECONDS, launched
from cubatch.estimate.predictions import UNSCALED, ModelNote, Part, PassPrediction, Scales, StepPrediction, step_sd
from cubatch.estimate.vendor.algorithms import Array
from cubatch.estimate.vendor.vendor_calls import EXTENTS, Call
from cubatch.estimate.vendor.vendor_model import dtype_on, parts_by_dtype
from cubatch.hardware.arithmetic import has_tensor_cores, peak_flops_per_second
from cubatch.hardware.facts import Device
from cubatch.network.passes import Pass

KINDS = ("convolution", "product", "attention", "layout", "bytes")
PHASES = ("forward", "backward", "optimizer")


@attrs.frozen
class Operator:
    """The record of one call of a traced step at a batch size: its kind, FLOP, bytes read and written, and kernels."""

    name: str  # the framework's name: "aten.addmm"
    # one of KINDS. "layout" is the conversion around a convolution on Tensor Cores whose channels are not last
    kind: str
    phase: str  # one of PHASES
    pass_: Pass  # the pass of the convolution or linear layer as which the product is predicted
    dtype: str  # type of the arithmetic; "tf32" where float32 may be computed so
    extents: tuple[tuple[float, ...], ...] = ()  # `vendor_calls.EXTENTS` of each of its products
    flops: int = 0  # FLOP by the framework's own formula; a multiply-add counts as two
    read_bytes: int = 0  # read_bytes, written_bytes: bytes of all tensors that it reads and writes
    written_bytes: int = 0
    launches: int = 1  # number of kernels
    host_calls: int = 1  # operators that the host launches for it: 0 if another record of the same call has it
    # how often it occurs in a step, such as once for each batch after the first if gradients are accumulated
    repeats: int = 1

    @property
    def identity(self) -> tuple[object, ...]:
        """The fields that identify an operator: records at several batch sizes with equal fields are one operator."""
        return self.name, self.kind, self.phase, self.pass_, self.dtype, len(self.extents), self.repeats

    @property
    def numbers(self) -> tuple[float, ...]:
        """Bytes read and written, FLOP, kernels, host calls, then extents of products: they grow with the batch."""
        moved = self.read_bytes + self.written_bytes
        return (moved, self.flops, self.launches, self.host_calls, *(x for row in self.extents for x in row))


_MOVED, _FLOPS, _LAUNCHES, _HOST, _EXTENTS = range(5)


@attrs.frozen(eq=False)
class TracedPrediction:
    """The predicted step of a traced module."""

    step: StepPrediction  # seconds, intervals and operators, in the order of the trace
    phases: tuple[str, ...]  # phase of each operator
    # "compute" or "memory" of each operator, at the largest batch size; None if a rate is unknown
    bounds: tuple[str | None, ...]
    roofline_seconds: Array  # lower bound by the data sheet, by batch size
    host_seconds: Array  # time of the host, by batch size


def dtypes_on(operators: Sequence[Operator], device: Device) -> set[str]:
    """Return the names of the types in which a device computes the products of a step, such as "float32"."""
    return {_dtype_of(each, device) for each in operators if each.extents}


def predict_operators(
    # operators by traced batch size. Their numbers are linear in the batch size between neighboring sizes
    traced: Mapping[int, Sequence[Operator]],
    batch_sizes: Sequence[int],
    device: Device,
    *,
    scales: Scales = UNSCALED,  # factors on the GPU's times
) -> TracedPrediction:
    """
    Return the predicted seconds of a traced step at each batch size.

    Convolutions and matrix products take the time that `predict_step` gives to layers with the same extents.  All
    others move bytes.  Kernels run while the host launches the next ones (`host_launches.launched`).
    """
    known = sorted(traced)
    if len({tuple(each.identity for each in traced[n]) for n in known}) > 1:
        return _piecewise(traced, batch_sizes, device, scales)
    first = [each for each in traced[known[0]] if _runs(each, device)]
    rows = [[each.numbers for each in traced[n] if _runs(each, device)] for n in known]
    sizes = np.array(batch_sizes, float)
    series = [
        np.rint(between(known, np.array([row[i] for row in rows], float), sizes)).T for i in range(len(first))
    ]  # (numbers, sizes)
    distinct: dict[tuple[object, ...], int] = {}
    places = [
        distinct.setdefault((each.kind, each.pass_, _dtype_of(each, device), numbers.tobytes()), len(distinct))
        for each, numbers in zip(first, series, strict=True)
    ]
    chosen = [places.index(i) for i in range(len(distinct))]
    notes: list[ModelNote] = []
    part, unseen = _part([(first[i], series[i]) for i in chosen], sizes, device, scales, notes)
    repeats = [each.repeats for each in first]
    counts = np.bincount(places, weights=repeats, minlength=len(distinct)).astype(float)
    kernels: Array = counts @ part.seconds
    calls = [
        HOST_SECONDS[each.phase] * each.repeats * numbers[_HOST] for each, numbers in zip(first, series, strict=True)
    ]
    host = sum(calls, np.zeros(len(sizes)))
    seconds, low, high = launched(kernels, host, np.hypot(step_sd(part, counts, kernels), unseen))
    if (host > kernels).any():
        notes.append(ModelNote("host_bound", f"{HOST_SECONDS['forward'] * 1e6:g}"))
    roofs = [_roofs(each, numbers, device) for each, numbers in zip(first, series, strict=True)]
    step = StepPrediction(
        batch_sizes=tuple(int(n) for n in sizes),
        seconds=seconds,
        low=low,
        high=high,
        passes=tuple(
            PassPrediction(each.name, each.pass_, each.repeats * part.seconds[i], part.algorithms[i], part.blocks[i])
            for each, i in zip(first, places, strict=True)
        ),
        notes=tuple(dict.fromkeys(notes)),
        scale_sd=unseen,
    )
    return TracedPrediction(
        step=step,
        phases=tuple(each.phase for each in first),
        bounds=tuple(None if roof is None else "compute" if roof[0][-1] > roof[1][-1] else "memory" for roof in roofs),
        roofline_seconds=sum(
            (each.repeats * np.maximum(*roof) for each, roof in zip(first, roofs, strict=True) if roof is not None),
            np.zeros(len(sizes)),
        ),
        host_seconds=host,
    )


def between(known: Sequence[int], values: Array, sizes: Array) -> Array:
    """
    Return values at batch sizes `sizes`, interpolated linearly between `known` ones and extrapolated beyond them.

    `values` has a row per known size, ascending. If only one size is known, its row is returned for all sizes.

    Example:
        >>> between([2, 4], np.array([[10.0], [14.0]]), np.array([3.0, 8.0])).ravel().tolist()
        [12.0, 22.0]
    """
    if len(known) == 1:
        return np.repeat(values, len(sizes), axis=0)
    right = np.clip(np.searchsorted(known, sizes), 1, len(known) - 1)
    low, high = np.array(known, float)[right - 1], np.array(known, float)[right]
    share = ((sizes - low) / (high - low)).reshape(-1, *[1] * (values.ndim - 1))
    inside: Array = values[right - 1] + share * (values[right] - values[right - 1])
    return inside


def _piecewise(
    traced: Mapping[int, Sequence[Operator]], batch_sizes: Sequence[int], device: Device, scales: Scales
) -> TracedPrediction:
    """
    Return the predicted step with times interpolated between traced sizes, each of which is predicted by itself.

    This is for steps whose operators differ between batch sizes, as of a module with a loop over samples. `scales` are
    factors on the GPU's times.
    """
    known, sizes = sorted(traced), np.array(batch_sizes, float)
    singles = [predict_operators({n: traced[n]}, [n], device, scales=scales) for n in known]

    def at(values: Sequence[Array]) -> Array:
        return np.maximum(between(known, np.array(values)[:, 0], sizes), 0.0)

    nearest = [int(np.argmin([abs(n - size) for n in known])) for size in sizes]
    last = singles[-1]
    passes = tuple(
        attrs.evolve(
            item,
            seconds=item.seconds[0] * at([each.step.seconds for each in singles]) / last.step.seconds[0],
            algorithms=item.algorithms * len(nearest),
            blocks=np.repeat(item.blocks, len(nearest)),
        )
        for item in last.step.passes
    )
    step = attrs.evolve(
        last.step,
        batch_sizes=tuple(int(n) for n in sizes),
        seconds=at([each.step.seconds for each in singles]),
        low=at([each.step.low for each in singles]),
        high=at([each.step.high for each in singles]),
        passes=passes,
        notes=tuple(dict.fromkeys(note for each in singles for note in each.step.notes)),
    )
    return attrs.evolve(
        last,
        step=step,
        roofline_seconds=at([each.roofline_seconds for each in singles]),
        host_seconds=at([each.host_seconds for each in singles]),
    )


def _part(
    work: Sequence[tuple[Operator, Array]], sizes: Array, device: Device, scales: Scales, notes: list[ModelNote]
) -> tuple[Part, float]:
    """
    Return the predictions of distinct operators, and the standard deviation of their common error.

    The latter is that of the logarithm of seconds, and depends on the GPU.

    Args:
        work: Operators, each with its `numbers` as an array (numbers, batch sizes).
        sizes: The batch sizes.
        scales: Factors on the predicted seconds of arithmetic and of bytes, from the GPU's measurements.
        notes: Notes on the accuracy are appended.
    """
    calls = [_call(*each, len(sizes)) for each in work]
    dtypes = [_dtype_of(operator, device) for operator, _ in work]
    return parts_by_dtype(calls, dtypes, sizes, device, scales=scales, notes=notes)


def _call(operator: Operator, numbers: Array, count: int) -> Call:
    extents = np.maximum(numbers[_EXTENTS:], 1.0).reshape(len(operator.extents), len(EXTENTS), count)
    return Call(
        pass_=operator.pass_,
        extents=extents.transpose(0, 2, 1),
        num_bytes=numbers[_MOVED],
        flops=numbers[_FLOPS],
        launches=numbers[_LAUNCHES],
        is_convolution=operator.kind == "convolution",
        is_attention=operator.kind == "attention",
    )


def _runs(operator: Operator, device: Device) -> bool:
    """Return whether the GPU runs an operator; conversions of layout run only where Tensor Cores need them."""
    if operator.kind != "layout":
        return True
    return bool(has_tensor_cores(device, dtype_on(operator.dtype, device)))


def _roofs(operator: Operator, numbers: Array, device: Device) -> tuple[Array, Array] | None:
    """
    Return by the data sheet the seconds that an operator's arithmetic takes and those of its bytes; None if unknown.

    `numbers` are the operator's `numbers` by batch size.
    """
    peak, bandwidth = peak_flops_per_second(device, _dtype_of(operator, device)), device.peak_bytes_per_second
    if bandwidth is None or peak is None:
        return None
    return numbers[_FLOPS] / peak, numbers[_MOVED] / bandwidth


def _dtype_of(operator: Operator, device: Device) -> str:
    """Return the type in which a device computes an operator; "float32" for one that only moves bytes."""
    return dtype_on(operator.dtype, device) if operator.extents or operator.flops else "float32"
