"""
Convolution as a matrix product on simt, mma and hopper kernels: an operand is gathered and never stored.

A 1x1 convolution with stride 1 and no padding is a plain product and goes to `gemm`. A depthwise one goes to
`depthwise` if that has a kernel. `engine.conv` has the table of products. The workspace has
`product_scratch.conv2d_workspace` bytes, that of a depthwise gradient `depthwise_wgrad_workspace`.

An input may be stored with more channels than the filter has, all zero, or in patches (see `kernels.padding`). The
filter is then copied into one with that number of channels; its gradient is computed with that number too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from cubatch.engine.backend import of, view
from cubatch.engine.native import depthwise, norm_sums
from cubatch.engine.native.arrays import check, take_workspace
from cubatch.engine.native.context import Context
from cubatch.engine.native.layout import copy_filter
from cubatch.engine.native.operands import PLAIN, Fused, Operands
from cubatch.engine.native.operation import operation
from cubatch.engine.native.product import launch, product_dtype, vector_of
from cubatch.engine.native.reductions import column_sums
from cubatch.kernels.padding import stored_channels
from cubatch.kernels.problem import Problem, conv2d_problem
from cubatch.kernels.workspace.depthwise_grid import supports
from cubatch.kernels.workspace.misc import VECTOR_BYTES
from cubatch.network.passes import Pass
from cubatch.network.windows import ConvShape, Pair, conv_shape


def shape_of(given: SimpleNamespace, x_shape: tuple[int, ...], w: Any) -> ConvShape:
    """Return the geometry of a convolution from its arguments and the shapes of its input and filter."""
    _, *hwc = x_shape
    return conv_shape(tuple(hwc), w.shape, given.stride, given.pad, given.dilation, groups=given.groups)


def output_shape(shape: ConvShape, samples: int) -> tuple[int, int, int, int]:
    """Return the shape (n, p, q, k) of a convolution's output for `samples` samples."""
    return samples, shape.vertical.out, shape.horizontal.out, shape.k


@operation()
def conv2d(
    context: Context, given: SimpleNamespace, *, fused: Fused = PLAIN, norm: Mapping[str, Any] | None = None
) -> Any:
    """
    Launch the kernels of `functional.conv2d` and return y; `fused` replaces scale, shift, residual and relu.

    `norm` has the arguments of a batch norm that reads y, see `norm_sums.launch`; None: no norm.
    """
    x, w, y = given.x, given.w, given.out
    wide, given, patch = _as_stored(x, w, given)
    if wide is not w:
        w = copy_filter(context, w, patch, out=wide)
    shape = shape_of(given, x.shape, w)
    y_shape = output_shape(shape, len(x))
    y = of(x).empty(y_shape, dtype=x.dtype) if y is None else y
    if fused is PLAIN and given.scale is given.residual is None and supports(shape):
        return depthwise.forward(context, shape, x, w, given.b, relu=given.relu, out=y)
    check(x.dtype, x=x, w=w)
    check(x.dtype, y_shape, out=y)
    if fused is PLAIN:
        activation = "relu" if given.relu else "none"
        fused = Fused(scale=given.scale, shift=given.shift, residual=given.residual, activation=activation)
    problem = conv2d_fprop_problem(context, x, w, shape)
    norm_sums.launch(
        context,
        Operands(problem=problem, a=x, b=w, out=y, bias=given.b, fused=fused, shape=shape, workspace=given.workspace),
        norm,
    )
    return y


