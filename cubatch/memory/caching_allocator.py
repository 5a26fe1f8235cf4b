"""
PyTorch's caching allocator for GPUs, block by block: the memory that it reserves for the tensors of a step.

The rules are those that `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.0 to 2.6 has for one stream:

- A size is rounded up to a multiple of 512 bytes.
- Up to 1 MiB it is placed in a segment of 2 MiB, below 10 MiB in one of 20 MiB. A larger size gets a segment of its
  own, rounded up to 2 MiB.
- A request takes the smallest free block that can hold it. The rest of the block is split off if it has 512 bytes in a
  segment of 2 MiB, or more than 1 MiB in others.
- A freed block merges with its free neighbors. Segments are kept.
- When memory runs out, all segments that are wholly free are returned to the driver.

With `expandable_segments:True` there are two ranges of addresses. Sizes up to 1 MiB are in pages of 2 MiB, larger sizes
in pages of 20 MiB:

- Where no free block is large enough, pages are mapped behind the last one, or in a gap before it. They are added to a
  free block next to them. That block is taken only if no other one is large enough.
- The rest of a block is split off if it has 512 bytes.
- When memory runs out, all pages that are wholly free are returned to the driver.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator

import attrs

_MIB = 2**20
_ALIGNMENT, _SMALL, _SMALL_SEGMENT = 512, _MIB, 2 * _MIB
_LARGE_SEGMENT, _LEAST_OF_ITS_OWN, _ROUNDED = 20 * _MIB, 10 * _MIB, 2 * _MIB
_ADDRESSES = 2**20 * _LARGE_SEGMENT  # of an expandable segment: more than any GPU has memory
_VARIABLES = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"  # the first one that is set counts


@attrs.define(eq=False)
class Block:
    """A range of addresses in a segment: the memory of a tensor, free memory, or a gap without memory."""

    address: int  # its first byte
    size: int  # bytes
    is_small: bool  # whether it is in a segment for small tensors
    is_free: bool = False  # whether no tensor has it
    is_gap: bool = False  # whether it has addresses, but no memory
    before: Block | None = None  # before, after: its neighbors in the segment; None at its ends
    after: Block | None = None


class CachingAllocator:
    """
    A simulation of PyTorch's caching allocator of one GPU.

    Args:
        capacity: Bytes at which free memory is returned to the driver; more is reserved if that does not suffice.
        is_expandable: Whether segments are expandable.

    Attributes:
        reserved_bytes: Bytes of all segments.
        peak_bytes: The largest value of `reserved_bytes`.
    """

    def __init__(self, capacity: float = math.inf, *, is_expandable: bool = False) -> None:
        self.reserved_bytes = self.peak_bytes = self._end = 0
        self._capacity, self._is_expandable = capacity, is_expandable
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._first = {small: Block(small * _ADDRESSES, _ADDRESSES, small, is_gap=True) for small in self._free}

    def allocate(self, num_bytes: int) -> Block:
        """Return a block of at least `num_bytes` bytes; reserve memory if no free block is large enough."""
        size = _up(num_bytes, _ALIGNMENT)
        is_small = size <= _SMALL
        free = self._free[is_small]
        place = bisect.bisect_left(free, (size,))
        while place + 1 < len(free) and _expanded(free[place + 1][-1]) < _expanded(free[place][-1]):
            place += 1  # past a block that can grow
        if place < len(free):
            block = free.pop(place)[-1]
        elif self._is_expandable:
            block = self._extended(size, is_small=is_small)
        else:
            block = self._new_segment(size, is_small=is_small)
        rest = block.size - size
        if rest >= _ALIGNMENT if is_small or self._is_expandable else rest > _SMALL:
            self._put(_split(block, size))
        block.is_free = False
        return block

    def free(self, block: Block) -> None:
        """Free a block, and merge it with its free neighbors."""
        if block.before is not None and block.before.is_free:
            block = _join(self._taken(block.before), block)
        if block.after is not None and block.after.is_free:
            block = _join(block, self._taken(block.after))
        self._put(block)

    def _new_segment(self, size: int, *, is_small: bool) -> Block:
        own = _up(size, _ROUNDED)
        whole = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT if size < _LEAST_OF_ITS_OWN else own
        self._reserve(whole)
        segment = Block(self._end, whole, is_small)
        self._end += whole
        return segment

    def _extended(self, size: int, *, is_small: bool) -> Block:
        """
        Return a block of at least `size` bytes at the lowest possible address of an expandable segment.

        `is_small` selects the segment of small blocks. Pages without memory are mapped, after a release of free memory
        if the capacity would not suffice.
        """
        block = self._roomy(size, is_small=is_small)
        if self.reserved_bytes + _up(size - block.size * block.is_free, _page(block)) > self._capacity:
            self._release()
            block = self._roomy(size, is_small=is_small)
        if block.is_gap:
            self._map(block, size)
        else:
            self._taken(block)
        while (after := block.after) is not None and (after.is_free or block.size < size):
            if after.is_free:
                self._taken(after)
            else:
                self._map(after, size - block.size)
            _join(block, after)
        return block

    def _roomy(self, size: int, *, is_small: bool) -> Block:
        """
        Return the first block from which on `size` bytes of addresses are free or not mapped.

        `is_small` selects the segment of small blocks.
        """
        begin, room = self._first[is_small], 0
        for block in _chain(begin):
            if not (block.is_free or block.is_gap):
                room = 0
                continue
            begin, room = (begin if room else block), room + block.size
            if room >= size:
                break
        return begin

    def _map(self, gap: Block, size: int) -> None:
        """Map at least `size` bytes at the begin of a gap, or all of it, in whole pages."""
        whole = min(gap.size, _up(size, _page(gap)))
        if whole < gap.size:
            _split(gap, whole).is_gap = True
        gap.is_gap = False
        self._reserve(whole)

    def _reserve(self, num_bytes: int) -> None:
        if self.reserved_bytes + num_bytes > self._capacity and not self._is_expandable:
            self._release()
        self.reserved_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)

    def _release(self) -> None:
        """Return free memory to the driver: whole segments, or whole pages of expandable segments."""
        for block in [block for free in self._free.values() for *_, block in free]:
            if not self._is_expandable and block.before is None and block.after is None:
                self.reserved_bytes -= self._taken(block).size
            elif self._is_expandable:
                self._unmap(block)

    def _unmap(self, block: Block) -> None:
        page, end = _page(block), block.address + block.size
        begin, stop = _up(block.address, page), end // page * page
        if begin >= stop:
            return
        gap = self._taken(block)
        if begin > block.address:
            gap = _split(block, begin - block.address)
            self._put(block)
        if stop < end:
            self._put(_split(gap, stop - begin))
        self.reserved_bytes -= gap.size
        gap.is_free, gap.is_gap = False, True
        if gap.before is not None and gap.before.is_gap:
            gap = _join(gap.before, gap)
        if gap.after is not None and gap.after.is_gap:
            _join(gap, gap.after)

    def _put(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], (block.size, block.address, block))

    def _taken(self, block: Block) -> Block:
        free = self._free[block.is_small]
        free.pop(bisect.bisect_left(free, (block.size, block.address)))
        return block


def _up(num_bytes: int, step: int) -> int:
    return -(-num_bytes // step) * step


def _page(block: Block) -> int:
    return _SMALL_SEGMENT if block.is_small else _LARGE_SEGMENT


def _expanded(block: Block) -> int:
    """Return the bytes of a block, with those of the gap behind it, if there is one."""
    return block.size + (block.after.size if block.after is not None and block.after.is_gap else 0)


def _chain(block: Block | None) -> Iterator[Block]:
    while block is not None:
        yield block
        block = block.after


def _split(block: Block, size: int) -> Block:
    """Shorten a block to `size` bytes, and return the rest of it."""
    rest = Block(block.address + size, block.size - size, block.is_small, before=block, after=block.after)
    if block.after is not None:
        block.after.before = rest
    block.size, block.after = size, rest
    return rest


def _join(first: Block, second: Block) -> Block:
    """Join a block to the one before it in the segment, and return the joined block."""
    first.size, first.after = first.size + second.size, second.after
    if second.after is not None:
        second.after.before = first
    return first


def is_expandable() -> bool:
    """
    Return whether PyTorch has expandable segments in this environment.

    The environment variables are PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF; the first one that is set counts.
    """
    settings = next((os.environ[name] for name in _VARIABLES if name in os.environ), "")
    return re.search(r"expandable_segments\s*:\s*True\b", settings) is not None


def reserved_bytes(
    lives: Iterable[tuple[int, float, float]], capacity: float = math.inf, *, is_expandable: bool = False
) -> int:
    """
    Return the most bytes that the allocator reserves for storages with the given lifetimes.

    Args:
        lives: Bytes, time of allocation and time of release of each storage, in any unit of time.
        capacity, is_expandable: As for `CachingAllocator`.

    Example:
        >>> lives = [(15 * 2**20, 0, 1), (25 * 2**20, 2, 3), (35 * 2**20, 4, 5)]
        >>> reserved_bytes(lives) // 2**20, reserved_bytes(lives, is_expandable=True) // 2**20
        (78, 40)
    """
    stored = [life for life in lives if life[0]]
    begins = ((begin, 1, place) for place, (_, begin, _) in enumerate(stored))
    ends = ((end, 0, place) for place, (_, _, end) in enumerate(stored))
    allocator, blocks = CachingAllocator(capacity, is_expandable=is_expandable), dict[int, Block]()
    for _, is_begin, place in sorted(itertools.chain(begins, ends)):
        if is_begin:
            blocks[place] = allocator.allocate(stored[place][0])
        else:
            allocator.free(blocks.pop(place))
    return allocator.peak_bytes
