"""
Multi-head self-attention (Vaswani et al., 2017, arXiv:1706.03762, section 3.2) with its two projections.

Of every sample and head, with queries q, keys k and values v of d channels each,

    weights = softmax(q k^T / sqrt(d)),    mixed = weights v

is computed in blocks of whole samples, so that a block's weights stay in the cache between the two products.
The backward pass subtracts from the gradient of each row of weights its mean under those weights. That mean is the
product of the weighted sums of the values with their gradient (Dao et al., 2022, arXiv:2205.14135, appendix B.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cubatch.engine.backend import areas, of, take_workspace, view
from cubatch.engine.linear import linear, linear_dgrad, linear_wgrad
from cubatch.memory.blocks import Attend, AttendBackward


def attention(
    x: Any, w_in: Any, w_out: Any, b_in: Any = None, b_out: Any = None, *, heads: int,
    keep: Sequence[Any] | None = None, out: Any = None, workspace: Any = None,
) -> Any:  # fmt: skip
    """
    Return multi-head self-attention: at each position, a weighted mean of the values of all of its sample's positions.

    Args:
        x: Activations (n, ..., c): t positions.
        w_in: Projections to queries, keys and values (3c, c), each by head.
        w_out: Projection of the weighted sums of the values (c, c).
        b_in: Bias of the projections `w_in` (3c,), or None.
        b_out: Bias of the projection `w_out` (c,), or None.
        heads: Number of heads; divides c.
        keep: Three arrays for the backward pass; None keeps nothing. The first receives queries, keys and values
            (3 t c elements a sample). The second receives the weights: heads x t rows of at least t, of which the
            padding is not written. The third receives the weighted sums of the values (t c).
        out: Where y goes, of x's shape; not x.
        workspace: Scratch memory, see `functional`; None allocates it.

    Example:
        >>> import numpy as np
        >>> one = np.ones((1, 1))
        >>> y = attention(np.array([[[1.0], [3.0]]]), np.array([[0.0], [0.0], [1.0]]), 2 * one, heads=1)
        >>> y.ravel()  # with equal scores, twice the mean
        array([4., 4.])
    """
    xp, (n, t, c) = of(x), _rows(x)
    y, width = xp.empty_like(x) if out is None else out, c // heads
    need = Attend(itemsize=x.itemsize, tokens=t, channels=c, heads=heads, saves=keep is not None)
    workspace = take_workspace(workspace, x, need, n)
    rows, target = x.reshape(n, t, c), y.reshape(n, t, c)
    for samples, _ in need.cut(n, workspace.nbytes):
        count = samples.stop - samples.start
        column_at, *saved_at = need.offsets(count, 1)
        if keep is None:
            shapes = ((count, 3 * t * c), (count, heads * t * t), (count, t * c))
            saved = [view(workspace, shape, x.dtype, offset=at) for shape, at in zip(shapes, saved_at, strict=True)]
        else:
            saved = [array[samples] for array in keep]
        column = view(workspace, (count, heads, t, 1), x.dtype, offset=column_at)
        qkv, mixed = saved[0].reshape(count, t, 3 * c), saved[2]
        weights = saved[1].reshape(count, heads, t, -1)[..., :t]
        linear(rows[samples], w_in, b_in, out=qkv)
        queries, keys, values = _heads(qkv, heads, width)
        (scaled,) = _heads(mixed.reshape(count, t, c), heads, width)  # where the mixed values will lie
        xp.multiply(queries, 1 / math.sqrt(width), out=scaled)
        xp.matmul(scaled, keys.swapaxes(-1, -2), out=weights)
        xp.max(weights, axis=-1, keepdims=True, out=column)
        xp.subtract(weights, column, out=weights)
        xp.exp(weights, out=weights)
        xp.sum(weights, axis=-1, keepdims=True, out=column)
        xp.divide(weights, column, out=weights)
        xp.matmul(weights, values, out=scaled)
        linear(mixed.reshape(count, t, c), w_out, b_out, out=target[samples])
    return y


def attention_backward(
    dy: Any, x: Any, w_in: Any, w_out: Any, *, heads: int, saved: Sequence[Any], dw_in: Any, dw_out: Any,
    db_in: Any = None, db_out: Any = None, out: Any = None, workspace: Any = None,
) -> Any:  # fmt: skip
    """
    Compute the gradients of attention's input and projections, summed over all samples; return the input's.

    Args:
        dy: Gradient of the output (n, ..., c).
        x: The forward pass's input.
        w_in, w_out, heads: As in the forward pass.
        saved: Queries, keys and values; weights; and weighted sums of the values, as the forward pass kept them.
        dw_in, dw_out: Overwritten with the gradients of the projections, of their shapes.
        db_in, db_out: Overwritten with the gradients of the biases, of their shapes, or None.
        out: Where dx goes; may be dy.
        workspace: Scratch memory, see `functional`; None allocates it.
    """
    xp, (n, t, c) = of(dy), _rows(dy)
    dx, width = xp.empty_like(dy) if out is None else out, c // heads
    need = AttendBackward(itemsize=dy.itemsize, tokens=t, channels=c, heads=heads)
    workspace = take_workspace(workspace, dy, need, n)
    rows, errors, target = x.reshape(n, t, c), dy.reshape(n, t, c), dx.reshape(n, t, c)
    linear_wgrad(saved[2].reshape(n, t, c), errors, dw=dw_out, db=db_out)
    factor = 1 / math.sqrt(width)
    for samples, _ in need.cut(n, workspace.nbytes):
        count = samples.stop - samples.start
        shapes = ((count, t, 3 * c), (count, heads, t, t), (count, t, c), (count, t, heads, 1), (3 * c, c), (3 * c,))
        dqkv, dweights, dmixed, column, partial, partial_bias = areas(
            workspace, need, (count, 1), *((shape, dy.dtype) for shape in shapes)
        )
        weights = saved[1][samples].reshape(count, heads, t, -1)[..., :t]
        queries, keys, values = _heads(saved[0][samples].reshape(count, t, 3 * c), heads, width)
        dqueries, dkeys, dvalues = _heads(dqkv, heads, width)
        linear_dgrad(errors[samples], w_out, out=dmixed)
        (owed,) = _heads(dmixed, heads, width)
        xp.matmul(weights.swapaxes(-1, -2), owed, out=dvalues)
        xp.matmul(owed, values.swapaxes(-1, -2), out=dweights)
        xp.multiply(dmixed, saved[2][samples].reshape(count, t, c), out=dmixed)
        xp.sum(dmixed.reshape(count, t, heads, width), axis=-1, keepdims=True, out=column)
        xp.subtract(dweights, column.swapaxes(1, 2), out=dweights)
        xp.multiply(dweights, weights, out=dweights)
        xp.matmul(dweights, keys, out=dqueries)
        xp.matmul(dweights.swapaxes(-1, -2), queries, out=dkeys)
        towards_scores = dqkv[..., : 2 * c]
        xp.multiply(towards_scores, factor, out=towards_scores)
        linear_dgrad(dqkv, w_in, out=target[samples])
        if not samples.start:
            linear_wgrad(rows[samples], dqkv, dw=dw_in, db=db_in)
            continue
        linear_wgrad(rows[samples], dqkv, dw=partial, db=None if db_in is None else partial_bias)
        xp.add(dw_in, partial, out=dw_in)
        if db_in is not None:
            xp.add(db_in, partial_bias, out=db_in)
    return dx


def _rows(x: Any) -> tuple[int, int, int]:
    return len(x), math.prod(x.shape[1:-1]), x.shape[-1]


def _heads(projected: Any, heads: int, width: int) -> list[Any]:
    """Return a view (n, heads, t, width) for each part of projections (n, t, parts x heads x width)."""
    n, t, _ = projected.shape
    return list(projected.reshape(n, t, -1, heads, width).transpose(2, 0, 3, 1, 4))
