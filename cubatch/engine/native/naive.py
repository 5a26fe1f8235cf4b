"""
Products and convolutions on kernels/naive: one thread, one output, no condition on anything.

Slow; the second opinion on the other families, and the first rung of the ladder that the others are measured on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.backend import of
from cubatch.engine.native.arrays import check, check_shape, dtype_of
from cubatch.engine.native.context import Context
from cubatch.errors import InvalidArgument
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
    """
    Multiply matrices: out[m, n] = bias[n] + sum over k of a[m, k] * b[k, n].

    Args:
        context: Where it runs.
        a: (m, k), or (k, m) where the layout's first letter is t.
        b: (k, n), or (n, k) where its second letter is t.
        bias: (n,), or None.
        layout: "nn", "nt" or "tn".
        relu: Clamp the result at zero.
        out: Where it goes: (m, n); None allocates it.

    Raises:
        InvalidArgument: If matrices do not go together, or the layout is none of the three.
    """
    if layout not in {"nn", "nt", "tn"}:
        raise InvalidArgument("layout", layout, "nn, nt or tn")
    (m, gemm_k), (b_k, n) = (x.shape[::-1] if turn == "t" else x.shape for x, turn in zip((a, b), layout, strict=True))
    if b_k != gemm_k:
        raise InvalidArgument(
            "b", b.shape, f"with {gemm_k} elements to sum over, as a of {a.shape} has in layout {layout}"
        )
    result = of(a).empty((m, n), dtype=a.dtype) if out is None else out
    check(a.dtype, a=a, b=b, bias=bias, out=result)
    check_shape("out", result, (m, n))
    product = np.array((m, n, gemm_k, relu), dtype=_PRODUCT)[()]
    kernel = find(f"gemm_{layout}", dtype_of(a), family="naive")
    context.launch(kernel, (-(-m * n // _THREADS), 1, 1), (a, b, bias, result, product))
    return result


def conv2d(
    context: Context, x: Any, w: Any, b: Any = None, *, stride: Pair = (1, 1), pad: Pad = _NO_PAD,
    dilation: Pair = (1, 1), groups: int = 1, relu: bool = False, out: Any = None, workspace: Any = None,
) -> Any:  # fmt: skip
    """Convolve; arguments as `functional.conv2d`, after where it runs. No workspace is needed."""
    del workspace
    shape = conv_shape(x.shape[1:], w.shape, stride, pad, dilation, groups)
    y_shape = (len(x), shape.vertical.out, shape.horizontal.out, shape.k)
    y = of(x).empty(y_shape, dtype=x.dtype) if out is None else out
    check(x.dtype, x=x, w=w, b=b, out=y)
    check_shape("out", y, y_shape)
    _launch(context, "conv2d_fprop", shape, len(x), y.size, (x, w, b, y), relu=relu)
    return y


def conv2d_dgrad(
    context: Context, dy: Any, w: Any, *, x_shape: tuple[int, int, int, int], stride: Pair = (1, 1),
    pad: Pad = _NO_PAD, dilation: Pair = (1, 1), groups: int = 1, out: Any = None, workspace: Any = None,
) -> Any:  # fmt: skip
    """Give the gradient by the input; arguments as `functional.conv2d_dgrad`. No workspace is needed."""
    del workspace
    shape = conv_shape(x_shape[1:], w.shape, stride, pad, dilation, groups)
    dx = of(dy).empty(x_shape, dtype=dy.dtype) if out is None else out
    check(dy.dtype, dy=dy, w=w, out=dx)
    check_shape("dy", dy, (x_shape[0], shape.vertical.out, shape.horizontal.out, shape.k))
    check_shape("out", dx, x_shape)
    _launch(context, "conv2d_dgrad", shape, len(dy), dx.size, (dy, w, dx))
    return dx


def conv2d_wgrad(
    context: Context, x: Any, dy: Any, *, dw: Any, db: Any = None, stride: Pair = (1, 1), pad: Pad = _NO_PAD,
    dilation: Pair = (1, 1), groups: int = 1, workspace: Any = None,
) -> Any:  # fmt: skip
    """Give the gradients by filter and bias; arguments as `functional.conv2d_wgrad`. No workspace is needed."""
    del workspace
    shape = conv_shape(x.shape[1:], dw.shape, stride, pad, dilation, groups)
    check(x.dtype, x=x, dy=dy, dw=dw, db=db)
    check_shape("dy", dy, (len(x), shape.vertical.out, shape.horizontal.out, shape.k))
    outputs = dw.size + (0 if db is None else shape.k)
    _launch(context, "conv2d_wgrad", shape, len(x), outputs, (x, dy, dw, db))
    return dw


def _launch(
    context: Context, operation: str, shape: ConvShape, samples: int, outputs: int, arrays: tuple[Any, ...], *,
    relu: bool = False,
) -> None:  # fmt: skip
    v, h = shape.vertical, shape.horizontal
    extents = (samples, v.size, h.size, shape.c, v.out, h.out, shape.k, v.taps, h.taps)
    steps = (v.stride, h.stride, v.step, h.step, -v.offset, -h.offset, shape.groups, relu)
    convolution = np.array(extents + steps, dtype=_CONVOLUTION)[()]
    kernel = find(operation, dtype_of(arrays[0]), family="naive")
    context.launch(kernel, (-(-outputs // _THREADS), 1, 1), (*arrays, convolution))
