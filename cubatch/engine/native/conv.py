"""
Convolution as a matrix product on simt, mma and hopper kernels: an operand is gathered and never stored.

A 1x1 convolution with stride 1 and no padding is a plain product and goes to `gemm`. A depthwise one goes to
`depthwise` if that has a kernel. `engine.conv` has the table of products.

An input may be stored with more channels than the filter has, all zero (see `kernels.padding`). The filter is then
copied into one with that number of channels; its gradient is computed with that number too.
"""

from __future__ import annotations

import math
from typing import Any

from cubatch.engine.backend import of, view
from cubatch.engine.native import depthwise
from cubatch.engine.native.arrays import check, take_workspace
from cubatch.engine.native.context import Context
from cubatch.engine.native.layout import copy_channels
from cubatch.engine.native.product import PLAIN, Fused, geometry, launch, product_dtype, vector_of
from cubatch.engine.native.reductions import column_sums
from cubatch.kernels.padding import stored_channels
from cubatch.kernels.problem import Problem, conv2d_problem
from cubatch.kernels.workspace.depthwise_grid import supports
from cubatch.kernels.workspace.misc import VECTOR_BYTES
from cubatch.network.passes import Pass
from cubatch.network.windows import ConvShape, Pad, Pair, conv_shape

_NO_PAD = (0, 0, 0, 0)


def conv2d(
    context: Context, x: Any, w: Any, b: Any = None, *, stride: Pair = (1, 1), pad: Pad = _NO_PAD,
    dilation: Pair = (1, 1), groups: int = 1, scale: Any = None, shift: Any = None, residual: Any = None,
    relu: bool = False, out: Any = None, workspace: Any = None, fused: Fused = PLAIN,
) -> Any:  # fmt: skip
    """
    Launch the kernels of `functional.conv2d`.

    The workspace has `product_scratch.conv2d_workspace` bytes. `fused` replaces scale, shift, residual and relu.
    """
    wide, workspace = _as_wide(x, w, groups, workspace)
    if wide is not w:
        w = copy_channels(context, w, out=wide)
    shape = conv_shape(x.shape[1:], w.shape, stride, pad, dilation, groups=groups)
    y_shape = _y_shape(shape, len(x))
    y = of(x).empty(y_shape, dtype=x.dtype) if out is None else out
    if fused is PLAIN and scale is residual is None and supports(shape):
        return depthwise.forward(context, shape, x, w, b, relu=relu, out=y)
    check(x.dtype, x.shape, x=x)
    check(x.dtype, w.shape, w=w)
    check(x.dtype, y_shape, out=y)
    if fused is PLAIN:
        fused = Fused(scale=scale, shift=shift, residual=residual, activation="relu" if relu else "none")
    problem = conv2d_fprop_problem(context, x, w, shape)
    launch(
        context, problem, x, w, y, bias=b, rows=len(x) * shape.pixels, columns=shape.k, fused=fused,
        conv=_forward(shape), batch=len(x), workspace=workspace,
    )  # fmt: skip
    return y


