"""PyTorch's caching allocator, block by block."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from cubatch.memory.caching_allocator import CachingAllocator, reserved_bytes

KIB, MIB = 2**10, 2**20


def blocks_of(block):
    """Give the sizes of the blocks of a segment, and which of them are free, from its first block on."""
    while block.before is not None:
        block = block.before
    sizes = []
    while block is not None:
        sizes.append((block.size, block.is_free))
        block = block.after
    return sizes


def test_blocks_lie_as_a_published_snapshot_has_them():
    """
    `x @ W + b` with W [1000, 10], b [10] and x [1000], as `torch.cuda.memory_snapshot()` showed it to a user.

    https://discuss.pytorch.org/t/torch-cuda-memory-snapshot-shows-an-unexpected-8519680b-memory-allocation-during-matrix-multiplication/178671
    """
    allocator = CachingAllocator()
    first = allocator.allocate(40_000)
    for size in (40, 4000):
        allocator.allocate(size)
    workspace = allocator.allocate(8_519_680)
    product = allocator.allocate(40)
    allocator.allocate(40)
    allocator.free(product)
    assert blocks_of(first) == [
        (40_448, False), (512, False), (4096, False), (512, True), (512, False), (2_051_072, True),
    ]  # fmt: skip
    assert blocks_of(workspace) == [(8_519_680, False), (12_451_840, True)]
    assert allocator.reserved_bytes == 2_097_152 + 20_971_520


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2 * MIB),
        ([MIB] * 2, 2 * MIB),
        ([MIB] * 2 + [1], 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([10 * MIB - 512] * 2, 20 * MIB),
        ([10 * MIB], 10 * MIB),
        ([10 * MIB + 1], 12 * MIB),
        ([19 * MIB + 1, MIB + 1], 40 * MIB),  # of 20 MiB of its own no part of 1 MiB or less is split off
        ([9 * MIB, 9 * MIB, 2 * MIB], 20 * MIB),
        ([9 * MIB, 9 * MIB, 3 * MIB], 40 * MIB),
        ([0], 0),
    ],
)
def test_segments_are_of_the_documented_sizes(sizes, reserved):
    """2 MiB up to 1 MiB, 20 MiB below 10 MiB, then a segment of its own in steps of 2 MiB."""
    assert reserved_bytes((size, begin, math.inf) for begin, size in enumerate(sizes)) == reserved


def test_a_free_block_is_used_again_and_the_smallest_that_is_large_enough():
    """After 30, 40 and 30 MiB with the first two freed, 25 MiB go into the 30, and 40 into the 40."""
    lives = [(30 * MIB, 0, 5), (40 * MIB, 1, 4), (30 * MIB, 2, 9), (25 * MIB, 6, 9), (40 * MIB, 7, 9)]
    assert reserved_bytes(lives) == 100 * MIB
    assert reserved_bytes([*lives, (6 * MIB, 8, 9)]) == 120 * MIB  # 5 MiB are left of the 30


def test_neighbors_merge_when_they_are_freed():
    """Five blocks of 4 MiB of one segment, freed in any order, hold one of 20 MiB less a block."""
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [0, 2, 4, 1, 3]):
        allocator = CachingAllocator()
        blocks = [allocator.allocate(4 * MIB) for _ in order]
        for place in order:
            allocator.free(blocks[place])
        whole = allocator.allocate(20 * MIB - 512 * KIB)
        assert (whole.size, allocator.reserved_bytes) == (20 * MIB, 20 * MIB)


def test_no_two_blocks_overlap_and_nothing_is_lost():
    """After 3000 random allocations and ends; the free blocks of all segments fill them."""
    draw = random.Random(0)
    allocator, living = CachingAllocator(), []
    for _ in range(3000):
        if living and draw.random() < 0.48:
            allocator.free(living.pop(draw.randrange(len(living))))
            continue
        size = int(2 ** draw.uniform(0, 26))
        block = allocator.allocate(size)
        assert block.size >= size
        living.append(block)
    places = sorted((block.address, block.address + block.size) for block in living)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
    for block in living:
        allocator.free(block)
    free = [size for pool in allocator._free.values() for size, _, _ in pool]
    assert sum(free) == allocator.reserved_bytes
