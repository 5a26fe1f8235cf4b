"""
Attention on hand-written kernels: linear layers, and between them a product of heads, a softmax and another product.

In inference, heads of at most 64 channels use a kernel that stores neither scores nor weights. Otherwise both are
stored with the type of the activations; the softmax overwrites the scores. Their rows are padded, see
`kernels.padding.stored_row`; no kernel reads or writes the padding.

Training can store a number per query and head instead: the logarithm of its sum of exponentials (`keeps_log_sums`). The
backward pass then computes the weights again, in one kernel for the gradients of queries and one for keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

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
from cubatch.kernels.padding import WIDEST_HEAD, stored_row
from cubatch.kernels.workspace import attention_scratch as scratch


@operation(out=lambda given: given.x.shape)
def attention(context: Context, given: SimpleNamespace) -> Any:
    """
    Launch the kernels of `functional.attention` and return y.

    Rows of the weights in `keep` have `stored_row` elements. If their array is float32 and the others have 16 bits, it
    receives the logarithms of sums of `attend`. The workspace has `attention_scratch.attention_workspace` bytes.
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
        keep, workspace = list(_cut(workspace, sizes, [x.dtype] * len(sizes))), workspace[sum(sizes) :]
    qkv, mixed = _as(keep[0], (n, t, 3 * c)), _as(keep[2], (n, t, c))
    linear(context, x.reshape(n, t, c), given.w_in, given.b_in, out=qkv, workspace=workspace)
    if keeps_log_sums(keep):
        attend(context, qkv, heads=heads, out=mixed, log_sums=_as(keep[1], (n, heads, t)))
    elif stores:
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


def keeps_log_sums(saved: Sequence[Any]) -> bool:
    """Return whether the second of the saved arrays has the logarithms of sums of `attend`, not weights in 16 bits."""
    return bool(saved[1].dtype.itemsize > saved[0].dtype.itemsize)


