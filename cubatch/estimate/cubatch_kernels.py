"""
Predicted seconds of a pass by cubatch kernels.

A tiled product takes the clocks by which its variants are ranked (`cost_model`), at the boost clock.  It never takes
less than its arithmetic at the peak rate, if known, or its bytes at the bandwidth.  Attention is the sum of its
launches.  Every other pass moves bytes at a fixed share of the bandwidth.  Two things were fitted to timings: attention
on mma.sync, and products on Hopper.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Sequence

import attrs
import numpy as np

from cubatch.errors import InvalidArgument
from cubatch.estimate.predictions import UNSCALED, Scales
from cubatch.estimate.vendor.algorithms import Array
from cubatch.hardware import arithmetic as device_arithmetic
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.kernels import attention_launches, winograd_plan
from cubatch.kernels.cost_model import blocks, tile_of
from cubatch.kernels.problem import Problem, problem_of
from cubatch.kernels.ranking import ranking
from cubatch.kernels.transposing import part_of, ranking_transposed
from cubatch.kernels.variant import Kernel
from cubatch.kernels.workspace.misc import gradients_at_once, merged_tiles
from cubatch.network.layer import Layer
from cubatch.network.layers import Attention
from cubatch.network.passes import Pass

LAUNCH_SECONDS = 3e-6
"""Time between the starts of two short kernels on a stream; an assumption."""

MOVED_SHARE = 0.75
"""Share of the data sheet's bandwidth that kernels without products reach: 85 % of a copy, which reaches about 90 %."""

_HOPPER = (9, 0)
_TIMES_COUNTED = {"simt": 1.3, "winograd": 1.2, "mma": 2.0, "hopper": 1.45}
"""
Measured over counted time of arithmetic by family, on an H200.

Fitted by benchmarks/fit_ours.py to 279 passes of benchmarks/results/h200-sxm/2026-11-26-2572091.json that arithmetic
bounds.  Tensor cores lower the clock there to 1.4 to 1.65 GHz by the power limit, and mma.sync reaches half the rate of
wgmma.
"""

_LANES_PER_CLOCK = 128
"""Lanes of an SM that an instruction is issued for in a clock: 4 schedulers with 32 lanes."""

_SLOPE_INSTRUCTIONS = 31
"""
Instructions of the slope of GELU and of a bias's sum for each element in an epilogue.

Counted in the machine code of a tile of 128 x 256 for sm_90a, compiled by NVRTC 12.9: what it has more than without.
"""


