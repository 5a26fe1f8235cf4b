"""
Scratch memory of the engine's operations: what a block of work needs, and how work is cut into blocks.

One rule for every operation, followed by the memory plan that sizes the workspace and by the engine
that is handed it:

    workspace = max(least, min(room, whole))

where `least` is what one row of outputs of one sample needs, `whole` what the whole batch needs
at once, and `room` what stays in the cache (on a GPU: what fills it), or more where a block has to be
larger to be worth what it costs whatever its size: a product reads the whole filter, or adds a sum as
large as the filter, for each block.  The engine then works in even blocks of as many samples as the
workspace holds, or of as many rows where it does not even hold a sample.  Pure numbers: no array is
touched here.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence

import attrs

from cubatch.network.windows import Axis

ALIGNMENT = 64
"""Areas of scratch memory start at multiples of this many bytes: a cache line, an AVX-512 register."""

_SUMS = 2
_VECTORS = 4
_TWO = 2

PLAIN: frozenset[str] = frozenset()
"""How a product ends to which nothing else happens: see `Op.ending`."""

Block = tuple[slice, slice]
"""Samples, output rows."""


def ending(**arrays: object) -> frozenset[str]:
    """
    Give the names of what a product ends with: of the arrays that are there.

    Example:
        >>> sorted(ending(residual=None, positive=0))
        ['positive']
    """
    return frozenset(name for name, array in arrays.items() if array is not None)


def aligned(num_bytes: int) -> int:
    """
    Round a size up to whole units of alignment.

    Example:
        >>> aligned(1), aligned(64), aligned(65)
        (64, 64, 128)
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def workspace_bytes(needs: Sequence[Need], samples: int, target: int) -> int:
    """
    Size the workspace of an operation by the rule above.

    Args:
        needs: What the operation's parts need, one after the other.
        samples: Samples it is handed at once.
        target: Bytes beyond which a larger block would not help.

    Example:
        >>> workspace_bytes([Flat(itemsize=4)], samples=10, target=1 << 20)
        64
    """
    return max((max(need.least, min(need.room(target), need.whole(samples))) for need in needs), default=0)


@attrs.frozen(kw_only=True)
class Need:
    """
    Scratch memory as a function of the block.

    Attributes:
        itemsize: Bytes of an element.
        rows: Output rows of one sample.
    """

    itemsize: int
    rows: int = 1

    def areas(self, samples: int, rows: int) -> tuple[int, ...]:
        """Give the bytes of each area for a block, in their order in the workspace."""
        raise NotImplementedError

    def num_bytes(self, samples: int, rows: int) -> int:
        """Count the bytes for a block, each area aligned."""
        return sum(map(aligned, self.areas(samples, rows)))

    def offsets(self, samples: int, rows: int) -> list[int]:
        """Give the place of each area for a block."""
        ends = [0]
        for area in self.areas(samples, rows):
            ends.append(ends[-1] + aligned(area))
        return ends[:-1]

    def room(self, target: int) -> int:
        """Give the bytes beyond which a larger block would not help, where `target` stay in the cache."""
        return target

    @property
    def least(self) -> int:
        """Bytes without which not even one row of outputs can be worked on."""
        return self.num_bytes(1, 1)

    def whole(self, samples: int) -> int:
        """Bytes with which all samples are one block; more never helps."""
        return self.num_bytes(max(samples, 1), self.rows)

    def cut(self, samples: int, num_bytes: int) -> tuple[Block, ...]:
        """
        Cut samples into even blocks: of whole samples, or of rows of one where a sample is too much.

        Args:
            samples: Samples there are.
            num_bytes: Bytes of the workspace, at least `least`.

        Example:
            >>> Flat(itemsize=64).cut(3, 128)
            ((slice(0, 2, None), slice(0, 1, None)), (slice(2, 3, None), slice(0, 1, None)))
        """
        return _cut(self, samples, num_bytes)

    def num_blocks(self, samples: int, num_bytes: int) -> int:
        """
        Count the blocks that the engine cuts samples into.

        Example:
            >>> Flat(itemsize=64).num_blocks(3, 128)
            2
        """
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
    """Give the samples and the rows of the largest block: all rows, or those of one sample that fit."""
    if need.num_bytes(1, need.rows) <= num_bytes:
        return bisect.bisect_right(
            range(1, samples + 1), num_bytes, key=lambda n: need.num_bytes(n, need.rows)
        ), need.rows
    return 1, bisect.bisect_right(range(1, need.rows + 1), num_bytes, key=lambda rows: need.num_bytes(1, rows))


