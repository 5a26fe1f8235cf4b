"""Pooling on hand-written kernels: a thread for each result, which gathers its inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cubatch.engine.native.arrays import check, vector_width
from cubatch.engine.native.context import Context, Grid
from cubatch.engine.native.operation import operation
from cubatch.engine.native.scaling import sample_sums_grid, sample_walk_grid
from cubatch.errors import InvalidArgument
from cubatch.kernels.workspace.misc import THREADS
from cubatch.network.layers.pooling_layers import MOST_TAPS
from cubatch.network.windows import Window, pool_axes

# PoolShape of kernels/misc/pooling.cu.
_SHAPE = np.dtype(
    [
        (name, np.int32)
        for name in (
            "h", "w", "c", "p", "q", "r", "s", "stride_h", "stride_w", "pad_top", "pad_left", "begin_h", "end_h",
            "begin_w", "end_w",
        )
    ]
)  # fmt: skip


def _pooled(x_shape: tuple[int, ...], window: Window) -> tuple[int, int, int, int]:
    vertical, horizontal = pool_axes((x_shape[1], x_shape[2]), window)
    return x_shape[0], vertical.out, horizontal.out, x_shape[3]


@operation(out=lambda given: _pooled(given.x.shape, given.window))
def max_pool2d(context: Context, given: SimpleNamespace) -> Any:
    x, window, argmax, y = given.x, given.window, given.argmax, given.out
    taps = window.r * window.s
    if taps > MOST_TAPS:
        remedy = "Use a smaller window: the position of the largest value is stored in one byte."
        raise InvalidArgument("r * s", taps, f"at most {MOST_TAPS}", remedy)
    check(x.dtype, x=x)
    check(np.uint8, y.shape, argmax=argmax)
    vector = _vector(context, x, y, argmax)
    reaches_out = any(axis.reaches_out for axis in pool_axes(x.shape[1:3], window))
    first_wins = not (given.relu or reaches_out)  # it has no competitor, even if it is a NaN
    numbers = _shape(x.shape, window), first_wins, given.relu, vector
    context.run("max_pool2d", x, _grid(y.shape, vector), x, y, argmax, *numbers)
    return y


@operation(out=lambda given: given.x_shape)
def max_pool2d_backward(context: Context, given: SimpleNamespace) -> Any:
    dy, argmax, dx = given.dy, given.argmax, given.out
    check(dy.dtype, _pooled(dx.shape, given.window), dy=dy)
    check(np.uint8, dy.shape, argmax=argmax)
    vector = _vector(context, dy, dx, argmax)
    shape = _shape(dx.shape, given.window)
    context.run("max_pool2d_backward", dy, _grid(dx.shape, vector), dy, argmax, dx, shape, vector)
    return dx


@operation(out=lambda given: _pooled(given.x.shape, given.window))
def avg_pool2d(context: Context, given: SimpleNamespace) -> Any:
    x, y = given.x, given.out
    check(x.dtype, x=x)
    vector = _vector(context, x, y)
    context.run("avg_pool2d", x, _grid(y.shape, vector), x, y, _shape(x.shape, given.window), vector)
    return y


@operation(out=lambda given: given.x_shape)
def avg_pool2d_backward(context: Context, given: SimpleNamespace) -> Any:
    dy, dx = given.dy, given.out
    check(dy.dtype, _pooled(dx.shape, given.window), dy=dy)
    vector = _vector(context, dy, dx)
    context.run("avg_pool2d_backward", dy, _grid(dx.shape, vector), dy, dx, _shape(dx.shape, given.window), vector)
    return dx


@operation(out=lambda given: (given.x.shape[0], given.x.shape[3]))
def global_avg_pool(context: Context, given: SimpleNamespace) -> Any:
    x, (_, h, w, c) = given.x, given.x.shape
    check(x.dtype, x=x)
    grid, numbers = sample_sums_grid(context, x.shape, vector_width(context, c, x), x.itemsize)
    context.run("global_avg_pool", x, grid, x, given.out, h * w, *numbers)
    return given.out


@operation(out=lambda given: given.x_shape)
def global_avg_pool_backward(context: Context, given: SimpleNamespace) -> Any:
    dy, residual, dx, (n, h, w, c) = given.dy, given.residual, given.out, given.x_shape
    check(dy.dtype, (n, c), dy=dy)
    check(dy.dtype, dx.shape, residual=residual)
    grid, numbers = sample_walk_grid(context, dx.shape, vector_width(context, c, dy, residual, dx), dy.itemsize)
    context.run("global_avg_pool_backward", dy, grid, dy, residual, dx, h * w, *numbers)
    return dx


def _vector(context: Context, first: Any, second: Any, argmax: Any = None) -> int:
    vector = vector_width(context, first.shape[3], first, second)
    return vector if context.aligned(argmax, vector) else 1


def _grid(shape: tuple[int, ...], vector: int) -> Grid:
    """Return the grid of a kernel with whole blocks for each image (n, h, w, c), and a thread for `vector` channels."""
    n, rows, columns, channels = shape
    return (n * -(-rows * columns * (channels // vector) // THREADS), 1, 1)


def _shape(x_shape: tuple[int, ...], window: Window) -> Any:
    _, h, w, c = x_shape
    v, u = pool_axes((h, w), window)
    top, bottom, left, right = window.pad
    counted = (-top, h + bottom, -left, w + right) if window.count_include_pad else (0, h, 0, w)
    values = (h, w, c, v.out, u.out, v.taps, u.taps, v.stride, u.stride, top, left, *counted)
    return np.array([values], dtype=_SHAPE)[0]
