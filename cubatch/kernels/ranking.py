"""
Rank the variants that can run a matrix product or convolution by their predicted cost.

The order by `cost_model` is a first choice, which a measured choice replaces (`Context.chooser`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import attrs

from cubatch.errors import InvalidArgument
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.kernels import variant as variants, winograd_plan
from cubatch.kernels.cost_model import blocks, launch_clocks, tile_of
from cubatch.kernels.problem import Problem
from cubatch.kernels.tensor_map import ALIGNMENT
from cubatch.kernels.variant import Kernel

LEAST_SLICE = 32
"""Fewest main-loop steps of a slice of gemm_k on CUDA cores: a shorter one costs more than it gains."""

LEAST_DEPTH = 512
"""Fewest elements of gemm_k in a slice on tensor cores, whose steps differ in length."""

MOST_PARTIAL_BYTES = 1 << 26
"""Most scratch memory of a split product's partial sums: the L2 cache of a large GPU."""

MOST_TRANSPOSED_BYTES = 1 << 29
"""Most scratch memory of operands that are transposed before they are multiplied."""

MOST_IN_YZ = 65535
"""Most blocks of a grid in y, and in z."""

MOST_TRANSPOSED_ROWS = 32 * MOST_IN_YZ
"""Most rows of a matrix that is transposed: a block of kernels/misc/layout.cu takes 32."""

_TERM_BYTES = 2  # of a residual element in the ring: ADDS_TILES of kernels/hopper/walk.cuh

_BYTES_PER_CLOCK = 10.0  # an SM's share of DRAM and L2
_REDUCE_CLOCKS = 4000.0  # a launch that adds up partial sums

_WORTH_A_TIMING = 0.25  # most predicted cost of another number of slices, above the least cost
_EACH_SLICES = 64  # up to here each number of slices is compared; above it those that just fill the SMs
_MOST_SLICES = 384  # two per SM of the largest GPUs, rounded up
_MOST_COUNTED = (1 << 31) - (1 << 10)  # kernels/hopper count in 32 bits, up to the end of a tile
_LIMIT = 1 << 31
_FLOAT_BYTES = 4
_TRANSPOSED = ("gemm_nn", "conv2d_dgrad")  # operations whose B is not contiguous along gemm_k


@attrs.frozen
class SplitKernel:
    """A variant of a kernel and the number of slices that its launch splits gemm_k into."""

    kernel: Kernel  # the variant
    slices: int = 1  # at least 1; above 1, a second launch adds up their partial sums

    @classmethod
    def modelled(cls, problem: Problem, kernel: Kernel, device: Device) -> SplitKernel:
        """Return a variant with the number of slices of gemm_k that has the least predicted cost."""
        return cls(kernel, slices(problem, kernel, device))


Prepare = Callable[[SplitKernel], Callable[[], object]]
"""Binds a variant to the arrays of a problem and returns its launch."""


def ranked(problem: Problem, device: Device) -> list[Kernel]:
    """Return the variants that can run a problem on a device, in the order of their predicted cost."""
    return [kernel for _, _, kernel in ranking(problem, device)]


@functools.lru_cache(maxsize=4096)
def ranking(problem: Problem, device: Device) -> tuple[tuple[float, int, Kernel], ...]:
    """Return (predicted clock cycles of an SM, slices of gemm_k, variant) of variants that can run, cheapest first."""
    costs = [(*_split(problem, variant, device), variant) for variant in fitting(problem, device)]
    return tuple(sorted(costs, key=lambda item: item[0]))


def fitting(problem: Problem, device: Device) -> tuple[Kernel, ...]:
    """
    Return the variants that can run a problem on a device, in no particular order.

    Raises InvalidArgument if there is none, or if the device's SMs or compute capability are unknown.
    """
    kernels = _fitting(
        device, problem.operation, problem.dtype, problem.vector, family_without=_family_without(problem),
        fits_convolutions=_fits_convolutions(problem),
    )  # fmt: skip
    return tuple(kernel for kernel in kernels if winograd_plan.takes(problem, kernel))


def can_run(problem: Problem, kernel: Kernel) -> bool:
    """Return whether a kernel variant can run a problem of its operation, given the problem's alignment and extents."""
    if kernel.winograd is not None:
        return winograd_plan.takes(problem, kernel)
    has_code = kernel.entry == kernel.operation or _fits_convolutions(problem)
    return problem.vector % kernel.vector == 0 and kernel.family != _family_without(problem) and has_code


