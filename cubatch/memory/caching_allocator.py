"""
PyTorch's caching allocator for GPUs, block by block: the memory that it reserves for the tensors of a step.

The rules are those of the default settings, as `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.0 to 2.6 has them:

- A size is rounded up to a multiple of 512 bytes.
- Up to 1 MiB it is placed in a segment of 2 MiB, below 10 MiB in one of 20 MiB. A larger size gets a segment of its
  own, rounded up to 2 MiB.
- A request takes the smallest free block that can hold it. The rest of the block is split off if it has 512 bytes in a
  segment of 2 MiB, or more than 1 MiB in others.
- A freed block merges with its free neighbors. Segments are kept.

PyTorch returns unused segments to the driver when memory runs out. That is not simulated: the result is an upper bound.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable

import attrs

_MIB = 2**20
_ALIGNMENT, _SMALL, _SMALL_SEGMENT = 512, _MIB, 2 * _MIB
_LARGE_SEGMENT, _LEAST_OF_ITS_OWN, _ROUNDED = 20 * _MIB, 10 * _MIB, 2 * _MIB


@attrs.define(eq=False)
class Block:
    """Part of a segment: its place, its size in bytes, and its neighbors in the segment."""

    address: int
    size: int
    is_small: bool
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """
    The allocator of one GPU.

    Attributes:
        reserved_bytes: Bytes of all segments.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, num_bytes: int) -> Block:
        """Return a block of at least `num_bytes` bytes; reserve a new segment if no free block is large enough."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        is_small = size <= _SMALL
        free = self._free[is_small]
        place = bisect.bisect_left(free, (size,))
        block = free.pop(place)[-1] if place < len(free) else self._new_segment(size, is_small=is_small)
        rest = block.size - size
        if rest >= _ALIGNMENT if is_small else rest > _SMALL:
            left = Block(block.address + size, rest, is_small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = left
            block.size, block.after = size, left
            self._put(left)
        block.is_free = False
        return block

    def free(self, block: Block) -> None:
        """Free a block, and merge it with its free neighbors."""
        if block.before is not None and block.before.is_free:
            block = self._merged(self._taken(block.before), block)
        if block.after is not None and block.after.is_free:
            block = self._merged(block, self._taken(block.after))
        self._put(block)

    def _new_segment(self, size: int, *, is_small: bool) -> Block:
        own = -(-size // _ROUNDED) * _ROUNDED
        whole = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT if size < _LEAST_OF_ITS_OWN else own
        segment = Block(self.reserved_bytes, whole, is_small)
        self.reserved_bytes += whole
        return segment

    def _put(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], (block.size, block.address, block))

    def _taken(self, block: Block) -> Block:
        free = self._free[block.is_small]
        free.pop(bisect.bisect_left(free, (block.size, block.address)))
        return block

    def _merged(self, first: Block, second: Block) -> Block:
        first.size, first.after = first.size + second.size, second.after
        if second.after is not None:
            second.after.before = first
        return first


def reserved_bytes(lives: Iterable[tuple[int, float, float]]) -> int:
    """
    Return the bytes of all segments that the allocator reserves for storages with the given lifetimes.

    Args:
        lives: Bytes, time of allocation and time of release of each storage.

    Example:
        >>> reserved_bytes([(1000, 0, 9), (2**20 + 1, 1, 2), (9 * 2**20, 3, 4)]) // 2**20
        22
    """
    stored = [life for life in lives if life[0]]
    begins = ((begin, 1, place) for place, (_, begin, _) in enumerate(stored))
    ends = ((end, 0, place) for place, (_, _, end) in enumerate(stored))
    allocator, blocks = CachingAllocator(), dict[int, Block]()
    for _, is_begin, place in sorted(itertools.chain(begins, ends)):
        if is_begin:
            blocks[place] = allocator.allocate(stored[place][0])
        else:
            allocator.free(blocks.pop(place))
    return allocator.reserved_bytes
