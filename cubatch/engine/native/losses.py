"""Softmax and its cross-entropy on hand-written kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.backend import of, view
from cubatch.engine.native.arrays import check, dtype_of, take_workspace
from cubatch.engine.native.context import Context
from cubatch.kernels import variant
from cubatch.kernels.workspace.misc import row_blocks, row_lanes, softmax_cross_entropy_workspace


def softmax(
    context: Context,
    x: Any,
    *,
    out: Any = None,
    workspace: Any = None,  # noqa: ARG001 - none is needed
) -> Any:
    """Turn the last axis into probabilities; arguments and result are those of `functional.softmax`."""
    y = of(x).empty_like(x) if out is None else out
    check(x.dtype, x.shape, x=x, out=y)
    rows, classes = _extents(x)
    grid = (row_blocks(rows, classes, context.device), 1, 1)
    context.launch(variant.find("softmax", dtype_of(x)), grid, [x, y, *_arguments(context, rows, classes)])
    return y


def softmax_backward(
    context: Context,
    dy: Any,
    y: Any,
    *,
    out: Any = None,
    workspace: Any = None,  # noqa: ARG001 - none is needed
) -> Any:
    """Give the gradient by softmax's input; arguments and result are those of `functional.softmax_backward`."""
    dx = of(dy).empty_like(dy) if out is None else out
    check(dy.dtype, dy.shape, dy=dy, y=y, out=dx)
    rows, classes = _extents(dy)
    grid = (row_blocks(rows, classes, context.device), 1, 1)
    arguments = [dy, y, dx, *_arguments(context, rows, classes)]
    context.launch(variant.find("softmax_backward", dtype_of(dy)), grid, arguments)
    return dx


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
    Give the mean cross-entropy of softmax(logits) with the labels, and its gradient.

    Args:
        context: Where it runs.
        logits: Scores (..., classes), C-contiguous.
        labels: int32 (...) in [0, classes); another number counts as no class at all.
        loss: Where the loss goes: a float64 array of one element; None allocates it.
        dlogits: Where the gradient goes: the shape of logits, may be logits itself. None allocates it.
        count: Positions the mean is taken over; None for those handed in.
        scale: float32 array of one element that the gradient is multiplied by; None for 1.
        workspace: 1-D uint8 array of `workspace.misc.softmax_cross_entropy_workspace` bytes. None allocates one.

    Returns:
        The loss: `loss` where that was given.

    Raises:
        InvalidArgument: If types differ or the workspace is too small.
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