def conv2d_fprop_problem(context: Context, x: Any, w: Any, shape: ConvShape) -> Problem:
    """Return the problem of a forward pass."""
    vector = vector_of(context, (shape.c // shape.groups,), x, w)
    return conv2d_problem(Pass.FPROP, shape, len(x), product_dtype(context, x), vector)


def conv2d_dgrad(
    context: Context, dy: Any, w: Any, *, x_shape: tuple[int, int, int, int], stride: Pair = (1, 1),
    pad: Pad = _NO_PAD, dilation: Pair = (1, 1), groups: int = 1, residual: Any = None, positive: Any = None,
    out: Any = None, workspace: Any = None,
) -> Any:  # fmt: skip
    """
    Launch the kernels of `functional.conv2d_dgrad`; all phases of a stride are one launch.

    The workspace has `product_scratch.conv2d_workspace` bytes.
    """
    shape = conv_shape(x_shape[1:], w.shape, stride, pad, dilation, groups=groups)
    dx = of(dy).empty(x_shape, dtype=dy.dtype) if out is None else out
    if residual is positive is None and supports(shape):
        return depthwise.dgrad(context, shape, dy, w, out=dx)
    check(dy.dtype, _y_shape(shape, x_shape[0]), dy=dy)
    check(dy.dtype, w.shape, w=w)
    check(dy.dtype, x_shape, out=dx)
    vector = vector_of(context, (shape.c // groups, shape.k // groups), dy, w)
    problem = conv2d_problem(Pass.DGRAD, shape, len(dy), product_dtype(context, dy), vector)
    v, h = shape.vertical, shape.horizontal
    first = (-(-v.size // v.stride), -(-h.size // h.stride))
    conv = geometry(shape, first, (v.size // v.stride, h.size // h.stride))
    launch(
        context, problem, dy, w, dx, rows=len(dy) * v.size * h.size, columns=shape.c,
        fused=Fused(residual=residual, mask=positive), conv=conv, batch=len(dy), workspace=workspace,
    )  # fmt: skip
    return dx


def conv2d_wgrad(
    context: Context, x: Any, dy: Any, *, dw: Any, db: Any = None, stride: Pair = (1, 1), pad: Pad = _NO_PAD,
    dilation: Pair = (1, 1), groups: int = 1, workspace: Any = None, fused: Fused = PLAIN,
) -> Any:  # fmt: skip
    """
    Launch the kernels of `functional.conv2d_wgrad`.

    The workspace has `product_scratch.conv2d_workspace` bytes, or `depthwise_wgrad_workspace`. With `fused.residual=dw`
    the gradient is added to dw.
    """
    wide, rest = _as_wide(x, dw, groups, workspace)
    if wide is not dw and fused.residual is not None:
        fused = Fused(residual=copy_channels(context, fused.residual, out=wide))
    shape = conv_shape(x.shape[1:], wide.shape, stride, pad, dilation, groups=groups)
    if fused is PLAIN and supports(shape):
        return depthwise.wgrad(context, shape, x, dy, dw=dw, db=db, workspace=workspace)
    check(x.dtype, x.shape, x=x)
    check(x.dtype, _y_shape(shape, len(x)), dy=dy)
    check(x.dtype, dw.shape, dw=dw)
    check(x.dtype, (shape.k,), db=db)
    vector = vector_of(context, (shape.c // groups, shape.k // groups), x, dy)
    problem = conv2d_problem(Pass.WGRAD, shape, len(x), product_dtype(context, x), vector)
    launch(
        context, problem, dy, x, wide, rows=shape.k, columns=shape.filter_elements // shape.k, fused=fused,
        conv=_forward(shape), batch=len(x), workspace=rest,
    )  # fmt: skip
    if wide is not dw:
        copy_channels(context, wide, out=dw)
    if db is not None:
        column_sums(context, dy, out=db, workspace=workspace)
    return dw


def _as_wide(x: Any, w: Any, groups: int, workspace: Any) -> tuple[Any, Any]:
    """Return a filter with the number of channels that the input is stored with, and the rest of the workspace."""
    channels = x.shape[-1]
    if groups != 1 or channels == w.shape[-1] or channels != stored_channels(w.shape[-1]):
        return w, workspace
    wide = (*w.shape[:-1], channels)
    if workspace is None:
        return of(w).empty(wide, dtype=w.dtype), None
    held = -(-math.prod(wide) * w.itemsize // VECTOR_BYTES) * VECTOR_BYTES
    return view(take_workspace(workspace, w, held), wide, w.dtype), workspace[held:]


def _forward(shape: ConvShape) -> Any:
    pixels = (shape.vertical.out, shape.horizontal.out)
    return geometry(shape, pixels, pixels)


def _y_shape(shape: ConvShape, samples: int) -> tuple[int, int, int, int]:
    return samples, shape.vertical.out, shape.horizontal.out, shape.k
