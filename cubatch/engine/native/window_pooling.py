"""Pooling on hand-written kernels: a thread for each result, which gathers its inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.backend import of
from cubatch.engine.native.arrays import check, dtype_of, vector_width
from cubatch.engine.native.context import Context, Grid
from cubatch.engine.native.scaling import sample_sums_grid, sample_walk_grid
from cubatch.errors import InvalidArgument
from cubatch.kernels import variant
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


def max_pool2d(
    context: Context, x: Any, window: Window, *, relu: bool = False, out: Any = None, argmax: Any = None
) -> Any:
    """Launch the kernel of `functional.max_pool2d`."""
    taps = window.r * window.s
    if taps > MOST_TAPS:
        raise InvalidArgument("r * s", taps, f"at most {MOST_TAPS}", "The winning tap is kept in one byte.")
    axes = pool_axes(x.shape[1:3], window)
    y = _output(x, axes, out)
    check(np.uint8, y.shape, argmax=argmax)
    vector = _vector(context, x, y, argmax)
    first_wins = not (relu or any(axis.reaches_out for axis in axes))  # it has no competitor, even if it is a NaN
    context.launch(
        variant.find("max_pool2d", dtype_of(x)),
        _grid(y.shape, vector),
        [x, y, argmax, _shape(x.shape, axes, window), np.int32(first_wins), np.int32(relu), np.int32(vector)],
    )
    return y


def max_pool2d_backward(
    context: Context, dy: Any, argmax: Any, window: Window, *, x_shape: tuple[int, int, int, int], out: Any = None
) -> Any:
    """Launch the kernel of `functional.max_pool2d_backward`."""
    axes = pool_axes(x_shape[1:3], window)
    dx = _gradient(dy, x_shape, axes, out)
    check(np.uint8, dy.shape, argmax=argmax)
    vector = _vector(context, dy, dx, argmax)
    context.launch(
        variant.find("max_pool2d_backward", dtype_of(dy)),
        _grid(x_shape, vector),
        [dy, argmax, dx, _shape(x_shape, axes, window), np.int32(vector)],
    )
    return dx


def avg_pool2d(context: Context, x: Any, window: Window, *, out: Any = None) -> Any:
    """Launch the kernel of `functional.avg_pool2d`."""
    axes = pool_axes(x.shape[1:3], window)
    y = _output(x, axes, out)
    vector = _vector(context, x, y)
    context.launch(
        variant.find("avg_pool2d", dtype_of(x)),
        _grid(y.shape, vector),
        [x, y, _shape(x.shape, axes, window), np.int32(vector)],
    )
    return y


def avg_pool2d_backward(
    context: Context, dy: Any, window: Window, *, x_shape: tuple[int, int, int, int], out: Any = None
) -> Any:
    """Launch the kernel of `functional.avg_pool2d_backward`."""
    axes = pool_axes(x_shape[1:3], window)
    dx = _gradient(dy, x_shape, axes, out)
    vector = _vector(context, dy, dx)
    context.launch(
        variant.find("avg_pool2d_backward", dtype_of(dy)),
        _grid(x_shape, vector),
        [dy, dx, _shape(x_shape, axes, window), np.int32(vector)],
    )
    return dx


def global_avg_pool(context: Context, x: Any, *, out: Any = None) -> Any:
    """Launch the kernel of `functional.global_avg_pool`."""
    n, h, w, c = x.shape
    y = of(x).empty((n, c), dtype=x.dtype) if out is None else out
    check(x.dtype, x.shape, x=x)
    check(x.dtype, (n, c), out=y)
    vector = vector_width(context, c, x)
    grid, arguments = sample_sums_grid(context, x.shape, vector, x.itemsize)
    context.launch(variant.find("global_avg_pool", dtype_of(x)), grid, [x, y, np.int32(h * w), *arguments])
    return y


def global_avg_pool_backward(context: Context, dy: Any, *, x_shape: tuple[int, int, int, int], out: Any = None) -> Any:
    """Launch the kernel of `functional.global_avg_pool_backward`."""
    dx = of(dy).empty(x_shape, dtype=dy.dtype) if out is None else out
    check(dy.dtype, (x_shape[0], x_shape[3]), dy=dy)
    check(dy.dtype, x_shape, out=dx)
    vector = vector_width(context, x_shape[3], dy, dx)
    grid, arguments = sample_walk_grid(context, x_shape, vector, dy.itemsize)
    context.launch(
        variant.find("global_avg_pool_backward", dtype_of(dy)),
        grid,
        [dy, dx, np.int32(x_shape[1] * x_shape[2]), *arguments],
    )
    return dx


def _outputs(x_shape: tuple[int, ...], axes: Any) -> tuple[int, int, int, int]:
    return x_shape[0], axes[0].out, axes[1].out, x_shape[3]


def _gradient(dy: Any, x_shape: tuple[int, int, int, int], axes: Any, out: Any) -> Any:
    dx = of(dy).empty(x_shape, dtype=dy.dtype) if out is None else out
    check(dy.dtype, _outputs(x_shape, axes), dy=dy)
    check(dy.dtype, x_shape, out=dx)
    return dx


def _output(x: Any, axes: Any, out: Any) -> Any:
    shape = _outputs(x.shape, axes)
    y = of(x).empty(shape, dtype=x.dtype) if out is None else out
    check(x.dtype, x.shape, x=x)
    check(x.dtype, shape, out=y)
    return y


def _vector(context: Context, first: Any, second: Any, argmax: Any = None) -> int:
    vector = vector_width(context, first.shape[3], first, second)
    return vector if context.aligned(argmax, vector) else 1


def _grid(shape: tuple[int, ...], vector: int) -> Grid:
    """Return a grid with whole blocks for each image, and a thread for each of its vectors."""
    n, rows, columns, channels = shape
    return (n * -(-rows * columns * (channels // vector) // THREADS), 1, 1)


def _shape(x_shape: tuple[int, ...], axes: Any, window: Window) -> Any:
    _, h, w, c = x_shape
    v, u = axes
    top, bottom, left, right = window.pad
    counted = (-top, h + bottom, -left, w + right) if window.count_include_pad else (0, h, 0, w)
    values = (h, w, c, v.out, u.out, v.taps, u.taps, v.stride, u.stride, top, left, *counted)
    return np.array([values], dtype=_SHAPE)[0]