def attend(context: Context, qkv: Any, *, heads: int, out: Any, log_sums: Any = None) -> None:
    """
    Write the sums of the values, weighted by the softmax of their scores, without storing the scores.

    `qkv` (n, t, 3c) has c channels of queries, then of keys, then of values, each by head. A head has at most
    `WIDEST_HEAD` channels. `log_sums` receives the logarithms to base 2 of each query's sum of exponentials (n, heads,
    t), in float32; None: not stored.
    """
    n, t, c = out.shape
    width = c // heads
    if width > WIDEST_HEAD:
        raise InvalidArgument("heads", heads, f"enough for at most {WIDEST_HEAD} of {c} channels each")
    check(out.dtype, (n, t, 3 * c), qkv=qkv)
    check(out.dtype, out.shape, out=out)
    check(np.float32, (n, heads, t), log_sums=log_sums)
    grid = (n * -(-t // scratch.QUERIES), heads, 1)
    more, name = ([], "attend") if log_sums is None else ([log_sums], "attend_sums")
    numbers = t, c, width, 1 / math.sqrt(width)
    context.launch(find(name, dtype_of(out), context.device), grid, [qkv, out, *more, *numbers])


def attend_backward(
    context: Context, qkv: Any, mixed: Any, dmixed: Any, log_sums: Any, *, heads: int, means: Any, out: Any
) -> None:
    """
    Write the gradients of queries, keys and values (n, t, 3c) to `out`, without storing weights or scores.

    `qkv`, `mixed` and `log_sums` are the argument and the results of `attend`. `means` receives the mean of each
    query's gradients of its weights (n, heads, t), in float32.
    """
    n, t, c = mixed.shape
    check(mixed.dtype, mixed.shape, mixed=mixed, dmixed=dmixed)
    check(mixed.dtype, (n, t, 3 * c), qkv=qkv, out=out)
    check(np.float32, (n, heads, t), log_sums=log_sums, means=means)
    grid, numbers = (n * -(-t // scratch.QUERIES), heads, 1), (t, c, c // heads, 1 / math.sqrt(c // heads))
    for name in ("attend_queries", "attend_keys"):  # the second reads the means that the first writes
        kernel = find(name, dtype_of(mixed), context.device)
        context.launch(kernel, grid, [qkv, mixed, dmixed, log_sums, means, out, *numbers])


@operation(out=lambda given: given.dy.shape)
def attention_backward(context: Context, given: SimpleNamespace) -> Any:
    """Launch the kernels of `functional.attention_backward` in `attention_backward_workspace` bytes; return dx."""
    dy, x, w_in, dx, heads = given.dy, given.x, given.w_in, given.out, given.heads
    n, t, c, dtype = len(x), math.prod(x.shape[1:-1]), x.shape[-1], product_dtype(context, x)
    check(x.dtype, x.shape, dy=dy, x=x, out=dx)
    by_sums = keeps_log_sums(given.saved)
    need = scratch.attention_backward_workspace((n, t, c), heads, dtype, context.device, by_sums=by_sums)
    workspace = take_workspace(given.workspace, x, need)
    sizes = scratch.saved_bytes((n, t, c), heads, dtype, by_sums=by_sums)
    shapes = (n, t, 3 * c), (n, heads, t) if by_sums else (n, heads, t, stored_row(t)), (n, t, c)
    gradients, rest = _cut(workspace, sizes, [array.dtype for array in given.saved]), workspace[sum(sizes) :]
    dqkv, between, dmixed = (_as(array, shape) for array, shape in zip(gradients, shapes, strict=True))
    qkv, stored, mixed = (_as(array, shape) for array, shape in zip(given.saved, shapes, strict=True))
    errors = dy.reshape(n, t, c)
    linear_wgrad(context, mixed, errors, dw=given.dw_out, db=given.db_out, workspace=rest)
    linear_dgrad(context, errors, given.w_out, out=dmixed, workspace=rest)
    if by_sums:
        attend_backward(context, qkv, mixed, dmixed, stored, heads=heads, means=between, out=dqkv)
    else:
        _mix_backward(context, qkv, stored, dmixed, dweights=between, out=dqkv)
    linear_wgrad(context, x.reshape(n, t, c), dqkv, dw=given.dw_in, db=given.db_in, workspace=rest)
    linear_dgrad(context, dqkv, w_in, out=dx.reshape(n, t, c), workspace=rest)
    return dx


def _mix_backward(context: Context, qkv: Any, weights: Any, dmixed: Any, *, dweights: Any, out: Any) -> None:
    """
    Write the gradients of queries, keys and values to `out`, from weights (n, heads, t, t or more).

    `dmixed` is the gradient of the weighted sums of the values; `dweights` is scratch memory like the weights.
    """
    heads, t, width = weights.shape[1], weights.shape[2], dmixed.shape[-1] // weights.shape[1]
    queries, keys, values = (Heads.side_by_side(qkv, heads, width, part) for part in range(3))
    dqueries, dkeys, dvalues = (Heads.side_by_side(out, heads, width, part) for part in range(3))
    of_weights, of_scores = Heads.one_by_one(weights, t), Heads.one_by_one(dweights, t)
    owed, factor = Heads.side_by_side(dmixed, heads, width), 1 / math.sqrt(width)
    multiply_heads(context, "tn", of_weights, owed, dvalues)
    multiply_heads(context, "nt", owed, values, of_scores)
    softmax_rows_backward(context, dweights, weights, t, out=dweights)
    multiply_heads(context, "nn", of_scores, keys, dqueries, factor=factor)
    multiply_heads(context, "tn", of_scores, queries, dkeys, factor=factor)


def _cut(workspace: Any, sizes: Sequence[int], dtypes: Sequence[Any]) -> Iterator[Any]:
    """Yield a view of each of the consecutive areas of a workspace, by their bytes and types of elements."""
    begin = 0
    for size, dtype in zip(sizes, dtypes, strict=True):
        yield view(workspace, (size // dtype.itemsize,), dtype, offset=begin)
        begin += size


def _as(array: Any, shape: tuple[int, ...]) -> Any:
    """Return a view of an array's first elements with another shape; raise InvalidArgument if there are too few."""
    if array.size < math.prod(shape):
        raise InvalidArgument("array", array.shape, f"at least {math.prod(shape)} elements, for a shape of {shape}")
    return array.reshape(-1)[: math.prod(shape)].reshape(shape)
