"""Fully connected layers: one matrix product per pass."""

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
    """Launch the kernels of `functional.linear`; the workspace has `product_scratch.linear_workspace` bytes."""
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
    """Launch the kernels of `functional.linear_dgrad`; the workspace has `product_scratch.linear_workspace` bytes."""
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
    """Launch the kernels of `functional.linear_wgrad`; the workspace has `product_scratch.linear_workspace` bytes."""
    k, c = dw.shape
    check(x.dtype, (*dy.shape[:-1], c), x=x)
    check(x.dtype, (*x.shape[:-1], k), dy=dy)
    check(x.dtype, (k,), db=db)
    rows = dy.reshape(-1, k)
    gemm(context, rows, x.reshape(-1, c), layout="tn", out=dw, workspace=workspace)
    if db is not None:
        column_sums(context, rows, out=db, workspace=workspace)
    return dw
