"""
What a launch of a variant should take: the clocks of the SM with the most blocks.

Blocks that share an SM share its pipes, so a launch lasts as long as the SM with the most blocks, times what a block's
tile costs.  Its constants stand here in one place.  They come from counting the instructions of the compiled main
loops and from data sheets, not from a GPU's clock, but for what attention reaches of mma.sync.
"""

from __future__ import annotations

import math

from cubatch.errors import InvalidArgument
from cubatch.hardware import architectures
from cubatch.hardware.architectures import Architecture
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.kernels import winograd_plan
from cubatch.kernels.problem import Problem
from cubatch.kernels.variant import Kernel, Tile

BOX_CHANNELS = 64
"""Channels of a box of a tensor map whose rows are not along gemm_k: kernels/hopper/operands.cuh."""

# Share of the issued instructions that are multiply-adds, by a thread's tile, counted in the compiled main loops.
_EFFICIENCY = {(16, 8): 0.92, (8, 8): 0.89, (8, 4): 0.82}
# The same for loads of single elements, relative to loads of four.
_SCALAR_EFFICIENCY = 0.9
# Estimates, to be replaced by what a GPU shows: what a ring of buffers gains over two; a block's geometry, first tile
# and epilogue, in clocks.
_RING_GAIN = 1.03
_BLOCK_CLOCKS = 2000.0
# The share of multiply-adds in attention's own kernels, counted from sm_70 to sm_90: of a k-step 256 of 384 to 418
# instructions; of a step over keys, with heads of 64 channels, 1024 of 2209 to 2480, inner loops and softmax together.
HEADS_EFFICIENCY = 0.63
ATTEND_EFFICIENCY = 0.44
# Of the rate of mma.sync: about what attention in float16 reached on an H200, its projections taken off by the rate of
# such products there, at 197 tokens of 768 channels and at 1024 of 512 (benchmarks/results/h200-sxm, commit 797c6f5).
ATTENTION_MMA_EFFICIENCY = 0.3
# Warps of an SM without which its schedulers wait for arithmetic.
_ENOUGH_WARPS = 8
NEWEST = 99, 0
"""Compute capability of a device of which it is not known: of whatever is newest."""
# Bytes a clock that shared memory reads or takes, and an SM's share of the L2.
_SHARED_BYTES_PER_CLOCK = 128.0
_L2_BYTES_PER_CLOCK = 32.0
_WGMMA_ROWS = 64
# Of sm_90: what a tile of 128 x 256 needs of the L2 to keep up with wgmma.
_HOPPER_L2_BYTES_PER_CLOCK = 48.0


def tiles(problem: Problem, found: Kernel) -> tuple[int, int]:
    """
    Count the tiles of one group and phase along m and n.

    Example:
        >>> from cubatch.kernels.variant import find
        >>> problem = Problem("gemm_nt", "float32", 200, 100, 64, vector=4)
        >>> tiles(problem, find("gemm_nt", "float32", tile="128x64x8", vector=4))
        (2, 2)
    """
    problem = winograd_plan.product(problem, found)
    tile, columns = tile_of(found), problem.n
    if tile.cluster is not None and problem.tap_channels:
        columns = problem.n // problem.tap_channels * -(-problem.tap_channels // BOX_CHANNELS) * BOX_CHANNELS
    return -(-problem.m // tile.m), -(-columns // tile.n)


def blocks(problem: Problem, found: Kernel) -> int:
    """Count the blocks of a launch whose gemm_k is not split; one that idles beside its cluster's others counts."""
    problem = winograd_plan.product(problem, found)
    rows, columns = tiles(problem, found)
    cluster = tile_of(found).cluster or 1
    return -(-rows // cluster) * cluster * columns * problem.groups * problem.phases


def tile_of(found: Kernel) -> Tile:
    """Give a variant's tile; raise InvalidArgument for a kernel that has none."""
    if found.tile is None:
        raise InvalidArgument("kernel", found.name, "a kernel with a tile")
    return found.tile


def launch_clocks(problem: Problem, found: Kernel, device: Device, count: int) -> float:
    """Give the clocks of one launch of so many slices: those of the busiest SM."""
    tile = tile_of(found)
    busiest = max(1, -(-blocks(problem, found) * count // (device.num_sms or 1)))
    resident = min(busiest, tile.min_blocks) * tile.threads / architectures.every().warp_threads
    steps = -(-problem.k // tile.k)
    loop = -(-steps // count) * step_clocks(problem, found, device) / min(1.0, resident / _ENOUGH_WARPS)
    return busiest * (loop + _BLOCK_CLOCKS)


def lanes_clocks(num_blocks: int, products: int, efficiency: float, device: Device) -> float:
    """Give the clocks of the SM with the most blocks, each of which has so many multiply-adds on CUDA cores."""
    return _busiest_clocks(num_blocks, products / _like(device).float32_lanes / efficiency, device)


def tensor_clocks(num_blocks: int, products: int, device: Device) -> float:
    """Give the same of attention's kernels on tensor cores, in 16 bits."""
    return _busiest_clocks(num_blocks, products / _like(device).mma_fma["float16"] / ATTENTION_MMA_EFFICIENCY, device)


def _busiest_clocks(num_blocks: int, clocks: float, device: Device) -> float:
    return -(-num_blocks // (device.num_sms or 1)) * (clocks + _BLOCK_CLOCKS)


def step_clocks(problem: Problem, found: Kernel, device: Device) -> float:
    """Give the clocks of a main-loop step of one block that has an SM for itself."""
    tile = tile_of(found)
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
    """Count the clocks of one k-step of a wgmma tile; each 64 of its rows are read with all columns; swapped, all."""
    row = tile.k * BYTES_PER_ELEMENT[found.dtype]
    # A board's own rate is no bound here: data sheets give it for less than the boost clock (H100 SXM: at 1830 MHz).
    products = tile.m * tile.n * tile.k / _like(device).wgmma_fma[_rated(found)]
    reads_of_b = 1 if tile.swapped else tile.m // _WGMMA_ROWS
    shared = (2 * tile.m + (1 + reads_of_b) * tile.n) * row / _SHARED_BYTES_PER_CLOCK
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
    return architectures.like(device.compute_capability or NEWEST)


def _rated(found: Kernel) -> str:
    """Name the type whose rate on Tensor Cores a variant has: float16 and bfloat16 have the same."""
    return "tf32" if found.dtype == "tf32" else "float16"
