"""Fully connected layers: one matrix product per pass, with `product_scratch.linear_workspace` bytes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from cubatch.engine.native.arrays import check
from cubatch.engine.native.context import Context
from cubatch.engine.native.gemm import gemm
from cubatch.engine.native.operands import Fused
from cubatch.engine.native.operation import operation
from cubatch.engine.native.reductions import column_sums


@operation(out=lambda given: (*given.x.shape[:-1], given.w.shape[0]))
def linear(context: Context, given: SimpleNamespace, *, norm: Mapping[str, Any] | None = None) -> Any:
    x, w, y, residual, (k, c) = given.x, given.w, given.out, given.residual, given.w.shape
    check(x.dtype, (*x.shape[:-1], c), x=x)
    check(x.dtype, y.shape, residual=residual)
    fused = Fused(
        scale=given.scale, shift=given.shift, residual=_rows(residual, k), activation="relu" if given.relu else "none"
    )
    more = {"workspace": given.workspace, "fused": fused, "norm": norm}
    gemm(context, x.reshape(-1, c), w, given.b, out=y.reshape(-1, k), **more)
    return y


@operation(out=lambda given: (*given.dy.shape[:-1], given.w.shape[1]))
def linear_dgrad(context: Context, given: SimpleNamespace, *, norm: Mapping[str, Any] | None = None) -> Any:
    dy, w, dx, (k, c) = given.dy, given.w, given.out, given.w.shape
    check(dy.dtype, (*dy.shape[:-1], k), dy=dy)
    check(dy.dtype, dx.shape, residual=given.residual, positive=given.positive)
    fused = Fused(residual=_rows(given.residual, c), mask=_rows(given.positive, c))
    more = {"workspace": given.workspace, "fused": fused, "norm": norm}
    gemm(context, dy.reshape(-1, k), w, layout="nn", out=dx.reshape(-1, c), **more)
    return dx


@operation()
def linear_wgrad(context: Context, given: SimpleNamespace) -> Any:
    x, dy, dw, db, (k, c) = given.x, given.dy, given.dw, given.db, given.dw.shape
    check(x.dtype, (*dy.shape[:-1], c), x=x)
    check(x.dtype, (*x.shape[:-1], k), dy=dy)
    check(x.dtype, (k,), db=db)
    gemm(context, dy.reshape(-1, k), x.reshape(-1, c), layout="tn", out=dw, workspace=given.workspace)
    if db is not None:
        column_sums(context, dy, out=db, workspace=given.workspace)
    return dw


def _rows(array: Any, columns: int) -> Any:
    return None if array is None else array.reshape(-1, columns)
