"""What has one value for each sample and channel: the factors of squeeze-and-excite, and grids over samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.backend import of
from cubatch.engine.native.arrays import check, dtype_of, vector_width
from cubatch.engine.native.context import Context, Grid
from cubatch.kernels import variant
from cubatch.kernels.workspace.misc import walked_tiles


def scale(context: Context, x: Any, s: Any, *, out: Any = None) -> Any:
    """Multiply each channel of each sample by its factor; arguments and result are those of `functional.scale`."""
    y = of(x).empty_like(x) if out is None else out
    check(x.dtype, x.shape, x=x, out=y)
    check(x.dtype, (x.shape[0], 1, 1, x.shape[3]), s=s)
    grid, arguments = sample_walk_grid(context, x.shape, vector_width(context, x.shape[3], x, y), x.itemsize)
    rows = np.int32(x.shape[1] * x.shape[2])
    context.launch(variant.find("scale", dtype_of(x)), grid, [x, s, y, rows, *arguments])
    return y


def scale_backward(
    context: Context,
    dy: Any,
    x: Any,
    s: Any,
    *,
    dx: Any = None,
    ds: Any = None,
    workspace: Any = None,  # noqa: ARG001 - none is needed
) -> None:
    """Give the gradients by what is scaled and by the factors; arguments are those of `functional.scale_backward`."""
    check(dy.dtype, dy.shape, dy=dy, x=x, dx=dx)
    check(dy.dtype, (dy.shape[0], 1, 1, dy.shape[3]), s=s, ds=ds)
    written = () if dx is None else (dx,)
    vector = vector_width(context, dy.shape[3], dy, x, *written)
    grid, arguments = sample_sums_grid(context, dy.shape, vector, dy.itemsize)
    rows = np.int32(dy.shape[1] * dy.shape[2])
    context.launch(variant.find("scale_backward", dtype_of(dy)), grid, [dy, x, s, dx, ds, rows, *arguments])


def sample_sums_grid(context: Context, shape: tuple[int, ...], vector: int, itemsize: int) -> tuple[Grid, list[object]]:
    """Give each sample's channels to blocks that sum all its pixels: the grid, and channels, lanes and vector."""
    n, h, w, c = shape
    tiles = walked_tiles(h * w, c, vector, itemsize, context.device)
    return (n, tiles.blocks, 1), [np.int32(c), np.int32(tiles.lanes), np.int32(vector)]


def sample_walk_grid(context: Context, shape: tuple[int, ...], vector: int, itemsize: int) -> tuple[Grid, list[object]]:
    """Cut each sample's pixels into tiles: the grid, and rows of a tile, channels, lanes and vector."""
    n, h, w, c = shape
    tiles = walked_tiles(h * w, c, vector, itemsize, context.device, samples=n)
    grid = (n * tiles.tiles, tiles.blocks, 1)
    return grid, [np.int32(tiles.rows_per_tile), np.int32(c), np.int32(tiles.lanes), np.int32(vector)]
