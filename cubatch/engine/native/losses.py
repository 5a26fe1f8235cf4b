"""Softmax and its cross-entropy on hand-written kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cubatch.engine.backend import of, view
from cubatch.engine.native.arrays import check, take_workspace
from cubatch.engine.native.context import Context
from cubatch.engine.native.operation import operation
from cubatch.kernels.workspace.misc import row_blocks, row_lanes, softmax_cross_entropy_workspace


@operation(out=lambda given: given.x.shape)
def softmax(context: Context, given: SimpleNamespace) -> Any:
    softmax_rows(context, given.x, given.x.shape[-1], out=given.out)
    return given.out


def softmax_rows(context: Context, x: Any, columns: int, *, out: Any) -> None:
    """Write the softmax over the first `columns` elements of every row to `out`, which may be x; the padding stays."""
    check(x.dtype, x.shape, x=x, out=out)
    _run_rows(context, "softmax", (x, out), columns)


@operation(out=lambda given: given.dy.shape)
def softmax_backward(context: Context, given: SimpleNamespace) -> Any:
    softmax_rows_backward(context, given.dy, given.y, given.dy.shape[-1], out=given.out)
    return given.out


def softmax_rows_backward(context: Context, dy: Any, y: Any, columns: int, *, out: Any) -> None:
    """Write the gradient of `softmax_rows`' input, with the same `columns`, to `out`, which may be dy."""
    check(dy.dtype, dy.shape, dy=dy, y=y, out=out)
    _run_rows(context, "softmax_backward", (dy, y, out), columns)


def _run_rows(context: Context, name: str, arrays: tuple[Any, ...], columns: int) -> None:
    rows, stride = _extents(arrays[0])
    grid = (row_blocks(rows, columns, context.device), 1, 1)
    context.run(name, arrays[0], grid, *arrays, *_numbers(context, rows, columns), stride)


@operation()
def softmax_cross_entropy(context: Context, given: SimpleNamespace) -> Any:
    """
    Launch the kernels of `functional.softmax_cross_entropy` and return the loss, a float64 array of one element.

    Labels are int32, the scale is float32. The workspace has `workspace.misc.softmax_cross_entropy_workspace` bytes.
    """
    logits, labels, scale, xp = given.logits, given.labels, given.scale, of(given.logits)
    loss = xp.empty(1, dtype=np.float64) if given.loss is None else given.loss
    gradient = xp.empty_like(logits) if given.dlogits is None else given.dlogits
    check(logits.dtype, logits.shape, logits=logits, dlogits=gradient)
    check(np.int32, logits.shape[:-1], labels=labels)
    check(np.float64, (1,), loss=loss)
    check(np.float32, (1,), scale=scale)
    rows, classes = _extents(logits)
    share, blocks = float(1 / (rows if given.count is None else given.count)), row_blocks(rows, classes, context.device)
    need = softmax_cross_entropy_workspace(rows, classes, context.device)
    losses = view(take_workspace(given.workspace, logits, need), (blocks,), np.float64)
    numbers = *_numbers(context, rows, classes), share, scale
    context.run("softmax_cross_entropy", logits, (blocks, 1, 1), logits, labels, gradient, losses, *numbers)
    context.run("softmax_cross_entropy_finish", logits, (1, 1, 1), losses, blocks, loss, np.float64(share))
    return loss


def _extents(scores: Any) -> tuple[int, int]:
    classes = int(scores.shape[-1])
    return int(scores.size) // classes, classes


def _numbers(context: Context, rows: int, classes: int) -> tuple[object, ...]:
    return np.int64(rows), classes, row_lanes(rows, classes, context.device)
