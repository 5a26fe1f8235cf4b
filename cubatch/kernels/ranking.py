"""
Which variants can run a matrix product or convolution, ranked by what they should cost.

The model is the busiest SM's: blocks that share an SM share its pipes, so a launch lasts as long as the
SM with the most blocks, times what a block's tile costs.  Its constants stand below in one place.  They
come from counting the instructions of the compiled main loops and from data sheets, not from a GPU's clock:
the order they give is a first choice, which a measured one replaces (`Context.chooser`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import attrs

from cubatch.errors import InvalidArgument
from cubatch.hardware import architectures
from cubatch.hardware.architectures import Architecture
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.kernels import variant as variants
from cubatch.kernels import winograd
from cubatch.kernels.problem import Problem
from cubatch.kernels.variant import Kernel, Tile

LEAST_SLICE = 32
"""Main-loop steps below which a slice of gemm_k costs more than it gains, on CUDA cores."""

LEAST_DEPTH = 512
"""Extent of gemm_k below which it does on tensor cores, whose steps differ in length."""

BOX_CHANNELS = 64
"""Channels of a box of a tensor map whose rows are not along gemm_k: kernels/hopper/operands.cuh."""

MOST_PARTIAL_BYTES = 1 << 26
"""Partial sums of a split product take at most this much scratch memory: the L2 cache of a large GPU."""

MOST_TRANSPOSED_BYTES = 1 << 26
"""The same of an operand that is transposed before it is multiplied."""

# Share of the issued instructions that are multiply-adds, by a thread's tile, counted in the compiled main loops.
_EFFICIENCY = {(16, 8): 0.92, (8, 8): 0.89, (8, 4): 0.82}
# The same for loads of single elements, relative to loads of four.
_SCALAR_EFFICIENCY = 0.9
# Estimates, to be replaced by what a GPU shows: what a ring of buffers gains over two; a block's geometry, first tile
# and epilogue, in clocks.
_RING_GAIN = 1.03
_BLOCK_CLOCKS = 2000.0
# Warps of an SM without which its schedulers wait for arithmetic.
_ENOUGH_WARPS = 8
# Bytes that an SM's share of DRAM and L2 moves in a clock; what a split product's partial sums take.
_BYTES_PER_CLOCK = 10.0
_REDUCE_CLOCKS = 4000.0

# Bytes a clock that shared memory reads or takes, and an SM's share of the L2.
_SHARED_BYTES_PER_CLOCK = 128.0
_L2_BYTES_PER_CLOCK = 32.0
# Of sm_90: what a tile of 128 x 256 needs of the L2 to keep up with wgmma.
_HOPPER_L2_BYTES_PER_CLOCK = 48.0

_EACH_SLICES = 64  # up to which every count is looked at; beyond it those that just fill the SMs
_MOST_SLICES = 384  # two for each SM of the largest GPUs, rounded up
_MOST_COUNTED = (1 << 31) - (1 << 10)  # kernels/hopper count in 32 bits, and to the end of a tile
_LIMIT = 1 << 31
_MOST_Z = 65535
_FLOAT_BYTES = 4
_MOST_TRANSPOSED_ROWS = 32 * 65535  # blocks of kernels/misc/layout.cu take 32 each
_TRANSPOSED = ("gemm_nn", "conv2d_dgrad")  # whose B does not lie along gemm_k


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
    return tuple(found for found in _fitting(demands, device) if winograd.takes(problem, found))


def can_run(problem: Problem, found: Kernel) -> bool:
    """Tell whether a variant's loads and copies can take a problem of its operation, on a device that it runs on."""
    if found.winograd is not None:
        return winograd.takes(problem, found)
    stands_in = found.entry == found.operation or _is_convolution(problem)
    return problem.vector % found.vector == 0 and found.family != _family_without(problem) and stands_in


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


