"""Fully connected layers: one matrix product per pass; arguments as in `functional`."""

from __future__ import annotations

from typing import Any

from cubatch.engine.backend import of
from cubatch.engine.native.arrays import check
from cubatch.engine.native.context import Context
from cubatch.engine.native.gemm import gemm
from cubatch.engine.native.product import Fused
from cubatch.engine.native.reductions import column_sums


def linear(
    context: Context, x: Any, w: Any, b: Any = None, *, scale: Any = None, shift: Any = None, residual: Any = None,
    relu: bool = False, out: Any = None, workspace: Any = None,
) -> Any:  # fmt: skip
    """
    Multiply the last axis by a filter; as `functional.linear`.

    Args:
        context: Where it runs.
        x: Activations (..., c), C-contiguous.
        w: Filter (k, c).
        b: Bias (k,), or None.
        scale, shift: float32 (k,), both or none: a batch norm.
        residual: Added; of y's shape. May be `out`.
        relu: Clamp y at zero, at last.
        out: Where y goes: (..., k); None allocates it.
        workspace: 1-D uint8 array of `product_scratch.linear_workspace` bytes. None allocates one where it is needed.

    Raises:
        InvalidArgument: If arrays do not go together or the workspace is too small.
    """
    k, c = w.shape
    y = of(x).empty((*x.shape[:-1], k), dtype=x.dtype) if out is None else out
    check(x.dtype, (*x.shape[:-1], c), x=x)
    check(x.dtype, (*x.shape[:-1], k), out=y)
    check(x.dtype, y.shape, residual=residual)
    added = None if residual is None else residual.reshape(-1, k)
    fused = Fused(scale=scale, shift=shift, residual=added, activation="relu" if relu else "none")
    gemm(context, x.reshape(-1, c), w, b, out=y.reshape(-1, k), workspace=workspace, fused=fused)
    return y


def linear_dgrad(
    context: Context, dy: Any, w: Any, *, residual: Any = None, positive: Any = None, out: Any = None,
    workspace: Any = None,
) -> Any:  # fmt: skip
    """
    Give the gradient by a linear layer's input; as `functional.linear_dgrad`.

    Args:
        context: Where it runs.
        dy: Gradient by the output (..., k), C-contiguous.
        w: Filter (k, c).
        residual: Added; of dx's shape. May be `out`.
        positive: Output of a ReLU, of dx's shape: dx is zero where that is not positive.
        out: Where dx goes: (..., c); None allocates it.
        workspace: 1-D uint8 array of `products.linear_dgrad_workspace` bytes. None allocates one.

    Raises:
        InvalidArgument: If arrays do not go together or the workspace is too small.
    """
    k, c = w.shape
    dx = of(dy).empty((*dy.shape[:-1], c), dtype=dy.dtype) if out is None else out
    check(dy.dtype, (*dy.shape[:-1], k), dy=dy)
    check(dy.dtype, (*dy.shape[:-1], c), out=dx)
    check(dy.dtype, dx.shape, residual=residual, positive=positive)
    added, mask = (None if array is None else array.reshape(-1, c) for array in (residual, positive))
    fused = Fused(residual=added, mask=mask)
    gemm(context, dy.reshape(-1, k), w, layout="nn", out=dx.reshape(-1, c), workspace=workspace, fused=fused)
    return dx


def linear_wgrad(context: Context, x: Any, dy: Any, *, dw: Any, db: Any = None, workspace: Any = None) -> Any:
    """
    Give the gradients by a linear layer's filter and bias; as `functional.linear_wgrad`.

    Args:
        context: Where it runs.
        x: The forward pass's input (..., c), C-contiguous.
        dy: Gradient by the output (..., k), C-contiguous.
        dw: Where the filter's gradient goes: (k, c).
        db: Where the bias's gradient goes: (k,), or None.
        workspace: 1-D uint8 array of `products.linear_wgrad_workspace` bytes. None allocates one.

    Raises:
        InvalidArgument: If arrays do not go together or the workspace is too small.
    """
    k, c = dw.shape
    check(x.dtype, (*dy.shape[:-1], c), x=x)
    check(x.dtype, (*x.shape[:-1], k), dy=dy)
    check(x.dtype, (k,), db=db)
    rows = dy.reshape(-1, k)
    gemm(context, rows, x.reshape(-1, c), layout="tn", out=dw, workspace=workspace)
    if db is not None:
        column_sums(context, rows, out=db, workspace=workspace)
    return dw
