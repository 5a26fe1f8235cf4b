"""
Products and convolutions on kernels/naive: one thread computes one output, for any shapes.

Slow: a second implementation to test the other families against, and the baseline of their measurements.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.backend import of
from cubatch.engine.native.arrays import check, check_shape, dtype_of
from cubatch.engine.native.context import Context
from cubatch.engine.native.gemm import extents
from cubatch.kernels.variant import find
from cubatch.network.windows import ConvShape, Pad, Pair, conv_shape

_THREADS = 128
_NO_PAD = (0, 0, 0, 0)

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
    """Launch the kernel of a matrix product, with the arguments of `gemm.gemm`."""
    m, n, gemm_k = extents(a, b, layout)
    result = of(a).empty((m, n), dtype=a.dtype) if out is None else out
    check(a.dtype, a=a, b=b, bias=bias, out=result)
    check_shape("out", result, (m, n))
    product = np.array((m, n, gemm_k, relu), dtype=_PRODUCT)[()]
    kernel = find(f"gemm_{layout}", dtype_of(a), family="naive")
    context.launch(kernel, (-(-m * n // _THREADS), 1, 1), (a, b, bias, result, product))
    return result


def conv2d(
    context: Context, x: Any, w: Any, b: Any = None, *, stride: Pair = (1, 1), pad: Pad = _NO_PAD,
    dilation: Pair = (1, 1), groups: int = 1, relu: bool = False, out: Any = None,
) -> Any:  # fmt: skip
    """Launch the kernel of `functional.conv2d`."""
    shape = conv_shape(x.shape[1:], w.shape, stride, pad, dilation, groups=groups)
    y_shape = (len(x), shape.vertical.out, shape.horizontal.out, shape.k)
    y = of(x).empty(y_shape, dtype=x.dtype) if out is None else out
    check(x.dtype, x=x, w=w, b=b, out=y)
    check_shape("out", y, y_shape)
    _launch(context, "conv2d_fprop", shape, (x, w, b, y), samples=len(x), outputs=y.size, relu=relu)
    return y


def conv2d_dgrad(
    context: Context, dy: Any, w: Any, *, x_shape: tuple[int, int, int, int], stride: Pair = (1, 1),
    pad: Pad = _NO_PAD, dilation: Pair = (1, 1), groups: int = 1, out: Any = None,
) -> Any:  # fmt: skip
    """Launch the kernel of `functional.conv2d_dgrad`."""
    shape = conv_shape(x_shape[1:], w.shape, stride, pad, dilation, groups=groups)
    dx = of(dy).empty(x_shape, dtype=dy.dtype) if out is None else out
    check(dy.dtype, dy=dy, w=w, out=dx)
    check_shape("dy", dy, (x_shape[0], shape.vertical.out, shape.horizontal.out, shape.k))
    check_shape("out", dx, x_shape)
    _launch(context, "conv2d_dgrad", shape, (dy, w, dx), samples=len(dy), outputs=dx.size)
    return dx


def conv2d_wgrad(
    context: Context, x: Any, dy: Any, *, dw: Any, db: Any = None, stride: Pair = (1, 1), pad: Pad = _NO_PAD,
    dilation: Pair = (1, 1), groups: int = 1,
) -> Any:  # fmt: skip
    """Launch the kernel of `functional.conv2d_wgrad`."""
    shape = conv_shape(x.shape[1:], dw.shape, stride, pad, dilation, groups=groups)
    check(x.dtype, x=x, dy=dy, dw=dw, db=db)
    check_shape("dy", dy, (len(x), shape.vertical.out, shape.horizontal.out, shape.k))
    outputs = dw.size + (0 if db is None else shape.k)
    _launch(context, "conv2d_wgrad", shape, (x, dy, dw, db), samples=len(x), outputs=outputs)
    return dw


def _launch(
    context: Context, operation: str, shape: ConvShape, arrays: tuple[Any, ...], *, samples: int, outputs: int,
    relu: bool = False,
) -> None:  # fmt: skip
    v, h = shape.vertical, shape.horizontal
    extents = (samples, v.size, h.size, shape.c, v.out, h.out, shape.k, v.taps, h.taps)
    steps = (v.stride, h.stride, v.step, h.step, -v.offset, -h.offset, shape.groups, relu)
    convolution = np.array(extents + steps, dtype=_CONVOLUTION)[()]
    kernel = find(operation, dtype_of(arrays[0]), family="naive")
    context.launch(kernel, (-(-outputs // _THREADS), 1, 1), (*arrays, convolution))