def even_parts(total: int, most: int) -> list[slice]:
    """
    Cut a range into the fewest parts of at most `most`, as even as can be.

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
    """A pooling: a product and a flag for each output, and room for the source rows to stay cached."""

    vertical: Axis
    horizontal: Axis
    channels: int

    def areas(self, samples: int, rows: int) -> tuple[int, ...]:
        """Give the bytes of each area; nothing is written to the last."""
        outputs = samples * rows * self.horizontal.out * self.channels
        passing = samples * rows * self.vertical.stride * self.horizontal.size * self.channels
        return (outputs * self.itemsize, outputs, passing * self.itemsize)


@attrs.frozen(kw_only=True)
class Scores(Need):
    """Softmax and its loss, a "sample" being a row of scores: a sum, two numbers, products, flags."""

    classes: int

    def areas(self, samples: int, rows: int) -> tuple[int, ...]:
        """Give the bytes of each area."""
        count = samples * rows
        column = count * self.itemsize
        return (8, column, column, column * self.classes, count * self.classes)


@attrs.frozen(kw_only=True)
class Norm(Need):
    """Batch norm, a "sample" being one position: sums in float64, vectors of channels, ones, deviations."""

    channels: int

    def areas(self, samples: int, rows: int) -> tuple[int, ...]:
        """Give the bytes of each area."""
        count, c, item = samples * rows, self.channels, self.itemsize
        return (_SUMS * c * 8, _VECTORS * c * item, count * item, count * c * item)


@attrs.frozen(kw_only=True)
class RowNorm(Need):
    """Layer norm, a "sample" being one position: sums in float64, vectors, ones, two numbers a row, two tiles."""

    channels: int

    def areas(self, samples: int, rows: int) -> tuple[int, ...]:
        """Give the bytes of each area."""
        count, c, item = samples * rows, self.channels, self.itemsize
        return (_SUMS * c * 8, _TWO * c * item, count * item, _TWO * count * item, _TWO * count * c * item)


@attrs.frozen(kw_only=True)
class Flat(Need):
    """Element by element, a "sample" being one element of `itemsize` bytes: a flag, a random number."""

    def areas(self, samples: int, rows: int) -> tuple[int, ...]:
        """Give the bytes of the only area."""
        return (samples * rows * self.itemsize,)


@attrs.frozen(kw_only=True)
class Ends(Need):
    """What a gradient ends with, row by row of `row` elements: a tile of products, a flag for each."""

    row: int

    def areas(self, samples: int, rows: int) -> tuple[int, ...]:
        """Give the bytes of each area."""
        elements = samples * rows * self.row
        return (elements * self.itemsize, elements)


@attrs.frozen(kw_only=True)
class Curve(Need):
    """An activation function, a "sample" being one element: a value for each, and another or a flag."""

    def areas(self, samples: int, rows: int) -> tuple[int, ...]:
        """Give the bytes of each area."""
        values = samples * rows * self.itemsize
        return (values, values)


@attrs.frozen(kw_only=True)
class Products(Need):
    """Sums of products over positions, a "row" being one position: products, a one for each row, a band's sums."""

    channels: int

    def areas(self, samples: int, rows: int) -> tuple[int, ...]:
        """Give the bytes of each area."""
        sums = samples * self.channels * self.itemsize
        return (rows * sums, rows * self.itemsize, sums)
