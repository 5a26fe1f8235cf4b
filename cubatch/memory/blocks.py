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

from cubatch.network.windows import Axis, ConvShape, Phase, phases, seen_taps

ALIGNMENT = 64
"""Areas of scratch memory start at multiples of this many bytes: a cache line, an AVX-512 register."""

UNPACKED_PRODUCTS = 10**6
"""Multiply-adds up to which OpenBLAS does not pack its operands first (its AVX-512 kernels)."""

_SHORT_SIDE = 32
_SUMS = 2
_VECTORS = 4

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


@functools.lru_cache(maxsize=4096)
def _cut(need: Need, samples: int, num_bytes: int) -> tuple[Block, ...]:
    if not samples:
        return ()
    if need.num_bytes(1, need.rows) <= num_bytes:
        most = bisect.bisect_right(range(1, samples + 1), num_bytes, key=lambda count: need.num_bytes(count, need.rows))
        return tuple((part, slice(0, need.rows)) for part in even_parts(samples, most))
    most = bisect.bisect_right(range(1, need.rows + 1), num_bytes, key=lambda rows: need.num_bytes(1, rows))
    return tuple((slice(i, i + 1), band) for i in range(samples) for band in even_parts(need.rows, most))


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
class Tiles(Need):
    """
    A gathered matrix product of a convolution: fixed areas, zero-bordered source rows, columns, staged output.

    Attributes:
        vertical: The window's vertical axis.
        horizontal: The window's horizontal axis.
        channels: Channels of the source.
        groups: Groups of channels.
        fixed: Elements of each area that does not grow with the block.
        staged: Elements per output pixel of what lies beside the columns.
        flags: Elements per output pixel that pass or do not.
        filters: Elements of the filter, which a block reads or adds a sum to, whole.
        products: Multiply-adds per pixel where packing would cost more than multiplying, else 0.
    """

    vertical: Axis
    horizontal: Axis
    channels: int
    groups: int
    fixed: tuple[int, ...] = ()
    staged: int = 0
    flags: int = 0
    filters: int = 0
    products: int = 0

    @property
    def is_direct(self) -> bool:
        """Whether the source itself is the operand: a 1x1 window at stride 1 of one group, without padding."""
        return self.groups == 1 and self.vertical.is_identity and self.horizontal.is_identity

    @property
    def is_padded(self) -> bool:
        """Whether windows read beyond the source's edge, so that its rows are copied between zeros."""
        return self.vertical.reaches_out or self.horizontal.reaches_out

    def areas(self, samples: int, rows: int) -> tuple[int, ...]:
        """Give the bytes of each area: fixed ones, zero-bordered source rows, columns, staged output, flags."""
        v, h = self.vertical, self.horizontal
        pixels = samples * rows * h.out
        border = samples * v.span(rows) * h.span(h.out) * self.channels if self.is_padded else 0
        columns = 0 if self.is_direct else pixels * v.taps * h.taps * self.channels
        elements = (*self.fixed, border, columns, pixels * self.staged)
        return (*(count * self.itemsize for count in elements), pixels * self.flags)

    def room(self, target: int) -> int:
        """
        Give the bytes beyond which a larger block would not help.

        Columns are as large as the filter at least: gathering them then moves as much as multiplying does.
        """
        return max(target, sum(aligned(count * self.itemsize) for count in (*self.fixed, self.filters)))

    def cut_on_host(self, samples: int, num_bytes: int) -> tuple[Block, ...]:
        """Cut as `cut`, but keep products with a short side small enough for OpenBLAS not to pack them."""
        if self.products:
            few = UNPACKED_PRODUCTS // (self.products * self.rows * self.horizontal.out)
            num_bytes = min(num_bytes, self.whole(few))
        return self.cut(samples, num_bytes)


@attrs.frozen(kw_only=True)
class Depthwise(Need):
    """A depthwise convolution: the filter tap by tap, a value for each channel, one product for each output."""

    channels: int
    taps: int
    width: int

    def areas(self, samples: int, rows: int) -> tuple[int, ...]:
        """Give the bytes of each area."""
        row = self.channels * self.itemsize
        return (self.taps * row, row, samples * rows * self.width * row)


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