def _peak_rate(problem: Problem, device: Device) -> float:
    """
    Give the multiply-adds of an SM in a clock by the device's own data sheet; infinity where it is not known.

    By the ratio to float32, whose lanes are known, since a board here may have another clock than the data sheet's.
    A whole number: data sheets round, and of a hundredth less variants that cost the same would change places.
    """
    rates = device.peak_flops_per_second
    if problem.dtype not in rates or "float32" not in rates:
        return math.inf
    return max(1, round(_like(device).float32_lanes * rates[problem.dtype] / rates["float32"]))


def _like(device: Device) -> Architecture:
    """Give the architecture whose rates count: the newest where none is known."""
    return architectures.like(device.compute_capability or (99, 0))


def _rated(found: Kernel) -> str:
    """Name the type whose rate on Tensor Cores a variant has: float16 and bfloat16 have the same."""
    return "tf32" if found.dtype == "tf32" else "float16"


@functools.lru_cache(maxsize=4096)
def _ranked(problem: Problem, device: Device) -> tuple[tuple[float, int, Kernel], ...]:
    costs = [(*_split(problem, variant, device), variant) for variant in fitting(problem, device)]
    return tuple(sorted(costs, key=lambda item: item[0]))


def tiles(problem: Problem, found: Kernel) -> tuple[int, int]:
    """
    Count the tiles of one group and phase along m and n.

    Example:
        >>> problem = Problem("gemm_nt", "float32", 200, 100, 64, vector=4)
        >>> tiles(problem, variants.find("gemm_nt", "float32", tile="128x64x8", vector=4))
        (2, 2)
    """
    problem = winograd.product(problem, found)
    tile, columns = _tile(found), problem.n
    if tile.cluster is not None and problem.tap_channels:
        columns = problem.n // problem.tap_channels * -(-problem.tap_channels // BOX_CHANNELS) * BOX_CHANNELS
    return -(-problem.m // tile.m), -(-columns // tile.n)


def blocks(problem: Problem, found: Kernel) -> int:
    """Count the blocks of a launch whose gemm_k is not split; one that idles beside its cluster's others counts."""
    problem = winograd.product(problem, found)
    rows, columns = tiles(problem, found)
    cluster = _tile(found).cluster or 1
    return -(-rows // cluster) * cluster * columns * problem.groups * problem.phases


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


def least_steps(found: Kernel) -> int:
    """Give the fewest main-loop steps of a slice that is worth its partial sums."""
    tile = _tile(found)
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
    most = min(-(-problem.k // _tile(found).k) // least_steps(found), _MOST_SLICES)
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


def _tile(found: Kernel) -> Tile:
    if found.tile is None:
        raise InvalidArgument("kernel", found.name, "a kernel with a tile")
    return found.tile


@functools.lru_cache(maxsize=16384)
def _best_split(problem: Problem, found: Kernel, device: Device) -> tuple[float, int]:
    return _split(problem, found, device)


def _split(problem: Problem, found: Kernel, device: Device) -> tuple[float, int]:
    """Give the cost in clocks, and the number of slices that it is the least for."""
    if found.winograd is not None:
        return winograd.clocks(problem, found, device, lambda part: _launch_clocks(part, found, device, 1)), 1
    tile, outputs, num_sms = _tile(found), _outputs(problem), device.num_sms or 1
    steps = -(-problem.k // tile.k)

    first = 0.0  # a launch as that of the slices' sums
    if transposed := transposed_bytes(problem, found):
        first = _REDUCE_CLOCKS + 2 * transposed / (num_sms * _BYTES_PER_CLOCK)

    def cost(count: int) -> float:
        clocks = first + _launch_clocks(problem, found, device, count)
        if count > 1:
            clocks += _REDUCE_CLOCKS + 4 * (2 * count + 1) * outputs / (num_sms * _BYTES_PER_CLOCK)
        return clocks

    most = min(
        max(1, steps // least_steps(found)),
        _MOST_SLICES,
        max(1, _MOST_Z // problem.groups),
        max(1, MOST_PARTIAL_BYTES // max(1, 4 * outputs)),
    )
    filling = (level * num_sms // max(1, blocks(problem, found)) for level in range(1, tile.min_blocks + 1))
    counts = {*range(1, min(most, _EACH_SLICES) + 1), *(count for count in filling if 1 <= count <= most)}
    candidates = {-(-steps // -(-steps // count)) for count in counts} if steps else {1}  # no empty slice
    return min((cost(count), count) for count in sorted(candidates))


def _launch_clocks(problem: Problem, found: Kernel, device: Device, count: int) -> float:
    """Give the clocks of one launch of so many slices: those of the busiest SM."""
    tile = _tile(found)
    busiest = max(1, -(-blocks(problem, found) * count // (device.num_sms or 1)))
    resident = min(busiest, tile.min_blocks) * tile.threads / architectures.every().warp_threads
    steps = -(-problem.k // tile.k)
    loop = -(-steps // count) * _step_clocks(problem, found, device) / min(1.0, resident / _ENOUGH_WARPS)
    return busiest * (loop + _BLOCK_CLOCKS)


def _step_clocks(problem: Problem, found: Kernel, device: Device) -> float:
    """Give the clocks of a main-loop step of one block that has an SM for itself."""
    tile = _tile(found)
    if tile.cluster is not None:
        return _hopper_step_clocks(found, tile, tile.cluster, device)
    if tile.warp_m is not None and tile.warp_n is not None:
        return _tensor_step_clocks(found, tile, tile.warp_m + tile.warp_n, device, _peak_rate(problem, device))
    efficiency = _EFFICIENCY.get((tile.thread_m or 0, tile.thread_n or 0), min(_EFFICIENCY.values()))
    if found.vector == 1:
        efficiency *= _SCALAR_EFFICIENCY
    if tile.stages > 2:  # noqa: PLR2004 - more than two buffers are a ring
        efficiency *= _RING_GAIN
    return tile.k * tile.m * tile.n / _like(device).float32_lanes / efficiency


def _hopper_step_clocks(found: Kernel, tile: Tile, cluster: int, device: Device) -> float:
    """Count the clocks of one k-step of a wgmma tile; a warpgroup reads half its rows, all columns; swapped, all."""
    row = tile.k * BYTES_PER_ELEMENT[found.dtype]
    # A board's own rate is no bound here: data sheets give it for less than the boost clock (H100 SXM: at 1830 MHz).
    products = tile.m * tile.n * tile.k / _like(device).wgmma_fma[_rated(found)]
    shared = (2 * tile.m + (2 if tile.swapped else 3) * tile.n) * row / _SHARED_BYTES_PER_CLOCK
    return max(products, shared, (tile.m + tile.n / cluster) * row / _HOPPER_L2_BYTES_PER_CLOCK)


def _tensor_step_clocks(found: Kernel, tile: Tile, read_by_warp: int, device: Device, peak_rate: float) -> float:
    """
    Give the clocks of the pipe that takes longest: tensor cores, shared memory or L2.

    Args:
        found: A kernel of kernels/mma.
        tile: Its tile.
        read_by_warp: Rows and columns of the tile that each warp reads from shared memory.
        device: Tensor cores of one that is not in the table are as those of the last before it.
        peak_rate: Of the device, as `_peak_rate` gives it.
    """
    # A board's own rate counts where it is less: GeForce cards have half when they add up in float32, and a Titan V is
    # rated at 472.
    rate = min(_like(device).mma_fma[_rated(found)], peak_rate)
    row = tile.k * BYTES_PER_ELEMENT[found.dtype]
    loaded = (tile.m + tile.n) * row
    read = tile.threads // architectures.every().warp_threads * read_by_warp * row
    return max(tile.m * tile.n * tile.k / rate, (loaded + read) / _SHARED_BYTES_PER_CLOCK, loaded / _L2_BYTES_PER_CLOCK)


Choose = Callable[[Problem, Device], Kernel]
"""Gives the kernel that runs a product on a device."""


def first_ranked(problem: Problem, device: Device) -> Kernel:
    """Choose the kernel that is ranked first."""
    return ranked(problem, device)[0]
