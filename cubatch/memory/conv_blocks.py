"""
Scratch memory of convolutions, by the rule of `blocks`: gathered tiles and the other areas of each pass.

In all functions `itemsize` is the size of an element in bytes, and `ending` names the arrays of the epilogue.
"""

from __future__ import annotations

import attrs

from cubatch.memory.blocks import PLAIN, Block, Ends, Need, aligned
from cubatch.network.windows import Axis, ConvShape, Phase, phases, seen_taps, working_phases

UNPACKED_PRODUCTS = 10**6
"""Multiply-adds up to which OpenBLAS does not pack its operands first (in its AVX-512 kernels)."""

_SHORT_SIDE = 32


@attrs.frozen(kw_only=True)
class Tiles(Need):
    """Scratch memory of a convolution as a product: fixed areas, zero-bordered source rows, columns, staged output."""

    vertical: Axis  # the window's vertical axis
    horizontal: Axis  # the window's horizontal axis
    channels: int  # channels of the source
    groups: int  # groups of channels
    fixed: tuple[int, ...] = ()  # elements of each area that does not grow with the block
    staged: int = 0  # elements per output pixel that are stored in addition to the columns
    flags: int = 0  # flags per output pixel
    filters: int = 0  # elements of the filter; each block reads all of it, or adds to its whole gradient
    products: int = 0  # multiply-adds per pixel where packing would cost more than multiplying, else 0

    @property
    def is_direct(self) -> bool:
        """Whether the product reads the source itself: a 1x1 window at stride 1, one group, no padding."""
        return self.groups == 1 and self.vertical.is_identity and self.horizontal.is_identity

    @property
    def is_padded(self) -> bool:
        """Whether windows read beyond the source's edge, so that its rows are copied between zeros."""
        return self.vertical.reaches_out or self.horizontal.reaches_out

    def _areas(self, samples: int, rows: int) -> tuple[int, ...]:
        v, h = self.vertical, self.horizontal
        pixels = samples * rows * h.out
        border = samples * v.span(rows) * h.span(h.out) * self.channels if self.is_padded else 0
        columns = 0 if self.is_direct else pixels * v.taps * h.taps * self.channels
        elements = (*self.fixed, border, columns, pixels * self.staged)
        return (*(count * self.itemsize for count in elements), pixels * self.flags)

    def useful_bytes(self, target: int) -> int:
        """
        Return the bytes above which a larger block does not help, if `target` bytes stay in the cache.

        They are at least the bytes of the filter and the fixed areas: a block reads the whole filter.
        """
        return max(target, sum(aligned(count * self.itemsize) for count in (*self.fixed, self.filters)))

    def cut_on_host(self, samples: int, num_bytes: int) -> tuple[Block, ...]:
        """Return the blocks of `cut`, but made so small that OpenBLAS need not pack the operands of thin products."""
        return self.cut(samples, self._on_host(num_bytes))

    def num_blocks(self, samples: int, num_bytes: int) -> int:
        """Return the number of blocks that `cut_on_host` makes of the samples with a workspace of `num_bytes`."""
        return super().num_blocks(samples, self._on_host(num_bytes))

    def _on_host(self, num_bytes: int) -> int:
        if not self.products:
            return num_bytes
        few = UNPACKED_PRODUCTS // (self.products * self.rows * self.horizontal.out)
        return min(num_bytes, self.whole(few))


@attrs.frozen(kw_only=True)
class Depthwise(Need):
    """
    Scratch memory of a depthwise convolution.

    Its areas are the filter, a value per channel, and for each output pixel a constant 1 and a product per channel.
    """

    channels: int
    taps: int
    width: int

    def _areas(self, samples: int, rows: int) -> tuple[int, ...]:
        row, pixels = self.channels * self.itemsize, samples * rows * self.width
        return (self.taps * row, row, pixels * self.itemsize, pixels * row)


def conv2d_forward(shape: ConvShape, itemsize: int, ending: frozenset[str] = PLAIN) -> list[Need]:
    """
    Return the scratch memory of a convolution's forward pass, as a list for `workspace_bytes`.

    `ending` has the names of the arrays that its epilogue reads or writes: see `Op.ending`.
    """
    return [depthwise(shape, itemsize) if shape.is_depthwise else forward_tiles(_seen(shape), itemsize, ending)]


def conv2d_wgrad(shape: ConvShape, itemsize: int) -> list[Need]:
    """Return the scratch memory of the gradients of a convolution's filter and bias, as a list of one `Need`."""
    return [depthwise(shape, itemsize) if shape.is_depthwise else wgrad_tiles(_seen(shape), itemsize)]


def conv2d_dgrad(shape: ConvShape, itemsize: int, ending: frozenset[str] = PLAIN) -> list[Need]:
    """Return the scratch memory of each part of the gradient of a convolution's input."""
    if shape.is_depthwise:
        return [depthwise(shape, itemsize)]
    shape = _seen(shape)
    needs: list[Need] = [*dgrad_tiles(shape, itemsize, ending)]
    if "positive" in ending:
        needs += [idle_phase(shape, itemsize, phase) for phase in phases(shape) if not phase.works]
    return needs


def _seen(shape: ConvShape) -> ConvShape:
    return seen_taps(shape)[0]


def forward_tiles(shape: ConvShape, itemsize: int, ending: frozenset[str] = PLAIN) -> Tiles:
    """Return the scratch memory of the forward pass: a row each of biases, zeros and factors, and a block."""
    row = shape.horizontal.out * shape.k
    stays = shape.groups == 1 and "residual" not in ending  # a residual may share the output's memory
    return _tiles(shape, itemsize, fixed=(row, row, row if "folded" in ending else 0), staged=0 if stays else shape.k)


def wgrad_tiles(shape: ConvShape, itemsize: int) -> Tiles:
    """Return the scratch memory of the filter's gradient: sums of filter and bias, a block, a 1.0 for each pixel."""
    return _tiles(shape, itemsize, fixed=(shape.filter_elements, shape.k), staged=1)


def dgrad_tiles(shape: ConvShape, itemsize: int, ending: frozenset[str] = PLAIN) -> list[Tiles]:
    """
    Return the scratch memory of the input's gradient for each phase with taps: the turned filter, and a block.

    With a residual, which may share the memory of the result, products are staged.
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
        for phase in working_phases(shape)
    ]


def idle_phase(shape: ConvShape, itemsize: int, phase: Phase) -> Ends:
    """Return the scratch memory of the epilogue of a phase whose pixels no tap reaches."""
    return Ends(itemsize=itemsize, rows=phase.vertical.out, row=phase.horizontal.out * shape.c)


def depthwise(shape: ConvShape, itemsize: int) -> Depthwise:
    """Return the scratch memory of a depthwise convolution, which is the same for every pass."""
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
