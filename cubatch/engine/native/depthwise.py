"""
Depthwise convolution on kernels/depthwise: filters 3x3, 5x5 and 7x7, stride 1 and 2, any pad.

Arguments are those of `functional.conv2d` and its gradients, with the shape of a convolution that `supports` accepts;
`native.conv` runs all others on the grouped kernels.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cubatch.engine.native.arrays import check, floats, take_workspace
from cubatch.engine.native.context import Context, dtype_of
from cubatch.errors import InvalidArgument
from cubatch.kernels.variant import find
from cubatch.kernels.workspace.depthwise_grid import (
    DEPTHWISE_COLUMNS,
    DEPTHWISE_THREADS,
    LIMIT,
    REDUCE_CHANNELS,
    depthwise_strip_rows,
    depthwise_sums,
    depthwise_vector,
    depthwise_wgrad_workspace,
    sums_kernel,
)
from cubatch.network import windows
from cubatch.network.windows import ConvShape, Pair

_SLAB_VECTORS = 32  # of kernels/depthwise/convolve.cuh

# Window of kernels/depthwise/window.cuh.
_WINDOW = np.dtype(
    [(name, np.int32) for name in ("in_h", "in_w", "out_h", "out_w", "c", "in_top", "in_left", "out_top", "out_left")]
    + [(name, np.int32) for name in ("group_rows", "strip_rows", "num_strips", "num_columns", "slab_vectors")]
    + [("num_items", np.uint32)],
    align=True,
)


def forward(context: Context, shape: ConvShape, x: Any, w: Any, b: Any, *, relu: bool, out: Any) -> Any:
    """Launch the kernel that writes a depthwise convolution of x with w, plus b, clamped if `relu`; return `out`."""
    check(x.dtype, x=x, w=w, b=b)
    check(x.dtype, (len(x), shape.vertical.out, shape.horizontal.out, shape.c), out=out)
    rows, columns = _forward(shape.vertical), _forward(shape.horizontal)
    _convolve(context, shape, (x, w, b, out), rows, columns, relu=relu)
    return out


def dgrad(context: Context, shape: ConvShape, dy: Any, w: Any, *, out: Any) -> Any:
    """Launch the kernel that writes the gradient of a depthwise convolution's input to `out`; return it."""
    check(dy.dtype, w=w)
    check(dy.dtype, (len(out), shape.vertical.out, shape.horizontal.out, shape.c), dy=dy)
    check(dy.dtype, (len(out), shape.vertical.size, shape.horizontal.size, shape.c), out=out)
    rows, columns = _backward(shape.vertical), _backward(shape.horizontal)
    _convolve(context, shape, (dy, w, None, out), rows, columns, turned=True)
    return out


