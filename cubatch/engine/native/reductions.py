"""Sums over rows: the gradient of a bias, and the two of a norm's parameters."""

from __future__ import annotations

from typing import Any

from cubatch.engine.backend import of
from cubatch.engine.native.arrays import (
    check,
    column_grid,
    floats,
    summing_kernel,
    take_workspace,
    tile_arguments,
    vector_width,
)
from cubatch.engine.native.context import Context, dtype_of
from cubatch.kernels.workspace.misc import column_sums_workspace, merged_tiles, summed_tiles

FINISH_COLUMNS = 8
"""Columns of partial results that a block of a finishing kernel adds up: FINISH_LANES of kernels/common/columns.cuh."""


def column_sums(context: Context, x: Any, *, out: Any = None, workspace: Any = None) -> Any:
    """
    Return the sums over all axes but the last, added up in float32 and always in the same order.

    Args:
        x: Array (..., c).
        out: Receives the sums (c,), of x's type. None allocates it.
        workspace: 1-D uint8 array of `workspace.misc.column_sums_workspace` bytes. None allocates one.
    """
    dtype, channels = dtype_of(x), x.shape[-1]
    sums = of(x).empty(channels, dtype=x.dtype) if out is None else out
    check(x.dtype, x=x)
    check(x.dtype, (channels,), out=sums)
    rows = x.size // channels
    tiles = summed_tiles(rows, channels, vector_width(context, channels, x), x.itemsize, context.device)
    workspace = take_workspace(workspace, x, column_sums_workspace(rows, channels, dtype, context.device))
    partials = floats(workspace, tiles.tiles * channels)
    numbers = tile_arguments(rows, channels, tiles)
    context.launch(summing_kernel(context, "column_sums", x, rows), column_grid(tiles), [x, partials, *numbers])
    finish_sums(context, partials, out=sums)
    return sums


def finish_sums(context: Context, partials: Any, *, out: Any) -> None:
    """Write the sums of float32 partial sums (tiles, c), flat, to `out` (c,)."""
    channels = out.size
    context.run("column_sums_finish", out, finish_grid(channels), partials, partials.size // channels, channels, out)


def finish_grid(columns: int) -> tuple[int, int, int]:
    """Return the grid of a kernel that adds up partial results of `columns` columns."""
    return -(-columns // FINISH_COLUMNS), 1, 1


def add_up_tiles(context: Context, partials: Any, columns: int, *, workspace: Any) -> Any:
    """
    Return partial sums of fewer tiles, from a launch that adds up groups; the partial sums themselves if they are few.

    Both are float32 (tiles, columns), flat. The workspace has `column_sums_workspace` bytes for them.
    """
    rows = partials.size // columns
    if not merged_tiles(rows)[0]:
        return partials
    tiles = summed_tiles(rows, columns, vector_width(context, columns, partials), partials.itemsize, context.device)
    fewer = floats(workspace, tiles.tiles * columns)
    context.run("column_sums", partials, column_grid(tiles), partials, fewer, *tile_arguments(rows, columns, tiles))
    return fewer


def finish_gradients(context: Context, x: Any, sums: Any, *, means: Any, dgamma: Any, dbeta: Any) -> None:
    """
    Compute the gradients of a norm's gamma and beta from their partial sums, float32 (tiles, 2, c), flat.

    `means` receives the means over all rows: float32 (2, c).
    """
    channels = x.shape[-1]
    numbers = sums.size // (2 * channels), channels, 1 / max(x.size // channels, 1)
    context.run("batch_norm_backward_finish", x, finish_grid(2 * channels), sums, *numbers, dgamma, dbeta, means)
