"""
Products and convolutions on kernels/naive: one thread computes one output, for any shapes.

Slow: a second implementation to test the other families against, and the baseline of their measurements.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cubatch.engine.backend import of
from cubatch.engine.native.arrays import check
from cubatch.engine.native.context import Context, dtype_of
from cubatch.engine.native.conv import output_shape, shape_of
from cubatch.engine.native.gemm import extents
from cubatch.engine.native.operation import operation
from cubatch.kernels.variant import find
from cubatch.network.windows import ConvShape

_THREADS = 128

# Product of kernels/naive/gemm.cu and Convolution of kernels/naive/conv2d.cu.
_PRODUCT = np.dtype([(name, np.int64) for name in ("m", "n", "k", "relu")])
_CONVOLUTION = np.dtype(
    [("n", np.int64)]
    + [(name, np.int32) for name in ("h", "w", "c", "p", "q", "k", "r", "s")]
    + [(name, np.int32) for name in ("stride_h", "stride_w", "step_h", "step_w", "top", "left", "groups", "relu")],
    align=True,
)


def gemm(
    context: Context, a: Any, b: Any, bias: Any = None, *, layout: str = "nt", relu: bool = False, out: Any = None
) -> Any:
    """Launch the kernel of a matrix product and return `out`; arguments are those of `gemm.gemm`."""
    m, n, gemm_k = extents(a, b, layout)
    result = of(a).empty((m, n), dtype=a.dtype) if out is None else out
    check(a.dtype, a=a, b=b, bias=bias)
    check(a.dtype, (m, n), out=result)
    product = np.array((m, n, gemm_k, relu), dtype=_PRODUCT)[()]
    _launch(context, f"gemm_{layout}", m * n, (a, b, bias, result, product))
    return result


@operation(out=lambda given: output_shape(shape_of(given, given.x.shape, given.w), len(given.x)))
def conv2d(context: Context, given: SimpleNamespace) -> Any:
    x, w, b, y, shape = given.x, given.w, given.b, given.out, shape_of(given, given.x.shape, given.w)
    check(x.dtype, x=x, w=w, b=b)
    _launch(context, "conv2d_fprop", y.size, (x, w, b, y, _convolution(shape, len(x), relu=given.relu)))
    return y


@operation(out=lambda given: given.x_shape)
def conv2d_dgrad(context: Context, given: SimpleNamespace) -> Any:
    dy, w, dx, shape = given.dy, given.w, given.out, shape_of(given, given.x_shape, given.w)
    check(dy.dtype, w=w)
    check(dy.dtype, output_shape(shape, len(dx)), dy=dy)
    _launch(context, "conv2d_dgrad", dx.size, (dy, w, dx, _convolution(shape, len(dy))))
    return dx


@operation()
def conv2d_wgrad(context: Context, given: SimpleNamespace) -> Any:
    x, dy, dw, db, shape = given.x, given.dy, given.dw, given.db, shape_of(given, given.x.shape, given.dw)
    check(x.dtype, x=x, dw=dw, db=db)
    check(x.dtype, output_shape(shape, len(x)), dy=dy)
    outputs = dw.size + (0 if db is None else shape.k)
    _launch(context, "conv2d_wgrad", outputs, (x, dy, dw, db, _convolution(shape, len(x))))
    return dw


def _convolution(shape: ConvShape, samples: int, *, relu: bool = False) -> Any:
    v, h = shape.vertical, shape.horizontal
    sizes = (samples, v.size, h.size, shape.c, v.out, h.out, shape.k, v.taps, h.taps)
    steps = (v.stride, h.stride, v.step, h.step, -v.offset, -h.offset, shape.groups, relu)
    return np.array(sizes + steps, dtype=_CONVOLUTION)[()]


def _launch(context: Context, name: str, outputs: int, arguments: tuple[Any, ...]) -> None:
    kernel = find(name, dtype_of(arguments[0]), family="naive")
    context.launch(kernel, (-(-outputs // _THREADS), 1, 1), arguments)
