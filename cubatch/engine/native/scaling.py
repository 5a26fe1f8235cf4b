"""Factors of channels, of each sample or the same for all, and grids over samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cubatch.engine.backend import view
from cubatch.engine.native.arrays import check, take_workspace, vector_width
from cubatch.engine.native.context import Context, Grid, dtype_of
from cubatch.engine.native.layer_norm import parameter_sums
from cubatch.engine.native.operation import operation
from cubatch.kernels.workspace.misc import layer_scale_backward_workspace, walked_tiles


@operation(out=lambda given: given.x.shape)
def scale(context: Context, given: SimpleNamespace, *, residual: Any = None) -> Any:
    """Launch the kernel of `functional.scale`, and return y; the residual is added and may be y, None adds nothing."""
    x, s, y, (n, h, w, c) = given.x, given.s, given.out, given.x.shape
    check(x.dtype, x.shape, x=x, residual=residual)
    check(x.dtype, (n, 1, 1, c), s=s)
    added = [] if residual is None else [residual]
    grid, numbers = sample_walk_grid(context, x.shape, vector_width(context, c, x, y, *added), x.itemsize)
    context.run("scale_add" if added else "scale", x, grid, x, s, *added, y, h * w, *numbers)
    return y


@operation()
def scale_backward(context: Context, given: SimpleNamespace) -> None:
    dy, x, s, dx, ds, (n, h, w, c) = given.dy, given.x, given.s, given.dx, given.ds, given.dy.shape
    check(dy.dtype, dy.shape, dy=dy, x=x, dx=dx)
    check(dy.dtype, (n, 1, 1, c), s=s, ds=ds)
    vector = vector_width(context, c, dy, x, dx)
    grid, numbers = sample_sums_grid(context, dy.shape, vector, dy.itemsize)
    context.run("scale_backward", dy, grid, dy, x, s, dx, ds, h * w, *numbers)


@operation(out=lambda given: given.x.shape)
def layer_scale(context: Context, given: SimpleNamespace) -> Any:
    x, gamma, channels = given.x, given.gamma, given.x.shape[-1]
    check(x.dtype, (channels,), gamma=gamma)
    sample = (1, x.size // channels, 1, channels)  # all positions as those of one sample
    residual = None if given.residual is None else given.residual.reshape(sample)
    factors = gamma.reshape(1, 1, 1, channels)
    scale(context, x.reshape(sample), factors, residual=residual, out=given.out.reshape(sample))
    return given.out


@operation()
def layer_scale_backward(context: Context, given: SimpleNamespace) -> None:
    dy, x, gamma, dgamma, channels = given.dy, given.x, given.gamma, given.dgamma, given.x.shape[-1]
    check(x.dtype, x.shape, dy=dy, x=x, out=given.out)
    check(x.dtype, (channels,), gamma=gamma, dgamma=dgamma)
    need = layer_scale_backward_workspace(x.size // channels, channels, dtype_of(x), context.device)
    workspace = take_workspace(given.workspace, x, need)
    unused = view(workspace, (channels,), x.dtype, offset=need - 4 * channels)  # the sums of dy alone
    parameter_sums(context, dy, x, statistics=None, dgamma=dgamma, dbeta=unused, workspace=workspace)
    if given.out is not None:
        layer_scale(context, dy, gamma, out=given.out)


def sample_sums_grid(context: Context, shape: tuple[int, ...], vector: int, itemsize: int) -> tuple[Grid, list[object]]:
    """
    Return the grid of a kernel that sums all pixels of each sample of an array (n, h, w, c), and its arguments.

    The arguments are the channels, the threads along the channels, and the channels of a thread.
    """
    n, h, w, c = shape
    tiles = walked_tiles(h * w, c, vector, itemsize, context.device)
    return (n, tiles.blocks, 1), [c, tiles.lanes, vector]


def sample_walk_grid(context: Context, shape: tuple[int, ...], vector: int, itemsize: int) -> tuple[Grid, list[object]]:
    """
    Return the grid of a kernel over tiles of each sample's pixels of an array (n, h, w, c), and its arguments.

    The arguments are the rows of a tile, the channels, the threads along the channels, and the channels of a thread.
    """
    n, h, w, c = shape
    tiles = walked_tiles(h * w, c, vector, itemsize, context.device, samples=n)
    return (n * tiles.tiles, tiles.blocks, 1), [tiles.rows_per_tile, c, tiles.lanes, vector]
