"""
How a grid of blocks falls on the SMs: occupancy, waves, the busiest SM. Pure arithmetic.

Two pictures live here.  Waves count full complements of resident blocks, the picture of the
occupancy calculator.  Time follows the busiest SM: blocks that share an SM share its pipes, so a
pass lasts as long as the SM with the most blocks, however many of them are resident at a time.
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
    How a grid fills the device, counted in full complements of resident blocks.

    Attributes:
        num_waves: Waves the grid needs; the last may be partial.
        wave_efficiency: Share of block slots that did work, in (0, 1].
        blocks_per_wave: Blocks that are resident on the whole device at a time.
        last_wave_fraction: How full the last wave is, in (0, 1].
    """

    num_waves: int
    wave_efficiency: float
    blocks_per_wave: int
    last_wave_fraction: float


def count_waves(num_blocks: int, *, blocks_per_sm: int, num_sms: int) -> Waves:
    """
    Count the waves a grid needs, and how well it fills them.

    A wave is one full complement of resident blocks, `blocks_per_sm * num_sms`.
    A grid that does not divide into whole waves ends with a tail: the last wave
    does less work than the others.  Batch size reaches the hardware mostly through
    the number of blocks, which is why throughput climbs in steps.

    Assumes that every block costs the same.

    Args:
        num_blocks: Blocks in the grid.
        blocks_per_sm: Blocks resident on one SM at a time; see `occupancy()`.
        num_sms: SMs the device offers, after any MIG partitioning.

    Returns:
        Waves: `num_waves` (the last may be partial), `wave_efficiency`, the share of
        block slots that did work, in (0, 1], `blocks_per_wave` and `last_wave_fraction`.

    Raises:
        InvalidArgument: If any argument is not a whole number of at least 1 (also a ValueError).

    Example:
        One block too many costs almost a whole wave:

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
    Count the blocks that the busiest SM runs from the start of a grid to its end.

    The time of a pass follows this number, not the number of waves: it explains every published
    cliff in throughput against batch size (2080 Super, 48 SMs, tile 128 x 128: 96 boards of 8 x 8
    are 48 blocks, 97 are 49, and throughput falls by 29 %).  Assumes that blocks cost the same.

    Args:
        num_blocks: Blocks in the grid.
        num_sms: SMs the device offers.

    Returns:
        int: ceil(num_blocks / num_sms).

    Raises:
        InvalidArgument: If an argument is not a whole number of at least 1.

    Example:
        >>> busiest_sm_blocks(48, 48), busiest_sm_blocks(49, 48)
        (1, 2)
    """
    return _ceil_div(check_whole("num_blocks", num_blocks), check_whole("num_sms", num_sms))


def fill(num_blocks: int, num_sms: int) -> float:
    """
    Return the share of the device's SM time that a grid uses, if every block costs the same.

    Args:
        num_blocks: Blocks in the grid.
        num_sms: SMs the device offers.

    Returns:
        float: num_blocks / (busiest_sm_blocks * num_sms), in (0, 1]; 1 on a crest.

    Raises:
        InvalidArgument: If an argument is not a whole number of at least 1.

    Example:
        >>> fill(48, 48), round(fill(49, 48), 2)
        (1.0, 0.51)
    """
    return num_blocks / (busiest_sm_blocks(num_blocks, num_sms) * num_sms)


def coulom_batch_size(n: int = 1, *, h: int, w: int, c: int, num_sms: int) -> int:
    """
    Return the batch size at which a layer's outputs make n tiles of 128 x 128 per SM.

    Remi Coulom's rule for the convolutions of game networks: 1 << 14 = 128 * 128 outputs are
    what one block computes, so at this size every SM gets n whole blocks and none gets more.
    It is exact where the filters are a multiple of the tile's width and outputs are as many as inputs.

    Args:
        n: Tiles per SM.
        h: Height of the layer's input.
        w: Width of the layer's input.
        c: Channels of the layer's input.
        num_sms: SMs the device offers.

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
    How many blocks of a kernel one SM holds, and what forbids one more.

    Attributes:
        blocks_per_sm: Blocks resident on one SM; 0 means that the kernel cannot be launched.
        occupancy: Resident warps over the most an SM can hold, in [0, 1].
        limiters: What forbids one block more: of "warps", "registers", "shared_memory", "blocks", "barriers".
        limits: Blocks that each resource would allow by itself; without a resource that is not used.
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
    Count the blocks of a kernel that one SM can hold at a time.

    Resident blocks hide each other's waiting; a kernel that fits only once, or not at all, is
    known before it runs.  It is the theoretical occupancy: what really resides may be less.

    Leaves out what kernels here do not use: the halved resources of sm_52 and sm_61 where ordinary
    global loads are cached in L1 (loads through the read-only cache are not affected), and, as NVIDIA's
    arithmetic does, that the blocks of a cluster must find room together.

    Args:
        compute_capability: (major, minor) of the device, 3.7 to 12.1; a list will do.
        threads_per_block: 1 to 1024.
        registers_per_thread: As the compiler reports them, 0 to 255.
        shared_bytes_per_block: Static and dynamic together; above 48 KiB means that the kernel opted in.
        shared_carveout_bytes: Size wished for the SM's shared memory; the next that exists and holds
            one block is used. None: the largest. sm_5x and sm_6x have one size.
        barriers_per_block: Named barriers that the kernel uses, 0 to 16; they are counted from sm_90 on.

    Returns:
        Occupancy: `blocks_per_sm`, `occupancy`, `limiters` and each resource's own limit.

    Raises:
        InvalidArgument: If an argument is out of its range.
        UnknownName: If the limits of the compute capability are not known.

    Example:
        >>> found = occupancy(
        ...     compute_capability=(7, 0), threads_per_block=256,
        ...     registers_per_thread=128, shared_bytes_per_block=16896,
        ... )
        >>> found.blocks_per_sm, found.occupancy, found.limiters
        (2, 0.25, ('registers',))

    The arithmetic is that of NVIDIA's cuda_occupancy.h (CUDA 13.5), with which a test compares it.
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
    Return which carve-out to wish for so that an SM's shared memory holds so many blocks.

    The least that does: what is left of it is L1 cache.  Without a wish the driver chooses a size by rules of its own,
    and `occupancy` assumes the largest.

    Args:
        compute_capability: (major, minor) of the device.
        blocks_per_sm: As `occupancy` gives them.
        shared_bytes_per_block: Static and dynamic together.

    Returns:
        int: Percent of the SM's shared memory, as the driver takes the wish; devices of one size ignore it.

    Raises:
        InvalidArgument: If an argument is out of its range.
        UnknownName: If the limits of the compute capability are not known.

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
    wanted = check_whole("shared_carveout_bytes", carveout, least=0, most=sm.shared_bytes_per_sm)
    # The carve-out is a wish: the driver sets the SM to the next size that exists and holds one block.
    return min(size for size in sm.shared_carveouts if size >= max(wanted, per_block)) // per_block


def _shared_of_block(sm: Architecture, shared: int) -> int:
    return _round_up(shared + sm.reserved_shared_bytes, sm.shared_unit_bytes)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _round_up(value: int, unit: int) -> int:
    return _ceil_div(value, unit) * unit
