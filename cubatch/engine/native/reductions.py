"""Sums over rows: the gradient of a bias."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.backend import of
from cubatch.engine.native.arrays import (
    check,
    column_grid,
    dtype_of,
    floats,
    take_workspace,
    tile_arguments,
    vector_width,
)
from cubatch.engine.native.context import Context
from cubatch.kernels import variant
from cubatch.kernels.workspace.misc import column_sums_workspace, summed_tiles

FINISH_COLUMNS = 8
"""Columns of partial results that a block of a finishing kernel adds up: FINISH_LANES of kernels/common/columns.cuh."""


def column_sums(context: Context, x: Any, *, out: Any = None, workspace: Any = None) -> Any:
    """
    Sum over all axes but the last, in float32, always in the same order.

    Args:
        context: Where it runs.
        x: Array (..., c).
        out: Receives the sums (c,), of x's type. None allocates it.
        workspace: 1-D uint8 array of `workspace.misc.column_sums_workspace` bytes. None allocates one.
    """
    dtype, channels = dtype_of(x), x.shape[-1]
    sums = of(x).empty(channels, dtype=x.dtype) if out is None else out
    check(x.dtype, x.shape, x=x)
    check(x.dtype, (channels,), out=sums)
    rows = x.size // channels
    tiles = summed_tiles(rows, channels, vector_width(context, channels, x), x.itemsize, context.device)
    workspace = take_workspace(workspace, x, column_sums_workspace(rows, channels, dtype, context.device))
    partials = floats(workspace, tiles.tiles * channels)
    context.launch(
        variant.find("column_sums", dtype),
        column_grid(tiles),
        [x, partials, *tile_arguments(rows, channels, tiles)],
    )
    context.launch(
        variant.find("column_sums_finish", dtype),
        (-(-channels // FINISH_COLUMNS), 1, 1),
        [partials, np.int32(tiles.tiles), np.int32(channels), sums],
    )
    return sums
