"""
Which variants can run a matrix product or convolution, ranked by what they should cost.

The order that `cost_model` gives is a first choice, which a measured one replaces (`Context.chooser`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import attrs

from cubatch.errors import InvalidArgument
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.kernels import variant as variants
from cubatch.kernels import winograd_plan
from cubatch.kernels.cost_model import blocks, launch_clocks, tile_of
from cubatch.kernels.problem import Problem
from cubatch.kernels.tensor_map import ALIGNMENT
from cubatch.kernels.variant import Kernel, Tile

LEAST_SLICE = 32
"""Main-loop steps below which a slice of gemm_k costs more than it gains, on CUDA cores."""

LEAST_DEPTH = 512
"""Extent of gemm_k below which it does on tensor cores, whose steps differ in length."""

MOST_PARTIAL_BYTES = 1 << 26
"""Partial sums of a split product take at most this much scratch memory: the L2 cache of a large GPU."""

MOST_TRANSPOSED_BYTES = 1 << 26
"""The same of an operand that is transposed before it is multiplied."""

MOST_IN_YZ = 65535
"""Blocks that a grid takes in y, and in z."""

_TERM_BYTES = 2  # of an element of what comes through the ring: ADDS_TILES of kernels/hopper/walk.cuh

# Bytes that an SM's share of DRAM and L2 moves in a clock; what a split product's partial sums take.
_BYTES_PER_CLOCK = 10.0
_REDUCE_CLOCKS = 4000.0

# Other counts of slices are worth a timing where the model gives them no more than this beyond the least cost.
_DOUBT = 0.25
_EACH_SLICES = 64  # up to which every count is looked at; beyond it those that just fill the SMs
_MOST_SLICES = 384  # two for each SM of the largest GPUs, rounded up
_MOST_COUNTED = (1 << 31) - (1 << 10)  # kernels/hopper count in 32 bits, and to the end of a tile
_LIMIT = 1 << 31
_FLOAT_BYTES = 4
_MOST_TRANSPOSED_ROWS = 32 * MOST_IN_YZ  # blocks of kernels/misc/layout.cu take 32 each
_TRANSPOSED = ("gemm_nn", "conv2d_dgrad")  # whose B does not lie along gemm_k


@attrs.frozen
class SplitKernel:
    """
    A variant, and into how many slices its launch splits gemm_k.

    Attributes:
        kernel: The variant.
        slices: At least 1; their partial sums are added up by a second launch.
    """

    kernel: Kernel
    slices: int = 1

    @classmethod
    def modelled(cls, problem: Problem, kernel: Kernel, device: Device) -> SplitKernel:
        """
        Split a variant as the cost model does.

        Example:
            >>> v100 = Device(name="V100", compute_capability=(7, 0), num_sms=80)
            >>> wgrad = Problem("conv2d_wgrad", "float32", 256, 2304, 50176, vector=4)
            >>> tile = variants.find("conv2d_wgrad", "float32", tile="128x128x8", vector=4)
            >>> SplitKernel.modelled(wgrad, tile, v100).slices > 1
            True
        """
        return cls(kernel, slices(problem, kernel, device))


def ranked(problem: Problem, device: Device) -> list[Kernel]:
    """
    List the variants that can run a problem on a device, best first.

    Args:
        problem: What is to be computed.
        device: Where; its SMs and compute capability must be known.

    Raises:
        InvalidArgument: If the device's SMs or compute capability are not known, or no variant runs there.

    Example:
        >>> v100 = Device(name="V100", compute_capability=(7, 0), num_sms=80)
        >>> ranked(Problem("gemm_nt", "float32", 8192, 8192, 8192, vector=4), v100)[0].tile.name
        '256x128x8'
    """
    return [found for _, _, found in ranking(problem, device)]


def ranking(problem: Problem, device: Device) -> tuple[tuple[float, int, Kernel], ...]:
    """
    List what each variant should take, in clocks of an SM, its slices and itself; else as `ranked`.

    Example:
        >>> v100 = Device(name="V100", compute_capability=(7, 0), num_sms=80)
        >>> clocks, _, found = ranking(Problem("gemm_nt", "float32", 8192, 8192, 8192, vector=4), v100)[0]
        >>> found.tile.name, round(2 * 8192**3 / clocks / 80 / 128, 2)  # the share of the rate of 80 x 64 lanes
        ('256x128x8', 0.91)
    """
    return _ranked(problem, device)


def fitting(problem: Problem, device: Device) -> tuple[Kernel, ...]:
    """List the variants that can run a problem on a device, in no order; else as `ranked`."""
    demands = _Demands(
        problem.operation, problem.dtype, problem.vector, _family_without(problem), _is_convolution(problem)
    )
    return tuple(found for found in _fitting(demands, device) if winograd_plan.takes(problem, found))


def can_run(problem: Problem, found: Kernel) -> bool:
    """Tell whether a variant's loads and copies can take a problem of its operation, on a device that it runs on."""
    if found.winograd is not None:
        return winograd_plan.takes(problem, found)
    stands_in = found.entry == found.operation or _is_convolution(problem)
    return problem.vector % found.vector == 0 and found.family != _family_without(problem) and stands_in