def conv2d_fprop_problem(context: Context, x: Any, w: Any, shape: ConvShape) -> Problem:
    """Return the forward pass of a convolution of x with w as a problem of the tiled kernels."""
    vector = vector_of(context, (shape.c // shape.groups,), x, w)
    return conv2d_problem(Pass.FPROP, shape, len(x), product_dtype(context, x), vector)


def _gradient_problem(context: Context, pass_: Pass, left: Any, right: Any, shape: ConvShape) -> Problem:
    vector = vector_of(context, (shape.c // shape.groups, shape.k // shape.groups), left, right)
    return conv2d_problem(pass_, shape, len(left), product_dtype(context, left), vector)


@operation(out=lambda given: given.x_shape)
def conv2d_dgrad(context: Context, given: SimpleNamespace, *, norm: Mapping[str, Any] | None = None) -> Any:
    """
    Launch the kernels of `functional.conv2d_dgrad` and return dx.

    `norm` has the arguments of a batch norm before the convolution, see `norm_sums.launch`; None: no norm.
    """
    dy, w, dx, shape = given.dy, given.w, given.out, shape_of(given, given.x_shape, given.w)
    if given.residual is given.positive is None and supports(shape):
        return depthwise.dgrad(context, shape, dy, w, out=dx)
    check(dy.dtype, output_shape(shape, len(dx)), dy=dy)
    check(dy.dtype, w=w)
    problem = _gradient_problem(context, Pass.DGRAD, dy, w, shape)
    fused = Fused(residual=given.residual, mask=given.positive)
    operands = Operands(problem=problem, a=dy, b=w, out=dx, fused=fused, shape=shape, workspace=given.workspace)
    norm_sums.launch(context, operands, norm)
    return dx


@operation()
def conv2d_wgrad(context: Context, given: SimpleNamespace, *, fused: Fused = PLAIN) -> Any:
    """Launch the kernels of `functional.conv2d_wgrad` and return dw; `fused.residual=dw` adds the gradient to it."""
    x, dy, dw, db = given.x, given.dy, given.dw, given.db
    wide, stored, patch = _as_stored(x, dw, given)
    if wide is not dw and fused.residual is not None:
        fused = Fused(residual=copy_filter(context, fused.residual, patch, out=wide))
    shape = shape_of(stored, x.shape, wide)
    if fused is PLAIN and supports(shape):
        return depthwise.wgrad(context, shape, x, dy, dw=dw, db=db, workspace=given.workspace)
    check(x.dtype, x=x, dw=dw)
    check(x.dtype, output_shape(shape, len(x)), dy=dy)
    check(x.dtype, (shape.k,), db=db)
    problem = _gradient_problem(context, Pass.WGRAD, x, dy, shape)
    launch(
        context, Operands(problem=problem, a=dy, b=x, out=wide, fused=fused, shape=shape, workspace=stored.workspace)
    )
    if wide is not dw:
        copy_filter(context, dw, patch, out=wide, back=True)
    if db is not None:
        column_sums(context, dy, out=db, workspace=given.workspace)
    return dw


def _as_stored(x: Any, w: Any, given: SimpleNamespace) -> tuple[Any, SimpleNamespace, Pair]:
    """
    Return memory for the filter over x as stored, the arguments of that convolution, and a patch's height and width.

    `kernels.padding` describes how x is stored. The filter is w itself if it has the channels of x.
    """
    (k, r, s, c), channels, patch, workspace = w.shape, x.shape[-1], (1, 1), given.workspace
    each, changed = stored_channels(c), dict[str, Any]()
    if each != c and given.stride != patch and channels == each * math.prod(given.stride):
        patch, changed = given.stride, {"stride": (1, 1), "pad": (0, 0, 0, 0)}
    if given.groups != 1 or each == c or channels != each * math.prod(patch):
        return w, given, patch
    shape = k, -(-r // patch[0]), -(-s // patch[1]), channels
    if workspace is None:
        filters = of(w).empty(shape, dtype=w.dtype)
    else:
        held = -(-math.prod(shape) * w.itemsize // VECTOR_BYTES) * VECTOR_BYTES
        filters, changed["workspace"] = view(take_workspace(workspace, w, held), shape, w.dtype), workspace[held:]
    return filters, SimpleNamespace(**vars(given) | changed), patch