def can_finish(problem: Problem, kernel: Kernel, slices: int, *, has_terms: bool) -> bool:
    """
    Return whether a variant of kernels/hopper finishes sums in registers: gemm_k is not split.

    Hopper's copy engine then stores rows that are contiguous.  The rows of a phase are not; `of_phases` stores them.

    Args:
        slices: Slices of gemm_k.
        has_terms: Whether a residual is added or a mask applied.  These and swapped tiles need 16-bit elements.
    """
    itemsize = BYTES_PER_ELEMENT[problem.dtype]
    return (
        problem.operation != "conv2d_wgrad"
        and slices == 1
        and (problem.phases == 1 or kernel.finishes_phases)
        and problem.n * itemsize % ALIGNMENT == 0
        and (itemsize == _TERM_BYTES or not (has_terms or tile_of(kernel).swapped))
    )


def of_phases(problem: Problem, kernel: Kernel) -> Kernel | None:
    """
    Return the variant with the same tile that finishes the phases of a strided gradient in registers, to be timed.

    The result is None if the problem has no phases, or for elements of over 16 bits or other families than hopper.
    """
    if kernel.family != "hopper" or problem.phases == 1 or BYTES_PER_ELEMENT[kernel.dtype] != _TERM_BYTES:
        return None
    return variants.find(f"{problem.operation}_phases", kernel.dtype, family=kernel.family, tile=kernel.tile_name)


def _family_without(problem: Problem) -> str:
    """Return "hopper" if that family cannot run a problem, for its operands or extents; else an empty string."""
    counted = all(0 < extent < _MOST_COUNTED for extent in (problem.m, problem.n, problem.k))
    transposed = _transposed(problem)
    rows = problem.k * problem.phases if transposed else 0
    fits = transposed <= MOST_TRANSPOSED_BYTES and rows <= MOST_TRANSPOSED_ROWS
    return "" if problem.tensor_copies and problem.groups == 1 and counted and fits else "hopper"


def _fits_convolutions(problem: Problem) -> bool:
    """Return whether a "gemm_nn" fits the 32-bit counts of a convolution's code; True for other operations."""
    return problem.operation != "gemm_nn" or max(problem.m, problem.n * problem.k) < _LIMIT


@functools.lru_cache(maxsize=4096)  # by demands that are equal for problems of many sizes
def _fitting(
    device: Device, operation: str, dtype: str, vector: int, *, family_without: str, fits_convolutions: bool
) -> tuple[Kernel, ...]:
    capability = device.compute_capability
    if device.num_sms is None or capability is None:
        raise InvalidArgument("device", str(device), "a GPU whose num_sms and compute_capability are known")
    arch = 10 * capability[0] + capability[1]
    stored = (dtype, "float32") if dtype == "tf32" else (dtype,)
    known = (kernel for name in stored for kernel in variants.variants(operation, name, arch))
    tiled = [kernel for kernel in known if kernel.tile is not None]
    allowed = [
        variant for variant in tiled
        if (vector % variant.vector == 0 or variant.winograd) and variant.family != family_without
        and (fits_convolutions or variant.entry == variant.operation)
    ]  # fmt: skip
    # Narrow copies are used only if wide ones do not fit the rows.
    widest = max((variant.vector for variant in allowed if variant.family == "mma"), default=0)
    kernels = tuple(variant for variant in allowed if variant.family != "mma" or variant.vector == widest)
    if not kernels and not fits_convolutions:
        wanted = "of fewer than 2^31 rows and elements, or have columns and rows that are multiples of 4"
        raise InvalidArgument("right operand", f"a larger one in {operation} of {dtype}", wanted)
    if not kernels:
        wanted = f"one that a tiled kernel of {operation} in {dtype} is compiled for"
        raise InvalidArgument("device", f"{device} (sm_{arch})", wanted)
    return kernels


@functools.lru_cache(maxsize=16384)
def slices(problem: Problem, kernel: Kernel, device: Device) -> int:
    """
    Return the number of slices of gemm_k with the least predicted cost; with few tiles, more slices fill the device.

    The same arguments always give the same number, and so the same order of additions.
    """
    return _split(problem, kernel, device)[1]