def pass_seconds(
    layer: Layer,
    pass_: Pass,
    batch_sizes: Sequence[int],
    device: Device,  # a GPU of known num_sms, compute_capability, clock_hz and peak_bytes_per_second
    dtype: str,
    *,
    scales: Scales = UNSCALED,  # compute, memory: factors on the time of arithmetic and of bytes, from anchors
    more: int = 0,  # further elements per sample that the pass moves for fused layers
    # whether the pass belongs to a training step. Its forward pass stores attention's weights, and batch norm uses the
    # statistics of the batch
    saves: bool = False,
    # whether a product also computes the sums of a batch norm next to it, or a batch norm does not. A kernel sums each
    # tile while it stores it, and a launch or two add up the tiles. If the kernel cannot, those of the norm follow. Of
    # attention: whether logarithms of sums are saved instead of weights
    summed: bool = False,
    # whether an input's gradient is multiplied by the slope of GELU. With `summed` the product then sums the gradient
    # of a bias. If the kernel cannot, further launches follow
    curved: bool = False,
) -> tuple[Array, tuple[str, ...], Array]:
    """
    Predict the time of one pass by cubatch kernels at each batch size, and the kernel that runs.

        products   max(compute * max(clocks / boost clock, flops / peak), memory * bytes / bandwidth) + launches
        others     memory * roofline / 0.75 + launches

    Batch norm in training reads its input twice, since its statistics must be complete before the first result.  Its
    statistics and the gradients of parameters without products are sums of tiles, which a launch of its own adds up.
    On Hopper products take longer, as measured on an H200: arithmetic by family, bytes by 1 / 0.75.  A filter's
    gradient with a bias reads the outputs' gradient once more.  Winograd's algorithm has fewer FLOP than the layer, and
    its transforms take clocks.  Tensor cores wait while an epilogue computes slopes.  An unknown peak rate is no bound.
    If transposing both operands first takes less time, that time is returned, because steps compare both.

    Returns:
        Seconds, kernel name ("bytes" for a pass that only moves data), and blocks of its grid (0 for "bytes"), each by
        batch size. Attention returns those of its longest launch.

    Raises:
        InvalidArgument: If a fact of the device is missing, or no cubatch kernel runs there.
    """
    if device.clock_hz is None or device.peak_bytes_per_second is None:
        raise InvalidArgument("device", str(device), "a GPU whose boost clock and bandwidth are known")
    if isinstance(layer, Attention):  # has launches between its products
        return _attention_seconds(
            layer, pass_, batch_sizes, device, dtype, saves=saves, by_sums=summed, more=more, scales=scales
        )
    seconds, names, grids = [], [], []
    for n in batch_sizes:
        product = counted(layer, pass_, n, device, dtype)
        again, launches = _sums(layer, pass_, saves=saves) if product is None and not summed else (0, 1)
        moved = layer.traffic(pass_, n) + n * (more + again)
        if product is None:
            peak = device_arithmetic.peak_flops_per_second(device, dtype) or math.inf
            bytes_seconds = moved * BYTES_PER_ELEMENT[dtype] / device.peak_bytes_per_second
            floor = max(layer.pass_flops(pass_, n) / peak, bytes_seconds)
            seconds.append(scales.memory * floor / MOVED_SHARE + launches * LAUNCH_SECONDS * bool(moved))
            names.append("bytes")
            grids.append(0)
            continue
        again = n * _outputs(layer) if pass_ is Pass.WGRAD and "b" in layer.parameter_shapes else 0
        per_second = device.peak_bytes_per_second / BYTES_PER_ELEMENT[dtype] / scales.memory
        elements, launches = 0.0, 0
        if curved:
            clocks, elements, launches = _slope(layer, n, product, device, summed=summed)
            product = attrs.evolve(product, seconds=product.seconds + clocks / device.clock_hz)
        both = product, counted(layer, pass_, n, device, dtype, is_transposing=True)
        timed = [(_product_seconds(each, moved, per_second, device, scales), each) for each in both if each]
        longest, product = min(timed, key=operator.itemgetter(0))
        if curved:
            longest += elements / per_second / MOVED_SHARE + launches * LAUNCH_SECONDS
        elif summed:
            elements, launches = _sums_of_norm(layer, pass_, n, product)
            longest += elements / per_second / MOVED_SHARE + launches * LAUNCH_SECONDS
        seconds.append(longest + LAUNCH_SECONDS + (again / per_second / MOVED_SHARE + LAUNCH_SECONDS) * bool(again))
        names.append(product.kernel.name)
        grids.append(product.blocks)
    return np.array(seconds), tuple(names), np.array(grids, dtype=float)


@attrs.frozen
class Counted:
    """The kernel variant ranked first for a product, with its blocks and the predicted seconds of its arithmetic."""

    kernel: Kernel  # the variant
    blocks: int  # blocks of its grid
    seconds: float  # the longer of its clocks at the boost clock and its FLOP at the peak rate
    is_whole: bool = True  # whether it is one launch that neither splits gemm_k nor has phases
    moved: int = 0  # elements that are read and written to transpose operands before it
    launches: int = 0  # further launches: transpositions, and those of later parts of gemm_k


