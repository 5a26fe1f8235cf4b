"""Tokens and the class token on hand-written kernels: copies of columns, and one addition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cubatch.engine.backend import of
from cubatch.engine.native.arrays import check, column_grid, vector_width
from cubatch.engine.native.context import Context
from cubatch.engine.native.operation import operation
from cubatch.engine.native.pointwise import copy_columns, place_columns
from cubatch.engine.native.reductions import column_sums
from cubatch.kernels.workspace.misc import walked_tiles


@operation()
def tokens(context: Context, given: SimpleNamespace) -> Any:
    x, token, position, n, (count, c) = given.x, given.token, given.position, len(given.x), given.position.shape
    y = of(x).empty((n, count, 1, c), dtype=x.dtype) if given.out is None else given.out
    check(x.dtype, (n, (count - 1) * c), x=x.reshape(n, -1))
    check(x.dtype, (n, count * c), out=y.reshape(n, -1))
    check(x.dtype, (c,), token=token)
    check(x.dtype, (count, c), position=position)
    tiles = walked_tiles(n, count * c, vector_width(context, c, x, token, position, y), x.itemsize, context.device)
    numbers = np.int64(n), tiles.rows_per_tile, count * c, c, tiles.lanes, tiles.vector
    context.run("tokens", x, column_grid(tiles), x, token, position, y, *numbers)
    return y


@operation()
def tokens_backward(context: Context, given: SimpleNamespace) -> None:
    dy, dtoken, dposition, n, (count, c) = given.dy, given.dtoken, given.dposition, len(given.dy), given.dposition.shape
    errors = dy.reshape(n, -1)
    check(dy.dtype, (n, count * c), dy=errors)
    check(dy.dtype, (c,), dtoken=dtoken)
    column_sums(context, errors, out=dposition.reshape(-1), workspace=given.workspace)
    copy_columns(context, dposition.reshape(1, -1), dtoken.reshape(1, -1), width=c)
    if given.out is not None:
        pixels = given.out.reshape(n, -1)
        check(dy.dtype, (n, (count - 1) * c), out=pixels)
        copy_columns(context, errors, pixels, begin=c, width=(count - 1) * c)


@operation()
def class_token(context: Context, given: SimpleNamespace) -> Any:
    x, (n, *_, c) = given.x, given.x.shape
    y = of(x).empty((n, 1, 1, c), dtype=x.dtype) if given.out is None else given.out
    check(x.dtype, x=x)
    check(x.dtype, (n, c), out=y.reshape(n, -1))
    copy_columns(context, x.reshape(n, -1), y.reshape(n, -1), width=c)
    return y


@operation(out=lambda given: given.x_shape)
def class_token_backward(context: Context, given: SimpleNamespace) -> Any:
    dy, dx, n, c = given.dy, given.out, given.x_shape[0], given.x_shape[-1]
    check(dy.dtype, (n, c), dy=dy.reshape(n, -1))
    place_columns(context, dy.reshape(n, -1), dx.reshape(n, -1), 0)
    return dx
