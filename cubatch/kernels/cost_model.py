"""
Cost model of a launch of a variant: clocks of the SM with the most blocks.

Blocks that share an SM share its pipes.  So a launch takes as long as the SM with the most blocks, times the cost of a
block's tile.  The constants come from counting the instructions of compiled main loops and from data sheets.  Only
attention's efficiency on mma.sync was measured.
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

# Share of multiply-adds in the issued instructions by a thread's tile, counted in the compiled main loops.
_EFFICIENCY = {(16, 8): 0.92, (8, 8): 0.89, (8, 4): 0.82}
# Factor for loads of single elements instead of four.
_SCALAR_EFFICIENCY = 0.9
# Estimates, not measured: gain of a ring of buffers over two; clocks of a block's geometry, first tile and epilogue.
_RING_GAIN = 1.03
_BLOCK_CLOCKS = 2000.0
# Share of multiply-adds in attention's kernels, counted from sm_70 to sm_90.  A k-step has 256 in 384 to 418
# instructions. A step over keys, with heads of 64 channels, has 1024 in 2209 to 2480, softmax included.
HEADS_EFFICIENCY = 0.63
ATTEND_EFFICIENCY = 0.44
# Share of the mma.sync rate, from attention in float16 on an H200 less its projections at the rate of such products:
# 197 tokens of 768 channels and 1024 of 512 (benchmarks/results/h200-sxm, commit 797c6f5).
ATTENTION_MMA_EFFICIENCY = 0.3
_ENOUGH_WARPS = 8  # per SM; with fewer its schedulers wait for arithmetic
NEWEST = 99, 0  # assumed compute capability if unknown
# Bytes per clock of shared memory, and of an SM's share of the L2.
_SHARED_BYTES_PER_CLOCK = 128.0
_L2_BYTES_PER_CLOCK = 32.0
_WGMMA_ROWS = 64
# L2 rate of an SM of sm_90 that a tile of 128 x 256 needs to keep up with wgmma.
_HOPPER_L2_BYTES_PER_CLOCK = 48.0


def tiles(problem: Problem, kernel: Kernel) -> tuple[int, int]:
    """Return the number of a variant's tiles along m and along n, for one group and phase of a problem."""
    problem = winograd_plan.product(problem, kernel)
    tile, columns = tile_of(kernel), problem.n
    if tile.cluster is not None and problem.tap_channels:
        columns = problem.n // problem.tap_channels * -(-problem.tap_channels // BOX_CHANNELS) * BOX_CHANNELS
    return -(-problem.m // tile.m), -(-columns // tile.n)


def blocks(problem: Problem, kernel: Kernel) -> int:
    """Return the number of blocks of a launch without split-K, idle blocks of clusters included."""
    problem = winograd_plan.product(problem, kernel)
    rows, columns = tiles(problem, kernel)
    cluster = tile_of(kernel).cluster or 1
    return -(-rows // cluster) * cluster * columns * problem.groups * problem.phases


def tile_of(kernel: Kernel) -> Tile:
    """Return the tile of a kernel variant; raise InvalidArgument for a kernel without tiles."""
    if kernel.tile is None:
        raise InvalidArgument("kernel", kernel.name, "a kernel with a tile")
    return kernel.tile


def launch_clocks(problem: Problem, kernel: Kernel, device: Device, count: int) -> float:
    """Return the predicted clock cycles of the SM with the most blocks, if gemm_k is divided into `count` slices."""
    tile = tile_of(kernel)
    busiest = max(1, -(-blocks(problem, kernel) * count // (device.num_sms or 1)))
    resident = min(busiest, tile.min_blocks) * tile.threads / architectures.every().warp_threads
    steps = -(-problem.k // tile.k)
    loop = -(-steps // count) * step_clocks(problem, kernel, device) / min(1.0, resident / _ENOUGH_WARPS)
    return busiest * (loop + _BLOCK_CLOCKS)


def lanes_clocks(num_blocks: int, products: int, efficiency: float, device: Device) -> float:
    """
    Return the predicted clock cycles of the SM with the most blocks, for products on CUDA cores.

    A block has `products` multiply-adds, which are the share `efficiency` of the issued instructions.
    """
    return _busiest_clocks(num_blocks, products / _like(device).float32_lanes / efficiency, device)


def tensor_clocks(num_blocks: int, products: int, device: Device) -> float:
    """Return the predicted clocks of the SM with the most blocks of attention, each with `products` multiply-adds."""
    return _busiest_clocks(num_blocks, products / _like(device).mma_fma["float16"] / ATTENTION_MMA_EFFICIENCY, device)


def _busiest_clocks(num_blocks: int, clocks: float, device: Device) -> float:
    return -(-num_blocks // (device.num_sms or 1)) * (clocks + _BLOCK_CLOCKS)


def step_clocks(problem: Problem, kernel: Kernel, device: Device) -> float:
    """Return the predicted clock cycles of one step of the main loop of a block that is alone on its SM."""
    tile = tile_of(kernel)
    if tile.cluster is not None:
        return _hopper_step_clocks(kernel, tile, tile.cluster, device)
    if tile.warp_m is not None and tile.warp_n is not None:
        return _tensor_step_clocks(kernel, tile, tile.warp_m + tile.warp_n, device, _peak_rate(problem, device))
    efficiency = _EFFICIENCY.get((tile.thread_m or 0, tile.thread_n or 0), min(_EFFICIENCY.values()))
    if kernel.vector == 1:
        efficiency *= _SCALAR_EFFICIENCY
    if tile.stages > 2:  # noqa: PLR2004 - more than two buffers are a ring
        efficiency *= _RING_GAIN
    return tile.k * tile.m * tile.n / _like(device).float32_lanes / efficiency


def _hopper_step_clocks(kernel: Kernel, tile: Tile, cluster: int, device: Device) -> float:
    row = tile.k * BYTES_PER_ELEMENT[kernel.dtype]
    # The data sheet's rate is no bound here: it is for less than the boost clock (H100 SXM: 1830 MHz).
    products = tile.m * tile.n * tile.k / _like(device).wgmma_fma[_rated(kernel)]
    reads_of_b = 1 if tile.swapped else tile.m // _WGMMA_ROWS
    shared = (2 * tile.m + (1 + reads_of_b) * tile.n) * row / _SHARED_BYTES_PER_CLOCK
    return max(products, shared, (tile.m + tile.n / cluster) * row / _HOPPER_L2_BYTES_PER_CLOCK)


def _tensor_step_clocks(kernel: Kernel, tile: Tile, read_by_warp: int, device: Device, peak_rate: float) -> float:
    """
    Return the predicted clock cycles of a main loop step: the most of those of tensor cores, shared memory and L2.

    A warp reads `read_by_warp` rows and columns from shared memory. An unknown architecture counts as the one before
    it.
    """
    # The board's own rate may be lower: GeForce cards have half with float32 sums, and a Titan V is rated at 472.
    rate = min(_like(device).mma_fma[_rated(kernel)], peak_rate)
    row = tile.k * BYTES_PER_ELEMENT[kernel.dtype]
    loaded = (tile.m + tile.n) * row
    read = tile.threads // architectures.every().warp_threads * read_by_warp * row
    return max(tile.m * tile.n * tile.k / rate, (loaded + read) / _SHARED_BYTES_PER_CLOCK, loaded / _L2_BYTES_PER_CLOCK)


def _peak_rate(problem: Problem, device: Device) -> float:
    """
    Return the multiply-adds of an SM per clock cycle by the device's own data sheet; infinity if unknown.

    The rate relative to float32 is multiplied by the number of float32 lanes: a board may not run at the data sheet's
    clock. The result is a whole number: data sheets round, and 1 % less would reorder variants of equal cost.
    """
    rates = device.peak_flops_per_second
    if problem.dtype not in rates or "float32" not in rates:
        return math.inf
    return max(1, round(_like(device).float32_lanes * rates[problem.dtype] / rates["float32"]))


def _like(device: Device) -> Architecture:
    """Return the known architecture whose rates apply to a device; the newest if its compute capability is unknown."""
    return architectures.like(device.compute_capability or NEWEST)


def _rated(kernel: Kernel) -> str:
    """Return the dtype whose tensor core rate applies to a variant: "tf32", or "float16" for all others."""
    return "tf32" if kernel.dtype == "tf32" else "float16"
