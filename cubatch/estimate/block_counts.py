"""
Blocks of a layer's pass by algorithm and tile, and the general form of Coulom's rule.

A pass takes longer when the busiest SM gets one more block.  So the best of the batch sizes that take as long is the
largest at which no SM has more than n blocks.  For tiles of 128 x 128 outputs, filters in
multiples of 128, and as many outputs as inputs, this is Coulom's formula.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from cubatch.network.layer import Layer
from cubatch.network.passes import Gemm, Pass

TILE = (128, 128)
"""Rows and columns of a block's result if the kernel is unknown."""

WINOGRAD_OUTPUTS = 4
"""F(4x4, 3x3), which vendors also use, computes 4 x 4 outputs from 36 products."""

FUSED_FILTERS = 32
FUSED_PIXELS = ((1, 8, 16), (1, 16, 8), (2, 8, 8), (2, 4, 16), (2, 16, 4), (4, 2, 16), (4, 16, 2))
"""
A block of fused F(2x2, 3x3) computes 32 filters at 128 pixels, as images x rows x columns.

Derived from the grids of the vendor's kernels in published measurements (NeuSight, all of 2217 launches).
"""

Blocks = Callable[[int], int]
"""Blocks of a pass by batch size; the number never falls as the batch grows."""


def num_blocks(layer: Layer, pass_: Pass, batch_size: int, tile: tuple[int, int] = TILE) -> int:
    """
    Return the blocks of a pass as an implicit product: one per tile of the result.

    The phases of a strided dgrad and the groups of a convolution share one grid.  The products of attention depend on
    each other and are several launches: only the blocks of the launch with most FLOP are counted. `tile` is as for
    `on_sms.first_grid`.

    Returns:
        int: Blocks; 0 for a pass without a matrix product.

    Example:
        >>> from cubatch.network.layers import Conv2d
        >>> num_blocks(Conv2d(h=8, w=8, c=128, k=128, r=3, s=3, pad=1), Pass.FPROP, 97)
        49
    """
    grid = products(layer, pass_, batch_size)
    return sum(gemm.count * tiles(gemm.m, tile[0]) * tiles(gemm.n, tile[1]) for gemm in grid)


def largest_batch(blocks: Blocks, most: int, limit: int) -> int:
    """Return the largest batch size n up to `limit` with blocks(n) <= `most`; 0 if even one sample has more."""
    return bisect.bisect_right(range(1, limit + 1), most, key=blocks)


def products(layer: Layer, pass_: Pass, batch_size: int) -> tuple[Gemm, ...]:
    """
    Return the matrix products of a layer's pass that one launch computes, with extents in elements.

    If the pass needs several launches, these are the products of the launch with most FLOP.
    """
    gemms = layer.gemms(pass_, batch_size)
    return (max(gemms, key=lambda gemm: gemm.flops),) if gemms and layer.products_in_turn else gemms


def tiles(extent: int, tile: int) -> int:
    """Return ceil(extent / tile): the number of tiles of `tile` elements that cover `extent` elements."""
    return -(-extent // tile)