def wgrad(context: Context, shape: ConvShape, x: Any, dy: Any, *, dw: Any, db: Any, workspace: Any) -> Any:
    """
    Launch the kernels that write the gradient of the filter to dw and of the bias to db, unless None; return dw.

    The workspace has `depthwise_wgrad_workspace` bytes; None allocates it.
    """
    check(x.dtype, x=x, dw=dw, db=db)
    check(x.dtype, (len(x), shape.vertical.out, shape.horizontal.out, shape.c), dy=dy)
    dtype, row = dtype_of(x), (shape.taps + 1) * shape.c
    scratch = take_workspace(workspace, x, depthwise_wgrad_workspace(shape, len(x), dtype, context.device))
    vector = _vector(context, shape, x, dy)
    sums = depthwise_sums(shape, len(x), vector, dtype, context.device)
    partials = floats(scratch, sums.blocks * row)
    rows, columns = _forward(shape.vertical), _forward(shape.horizontal)
    window = _window(rows, columns, shape.c, len(x), strip_rows=sums.strip_rows, slab_vectors=sums.slab_vectors)
    taps, down = shape.vertical.taps, shape.vertical.stride
    kernel = sums_kernel(shape, vector, dtype)
    if vector > 1:
        context.launch(kernel, (sums.blocks, sums.slabs, 1), (x, dy, partials, window))
    else:
        grid = (sums.blocks, sums.slabs, shape.taps + (db is not None))
        context.launch(kernel, grid, (x, dy, partials, window, taps, down))
    grid = (-(-shape.c // REDUCE_CHANNELS), shape.taps + (db is not None), 1)
    context.run("depthwise_wgrad_reduce", x, grid, partials, dw, db, sums.blocks, shape.c, shape.taps)
    return dw


class _Axis(NamedTuple):
    """An axis in a pass, in the terms of kernels/depthwise/window.cuh."""

    size: int  # extent of the input
    out: int  # extent of the output
    pad: int  # zeros before the input
    up: int  # outputs for each step of the input, which form a group: the stride in an input gradient, else 1

    @property
    def origins(self) -> Pair:
        """The first input that the first group of outputs reads, and that group's first output, which may be -1."""
        first = -self.pad // self.up
        return first, first * self.up + self.pad

    @property
    def groups(self) -> int:
        return -(-(self.out - self.origins[1]) // self.up)

    @property
    def strips(self) -> int:
        """Number of strips that the row of an image is divided into, on the horizontal axis."""
        return -(-self.groups // (DEPTHWISE_COLUMNS // self.up))


def _forward(axis: windows.Axis) -> _Axis:
    return _Axis(axis.size, axis.out, -axis.offset, up=1)


def _backward(axis: windows.Axis) -> _Axis:
    return _Axis(axis.out, axis.size, axis.taps - 1 + axis.offset, up=axis.stride)


def _vector(context: Context, shape: ConvShape, *arrays: Any) -> int:
    vector, itemsize = depthwise_vector(shape.taps, arrays[0].itemsize), arrays[0].itemsize
    whole = shape.c % vector == 0 and all(context.aligned(array, vector * itemsize) for array in arrays)
    return vector if whole else 1


def _convolve(
    context: Context, shape: ConvShape, arrays: tuple[Any, ...], rows: _Axis, columns: _Axis, *,
    relu: bool = False, turned: bool = False,
) -> None:  # fmt: skip
    """
    Launch a kernel that computes every output of a depthwise pass; raise InvalidArgument for 2^31 threads or more.

    `arrays` are the input, the filter, the bias or None, and the output. `turned` is whether the taps are read in
    reverse order, as in dgrad.
    """
    x, w, bias, y = arrays
    vector = _vector(context, shape, *arrays)
    vectors = shape.c // vector
    slabs = -(-vectors // _SLAB_VECTORS)
    slab_vectors = -(-vectors // slabs)
    strip_rows = depthwise_strip_rows(rows.groups, len(x) * columns.strips * vectors, context.device)
    window = _window(rows, columns, shape.c, len(x), strip_rows=strip_rows, slab_vectors=slab_vectors)
    threads = int(window["num_items"]) * slab_vectors
    if threads >= LIMIT:
        raise InvalidArgument(
            "x", x.shape, f"of fewer samples: it needs {threads} threads, and a launch has fewer than {LIMIT}"
        )
    grid = (-(-threads // DEPTHWISE_THREADS), slabs, 1)
    filter_, stride = shape.vertical.taps, shape.vertical.stride
    floor = 0.0 if relu else -math.inf
    if vector == 1:
        steps = filter_, rows.up, stride // rows.up
        context.run("depthwise_each", x, grid, x, w, bias, y, window, floor, turned, *steps)
    elif stride == 1:
        kernel = find("depthwise_s1", dtype_of(x), FILTER=filter_)
        context.launch(kernel, grid, (x, w, bias, y, window, floor, turned))
    elif turned:
        context.launch(find("depthwise_dgrad_s2", dtype_of(x), FILTER=filter_), grid, (x, w, y, window))
    else:
        kernel = find("depthwise_fprop_s2", dtype_of(x), FILTER=filter_)
        context.launch(kernel, grid, (x, w, bias, y, window, floor))


def _window(rows: _Axis, columns: _Axis, c: int, samples: int, *, strip_rows: int, slab_vectors: int) -> np.void:
    (in_top, out_top), (in_left, out_left) = rows.origins, columns.origins
    strips = -(-rows.groups // strip_rows)
    extents = (rows.size, columns.size, rows.out, columns.out, c)
    cut = (rows.groups, strip_rows, strips, columns.strips, slab_vectors, samples * strips * columns.strips)
    return np.void((*extents, in_top, in_left, out_top, out_left, *cut), dtype=_WINDOW)