def can_store(problem: Problem, tile: Tile, slices: int, *, has_terms: bool) -> bool:
    """
    Return whether Hopper's copy engine can store the output of a product, whose rows then follow each other.

    Args:
        problem: The product.
        tile: Of the variant that computes it.
        slices: Into which gemm_k is split.
        has_terms: Whether a residual is added or a mask applied.  These need elements of 16 bits, swapped tiles too.

    Example:
        >>> tile = variants.find("gemm_nn", "float16", family="hopper", tile="128x256x64").tile
        >>> can_store(Problem("gemm_nn", "float16", 512, 256, 64, vector=8), tile, 1, has_terms=True)
        True
    """
    itemsize = BYTES_PER_ELEMENT[problem.dtype]
    return (
        problem.operation != "conv2d_wgrad"
        and problem.phases == slices == 1
        and problem.n * itemsize % ALIGNMENT == 0
        and (itemsize == _TERM_BYTES or not (has_terms or tile.swapped))
    )


def _family_without(problem: Problem) -> str:
    """Name the family that cannot take a problem for its operands or extents; empty where all can."""
    counted = all(0 < extent < _MOST_COUNTED for extent in (problem.m, problem.n, problem.k))
    transposed = _transposed(problem)
    rows = problem.k * problem.phases if transposed else 0
    fits = transposed <= MOST_TRANSPOSED_BYTES and rows <= _MOST_TRANSPOSED_ROWS
    return "" if problem.tensor_copies and problem.groups == 1 and counted and fits else "hopper"


def _is_convolution(problem: Problem) -> bool:
    """Tell whether a product can run by the code of a convolution, which counts images and filters in 32 bits."""
    return problem.operation != "gemm_nn" or max(problem.m, problem.n * problem.k) < _LIMIT


@attrs.frozen
class _Demands:
    """What variants must be able to do, which is the same for problems of many sizes."""

    operation: str
    dtype: str
    vector: int
    family_without: str
    is_convolution: bool


@functools.lru_cache(maxsize=4096)
def _fitting(demands: _Demands, device: Device) -> tuple[Kernel, ...]:
    operation, dtype, capability = demands.operation, demands.dtype, device.compute_capability
    if device.num_sms is None or capability is None:
        raise InvalidArgument("device", str(device), "a GPU whose num_sms and compute_capability are known")
    arch = 10 * capability[0] + capability[1]
    stored = (dtype, "float32") if dtype == "tf32" else (dtype,)
    known = (found for name in stored for found in variants.variants(operation, name, arch))
    tiled = [found for found in known if found.tile is not None]
    allowed = [
        variant for variant in tiled
        if (demands.vector % variant.vector == 0 or variant.winograd) and variant.family != demands.family_without
        and (demands.is_convolution or variant.entry == variant.operation)
    ]  # fmt: skip
    # Narrow copies are for rows that no wide ones take.
    widest = max((variant.vector for variant in allowed if variant.family == "mma"), default=0)
    found = tuple(variant for variant in allowed if variant.family != "mma" or variant.vector == widest)
    if not found and not demands.is_convolution:
        wanted = "one below 2^31 elements, as its rows, where columns or depth are no whole vectors"
        raise InvalidArgument("right operand", f"of {operation} in {dtype}", wanted)
    if not found:
        wanted = f"one that a tiled kernel of {operation} in {dtype} is compiled for"
        raise InvalidArgument("device", f"{device} (sm_{arch})", wanted)
    return found


@functools.lru_cache(maxsize=4096)
def _ranked(problem: Problem, device: Device) -> tuple[tuple[float, int, Kernel], ...]:
    costs = [(*_split(problem, variant, device), variant) for variant in fitting(problem, device)]
    return tuple(sorted(costs, key=lambda item: item[0]))


def slices(problem: Problem, found: Kernel, device: Device) -> int:
    """
    Say into how many slices to split gemm_k, so that few tiles still fill the device.

    A function of nothing else, so that the same call adds up in the same order every time.

    Args:
        problem: What is to be computed.
        found: The variant.
        device: Its SMs are to be filled.

    Example:
        >>> v100 = Device(name="V100", compute_capability=(7, 0), num_sms=80)
        >>> wgrad = Problem("conv2d_wgrad", "float32", 256, 2304, 50176, vector=4)
        >>> slices(wgrad, variants.find("conv2d_wgrad", "float32", tile="128x128x8", vector=4), v100) > 1
        True
    """
    return _best_split(problem, found, device)[1]