def other_slices(problem: Problem, kernel: Kernel, device: Device) -> dict[str, int]:
    """
    Return other numbers of slices of gemm_k that may be faster than the predicted best, to be timed.

    Returns:
        dict: About half as many as "/2" and twice as many as "*2", if their predicted cost is at most 25 % higher.

    Example:
        >>> v100 = Device(name="V100", compute_capability=(7, 0), num_sms=80)
        >>> wgrad = Problem("conv2d_wgrad", "float32", 256, 2304, 50176, vector=4)
        >>> tile = variants.find("conv2d_wgrad", "float32", tile="128x128x8", vector=4)
        >>> slices(wgrad, tile, v100), other_slices(wgrad, tile, v100)
        (20, {'/2': 10, '*2': 28})
    """
    costs = _costs_of_splits(problem, kernel, device)
    best = min(costs, key=lambda count: (costs[count], count))
    allowed = [count for count in costs if costs[count] <= (1 + _WORTH_A_TIMING) * costs[best]]
    sides = {
        "/2": ([count for count in allowed if count < best], best / 2),
        "*2": ([count for count in allowed if count > best], best * 2),
    }
    return {name: min(counts, key=lambda n: abs(math.log(n / aim))) for name, (counts, aim) in sides.items() if counts}


def least_steps(kernel: Kernel) -> int:
    """Return the fewest main-loop steps for which an additional slice of gemm_k is worthwhile."""
    tile = tile_of(kernel)
    return LEAST_SLICE if tile.thread_m is not None else LEAST_DEPTH // tile.k


def most_partial_bytes(problem: Problem, kernel: Kernel) -> int:
    """Return the most bytes of a variant's partial sums on any device, 0 if none; never less for a larger batch."""
    if kernel.winograd is not None:
        return 0
    most = min(-(-problem.k // tile_of(kernel).k) // least_steps(kernel), _MOST_SLICES)
    return min(4 * most * _outputs(problem), MOST_PARTIAL_BYTES) if most > 1 else 0


def transposed_bytes(problem: Problem, kernel: Kernel) -> int:
    """
    Return the bytes of the transposed right operand that a variant needs; 0 if it reads the operand as it is.

    Instructions of wgmma read tf32 along gemm_k only.
    """
    return _transposed(problem) if kernel.family == "hopper" else 0


def _transposed(problem: Problem) -> int:
    is_read_across = problem.dtype == "tf32" and problem.operation in _TRANSPOSED
    return _FLOAT_BYTES * problem.n * problem.k * problem.phases if is_read_across else 0


def _outputs(problem: Problem) -> int:
    return problem.m * problem.n * problem.groups * problem.phases


def _split(problem: Problem, kernel: Kernel, device: Device) -> tuple[float, int]:
    return min((cost, count) for count, cost in _costs_of_splits(problem, kernel, device).items())


def _costs_of_splits(problem: Problem, kernel: Kernel, device: Device) -> dict[int, float]:
    """Return the predicted cost in clock cycles for each number of slices of gemm_k that is worth considering."""
    if kernel.winograd is not None:
        return {1: winograd_plan.clocks(problem, kernel, device, lambda part: launch_clocks(part, kernel, device, 1))}
    tile, outputs, num_sms = tile_of(kernel), _outputs(problem), device.num_sms or 1
    steps = -(-problem.k // tile.k)

    first = 0.0  # transposing is a launch like adding up slices
    if transposed := transposed_bytes(problem, kernel):
        first = _REDUCE_CLOCKS + 2 * transposed / (num_sms * _BYTES_PER_CLOCK)

    def cost(count: int) -> float:
        clocks = first + launch_clocks(problem, kernel, device, count)
        if count > 1:
            clocks += _REDUCE_CLOCKS + 4 * (2 * count + 1) * outputs / (num_sms * _BYTES_PER_CLOCK)
        return clocks

    most = min(
        max(1, steps // least_steps(kernel)),
        _MOST_SLICES,
        max(1, MOST_IN_YZ // problem.groups),
        max(1, MOST_PARTIAL_BYTES // max(1, 4 * outputs)),
    )
    filling = (level * num_sms // max(1, blocks(problem, kernel)) for level in range(1, tile.min_blocks + 1))
    counts = {*range(1, min(most, _EACH_SLICES) + 1), *(count for count in filling if 1 <= count <= most)}
    candidates = {-(-steps // -(-steps // count)) for count in counts} if steps else {1}  # no empty slice
    return {count: cost(count) for count in sorted(candidates)}


Choose = Callable[[Problem, Device], SplitKernel]
"""Returns the kernel for a product on a device, and its slices."""


def first_ranked(problem: Problem, device: Device, prepare: Prepare | None = None) -> SplitKernel:  # noqa: ARG001 - a chooser
    """
    Return the variant of least predicted cost and its number of slices of gemm_k.

    Nothing is timed: `prepare`, which other choosers call, is ignored and may be None.
    """
    _, count, kernel = ranking(problem, device)[0]
    return SplitKernel(kernel, count)
