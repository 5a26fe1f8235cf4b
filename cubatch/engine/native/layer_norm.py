"""Layer norm, and the sums over positions of its parameters' gradients, on hand-written kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.backend import of
from cubatch.engine.native.arrays import check, dtype_of, floats, take_workspace, tile_arguments, vector_width
from cubatch.engine.native.context import Context
from cubatch.engine.native.reductions import FINISH_COLUMNS
from cubatch.kernels import variant
from cubatch.kernels.workspace.misc import batch_norm_backward_workspace, row_blocks, row_lanes, summed_tiles


def layer_norm(
    context: Context,
    x: Any,
    gamma: Any,
    beta: Any,
    *,
    eps: float = 1e-6,
    statistics: Any = None,
    out: Any = None,
) -> Any:
    """Launch the kernel of `functional.layer_norm`; statistics are float32."""
    y, channels = of(x).empty_like(x) if out is None else out, x.shape[-1]
    check(x.dtype, x.shape, x=x, out=y)
    check(x.dtype, (channels,), gamma=gamma, beta=beta)
    if statistics is not None:
        statistics = statistics.reshape(-1)
        check(np.float32, (2 * (x.size // channels),), statistics=statistics)
    grid, arguments = _row_grid(context, x, y)
    kernel = variant.find("layer_norm", dtype_of(x))
    context.launch(kernel, grid, [x, gamma, beta, y, statistics, *arguments, np.float32(eps)])
    return y


def layer_norm_backward(
    context: Context,
    dy: Any,
    x: Any,
    gamma: Any,
    *,
    statistics: Any,
    dgamma: Any,
    dbeta: Any,
    out: Any = None,
    workspace: Any = None,
) -> Any:
    """Launch the kernels of `functional.layer_norm_backward`, with `batch_norm_backward_workspace` bytes."""
    dx, channels = of(dy).empty_like(dy) if out is None else out, x.shape[-1]
    statistics = statistics.reshape(-1)
    check(x.dtype, x.shape, dy=dy, x=x, out=dx)
    check(x.dtype, (channels,), gamma=gamma, dgamma=dgamma, dbeta=dbeta)
    check(np.float32, (2 * (x.size // channels),), statistics=statistics)
    parameter_sums(context, dy, x, statistics=statistics, dgamma=dgamma, dbeta=dbeta, workspace=workspace)
    grid, arguments = _row_grid(context, dy, x, dx)
    context.launch(variant.find("layer_norm_backward", dtype_of(x)), grid, [dy, x, gamma, statistics, dx, *arguments])
    return dx


def parameter_sums(
    context: Context, dy: Any, x: Any, *, statistics: Any, dgamma: Any, dbeta: Any, workspace: Any
) -> None:
    """
    Sum dy times the factor of gamma, and dy, over all positions.

    Args:
        context: Where it runs.
        dy: Gradient by the output (..., c).
        x: The forward pass's input.
        statistics: Mean and inverse deviation of each position, flat; None if x is not normalised.
        dgamma, dbeta: Receive the sums (c,).
        workspace: 1-D uint8 array of `workspace.misc.batch_norm_backward_workspace` bytes. None allocates one.
    """
    dtype, channels = dtype_of(x), x.shape[-1]
    rows = x.size // channels
    tiles = summed_tiles(rows, channels, vector_width(context, channels, dy, x), x.itemsize, context.device)
    workspace = take_workspace(workspace, x, batch_norm_backward_workspace(rows, channels, dtype, context.device))
    means = floats(workspace, 2 * channels)
    partials = floats(workspace, tiles.tiles * 2 * channels, start=2 * channels)
    context.launch(
        variant.find("layer_norm_sums", dtype),
        (tiles.tiles, tiles.blocks, 1),
        [dy, x, statistics, partials, *tile_arguments(rows, channels, tiles)],
    )
    context.launch(
        variant.find("batch_norm_backward_finish", dtype),
        (-(-2 * channels // FINISH_COLUMNS), 1, 1),
        [partials, np.int32(tiles.tiles), np.int32(channels), np.float32(1 / max(rows, 1)), dgamma, dbeta, means],
    )


def _row_grid(context: Context, *arrays: Any) -> tuple[tuple[int, int, int], list[object]]:
    """Return the grid over rows of arrays (..., c), and rows, channels, lanes and vector."""
    channels = arrays[0].shape[-1]
    rows, vector = arrays[0].size // channels, vector_width(context, channels, *arrays)
    lanes = row_lanes(rows, channels // vector, context.device)
    grid = (row_blocks(rows, channels // vector, context.device), 1, 1)
    return grid, [np.int64(rows), np.int32(channels), np.int32(lanes), np.int32(vector)]
