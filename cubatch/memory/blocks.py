"""
Scratch memory of the engine's operations: the bytes of a block, and how the samples of a batch are cut into blocks.

The memory plan, which sizes the workspace, and the engine, which uses it, follow one rule for every operation:

    workspace = max(least, min(useful, whole))

- `least`: one row of outputs of one sample.
- `whole`: the whole batch at once.
- `useful`: bytes that stay in the cache, or fill a GPU. A product that reads the whole filter for each block, or adds a
  sum as large as the filter, needs larger blocks.

The engine works in even blocks of as many samples as the workspace holds.  Where it holds no whole sample, a block has
as many rows as fit.  This module computes numbers only and touches no array.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence

import attrs

from cubatch.network.windows import Axis

ALIGNMENT = 64
"""Areas of scratch memory start at multiples of this number of bytes: a cache line, an AVX-512 register."""

_PROJECTED = 3  # queries, keys and values

PLAIN: frozenset[str] = frozenset()
"""Ending of a product without epilogue: see `Op.ending`."""

Block = tuple[slice, slice]
"""Range of samples and range of output rows."""


def ending(**arrays: object) -> frozenset[str]:
    """Return the names of the given arrays that are not None, in the form of `Op.ending`."""
    return frozenset(name for name, array in arrays.items() if array is not None)


def aligned(num_bytes: int) -> int:
    """Return a size in bytes, rounded up to a multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def workspace_bytes(needs: Sequence[Need], samples: int, target: int) -> int:
    """
    Return the bytes of the workspace that an operation gets for its blocks; 0 if `needs` is empty.

    Args:
        needs: Scratch memory of the parts of the operation, which run one after the other.
        samples: Number of items that the operation processes, in the unit of its needs: samples, positions or elements.
        target: Bytes that stay in the cache, or fill a GPU: above them larger blocks do not help.
    """
    return max((max(need.least, min(need.useful_bytes(target), need.whole(samples))) for need in needs), default=0)


