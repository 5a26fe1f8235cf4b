"""
Attention on hand-written kernels: linear layers, and between them a product of heads, a softmax and another product.

In inference, heads of at most 64 channels use a kernel that stores neither scores nor weights. Otherwise both are
stored with the type of the activations; the softmax overwrites the scores. Their rows are padded, see
`kernels.padding.stored_row`; no kernel reads or writes the padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from cubatch.engine.backend import view
from cubatch.engine.native.arrays import check, take_workspace
from cubatch.engine.native.context import Context, dtype_of
from cubatch.engine.native.heads import Heads, multiply_heads
from cubatch.engine.native.linear import linear, linear_dgrad, linear_wgrad
from cubatch.engine.native.losses import softmax_rows, softmax_rows_backward
from cubatch.engine.native.operation import operation
from cubatch.engine.native.product import product_dtype
from cubatch.errors import InvalidArgument
from cubatch.kernels.attention_launches import find
from cubatch.kernels.padding import stored_row
from cubatch.kernels.workspace import attention_scratch as scratch


@operation(out=lambda given: given.x.shape)
def attention(context: Context, given: SimpleNamespace) -> Any:
    """
    Launch the kernels of `functional.attention`; rows of the weights in `keep` have `stored_row` elements.

    The workspace has `attention_scratch.attention_workspace` bytes.
    """
    x, y, keep, heads = given.x, given.out, given.keep, given.heads
    n, t, c, dtype = len(x), math.prod(x.shape[1:-1]), x.shape[-1], product_dtype(context, x)
    check(x.dtype, x=x)
    need = scratch.attention_workspace((n, t, c), heads, dtype, context.device, saves=keep is not None)
    workspace = take_workspace(given.workspace, x, need)
    stores = scratch.stores_weights(c, heads, saves=keep is not None)
    if keep is None:
        queries_at, weights_at, mixed_at = scratch.saved_bytes((n, t, c), heads, dtype)
        sizes = queries_at, weights_at * stores, mixed_at
        keep, workspace = list(_cut(workspace, sizes, x.dtype)), workspace[sum(sizes) :]
    qkv, mixed = _as(keep[0], (n, t, 3 * c)), _as(keep[2], (n, t, c))
    linear(context, x.reshape(n, t, c), given.w_in, given.b_in, out=qkv, workspace=workspace)
    if stores:
        _mix_by_weights(context, qkv, _as(keep[1], (n, heads, t, stored_row(t))), mixed)
    else:
        attend(context, qkv, heads=heads, out=mixed)
    linear(context, mixed, given.w_out, given.b_out, out=y.reshape(n, t, c), workspace=workspace)
    return y


def _mix_by_weights(context: Context, qkv: Any, weights: Any, mixed: Any) -> None:
    """
    Write the attention weights to `weights` (n, heads, t, t or more), and the weighted sums of values to `mixed`.

    `qkv` has the queries, keys and values of all heads, side by side.
    """
    heads, t, width = weights.shape[1], weights.shape[2], mixed.shape[-1] // weights.shape[1]
    queries, keys, values = (Heads.side_by_side(qkv, heads, width, part) for part in range(3))
    of_weights = Heads.one_by_one(weights, t)
    multiply_heads(context, "nt", queries, keys, of_weights, factor=1 / math.sqrt(width))
    softmax_rows(context, weights, t, out=weights)
    multiply_heads(context, "nn", of_weights, values, Heads.side_by_side(mixed, heads, width))


def attend(context: Context, qkv: Any, *, heads: int, out: Any) -> None:
    """
    Write the sums of the values, weighted by the softmax of their scores, without storing the scores.

    Args:
        qkv: Queries, keys and values (n, t, 3c): c channels of queries, then of keys, then of values. Each c are the
            channels of head 0, then of head 1, and so on.
        heads: Number of heads, of at most `WIDEST_HEAD` channels.
        out: Receives the sums (n, t, c), with the heads in the same order.
    """
    n, t, c = out.shape
    width = c // heads
    if width > scratch.WIDEST_HEAD:
        raise InvalidArgument("heads", heads, f"enough for at most {scratch.WIDEST_HEAD} of {c} channels each")
    check(out.dtype, (n, t, 3 * c), qkv=qkv)
    check(out.dtype, out.shape, out=out)
    grid = (n * -(-t // scratch.QUERIES), heads, 1)
    numbers = t, c, width, 1 / math.sqrt(width)
    context.launch(find("attend", dtype_of(out), context.device), grid, [qkv, out, *numbers])


@operation(out=lambda given: given.dy.shape)
def attention_backward(context: Context, given: SimpleNamespace) -> Any:
    """Launch the kernels of `functional.attention_backward`, with `attention_backward_workspace` bytes."""
    dy, x, w_in, dx, heads = given.dy, given.x, given.w_in, given.out, given.heads
    n, t, c, dtype = len(x), math.prod(x.shape[1:-1]), x.shape[-1], product_dtype(context, x)
    check(x.dtype, x.shape, dy=dy, x=x, out=dx)
    need, width = scratch.attention_backward_workspace((n, t, c), heads, dtype, context.device), c // heads
    workspace = take_workspace(given.workspace, x, need)
    sizes = scratch.saved_bytes((n, t, c), heads, dtype)
    shapes = (n, t, 3 * c), (n, heads, t, stored_row(t)), (n, t, c)
    gradients, rest = _cut(workspace, sizes, x.dtype), workspace[sum(sizes) :]
    dqkv, dweights, dmixed = (_as(array, shape) for array, shape in zip(gradients, shapes, strict=True))
    qkv, weights, mixed = (_as(array, shape) for array, shape in zip(given.saved, shapes, strict=True))
    errors = dy.reshape(n, t, c)
    linear_wgrad(context, mixed, errors, dw=given.dw_out, db=given.db_out, workspace=rest)
    linear_dgrad(context, errors, given.w_out, out=dmixed, workspace=rest)
    queries, keys, values = (Heads.side_by_side(qkv, heads, width, part) for part in range(3))
    dqueries, dkeys, dvalues = (Heads.side_by_side(dqkv, heads, width, part) for part in range(3))
    of_weights, of_scores = Heads.one_by_one(weights, t), Heads.one_by_one(dweights, t)
    owed, factor = Heads.side_by_side(dmixed, heads, width), 1 / math.sqrt(width)
    multiply_heads(context, "tn", of_weights, owed, dvalues)
    multiply_heads(context, "nt", owed, values, of_scores)
    softmax_rows_backward(context, dweights, weights, t, out=dweights)
    multiply_heads(context, "nn", of_scores, keys, dqueries, factor=factor)
    multiply_heads(context, "tn", of_scores, queries, dkeys, factor=factor)
    linear_wgrad(context, x.reshape(n, t, c), dqkv, dw=given.dw_in, db=given.db_in, workspace=rest)
    linear_dgrad(context, dqkv, w_in, out=dx.reshape(n, t, c), workspace=rest)
    return dx


def _cut(workspace: Any, sizes: Iterable[int], dtype: Any) -> Iterator[Any]:
    """Yield a view of type `dtype` of each of the consecutive areas of a workspace; `sizes` are their bytes."""
    begin = 0
    for size in sizes:
        yield view(workspace, (size // dtype.itemsize,), dtype, offset=begin)
        begin += size


def _as(array: Any, shape: tuple[int, ...]) -> Any:
    """Return a view of an array's first elements with another shape; raise InvalidArgument if there are too few."""
    if array.size < math.prod(shape):
        raise InvalidArgument("array", array.shape, f"at least {math.prod(shape)} elements, for a shape of {shape}")
    return array.reshape(-1)[: math.prod(shape)].reshape(shape)
