"""Layer norm, and sums over positions of parameters' gradients, on hand-written kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cubatch.engine.native.arrays import check, floats, summing_kernel, take_workspace, tile_arguments, vector_width
from cubatch.engine.native.context import Context, Grid, dtype_of
from cubatch.engine.native.operation import operation
from cubatch.engine.native.reductions import finish_gradients
from cubatch.kernels import variant
from cubatch.kernels.resources import resident_blocks
from cubatch.kernels.workspace import misc


@operation(out=lambda given: given.x.shape)
def layer_norm(context: Context, given: SimpleNamespace) -> Any:
    """Launch the kernel of `functional.layer_norm` and return y; statistics are float32."""
    x, gamma, beta, y, channels = given.x, given.gamma, given.beta, given.out, given.x.shape[-1]
    statistics = None if given.statistics is None else given.statistics.reshape(-1)
    check(x.dtype, x=x)
    check(x.dtype, (channels,), gamma=gamma, beta=beta)
    check(np.float32, (2 * (x.size // channels),), statistics=statistics)
    grid, numbers = _row_grid(context, x, y)
    context.run("layer_norm", x, grid, x, gamma, beta, y, statistics, *numbers, float(given.eps))
    return y


@operation(out=lambda given: given.dy.shape)
def layer_norm_backward(context: Context, given: SimpleNamespace) -> Any:
    """Launch the kernels of `functional.layer_norm_backward` in `layer_norm_backward_workspace` bytes; return dx."""
    dy, x, gamma, dgamma, dbeta, dx = given.dy, given.x, given.gamma, given.dgamma, given.dbeta, given.out
    channels, statistics = x.shape[-1], given.statistics.reshape(-1)
    rows = x.size // channels
    check(x.dtype, x.shape, dy=dy, x=x, residual=given.residual, out=dx)
    check(x.dtype, (channels,), gamma=gamma, dgamma=dgamma, dbeta=dbeta)
    check(np.float32, (2 * rows,), statistics=statistics)
    need = misc.layer_norm_backward_workspace(rows, channels, dtype_of(x), context.device)
    workspace, results = take_workspace(given.workspace, x, need), {"dgamma": dgamma, "dbeta": dbeta}
    added = [] if given.residual is None else [given.residual]
    kernel = variant.find("layer_norm_backward_add" if added else "layer_norm_backward", dtype_of(x))
    vector = vector_width(context, channels, dy, x, gamma, dx, *added)
    resident = resident_blocks(kernel, context.device.compute_capability)
    lanes, blocks = misc.summed_rows(rows, channels, vector, context.device, blocks_per_sm=resident)
    sums = floats(workspace, blocks * 2 * channels, start=2 * channels) if blocks else None
    if sums is None:
        parameter_sums(context, dy, x, statistics=statistics, **results, workspace=workspace)
        blocks = misc.row_blocks(rows, channels // vector, context.device)
    numbers = np.int64(rows), channels, lanes, vector
    context.launch(kernel, (blocks, 1, 1), [dy, x, gamma, statistics, *added, dx, sums, *numbers])
    if sums is not None:
        finish_gradients(context, x, sums, means=floats(workspace, 2 * channels), **results)
    return dx


def parameter_sums(
    context: Context, dy: Any, x: Any, *, statistics: Any, dgamma: Any, dbeta: Any, workspace: Any
) -> None:
    """
    Compute the gradients of gamma and beta: sums over all positions of dy times gamma's factor, and of dy.

    `statistics` None: x is not normalized. The workspace has `batch_norm_backward_workspace` bytes.
    """
    channels = x.shape[-1]
    rows = x.size // channels
    tiles = misc.summed_tiles(rows, channels, vector_width(context, channels, dy, x), x.itemsize, context.device)
    need = misc.batch_norm_backward_workspace(rows, channels, dtype_of(x), context.device)
    partials = floats(take_workspace(workspace, x, need), (1 + tiles.tiles) * 2 * channels)
    numbers = tile_arguments(rows, channels, tiles)
    grid = (tiles.tiles, tiles.blocks, 1)
    means, sums = partials[: 2 * channels], partials[2 * channels :]
    context.launch(summing_kernel(context, "layer_norm_sums", x, rows), grid, [dy, x, statistics, sums, *numbers])
    finish_gradients(context, x, sums, means=means, dgamma=dgamma, dbeta=dbeta)


def _row_grid(context: Context, *arrays: Any) -> tuple[Grid, list[object]]:
    """
    Return the grid of a kernel over rows of arrays (..., c), and its arguments.

    The arguments are the rows, the channels, the threads along the channels, and the channels of a thread.
    """
    channels = arrays[0].shape[-1]
    rows, vector = arrays[0].size // channels, vector_width(context, channels, *arrays)
    lanes = misc.row_lanes(rows, channels // vector, context.device)
    grid = (misc.row_blocks(rows, channels // vector, context.device), 1, 1)
    return grid, [np.int64(rows), channels, lanes, vector]