@attrs.frozen(kw_only=True)
class Need:
    """Scratch memory of a part of an operation, as a function of the samples and output rows of a block."""

    itemsize: int  # bytes of an element
    rows: int = 1  # output rows of one sample

    def _areas(self, samples: int, rows: int) -> tuple[int, ...]:
        raise NotImplementedError

    def num_bytes(self, samples: int, rows: int) -> int:
        """Return the bytes of a block of some samples with `rows` output rows each; every area in it is aligned."""
        return sum(map(aligned, self._areas(samples, rows)))

    def offsets(self, samples: int, rows: int) -> list[int]:
        """Return the offset in bytes of each area within the scratch memory of a block."""
        ends = [0]
        for area in self._areas(samples, rows):
            ends.append(ends[-1] + aligned(area))
        return ends[:-1]

    def useful_bytes(self, target: int) -> int:
        """Return the bytes above which a larger block does not help, if `target` bytes stay in the cache."""
        return target

    @property
    def least(self) -> int:
        """Bytes of the smallest block: one row of outputs of one sample."""
        return self.num_bytes(1, 1)

    def whole(self, samples: int) -> int:
        """Return the bytes of a single block with all samples, at least one."""
        return self.num_bytes(max(samples, 1), self.rows)

    def cut(self, samples: int, num_bytes: int) -> tuple[Block, ...]:
        """
        Cut samples into even blocks: of whole samples, or of rows of one sample if a whole one does not fit.

        Return a range of samples and a range of output rows for each. The workspace has at least `least` bytes.
        """
        return _cut(self, samples, num_bytes)

    def num_blocks(self, samples: int, num_bytes: int) -> int:
        """Return the number of blocks that `cut` makes of the samples with a workspace of `num_bytes`."""
        if not samples:
            return 0
        most, rows = _largest(self, samples, num_bytes)
        return -(-samples // most) * -(-self.rows // rows)


@functools.lru_cache(maxsize=4096)
def _cut(need: Need, samples: int, num_bytes: int) -> tuple[Block, ...]:
    if not samples:
        return ()
    most, rows = _largest(need, samples, num_bytes)
    return tuple(itertools.product(even_parts(samples, most), even_parts(need.rows, rows)))


@functools.lru_cache(maxsize=4096)
def _largest(need: Need, samples: int, num_bytes: int) -> tuple[int, int]:
    """
    Return samples and rows of the largest block within `num_bytes`: whole samples, or some rows of one sample.

    `num_bytes` is at least `Need.least`, the bytes of one row.
    """
    if need.num_bytes(1, need.rows) <= num_bytes:
        return bisect.bisect_right(
            range(1, samples + 1), num_bytes, key=lambda n: need.num_bytes(n, need.rows)
        ), need.rows
    return 1, bisect.bisect_right(range(1, need.rows + 1), num_bytes, key=lambda rows: need.num_bytes(1, rows))


def even_parts(total: int, most: int) -> list[slice]:
    """
    Return range(total), which is not empty, cut into the fewest slices of at most `most` items and nearly equal size.

    Example:
        >>> even_parts(5, 3)
        [slice(0, 3, None), slice(3, 5, None)]
    """
    parts = -(-total // most)
    share, extra = divmod(total, parts)
    starts = [index * share + min(index, extra) for index in range(parts + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(starts)]


@attrs.frozen(kw_only=True)
class Pool(Need):
    """
    Scratch memory of pooling: a product and a flag per output, and an area as large as the source rows of the block.

    The last area is not used: with it, blocks are so small that the source rows stay in the cache too.
    """

    vertical: Axis
    horizontal: Axis
    channels: int

    def _areas(self, samples: int, rows: int) -> tuple[int, ...]:
        outputs = samples * rows * self.horizontal.out * self.channels
        passing = samples * rows * self.vertical.stride * self.horizontal.size * self.channels
        return (outputs * self.itemsize, outputs, passing * self.itemsize)


@attrs.frozen(kw_only=True)
class Scores(Need):
    """
    Scratch memory of softmax and cross-entropy; a row of scores counts as a sample.

    Its areas are one float64 sum per block, two numbers per row, and a number and a flag of one byte per score. The
    numbers have `itemsize` bytes.
    """

    channels: int

    def _areas(self, samples: int, rows: int) -> tuple[int, ...]:
        count = samples * rows
        column = count * self.itemsize
        return (8, column, column, column * self.channels, count * self.channels)


@attrs.frozen(kw_only=True)
class Norm(Need):
    """
    Scratch memory of batch norm; a position counts as a sample.

    Its areas are float64 sums and vectors with a value per channel, and a constant 1 per position. The last area is the
    deviation of each element from its channel's mean.
    """

    channels: int

    def _areas(self, samples: int, rows: int) -> tuple[int, ...]:
        count, c, item = samples * rows, self.channels, self.itemsize
        return (2 * c * 8, 4 * c * item, count * item, count * c * item)


@attrs.frozen(kw_only=True)
class RowNorm(Need):
    """
    Scratch memory of layer norm; a position counts as a sample.

    Its areas are float64 sums and vectors with two values per channel, a constant 1 and two numbers per position, and
    two values per element.
    """

    channels: int

    def _areas(self, samples: int, rows: int) -> tuple[int, ...]:
        count, c, item = samples * rows, self.channels, self.itemsize
        return (2 * c * 8, 2 * c * item, count * item, 2 * count * item, 2 * count * c * item)


@attrs.frozen(kw_only=True)
class Flat(Need):
    """Scratch memory of an elementwise operation: a flag or a random number for each element."""

    def _areas(self, samples: int, rows: int) -> tuple[int, ...]:
        return (samples * rows * self.itemsize,)


@attrs.frozen(kw_only=True)
class Ends(Need):
    """Scratch memory of the epilogue of a gradient, by rows of `row` elements: a product and a flag per element."""

    row: int

    def _areas(self, samples: int, rows: int) -> tuple[int, ...]:
        elements = samples * rows * self.row
        return (elements * self.itemsize, elements)


@attrs.frozen(kw_only=True)
class Curve(Need):
    """Scratch memory of an activation function, with an element as sample: two values per element."""

    def _areas(self, samples: int, rows: int) -> tuple[int, ...]:
        values = samples * rows * self.itemsize
        return (values, values)


@attrs.frozen(kw_only=True)
class Products(Need):
    """
    Scratch memory of sums of products over the positions of a sample; a position counts as a row.

    Its areas are the products, a constant 1 per position, and the sums over the positions of a block.
    """

    channels: int

    def _areas(self, samples: int, rows: int) -> tuple[int, ...]:
        sums = samples * self.channels * self.itemsize
        return (rows * sums, rows * self.itemsize, sums)


@attrs.frozen(kw_only=True)
class Attend(Need):
    """
    Scratch memory of forward attention over whole samples.

    Its areas are a number per query, then projections (queries, keys, values), attention weights, and weighted sums of
    the values.
    """

    tokens: int  # positions of a sample
    channels: int  # width of a token, over all heads
    heads: int  # number of heads
    # whether arrays for the backward pass hold all areas but the numbers per query, instead of scratch memory. The
    # block size is the same: the block reads and writes those arrays
    saves: bool

    def _areas(self, samples: int, rows: int) -> tuple[int, ...]:
        *saved, column = _attention_areas(self, samples * rows)
        return (column,) if self.saves else (column, *saved)

    def useful_bytes(self, target: int) -> int:
        """
        Return the bytes above which a larger block does not help, if `target` bytes stay in the cache.

        If values are saved, only a part of what a block reads and writes is scratch memory.
        """
        if not self.saves:
            return target
        return self.num_bytes(max(1, target // sum(_attention_areas(self, 1))), 1)


@attrs.frozen(kw_only=True)
class AttendBackward(Need):
    """
    Scratch memory of backward attention over whole samples.

    Its areas are the gradients of the saved values, a number per query, and a block's contribution to dw_in and db_in.
    """

    tokens: int
    channels: int
    heads: int

    def _areas(self, samples: int, rows: int) -> tuple[int, ...]:
        outputs = _PROJECTED * self.channels * self.itemsize
        return (*_attention_areas(self, samples * rows), outputs * self.channels, outputs)


def _attention_areas(need: Attend | AttendBackward, samples: int) -> tuple[int, int, int, int]:
    """
    Return the bytes of four areas for `samples` samples.

    They are: queries, keys and values together; attention weights; weighted sums of values; one number per query.
    """
    token, row = samples * need.tokens * need.itemsize, need.heads * need.tokens
    return (_PROJECTED * token * need.channels, token * row, token * need.channels, token * need.heads)
