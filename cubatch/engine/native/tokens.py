"""Tokens and the class token on hand-written kernels: copies of columns, and one addition."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.backend import of
from cubatch.engine.native.arrays import check, column_grid, dtype_of, vector_width
from cubatch.engine.native.context import Context
from cubatch.engine.native.pointwise import copy_columns, place_columns
from cubatch.engine.native.reductions import column_sums
from cubatch.kernels import variant
from cubatch.kernels.workspace.misc import walked_tiles


def tokens(context: Context, x: Any, token: Any, position: Any, *, out: Any = None) -> Any:
    """Launch the kernel of `functional.tokens`."""
    n, (count, c) = len(x), position.shape
    y = of(x).empty((n, count, 1, c), dtype=x.dtype) if out is None else out
    check(x.dtype, (n, (count - 1) * c), x=x.reshape(n, -1))
    check(x.dtype, (n, count * c), out=y.reshape(n, -1))
    check(x.dtype, (c,), token=token)
    check(x.dtype, (count, c), position=position)
    vector = vector_width(context, c, x, token, position, y)
    tiles = walked_tiles(n, count * c, vector, x.itemsize, context.device)
    extents = (tiles.rows_per_tile, count * c, c, tiles.lanes, tiles.vector)
    context.launch(
        variant.find("tokens", dtype_of(x)),
        column_grid(tiles),
        [x, token, position, y, np.int64(n), *map(np.int32, extents)],
    )
    return y


def tokens_backward(
    context: Context, dy: Any, *, dtoken: Any, dposition: Any, out: Any = None, workspace: Any = None
) -> None:
    """Launch the kernels of `functional.tokens_backward`, with `column_sums_workspace` bytes for n rows."""
    n, (count, c) = len(dy), dposition.shape
    errors = dy.reshape(n, -1)
    check(dy.dtype, (n, count * c), dy=errors)
    check(dy.dtype, (c,), dtoken=dtoken)
    column_sums(context, errors, out=dposition.reshape(-1), workspace=workspace)
    copy_columns(context, dposition.reshape(1, -1), dtoken.reshape(1, -1), width=c)
    if out is not None:
        pixels = out.reshape(n, -1)
        check(dy.dtype, (n, (count - 1) * c), out=pixels)
        copy_columns(context, errors, pixels, begin=c, width=(count - 1) * c)


def class_token(context: Context, x: Any, *, out: Any = None) -> Any:
    """Launch the kernel of `functional.class_token`."""
    n, *_, c = x.shape
    y = of(x).empty((n, 1, 1, c), dtype=x.dtype) if out is None else out
    check(x.dtype, x.shape, x=x)
    check(x.dtype, (n, c), out=y.reshape(n, -1))
    copy_columns(context, x.reshape(n, -1), y.reshape(n, -1), width=c)
    return y


def class_token_backward(context: Context, dy: Any, *, x_shape: tuple[int, ...], out: Any = None) -> Any:
    """Launch the kernel of `functional.class_token_backward`."""
    n, *_, c = x_shape
    dx = of(dy).empty(x_shape, dtype=dy.dtype) if out is None else out
    check(dy.dtype, (n, c), dy=dy.reshape(n, -1))
    check(dy.dtype, x_shape, out=dx)
    place_columns(context, dy.reshape(n, -1), dx.reshape(n, -1), 0)
    return dx
