"""
Which variants can run a matrix product or convolution, ranked by what they should cost.

The model is the busiest SM's: blocks that share an SM share its pipes, so a launch lasts as long as the
SM with the most blocks, times what a block's tile costs.  Its constants stand below in one place.  They
come from counting the instructions of the compiled main loops, not from a GPU's clock: the order they
give is a first choice, which a measured one replaces (`Context.chooser`).
"""

from __future__ import annotations

import functools

import attrs

from cubatch import kernel
from cubatch.errors import InvalidArgument
from cubatch.hardware import Device
from cubatch.kernel import Kernel, Tile

LEAST_SLICE = 32
"""Main-loop steps below which a slice of gemm_k costs more than it gains."""

MOST_PARTIAL_BYTES = 1 << 26
"""Partial sums of a split product take at most this much scratch memory: the L2 cache of a large GPU."""

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

_HALF_RATE = frozenset({(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)})  # 64 float32 lanes in an SM; all others have 128
_WARP = 32
_MOST_SLICES = 64
_MOST_Z = 65535


@attrs.frozen
class Problem:
    """
    One launch of a tiled kernel, as a matrix product.

    Attributes:
        operation: "conv2d_fprop", "gemm_nt", ...
        dtype: Storage of the elements.
        m, n, k: Extents of the product, per group and phase; of phases the largest m and the mean k.
        groups: Groups of channels.
        phases: Phases of a strided gradient.
        vector: Widest load that extents and addresses allow, in elements.
    """

    operation: str
    dtype: str
    m: int
    n: int
    k: int
    groups: int = 1
    phases: int = 1
    vector: int = 1


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
    return list(_ranked(problem, device.num_sms, device.compute_capability, str(device)))


def fitting(problem: Problem, device: Device) -> tuple[Kernel, ...]:
    """List the variants that can run a problem on a device, in no order; else as `ranked`."""
    return _fitting(
        problem.operation, problem.dtype, problem.vector, device.num_sms, device.compute_capability, str(device)
    )


@functools.lru_cache(maxsize=4096)
def _fitting(
    operation: str, dtype: str, vector: int, num_sms: int | None, capability: tuple[int, int] | None, name: str
) -> tuple[Kernel, ...]:
    if num_sms is None or capability is None:
        raise InvalidArgument("device", name, "a GPU whose num_sms and compute_capability are known")
    arch = 10 * capability[0] + capability[1]
    tiled = [found for found in kernel.variants(operation, dtype, arch) if found.tile is not None]
    found = tuple(variant for variant in tiled if vector % variant.vector == 0)
    if not found:
        wanted = f"one that a tiled kernel of {operation} in {dtype} is compiled for"
        raise InvalidArgument("device", f"{name} (sm_{arch})", wanted)
    return found


@functools.lru_cache(maxsize=4096)
def _ranked(problem: Problem, num_sms: int | None, capability: tuple[int, int] | None, name: str) -> tuple[Kernel, ...]:
    found = _fitting(problem.operation, problem.dtype, problem.vector, num_sms, capability, name)
    lanes = 64 if capability in _HALF_RATE else 128
    costs = {variant: _best_split(problem, variant, num_sms or 1, lanes)[0] for variant in found}
    return tuple(sorted(found, key=costs.__getitem__))


def tiles(problem: Problem, found: Kernel) -> tuple[int, int]:
    """
    Count the tiles of one group and phase along m and n.

    Example:
        >>> problem = Problem("gemm_nt", "float32", 200, 100, 64, vector=4)
        >>> tiles(problem, kernel.find("gemm_nt", "float32", tile="128x64x8", vector=4))
        (2, 2)
    """
    tile = _tile(found)
    return -(-problem.m // tile.m), -(-problem.n // tile.n)


def blocks(problem: Problem, found: Kernel) -> int:
    """Count the blocks of a launch whose gemm_k is not split."""
    rows, columns = tiles(problem, found)
    return rows * columns * problem.groups * problem.phases


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
        >>> slices(wgrad, kernel.find("conv2d_wgrad", "float32", tile="128x128x8", vector=4), v100) > 1
        True
    """
    lanes = 64 if device.compute_capability in _HALF_RATE else 128
    return _best_split(problem, found, device.num_sms or 1, lanes)[1]


def most_partial_bytes(problem: Problem, found: Kernel) -> int:
    """
    Bound the bytes of partial sums on any device: never less for a larger batch.

    Example:
        >>> wgrad = Problem("conv2d_wgrad", "float32", 64, 576, 3136, vector=4)
        >>> found = kernel.find("conv2d_wgrad", "float32", tile="128x128x8", vector=4)
        >>> most_partial_bytes(wgrad, found) == 4 * 64 * 576 * (3136 // 8 // LEAST_SLICE)
        True
    """
    most = min(-(-problem.k // _tile(found).k) // LEAST_SLICE, _MOST_SLICES)
    return min(4 * most * _outputs(problem), MOST_PARTIAL_BYTES) if most > 1 else 0


def _outputs(problem: Problem) -> int:
    return problem.m * problem.n * problem.groups * problem.phases


def _tile(found: Kernel) -> Tile:
    if found.tile is None:
        raise InvalidArgument("kernel", found.name, "a kernel with a tile")
    return found.tile


@functools.lru_cache(maxsize=16384)
def _best_split(problem: Problem, found: Kernel, num_sms: int, lanes: int) -> tuple[float, int]:
    """Give the cost in clocks, and the number of slices that it is the least for."""
    steps = -(-problem.k // _tile(found).k)
    most = min(
        max(1, steps // LEAST_SLICE),
        _MOST_SLICES,
        max(1, _MOST_Z // problem.groups),
        max(1, MOST_PARTIAL_BYTES // max(1, 4 * _outputs(problem))),
    )
    candidates = {-(-steps // -(-steps // count)) for count in range(1, most + 1)} if steps else {1}  # no empty slice
    return min((_cost(problem, found, num_sms, lanes, count), count) for count in sorted(candidates))


def _cost(problem: Problem, found: Kernel, num_sms: int, lanes: int, count: int) -> float:
    tile = _tile(found)
    steps = -(-problem.k // tile.k)
    busiest = max(1, -(-blocks(problem, found) * count // num_sms))
    efficiency = _EFFICIENCY.get((tile.thread_m, tile.thread_n), min(_EFFICIENCY.values()))
    if found.vector == 1:
        efficiency *= _SCALAR_EFFICIENCY
    if tile.stages > 2:  # noqa: PLR2004 - more than two buffers are a ring
        efficiency *= _RING_GAIN
    resident = min(busiest, tile.min_blocks) * tile.threads / _WARP
    efficiency *= min(1.0, resident / _ENOUGH_WARPS)
    loop = -(-steps // count) * tile.k * tile.m * tile.n / lanes / efficiency
    clocks = busiest * (loop + _BLOCK_CLOCKS)
    if count > 1:
        clocks += _REDUCE_CLOCKS + 4 * (2 * count + 1) * _outputs(problem) / (num_sms * _BYTES_PER_CLOCK)
    return clocks
