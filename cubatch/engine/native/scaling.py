"""Factors of channels, of each sample or the same for all, and grids over samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.backend import of, view
from cubatch.engine.native.arrays import check, dtype_of, take_workspace, vector_width
from cubatch.engine.native.context import Context, Grid
from cubatch.engine.native.layer_norm import parameter_sums
from cubatch.kernels import variant
from cubatch.kernels.workspace.misc import layer_scale_backward_workspace, walked_tiles


def scale(context: Context, x: Any, s: Any, *, out: Any = None) -> Any:
    """Launch the kernel of `functional.scale`."""
    y = of(x).empty_like(x) if out is None else out
    check(x.dtype, x.shape, x=x, out=y)
    check(x.dtype, (x.shape[0], 1, 1, x.shape[3]), s=s)
    grid, arguments = sample_walk_grid(context, x.shape, vector_width(context, x.shape[3], x, y), x.itemsize)
    rows = np.int32(x.shape[1] * x.shape[2])
    context.launch(variant.find("scale", dtype_of(x)), grid, [x, s, y, rows, *arguments])
    return y


def scale_backward(context: Context, dy: Any, x: Any, s: Any, *, dx: Any = None, ds: Any = None) -> None:
    """Launch the kernel of `functional.scale_backward`."""
    check(dy.dtype, dy.shape, dy=dy, x=x, dx=dx)
    check(dy.dtype, (dy.shape[0], 1, 1, dy.shape[3]), s=s, ds=ds)
    written = () if dx is None else (dx,)
    vector = vector_width(context, dy.shape[3], dy, x, *written)
    grid, arguments = sample_sums_grid(context, dy.shape, vector, dy.itemsize)
    rows = np.int32(dy.shape[1] * dy.shape[2])
    context.launch(variant.find("scale_backward", dtype_of(dy)), grid, [dy, x, s, dx, ds, rows, *arguments])


def layer_scale(context: Context, x: Any, gamma: Any, *, out: Any = None) -> Any:
    """Launch the kernel of `functional.layer_scale`."""
    y, channels = of(x).empty_like(x) if out is None else out, x.shape[-1]
    check(x.dtype, (channels,), gamma=gamma)
    sample = (1, x.size // channels, 1, channels)  # all positions as those of one sample
    scale(context, x.reshape(sample), gamma.reshape(1, 1, 1, channels), out=y.reshape(sample))
    return y


def layer_scale_backward(
    context: Context, dy: Any, x: Any, gamma: Any, *, dgamma: Any, out: Any = None, workspace: Any = None
) -> None:
    """Launch the kernels of `functional.layer_scale_backward`, with `layer_scale_backward_workspace` bytes."""
    channels = x.shape[-1]
    check(x.dtype, x.shape, dy=dy, x=x, out=out)
    check(x.dtype, (channels,), gamma=gamma, dgamma=dgamma)
    need = layer_scale_backward_workspace(x.size // channels, channels, dtype_of(x), context.device)
    workspace = take_workspace(workspace, x, need)
    unused = view(workspace, (channels,), x.dtype, offset=need - 4 * channels)  # the sums of dy alone
    parameter_sums(context, dy, x, statistics=None, dgamma=dgamma, dbeta=unused, workspace=workspace)
    if out is not None:
        layer_scale(context, dy, gamma, out=out)


def sample_sums_grid(context: Context, shape: tuple[int, ...], vector: int, itemsize: int) -> tuple[Grid, list[object]]:
    """Return a grid with blocks that sum all pixels of a sample, and channels, lanes and vector."""
    n, h, w, c = shape
    tiles = walked_tiles(h * w, c, vector, itemsize, context.device)
    return (n, tiles.blocks, 1), [np.int32(c), np.int32(tiles.lanes), np.int32(vector)]


def sample_walk_grid(context: Context, shape: tuple[int, ...], vector: int, itemsize: int) -> tuple[Grid, list[object]]:
    """Cut each sample's pixels into tiles: return the grid, and rows of a tile, channels, lanes and vector."""
    n, h, w, c = shape
    tiles = walked_tiles(h * w, c, vector, itemsize, context.device, samples=n)
    grid = (n * tiles.tiles, tiles.blocks, 1)
    return grid, [np.int32(tiles.rows_per_tile), np.int32(c), np.int32(tiles.lanes), np.int32(vector)]