def other_slices(problem: Problem, found: Kernel, device: Device) -> dict[str, int]:
    """
    List the counts that may be better than that of `slices`, which only a timing can tell.

    Returns:
        dict: About half as many as "/2" and twice as many as "*2", where the model does not rule them out.

    Example:
        >>> v100 = Device(name="V100", compute_capability=(7, 0), num_sms=80)
        >>> wgrad = Problem("conv2d_wgrad", "float32", 256, 2304, 50176, vector=4)
        >>> tile = variants.find("conv2d_wgrad", "float32", tile="128x128x8", vector=4)
        >>> slices(wgrad, tile, v100), other_slices(wgrad, tile, v100)
        (20, {'/2': 10, '*2': 28})
    """
    costs = _costs_of_splits(problem, found, device)
    best = min(costs, key=lambda count: (costs[count], count))
    allowed = [count for count in costs if costs[count] <= (1 + _DOUBT) * costs[best]]
    sides = {
        "/2": ([count for count in allowed if count < best], best / 2),
        "*2": ([count for count in allowed if count > best], best * 2),
    }
    return {name: min(counts, key=lambda n: abs(math.log(n / aim))) for name, (counts, aim) in sides.items() if counts}


def least_steps(found: Kernel) -> int:
    """Give the fewest main-loop steps of a slice that is worth its partial sums."""
    tile = tile_of(found)
    return LEAST_SLICE if tile.thread_m is not None else LEAST_DEPTH // tile.k


def most_partial_bytes(problem: Problem, found: Kernel) -> int:
    """
    Bound the bytes of partial sums on any device: never less for a larger batch.

    Example:
        >>> wgrad = Problem("conv2d_wgrad", "float32", 64, 576, 3136, vector=4)
        >>> found = variants.find("conv2d_wgrad", "float32", tile="128x128x8", vector=4)
        >>> most_partial_bytes(wgrad, found) == 4 * 64 * 576 * (3136 // 8 // LEAST_SLICE)
        True
    """
    if found.winograd is not None:
        return 0
    most = min(-(-problem.k // tile_of(found).k) // least_steps(found), _MOST_SLICES)
    return min(4 * most * _outputs(problem), MOST_PARTIAL_BYTES) if most > 1 else 0


def transposed_bytes(problem: Problem, found: Kernel) -> int:
    """
    Count the bytes of the transposed copy of B that a variant multiplies: wgmma reads tf32 along gemm_k alone.

    Example:
        >>> problem = Problem("conv2d_dgrad", "tf32", 6272, 256, 576, phases=4, vector=4)
        >>> found = variants.find("conv2d_dgrad", "tf32", family="hopper", tile="128x256x32")
        >>> transposed_bytes(problem, found) == 4 * (3 * 3 * 256) * 256
        True
    """
    return _transposed(problem) if found.family == "hopper" else 0


def _transposed(problem: Problem) -> int:
    is_read_across = problem.dtype == "tf32" and problem.operation in _TRANSPOSED
    return _FLOAT_BYTES * problem.n * problem.k * problem.phases if is_read_across else 0


def _outputs(problem: Problem) -> int:
    return problem.m * problem.n * problem.groups * problem.phases


@functools.lru_cache(maxsize=16384)
def _best_split(problem: Problem, found: Kernel, device: Device) -> tuple[float, int]:
    return _split(problem, found, device)


def _split(problem: Problem, found: Kernel, device: Device) -> tuple[float, int]:
    """Give the cost in clocks, and the number of slices that it is the least for."""
    return min((cost, count) for count, cost in _costs_of_splits(problem, found, device).items())


def _costs_of_splits(problem: Problem, found: Kernel, device: Device) -> dict[int, float]:
    """Give the cost in clocks by the number of slices, for those that are looked at."""
    if found.winograd is not None:
        return {1: winograd_plan.clocks(problem, found, device, lambda part: launch_clocks(part, found, device, 1))}
    tile, outputs, num_sms = tile_of(found), _outputs(problem), device.num_sms or 1
    steps = -(-problem.k // tile.k)

    first = 0.0  # a launch as that of the slices' sums
    if transposed := transposed_bytes(problem, found):
        first = _REDUCE_CLOCKS + 2 * transposed / (num_sms * _BYTES_PER_CLOCK)

    def cost(count: int) -> float:
        clocks = first + launch_clocks(problem, found, device, count)
        if count > 1:
            clocks += _REDUCE_CLOCKS + 4 * (2 * count + 1) * outputs / (num_sms * _BYTES_PER_CLOCK)
        return clocks

    most = min(
        max(1, steps // least_steps(found)),
        _MOST_SLICES,
        max(1, MOST_IN_YZ // problem.groups),
        max(1, MOST_PARTIAL_BYTES // max(1, 4 * outputs)),
    )
    filling = (level * num_sms // max(1, blocks(problem, found)) for level in range(1, tile.min_blocks + 1))
    counts = {*range(1, min(most, _EACH_SLICES) + 1), *(count for count in filling if 1 <= count <= most)}
    candidates = {-(-steps // -(-steps // count)) for count in counts} if steps else {1}  # no empty slice
    return {count: cost(count) for count in sorted(candidates)}


Choose = Callable[[Problem, Device], SplitKernel]
"""Gives the kernel that runs a product on a device, and its slices."""


def first_ranked(problem: Problem, device: Device) -> SplitKernel:
    """Choose the kernel that is ranked first."""
    _, count, found = ranking(problem, device)[0]
    return SplitKernel(found, count)
