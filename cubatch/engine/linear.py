"""
Fully connected layers: one matrix product per pass.

Filters are (k, c). They are applied to the last axis of an input of any rank: a flattened image (n, c), a sequence
(n, t, c).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.backend import areas, gate, of, take_workspace, view
from cubatch.memory.blocks import Ends
from cubatch.memory.conv_blocks import UNPACKED_PRODUCTS

_FEW_ROWS, _LEAST_OUTPUTS = 16, 4  # of products that go without packing


def linear(
    x: Any, w: Any, b: Any = None, *, scale: Any = None, shift: Any = None, residual: Any = None, relu: bool = False,
    out: Any = None, workspace: Any = None,
) -> Any:  # fmt: skip
    """
    Return the products of the last axis and a filter: y[..., k] = b[k] + sum over c of x[..., c] * w[k, c].

    Args:
        x: Activations (..., c).
        w: Filter (k, c).
        b: Bias (k,), or None.
        scale, shift: Factor and term of each output's sum (k,), instead of a bias: a folded batch norm. Both or none.
        residual: Added to y, of its shape: another branch. May be `out`.
        relu: Clamp y at zero, as the last step.
        out: Where y goes: (..., k).
        workspace: With a scale or a residual, for a tile of rows. Otherwise, if y fits into it and there are many rows,
            y is computed transposed. OpenBLAS then reads the filter along its rows: up to twice as fast.
    """
    xp, (k, c) = of(x), w.shape
    y = xp.empty((*x.shape[:-1], k), dtype=x.dtype) if out is None else out
    rows = y.reshape(-1, k)
    if scale is not None or residual is not None:
        ends = {"scale": scale, "shift": shift, "residual": residual}
        _tile_by_tile(x.reshape(-1, c), w.T, rows, **ends, workspace=workspace)
    elif isinstance(x, np.ndarray) and (step := _outputs_at_once(len(rows), c, k)):
        _few_rows(x.reshape(-1, c), w, rows, step)
    elif isinstance(x, np.ndarray) and workspace is not None and workspace.nbytes >= y.nbytes:
        turned = view(workspace, (k, len(rows)), x.dtype)
        xp.matmul(w, x.reshape(-1, c).T, out=turned)
        xp.copyto(rows, turned.T)
    else:
        xp.matmul(x.reshape(-1, c), w.T, out=rows)
    if b is not None:
        xp.add(rows, b, out=rows)
    if relu:
        xp.maximum(rows, 0, out=rows)
    return y


def _outputs_at_once(rows: int, c: int, k: int) -> int:
    """Return how many of k outputs to compute in one product of `rows` rows of c inputs; 0 for all of them."""
    few = UNPACKED_PRODUCTS // max(1, rows * c) // _LEAST_OUTPUTS * _LEAST_OUTPUTS
    return few if 1 < rows <= _FEW_ROWS and few < k else 0


def _few_rows(x: Any, w: Any, out: Any, step: int) -> None:
    """
    Write a few rows times a large filter to `out`, `step` outputs at a time: OpenBLAS then does not pack the filter.

    Packing copies a filter that few rows use only once. For 8 rows of 9216 by 4096 outputs, an AMD EPYC core took
    39 ms, 30 ms transposed, and 14 ms in this way.
    """
    for first in range(0, len(w), step):
        of(x).matmul(x, w[first : first + step].T, out=out[:, first : first + step])


def _tile_by_tile(
    x: Any, w: Any, out: Any, *, scale: Any = None, shift: Any = None, residual: Any = None, positive: Any = None,
    workspace: Any,
) -> None:  # fmt: skip
    """
    Write x (rows, inputs) times w (inputs, outputs) to `out`, with the other terms of `linear` or `linear_dgrad`.

    It computes a tile of rows at a time in `workspace`, so that `residual` may be `out`.
    """
    xp, width = of(x), out.shape[-1]
    need = Ends(itemsize=x.itemsize, row=width)
    workspace = take_workspace(workspace, x, need, len(x))
    for piece, _ in need.cut(len(x), workspace.nbytes):
        part = out[piece]
        tile, flags = areas(workspace, need, (len(part), 1), (part.shape, x.dtype), (part.shape, "bool"))
        xp.matmul(x[piece], w, out=tile)
        if scale is not None:
            xp.multiply(tile, scale, out=tile)
            xp.add(tile, shift, out=tile)
        if residual is not None:
            xp.add(tile, residual.reshape(-1, width)[piece], out=tile)
        if positive is None:
            xp.copyto(part, tile)
        else:
            xp.not_equal(positive.reshape(-1, width)[piece], 0, out=flags)
            gate(tile, flags, part)


def linear_dgrad(
    dy: Any, w: Any, *, residual: Any = None, positive: Any = None, out: Any = None, workspace: Any = None
) -> Any:
    """
    Return the gradient of a linear layer's input: dx[..., c] = sum over k of dy[..., k] * w[k, c].

    `residual`, which may be `out`, is added. Where `positive`, the output of a ReLU before, is 0, dx is 0, residual
    included.
    """
    xp, (k, c) = of(dy), w.shape
    dx = xp.empty((*dy.shape[:-1], c), dtype=dy.dtype) if out is None else out
    errors, target = dy.reshape(-1, k), dx.reshape(-1, c)
    if residual is None and positive is None:
        xp.matmul(errors, w, out=target)
        return dx
    _tile_by_tile(errors, w, target, residual=residual, positive=positive, workspace=workspace)
    return dx


def linear_wgrad(x: Any, dy: Any, *, dw: Any, db: Any = None, workspace: Any = None) -> Any:  # noqa: ARG001
    """
    Compute the gradients of a linear layer's filter and bias, summed over all positions; return the filter's.

    `db` None leaves out the bias. Only hand-written kernels need the workspace.
    """
    xp, (k, c) = of(x), dw.shape
    errors = dy.reshape(-1, k)
    xp.matmul(errors.T, x.reshape(-1, c), out=dw)
    if db is not None:
        xp.sum(errors, axis=0, out=db)
    return dw
