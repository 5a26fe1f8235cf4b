"""Pooling on hand-written kernels: a thread for each result, which gathers what belongs to it."""

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
from cubatch.network.layers.pooling import MOST_TAPS
from cubatch.network.windows import Pad, Pair, pool_axes

_NO_PAD = (0, 0, 0, 0)
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
    context: Context,
    x: Any,
    *,
    r: int,
    s: int,
    stride: Pair | None = None,
    pad: Pad = _NO_PAD,
    ceil_mode: bool = False,
    relu: bool = False,
    out: Any = None,
    argmax: Any = None,
    workspace: Any = None,  # noqa: ARG001 - none is needed
) -> Any:
    """
    Take the largest value of each window; arguments and result are those of `functional.max_pool2d`.

    Raises:
        InvalidArgument: If nothing would come out, the window has too many taps, or types differ.
    """
    if r * s > MOST_TAPS:
        raise InvalidArgument("r * s", r * s, f"at most {MOST_TAPS}", "The winning tap is kept in one byte.")
    axes = pool_axes(x.shape[1:3], (r, s), stride or (r, s), pad, ceil_mode=ceil_mode)
    y = _output(x, axes, out)
    check(np.uint8, y.shape, argmax=argmax)
    vector = _vector(context, x, y, argmax)
    first_wins = not (relu or any(axis.reaches_out for axis in axes))  # it has nobody to beat, be it a NaN
    context.launch(
        variant.find("max_pool2d", dtype_of(x)),
        _grid(y.shape, vector),
        [x, y, argmax, _shape(x.shape, axes, pad), np.int32(first_wins), np.int32(relu), np.int32(vector)],
    )
    return y


def max_pool2d_backward(
    context: Context,
    dy: Any,
    argmax: Any,
    *,
    x_shape: tuple[int, int, int, int],
    r: int,
    s: int,
    stride: Pair | None = None,
    pad: Pad = _NO_PAD,
    ceil_mode: bool = False,
    out: Any = None,
    workspace: Any = None,  # noqa: ARG001 - none is needed
) -> Any:
    """Give each window's gradient to the input that won it; as `functional.max_pool2d_backward`."""
    axes = pool_axes(x_shape[1:3], (r, s), stride or (r, s), pad, ceil_mode=ceil_mode)
    dx = _gradient(dy, x_shape, axes, out)
    check(np.uint8, dy.shape, argmax=argmax)
    vector = _vector(context, dy, dx, argmax)
    context.launch(
        variant.find("max_pool2d_backward", dtype_of(dy)),
        _grid(x_shape, vector),
        [dy, argmax, dx, _shape(x_shape, axes, pad), np.int32(vector)],
    )
    return dx


def avg_pool2d(
    context: Context,
    x: Any,
    *,
    r: int,
    s: int,
    stride: Pair | None = None,
    pad: Pad = _NO_PAD,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    out: Any = None,
    workspace: Any = None,  # noqa: ARG001 - none is needed
) -> Any:
    """Take the mean of each window; arguments and result are those of `functional.avg_pool2d`."""
    axes = pool_axes(x.shape[1:3], (r, s), stride or (r, s), pad, ceil_mode=ceil_mode)
    y = _output(x, axes, out)
    vector = _vector(context, x, y)
    context.launch(
        variant.find("avg_pool2d", dtype_of(x)),
        _grid(y.shape, vector),
        [x, y, _shape(x.shape, axes, pad, count_include_pad=count_include_pad), np.int32(vector)],
    )
    return y


def avg_pool2d_backward(
    context: Context,
    dy: Any,
    *,
    x_shape: tuple[int, int, int, int],
    r: int,
    s: int,
    stride: Pair | None = None,
    pad: Pad = _NO_PAD,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    out: Any = None,
    workspace: Any = None,  # noqa: ARG001 - none is needed
) -> Any:
    """Spread each window's gradient evenly over the inputs it averaged; as `functional.avg_pool2d_backward`."""
    axes = pool_axes(x_shape[1:3], (r, s), stride or (r, s), pad, ceil_mode=ceil_mode)
    dx = _gradient(dy, x_shape, axes, out)
    vector = _vector(context, dy, dx)
    context.launch(
        variant.find("avg_pool2d_backward", dtype_of(dy)),
        _grid(x_shape, vector),
        [dy, dx, _shape(x_shape, axes, pad, count_include_pad=count_include_pad), np.int32(vector)],
    )
    return dx


def global_avg_pool(context: Context, x: Any, *, out: Any = None) -> Any:
    """Take the mean of each sample's channels over all its pixels: (n, h, w, c) to (n, c)."""
    n, h, w, c = x.shape
    y = of(x).empty((n, c), dtype=x.dtype) if out is None else out
    check(x.dtype, x.shape, x=x)
    check(x.dtype, (n, c), out=y)
    vector = vector_width(context, c, x)
    grid, arguments = sample_sums_grid(context, x.shape, vector, x.itemsize)
    context.launch(variant.find("global_avg_pool", dtype_of(x)), grid, [x, y, np.int32(h * w), *arguments])
    return y


def global_avg_pool_backward(context: Context, dy: Any, *, x_shape: tuple[int, int, int, int], out: Any = None) -> Any:
    """Spread each channel's gradient (n, c) evenly over its pixels; `out` is (n, h, w, c)."""
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
    """Give each image blocks of its own, a thread for each of its vectors."""
    n, rows, columns, channels = shape
    return (n * -(-rows * columns * (channels // vector) // THREADS), 1, 1)


def _shape(x_shape: tuple[int, ...], axes: Any, pad: Pad, *, count_include_pad: bool = False) -> Any:
    _, h, w, c = x_shape
    v, u = axes
    top, bottom, left, right = pad
    counted = (-top, h + bottom, -left, w + right) if count_include_pad else (0, h, 0, w)
    values = (h, w, c, v.out, u.out, v.taps, u.taps, v.stride, u.stride, top, left, *counted)
    return np.array([values], dtype=_SHAPE)[0]
