"""Softmax and its cross-entropy on hand-written kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.backend import of, view
from cubatch.engine.native.arrays import check, dtype_of, take_workspace
from cubatch.engine.native.context import Context
from cubatch.kernels import variant
from cubatch.kernels.workspace.misc import row_blocks, row_lanes, softmax_cross_entropy_workspace


def softmax(context: Context, x: Any, *, out: Any = None) -> Any:
    """Launch the kernel of `functional.softmax`."""
    y = of(x).empty_like(x) if out is None else out
    softmax_rows(context, x, x.shape[-1], out=y)
    return y


def softmax_rows(context: Context, x: Any, columns: int, *, out: Any) -> None:
    """
    Turn the first elements of every row of the last axis into probabilities; the padding behind them is not touched.

    Args:
        context: Where it runs.
        x: Scores (..., stride).
        columns: Elements of a row that are scores; at most `stride`.
        out: Receives the probabilities: of x's shape, may be x.
    """
    check(x.dtype, x.shape, x=x, out=out)
    rows, stride = _extents(x)
    grid = (row_blocks(rows, columns, context.device), 1, 1)
    arguments = [x, out, *_arguments(context, rows, columns), np.int32(stride)]
    context.launch(variant.find("softmax", dtype_of(x)), grid, arguments)


def softmax_backward(context: Context, dy: Any, y: Any, *, out: Any = None) -> Any:
    """Launch the kernel of `functional.softmax_backward`."""
    dx = of(dy).empty_like(dy) if out is None else out
    softmax_rows_backward(context, dy, y, dy.shape[-1], out=dx)
    return dx


def softmax_rows_backward(context: Context, dy: Any, y: Any, columns: int, *, out: Any) -> None:
    """Compute the gradient by the input of `softmax_rows`, whose `columns` these are; `out` may be dy."""
    check(dy.dtype, dy.shape, dy=dy, y=y, out=out)
    rows, stride = _extents(dy)
    grid = (row_blocks(rows, columns, context.device), 1, 1)
    arguments = [dy, y, out, *_arguments(context, rows, columns), np.int32(stride)]
    context.launch(variant.find("softmax_backward", dtype_of(dy)), grid, arguments)


def softmax_cross_entropy(
    context: Context,
    logits: Any,
    labels: Any,
    *,
    loss: Any = None,
    dlogits: Any = None,
    count: int | None = None,
    scale: Any = None,
    workspace: Any = None,
) -> Any:
    """
    Launch the kernels of `functional.softmax_cross_entropy`; labels are int32, the scale is float32.

    The workspace has `workspace.misc.softmax_cross_entropy_workspace` bytes.
    """
    xp = of(logits)
    loss = xp.empty(1, dtype=np.float64) if loss is None else loss
    gradient = xp.empty_like(logits) if dlogits is None else dlogits
    check(logits.dtype, logits.shape, logits=logits, dlogits=gradient)
    check(np.int32, logits.shape[:-1], labels=labels)
    check(np.float64, (1,), loss=loss)
    check(np.float32, (1,), scale=scale)
    rows, classes = _extents(logits)
    share = 1 / (rows if count is None else count)
    blocks = row_blocks(rows, classes, context.device)
    workspace = take_workspace(workspace, logits, softmax_cross_entropy_workspace(rows, classes, context.device))
    losses = view(workspace, (blocks,), np.float64)
    context.launch(
        variant.find("softmax_cross_entropy", dtype_of(logits)),
        (blocks, 1, 1),
        [logits, labels, gradient, losses, *_arguments(context, rows, classes), np.float32(share), scale],
    )
    context.launch(
        variant.find("softmax_cross_entropy_finish", dtype_of(logits)),
        (1, 1, 1),
        [losses, np.int32(blocks), loss, np.float64(share)],
    )
    return loss


def _extents(scores: Any) -> tuple[int, int]:
    classes = int(scores.shape[-1])
    return int(scores.size) // classes, classes


def _arguments(context: Context, rows: int, classes: int) -> list[object]:
    return [np.int64(rows), np.int32(classes), np.int32(row_lanes(rows, classes, context.device))]