def counted(
    layer: Layer, pass_: Pass, batch_size: int, device: Device, dtype: str, *, among: Container[str] | None = None,
    is_transposing: bool = False,
) -> Counted | None:  # fmt: skip
    """
    Return the kernel ranked first for a pass, with its blocks and the seconds of its arithmetic.

    The result is None for a pass that only moves bytes, or if no kernel of `among` computes the pass.

    Args:
        among: Names of the kernels that may be returned; None: all.
        is_transposing: Whether both operands are transposed first: see `kernels.transposing`.
    """
    problem = problem_of(layer, pass_, batch_size, dtype)
    if problem is None:
        return None
    ranked = ranking_transposed(problem, device) if is_transposing else ranking(problem, device)
    best = next((each for each in ranked if among is None or each[2].name in among), None)
    if best is None:
        return None
    clocks, parts, kernel = best
    flops = _flops(layer, pass_, batch_size, problem, kernel)
    peak = device_arithmetic.peak_flops_per_second(device, dtype) or math.inf
    seconds = max(clocks / (device.clock_hz or math.inf), flops / peak)
    product = Counted(kernel, blocks(problem, kernel) * parts, seconds, parts == problem.phases == 1)
    if not is_transposing:
        return product
    launches = 3 * -(-problem.k // part_of(problem).k)
    return attrs.evolve(product, moved=2 * (problem.m + problem.n) * problem.k, launches=launches - 1)


def _product_seconds(product: Counted, moved: int, per_second: float, device: Device, scales: Scales) -> float:
    """Return the seconds of a product that moves `moved` elements, `per_second` a second, without its first launch."""
    times, share = _measured(device, product.kernel.family)
    longest = max(scales.compute * times * product.seconds, moved / per_second / share)
    return longest + product.moved / per_second / MOVED_SHARE + product.launches * LAUNCH_SECONDS


def was_timed(device: Device) -> bool:
    """Return whether predicted times were fitted to measurements on GPUs of the device's compute capability."""
    return device.compute_capability == _HOPPER


def moved_seconds(
    elements: int, batch_sizes: Sequence[int], device: Device, dtype: str, *, scales: Scales = UNSCALED
) -> tuple[Array, tuple[str, ...], Array]:
    """
    Predict the seconds of a launch that only moves `elements` elements per sample, such as a sum of gradients.

    Returns:
        As `pass_seconds`: seconds, "bytes" as the kernel name, and 0 blocks, per batch size.

    Example:
        >>> card = Device(name="card", peak_bytes_per_second=1e9)
        >>> [round(float(seconds), 6) for seconds in moved_seconds(750, [1, 1000], card, "float32")[0]]
        [7e-06, 0.004003]
    """
    per_second = (device.peak_bytes_per_second or math.inf) / BYTES_PER_ELEMENT[dtype] / scales.memory
    seconds = np.array([n * elements / per_second / MOVED_SHARE + LAUNCH_SECONDS for n in batch_sizes])
    return seconds, ("bytes",) * len(seconds), np.zeros(len(seconds))


def _sums(layer: Layer, pass_: Pass, *, saves: bool) -> tuple[int, int]:
    """
    Return the elements per sample that a pass without products reads a second time, and the number of its launches.

    `saves` is whether the step is one of training, in which a norm computes statistics.
    """
    if layer.has_statistics and pass_ is Pass.FPROP and saves:
        return math.prod(layer.input_shape), 3  # moments of tiles, their merging, and the norm
    sums = pass_ is Pass.WGRAD or (pass_ is Pass.DGRAD and gradients_at_once(layer))
    return 0, 2 if sums else 1  # the second adds up tiles


def _slope(
    layer: Layer, batch_size: int, product: Counted, device: Device, *, summed: bool
) -> tuple[float, float, int]:
    """
    Return the clocks of GELU's slope in an input's gradient, the elements moved in addition, and the launches.

    The clocks are those of an SM, which issues an instruction for 128 lanes in a clock.  They are 0 if the kernel has
    no such epilogue.  Then the slope, and with `summed` the sums of a bias, are launches after the product.
    """
    h, w, channels = layer.input_shapes[0]
    kernel, rows = product.kernel, batch_size * h * w
    is_product = kernel.family == "hopper" and kernel.operation == "gemm_nn"
    if not (product.is_whole and is_product and kernel.dtype in {"float16", "bfloat16"}):
        return 0.0, rows * channels * (2 + summed), 1 + 2 * summed
    clocks = rows * channels * _SLOPE_INSTRUCTIONS / (_LANES_PER_CLOCK * (device.num_sms or 1))
    if not summed:
        return clocks, 0.0, 0
    tile = tile_of(kernel)
    tiles = -(-rows // (tile.m if tile.swapped else tile.m // 2))
    floats = 2 * tiles * channels * BYTES_PER_ELEMENT["float32"] / BYTES_PER_ELEMENT[kernel.dtype]
    return clocks, floats, 1 + bool(merged_tiles(tiles)[0])


def _sums_of_norm(layer: Layer, pass_: Pass, batch_size: int, product: Counted) -> tuple[float, int]:
    """Return the number of elements of the dtype that the sums of a norm next to a product move, and their launches."""
    h, w, channels = layer.output_shape if pass_ is Pass.FPROP else layer.input_shapes[0]
    rows = batch_size * h * w
    kernel, tile = product.kernel, tile_of(product.kernel)
    is_forward, on_hopper = pass_ is Pass.FPROP, kernel.family == "hopper"
    is_narrow = BYTES_PER_ELEMENT[kernel.dtype] < BYTES_PER_ELEMENT["float32"]
    if not (product.is_whole and (is_narrow if on_hopper else is_forward and kernel.winograd is None)):
        return rows * channels * (1 if is_forward else 2), 2
    tiles = -(-rows // (tile.m // 2 if on_hopper and not tile.swapped else tile.m))
    floats = 2 * tiles * channels * (3 if is_forward else 2)  # written and read
    return floats * BYTES_PER_ELEMENT["float32"] / BYTES_PER_ELEMENT[kernel.dtype], 1 + bool(merged_tiles(tiles)[0])


def _attention_seconds(
    layer: Attention,
    pass_: Pass,
    batch_sizes: Sequence[int],
    device: Device,
    dtype: str,
    *,
    saves: bool,
    by_sums: bool,
    more: int,
    scales: Scales,
) -> tuple[Array, tuple[str, ...], Array]:
    """
    Return for each batch size the seconds of all launches of an attention pass, and name and blocks of the longest one.

    The arguments are those of `pass_seconds`; the first projection moves the `more` elements.
    """
    per_second = (device.peak_bytes_per_second or math.inf) / BYTES_PER_ELEMENT[dtype] / scales.memory
    clocks_per_second = device.clock_hz or math.inf
    projected = [
        pass_seconds(linear, pass_, batch_sizes, device, dtype, scales=scales, more=extra)
        for linear, extra in zip(layer.projections, (more, 0), strict=True)
    ]
    seconds, names, grids = [], [], []
    for place, n in enumerate(batch_sizes):
        parts = [(float(times[place]), kernels[place], int(blocks[place])) for times, kernels, blocks in projected]
        for launch in attention_launches.launches(layer, pass_, n, dtype, device, saves=saves, by_sums=by_sums):
            peak = device_arithmetic.peak_flops_per_second(device, launch.rated) or math.inf
            times, share = _measured(device, launch.family) if launch.family else (1.0, 1.0)
            arithmetic = scales.compute * times * max(launch.clocks / clocks_per_second, launch.flops / peak)
            moving = launch.moved / per_second / (share if launch.flops else MOVED_SHARE)
            parts.append((max(arithmetic, moving) + LAUNCH_SECONDS, launch.name, launch.blocks))
        _, name, blocks = max(parts)
        seconds.append(sum(part[0] for part in parts))
        names.append(name)
        grids.append(blocks)
    return np.array(seconds), tuple(names), np.array(grids, dtype=float)


def _measured(device: Device, family: str) -> tuple[float, float]:
    """
    Return two factors for the products of a kernel family, from measurements on GPUs of this compute capability.

    The first is measured over counted time of arithmetic. The second is the share of the data sheet's bandwidth that is
    reached. Both are 1 where nothing was measured.
    """
    if not was_timed(device):
        return 1.0, 1.0
    return _TIMES_COUNTED.get(family, 1.0), MOVED_SHARE


def _flops(layer: Layer, pass_: Pass, batch_size: int, problem: Problem, kernel: Kernel) -> float:
    """Return the FLOP that a kernel executes for a pass; Winograd's algorithm has fewer than the layer."""
    if kernel.winograd is None:
        return sum(gemm.flops for gemm in layer.gemms(pass_, batch_size))
    products = winograd_plan.product(problem, kernel)
    return 2 * products.groups * products.m * products.n * products.k


def _outputs(layer: Layer) -> int:
    p, q, k = layer.output_shape
    return p * q * k
