"""
Softmax and its cross-entropy, with the gradient in the same pass.

The maximum of a row is subtracted from it, so that no exponential overflows. The loss is computed from these
differences, so that no logarithm of zero occurs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cubatch.engine.backend import areas, of, take_workspace
from cubatch.memory.blocks import Scores


def softmax(x: Any, *, out: Any = None, workspace: Any = None) -> Any:
    """
    Return the probabilities along the last axis: exp(x) / sum of exp(x).

    Args:
        x: Scores (..., classes).
        out: Where the probabilities go; may be x.
        workspace: Scratch memory, see `functional`; None allocates it.
    """
    xp = of(x)
    y = xp.empty_like(x) if out is None else out
    source, target = _by_row(x), _by_row(y)
    for rows, (_, column, *_) in _pieces(source, workspace):
        part = target[rows]
        xp.max(source[rows], axis=1, keepdims=True, out=column)
        xp.subtract(source[rows], column, out=part)
        xp.exp(part, out=part)
        xp.sum(part, axis=1, keepdims=True, out=column)
        xp.divide(part, column, out=part)
    return y


def softmax_backward(dy: Any, y: Any, *, out: Any = None, workspace: Any = None) -> Any:
    """Return the gradient of softmax's input: y * (dy - sum over classes of dy * y); `out` may be dy."""
    xp = of(dy)
    dx = xp.empty_like(dy) if out is None else out
    errors, results, target = _by_row(dy), _by_row(y), _by_row(dx)
    for rows, (_, column, _, product, _) in _pieces(errors, workspace):
        part, result = target[rows], results[rows]
        xp.multiply(errors[rows], result, out=product)
        xp.sum(product, axis=1, keepdims=True, out=column)
        xp.subtract(errors[rows], column, out=part)
        xp.multiply(part, result, out=part)
    return dx


def softmax_cross_entropy(
    logits: Any, labels: Any, *, loss: Any = None, dlogits: Any = None, count: int | None = None, scale: Any = None,
    workspace: Any = None,
) -> Any:  # fmt: skip
    """
    Return the mean cross-entropy of softmax(logits) with the labels, and compute its gradient.

    Args:
        logits: Scores (..., classes).
        labels: Integers (...) in [0, classes); any other number counts as no class.
        loss: Receives the loss: a float64 array of one element; None allocates it.
        dlogits: Receives the gradient: the shape of logits, may be logits. None allocates it.
        count: Positions that the mean is taken over; None for those of logits. A shard passes the number of the whole
            batch; then the losses and the gradients of shards add up.
        scale: Array of one element that the gradient, not the loss, is multiplied by; see `loss_scale`. None for 1.
        workspace: Scratch memory, see `functional`; None allocates it.

    Example:
        >>> import numpy as np
        >>> round(softmax_cross_entropy(np.zeros((2, 4)), np.array([0, 3])).item(), 9)
        1.386294361
    """
    xp, classes = of(logits), logits.shape[-1]
    loss = xp.empty(1, dtype=xp.float64) if loss is None else loss
    scores, wanted = _by_row(logits), labels.reshape(-1, 1)
    gradient = _by_row(xp.empty_like(logits) if dlogits is None else dlogits)
    count = len(scores) if count is None else count
    every_class = xp.arange(classes, dtype=labels.dtype)
    xp.copyto(loss, 0)
    for rows, (total, column, right, product, hit) in _pieces(scores, workspace):
        part = gradient[rows]
        xp.max(scores[rows], axis=1, keepdims=True, out=column)
        xp.subtract(scores[rows], column, out=part)
        xp.equal(wanted[rows], every_class, out=hit)
        xp.copyto(product, 0)
        xp.copyto(product, part, where=hit)
        xp.sum(product, axis=1, keepdims=True, out=right)
        xp.exp(part, out=part)
        xp.sum(part, axis=1, keepdims=True, out=column)
        xp.divide(part, column, out=part)
        xp.subtract(part, hit, out=part)
        xp.multiply(part, 1 / count, out=part)
        if scale is not None:
            xp.multiply(part, scale, out=part)
        xp.log(column, out=column)
        xp.subtract(column, right, out=column)
        xp.sum(column, axis=0, dtype=xp.float64, out=total)
        xp.add(loss, total, out=loss)
    xp.multiply(loss, 1 / count, out=loss)
    return loss


def _by_row(array: Any) -> Any:
    return array.reshape(-1, array.shape[-1])


def _pieces(array: Any, workspace: Any) -> Iterator[tuple[slice, list[Any]]]:
    """
    Yield ranges of rows of `array` (rows, classes), each with its scratch arrays in `workspace`.

    These are a float64 sum, two arrays with a number per row, and a product and a flag for each score. Without a
    workspace one is allocated.
    """
    rows, classes = array.shape
    need = Scores(itemsize=array.itemsize, channels=classes)
    workspace = take_workspace(workspace, array, need, rows)
    for piece, _ in need.cut(rows, workspace.nbytes):
        count = piece.stop - piece.start
        column, tile = ((count, 1), array.dtype), (count, classes)
        views = ((1,), "float64"), column, column, (tile, array.dtype), (tile, "bool")
        yield piece, areas(workspace, need, (count, 1), *views)
