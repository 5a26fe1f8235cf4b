"""PyTorch's caching allocator, block by block."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from cubatch.memory.caching_allocator import CachingAllocator, is_expandable, reserved_bytes

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


def in_turn(sizes, **options):
    """The most bytes that are reserved for blocks of some MiB, each freed before the next is allocated."""
    return reserved_bytes(((size * MIB, 2 * place, 2 * place + 1) for place, size in enumerate(sizes)), **options)


def test_free_segments_are_returned_when_memory_runs_out():
    """They are kept until then; one that a small block is part of stays."""
    assert in_turn([15, 25, 35]) == (16 + 26 + 36) * MIB
    assert in_turn([15, 25, 35], capacity=64 * MIB) == (16 + 26) * MIB
    assert in_turn([15, 25, 35], capacity=40 * MIB) == 36 * MIB
    allocator = CachingAllocator(30 * MIB)
    freed, kept = allocator.allocate(9 * MIB), allocator.allocate(5 * MIB)
    allocator.free(freed)
    allocator.allocate(16 * MIB)
    assert (kept.before, allocator.reserved_bytes) == (freed, 36 * MIB)


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2 * MIB),
        ([MIB] * 3, 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([1, MIB + 1], 22 * MIB),
        ([10 * MIB] * 2, 20 * MIB),
        ([10 * MIB + 1] * 2, 40 * MIB),
        ([19 * MIB + 1, MIB + 1], 40 * MIB),
        ([70 * MIB, 9 * MIB], 80 * MIB),
    ],
)
def test_an_expandable_segment_grows_by_pages(sizes, reserved):
    """Of 2 MiB for sizes up to 1 MiB, else of 20 MiB; a block may lie across pages."""
    lives = [(size, begin, math.inf) for begin, size in enumerate(sizes)]
    assert reserved_bytes(lives, is_expandable=True) == reserved


def test_an_expandable_segment_needs_no_more_than_its_longest_state():
    """Where sizes grow, default segments are left behind."""
    assert in_turn([15, 25, 35], is_expandable=True) == 40 * MIB


def test_the_end_of_an_expandable_segment_is_used_last():
    """Of blocks of 30 and 15 MiB, 12 go into the 30: the 15 may grow. There 16 need another page, next to them."""
    allocator = CachingAllocator(is_expandable=True)
    first, *_ = [allocator.allocate(size * MIB) for size in (30, 5, 10)]
    allocator.free(first)
    assert allocator.reserved_bytes == 60 * MIB
    assert allocator.allocate(12 * MIB).address == first.address
    assert allocator.allocate(19 * MIB).address == first.address + 45 * MIB
    assert allocator.reserved_bytes == 80 * MIB


def test_free_pages_are_returned_when_memory_runs_out_and_gaps_are_filled_first():
    """
    Of 40 MiB the last 10 are used, so that one page is free; with 40 more after it the capacity is reached.

    After that 25 MiB are placed in the gap of 20 and the free 10 behind it.
    """
    allocator = CachingAllocator(60 * MIB, is_expandable=True)
    first, kept = allocator.allocate(30 * MIB), allocator.allocate(10 * MIB)
    allocator.free(first)
    large = allocator.allocate(35 * MIB)
    assert (large.address, allocator.peak_bytes) == (kept.address + 10 * MIB, 60 * MIB)
    assert allocator.allocate(25 * MIB).address == kept.address - 30 * MIB


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments: True"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}, False),
    ],
)
def test_the_environment_chooses_expandable_segments(monkeypatch, variables, expected):
    """By the first variable that is set, as in PyTorch."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_expandable() == expected


@pytest.mark.parametrize("options", [{}, {"is_expandable": True}, {"capacity": 2**31, "is_expandable": True}], ids=str)
def test_no_two_blocks_overlap_and_nothing_is_lost(options):
    """After 3000 random allocations and ends; the free blocks of all segments fill them."""
    draw = random.Random(0)
    allocator, living = CachingAllocator(**options), []
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