def conv2d_forward(shape: ConvShape, itemsize: int, ending: frozenset[str] = PLAIN) -> list[Need]:
    """
    Say what a convolution's forward pass needs, part after part.

    Example:
        >>> from cubatch.network.windows import conv_shape
        >>> shape = conv_shape((28, 28, 1), (32, 3, 3, 1), (1, 1), (1, 1, 1, 1), (1, 1), 1)
        >>> workspace_bytes(conv2d_forward(shape, 4), samples=128, target=768 * 1024)
        786432
    """
    return [depthwise(shape, itemsize) if shape.is_depthwise else forward_tiles(_seen(shape), itemsize, ending)]


def conv2d_wgrad(shape: ConvShape, itemsize: int) -> list[Need]:
    """Say what the gradient of a convolution's filter and bias needs, part after part."""
    return [depthwise(shape, itemsize) if shape.is_depthwise else wgrad_tiles(_seen(shape), itemsize)]


def conv2d_dgrad(shape: ConvShape, itemsize: int, ending: frozenset[str] = PLAIN) -> list[Need]:
    """Say what the gradient of a convolution's input needs, part after part."""
    if shape.is_depthwise:
        return [depthwise(shape, itemsize)]
    shape = _seen(shape)
    idle = [idle_phase(shape, itemsize, phase) for phase in phases(shape) if not phase.works]
    return [*dgrad_tiles(shape, itemsize, ending), *(idle if "positive" in ending else [])]


def _seen(shape: ConvShape) -> ConvShape:
    return seen_taps(shape)[0]


def forward_tiles(shape: ConvShape, itemsize: int, ending: frozenset[str] = PLAIN) -> Tiles:
    """Lay out the forward pass: a row of biases, one of zeros, one of factors, the block."""
    row = shape.horizontal.out * shape.k
    stays = shape.groups == 1 and "residual" not in ending  # which may lie where the output goes
    return _tiles(shape, itemsize, fixed=(row, row, row if "folded" in ending else 0), staged=0 if stays else shape.k)


def wgrad_tiles(shape: ConvShape, itemsize: int) -> Tiles:
    """Lay out the filter's gradient: partial sums of filter and bias, the block, a one for each pixel."""
    return _tiles(shape, itemsize, fixed=(shape.filter_elements, shape.k), staged=1)


def dgrad_tiles(shape: ConvShape, itemsize: int, ending: frozenset[str] = PLAIN) -> list[Tiles]:
    """
    Lay out the input's gradient, for each phase that works: the turned filter, the block.

    What is added to it may lie where it goes, so that products are staged.
    """
    dense = shape.groups == 1 and shape.vertical.stride == 1 and shape.horizontal.stride == 1
    stays = dense and "residual" not in ending
    per_tap = shape.filter_elements // shape.taps
    return [
        Tiles(
            itemsize=itemsize,
            rows=phase.vertical.out,
            vertical=phase.vertical,
            horizontal=phase.horizontal,
            channels=shape.k,
            groups=shape.groups,
            fixed=(phase.taps * per_tap,),
            staged=0 if stays else shape.c,
            flags=shape.c if "positive" in ending else 0,
            filters=phase.taps * per_tap,
        )
        for phase in phases(shape)
        if phase.works
    ]


def idle_phase(shape: ConvShape, itemsize: int, phase: Phase) -> Ends:
    """Lay out what a phase without taps ends with."""
    return Ends(itemsize=itemsize, rows=phase.vertical.out, row=phase.horizontal.out * shape.c)


def depthwise(shape: ConvShape, itemsize: int) -> Depthwise:
    """Lay out any pass of a depthwise convolution."""
    return Depthwise(
        itemsize=itemsize, rows=shape.vertical.out, channels=shape.c, taps=shape.taps, width=shape.horizontal.out
    )


def _tiles(shape: ConvShape, itemsize: int, *, fixed: tuple[int, ...], staged: int) -> Tiles:
    thin = shape.groups == 1 and shape.taps * shape.c <= _SHORT_SIDE
    return Tiles(
        itemsize=itemsize,
        rows=shape.vertical.out,
        vertical=shape.vertical,
        horizontal=shape.horizontal,
        channels=shape.c,
        groups=shape.groups,
        fixed=fixed,
        staged=staged,
        filters=shape.filter_elements,
        products=shape.filter_elements if thin else 0,
    )
