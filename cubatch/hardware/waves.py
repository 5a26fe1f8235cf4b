"""
Occupancy, wave quantization and the busiest SM of a grid of blocks: pure arithmetic.

Waves count full complements of resident blocks, as the occupancy calculator does. Time follows the busiest SM. Blocks
that share an SM share its pipes, so a pass lasts as long as the SM with the most blocks, resident or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from cubatch.checks import check_whole
from cubatch.hardware import architectures
from cubatch.hardware.architectures import Architecture

_LIMITERS = ("warps", "registers", "shared_memory", "blocks", "barriers")


@attrs.frozen
class Waves:
    """
    The waves of a grid: full complements of resident blocks.

    Attributes:
        num_waves: Waves of the grid; the last may be partial.
        wave_efficiency: Share of block slots that do work, in (0, 1].
        blocks_per_wave: Blocks that are resident on the whole device at a time.
        last_wave_fraction: Blocks of the last wave as a share of a full one, in (0, 1].
    """

    num_waves: int
    wave_efficiency: float
    blocks_per_wave: int
    last_wave_fraction: float


def count_waves(num_blocks: int, *, blocks_per_sm: int, num_sms: int) -> Waves:
    """
    Return the number of waves of a grid, and the share of the block slots that do work.

    A wave is one full complement of resident blocks, `blocks_per_sm * num_sms`. A grid that does not divide into whole
    waves ends with a partial one. Batch size reaches the hardware mostly through the number of blocks, which is why
    throughput climbs in steps. The count assumes that every block costs the same.

    Args:
        num_blocks: Blocks in the grid.
        blocks_per_sm: Blocks resident on one SM at a time; see `occupancy()`.
        num_sms: SMs of the device, after any MIG partitioning.

    Raises:
        InvalidArgument: If any argument is not a whole number of at least 1 (also a ValueError).

    Example:
        One more block costs almost a whole wave:

        >>> count_waves(264, blocks_per_sm=2, num_sms=132).wave_efficiency
        1.0
        >>> tail = count_waves(265, blocks_per_sm=2, num_sms=132)
        >>> tail.num_waves, round(tail.wave_efficiency, 3)
        (2, 0.502)
    """
    num_blocks = check_whole("num_blocks", num_blocks)
    blocks_per_wave = check_whole("blocks_per_sm", blocks_per_sm) * check_whole("num_sms", num_sms)
    num_waves = _ceil_div(num_blocks, blocks_per_wave)
    last_blocks = num_blocks - (num_waves - 1) * blocks_per_wave
    return Waves(num_waves, num_blocks / (num_waves * blocks_per_wave), blocks_per_wave, last_blocks / blocks_per_wave)


def busiest_sm_blocks(num_blocks: int, num_sms: int) -> int:
    """
    Return ceil(num_blocks / num_sms): the blocks that the busiest SM runs from start to end of a grid.

    The time of a pass follows this number, not the number of waves. It explains the published drops in throughput at
    certain batch sizes. Example: on a 2080 Super (48 SMs, tile 128 x 128) 96 boards of 8 x 8 are 48 blocks. With 97
    boards, which are 49 blocks, throughput falls by 29 %. The count assumes that blocks cost the same.

    Example:
        >>> busiest_sm_blocks(48, 48), busiest_sm_blocks(49, 48)
        (1, 2)
    """
    return _ceil_div(check_whole("num_blocks", num_blocks), check_whole("num_sms", num_sms))


def fill(num_blocks: int, num_sms: int) -> float:
    """
    Return the share of all SMs' time for which a grid of blocks keeps them busy, in (0, 1], if blocks cost the same.

    Example:
        >>> fill(48, 48), round(fill(49, 48), 2)
        (1.0, 0.51)
    """
    return num_blocks / (busiest_sm_blocks(num_blocks, num_sms) * num_sms)


def coulom_batch_size(n: int = 1, *, h: int, w: int, c: int, num_sms: int) -> int:
    """
    Return the batch size at which a layer's outputs make n tiles of 128 x 128 per SM.

    Remi Coulom's rule for the convolutions of game networks. One block computes 1 << 14 = 128 * 128 outputs, so at this
    size every SM gets n whole blocks. The rule is exact if the filters are a multiple of the tile's width, and the
    layer has as many outputs as inputs.

    Args:
        n: Tiles per SM.
        h, w, c: Height, width and channels of the layer's input.
        num_sms: SMs of the device.

    Returns:
        int: n * (1 << 14) * num_sms / (h * w * c), rounded down; 0 if not even one sample fits in n tiles per SM.

    Raises:
        InvalidArgument: If an argument is not a whole number of at least 1.

    Example:
        Go boards of 19 x 19 with 128 channels on a V100:

        >>> [coulom_batch_size(n, h=19, w=19, c=128, num_sms=80) for n in (1, 2, 3, 4)]
        [28, 56, 85, 113]
    """
    outputs_per_sample = check_whole("h", h) * check_whole("w", w) * check_whole("c", c)
    return check_whole("n", n) * (1 << 14) * check_whole("num_sms", num_sms) // outputs_per_sample


@attrs.frozen
class Occupancy:
    """
    The blocks of a kernel that one SM can hold, and the resources that limit them.

    Attributes:
        blocks_per_sm: Blocks resident on one SM; 0 means that the kernel cannot be launched.
        occupancy: Resident warps as a share of the most that an SM can hold, in [0, 1].
        limiters: Limiting resources, of "warps", "registers", "shared_memory", "blocks", "barriers".
        limits: Blocks that each resource allows by itself; without unused resources.
    """

    blocks_per_sm: int
    occupancy: float
    limiters: tuple[str, ...]
    limits: dict[str, int]


def occupancy(
    *,
    compute_capability: Sequence[int],
    threads_per_block: int,
    registers_per_thread: int,
    shared_bytes_per_block: int = 0,
    shared_carveout_bytes: int | None = None,
    barriers_per_block: int = 1,
) -> Occupancy:
    """
    Return the blocks of a kernel that one SM can hold at a time: the theoretical occupancy.

    Two effects are left out, since kernels of cubatch do not have them or NVIDIA's arithmetic leaves them out too. On
    sm_52 and sm_61, global loads that are cached in L1 halve some resources. The blocks of a cluster must be resident
    together.

    Args:
        compute_capability: (major, minor) of the device, 3.7 to 12.1.
        threads_per_block: 1 to 1024.
        registers_per_thread: 0 to 255, as the compiler reports them.
        shared_bytes_per_block: Static and dynamic shared memory together; above 48 KiB the kernel must opt in.
        shared_carveout_bytes: Preferred size of the SM's shared memory; the next larger size that holds one block is
            used. None is the largest. sm_5x and sm_6x have one size.
        barriers_per_block: Named barriers that the kernel uses, 0 to 16; they are counted from sm_90 on.

    Raises:
        InvalidArgument: If an argument is out of its range.
        UnknownName: If the limits of the compute capability are not known.

    Example:
        >>> volta = occupancy(
        ...     compute_capability=(7, 0), threads_per_block=256,
        ...     registers_per_thread=128, shared_bytes_per_block=16896,
        ... )
        >>> volta.blocks_per_sm, volta.occupancy, volta.limiters
        (2, 0.25, ('registers',))

    A test compares the arithmetic with NVIDIA's cuda_occupancy.h (CUDA 13.5).
    """
    sm, every = architectures.of(compute_capability), architectures.every()
    threads = check_whole("threads_per_block", threads_per_block, most=every.threads_per_block)
    registers = check_whole("registers_per_thread", registers_per_thread, least=0, most=every.registers_per_thread)
    shared = check_whole("shared_bytes_per_block", shared_bytes_per_block, least=0)
    warps = _ceil_div(threads, every.warp_threads)
    limits = {"warps": sm.warps_per_sm // warps, "blocks": sm.blocks_per_sm}
    if registers:
        limits["registers"] = _blocks_by_registers(sm, warps, registers)
    if shared or sm.reserved_shared_bytes:
        limits["shared_memory"] = _blocks_by_shared(sm, shared, shared_carveout_bytes)
    barriers = check_whole("barriers_per_block", barriers_per_block, least=0, most=every.barriers_per_block)
    if barriers and sm.barriers_per_sm is not None:
        limits["barriers"] = sm.barriers_per_sm // barriers
    blocks = min(limits.values())
    limiters = tuple(name for name in _LIMITERS if limits.get(name) == blocks)
    return Occupancy(blocks, blocks * warps / sm.warps_per_sm, limiters, limits)


def carveout_percent(
    *, compute_capability: Sequence[int], blocks_per_sm: int, shared_bytes_per_block: int
) -> int:  # fmt: skip
    """
    Return the smallest carve-out, in percent of the SM's shared memory and at most 100, that holds a number of blocks.

    The rest of the memory is L1 cache. Without a preferred carve-out the driver chooses one by its own rules, and
    `occupancy` assumes the largest. Devices with a fixed size ignore it.

    Args:
        compute_capability: (major, minor) of the device.
        blocks_per_sm: Number of blocks, such as `blocks_per_sm` of `occupancy`.
        shared_bytes_per_block: Static and dynamic shared memory together.

    Example:
        >>> carveout_percent(compute_capability=(8, 0), blocks_per_sm=2, shared_bytes_per_block=48 << 10)
        60
    """
    sm = architectures.of(compute_capability)
    blocks = check_whole("blocks_per_sm", blocks_per_sm, least=0)
    shared = check_whole("shared_bytes_per_block", shared_bytes_per_block, least=0)
    return min(100, _ceil_div(100 * blocks * _shared_of_block(sm, shared), sm.shared_bytes_per_sm))


def _blocks_by_registers(sm: Architecture, warps: int, registers: int) -> int:
    every = architectures.every()
    per_warp = _round_up(registers * every.warp_threads, every.register_unit)
    if _round_up(warps, every.partitions_at_launch) * per_warp > sm.registers_per_block:
        return 0
    return sm.registers_per_sm // sm.partitions // per_warp * sm.partitions // warps


def _blocks_by_shared(sm: Architecture, shared: int, carveout: int | None) -> int:
    per_block = _shared_of_block(sm, shared)
    if per_block - sm.reserved_shared_bytes > sm.shared_bytes_per_block:
        return 0
    if carveout is None:
        return sm.shared_bytes_per_sm // per_block
    preferred = check_whole("shared_carveout_bytes", carveout, least=0, most=sm.shared_bytes_per_sm)
    # The driver sets the SM to the next size that exists and holds one block.
    return min(size for size in sm.shared_carveouts if size >= max(preferred, per_block)) // per_block


def _shared_of_block(sm: Architecture, shared: int) -> int:
    return _round_up(shared + sm.reserved_shared_bytes, sm.shared_unit_bytes)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _round_up(value: int, unit: int) -> int:
    return _ceil_div(value, unit) * unit
