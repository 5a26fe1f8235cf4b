"""
Batch norm on hand-written kernels: moments of tiles of rows, merged in one order, then one pass over the elements.

On a GPU one member receives the whole batch: `count` is its number of positions, and `reduce` is never called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cubatch.engine.backend import of
from cubatch.engine.native.arrays import check, dtype_of, floats, take_workspace, tile_arguments, vector_width
from cubatch.engine.native.context import Context
from cubatch.engine.native.reductions import FINISH_COLUMNS
from cubatch.errors import InvalidArgument
from cubatch.kernels import variant
from cubatch.kernels.resources import resident_blocks
from cubatch.kernels.workspace.misc import (
    batch_norm_backward_workspace,
    batch_norm_finish_workspace,
    batch_norm_workspace,
    merged_tiles,
    summed_tiles,
    walked_tiles,
)

_MOMENTS = 3


def batch_norm_train(
    context: Context,
    x: Any,
    gamma: Any,
    beta: Any,
    *,
    mean: Any,
    inv_std: Any,
    running_mean: Any = None,
    running_var: Any = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    count: int | None = None,
    reduce: Callable[[Any], object] | None = None,  # noqa: ARG001 - see above
    residual: Any = None,
    relu: bool = False,
    out: Any = None,
    workspace: Any = None,
) -> Any:
    """
    Launch the kernels of `functional.batch_norm_train`; statistics are float32, parameters have x's type.

    The workspace has `workspace.misc.batch_norm_workspace` bytes.
    """
    dtype, channels = dtype_of(x), x.shape[-1]
    y = of(x).empty_like(x) if out is None else out
    rows = _whole_batch(x, count)
    # All that the three steps check, before the first is launched.
    check(x.dtype, x.shape, x=x, residual=residual, out=y)
    check(x.dtype, (channels,), gamma=gamma, beta=beta)
    check(np.float32, (channels,), mean=mean, inv_std=inv_std, running_mean=running_mean, running_var=running_var)
    tiles = summed_tiles(rows, channels, vector_width(context, channels, x), x.itemsize, context.device)
    workspace = take_workspace(workspace, x, batch_norm_workspace(rows, channels, dtype, context.device))
    partials = floats(workspace, tiles.tiles * _MOMENTS * channels)
    context.launch(
        variant.find("batch_norm_statistics", dtype),
        (tiles.tiles, tiles.blocks, 1),
        [x, partials, *tile_arguments(rows, channels, tiles)],
    )
    batch_norm_finish(
        context,
        partials,
        tiles.tiles,
        dtype=dtype,
        origin=x.reshape(-1)[:channels],
        mean=mean,
        inv_std=inv_std,
        running_mean=running_mean,
        running_var=running_var,
        momentum=momentum,
        eps=eps,
        workspace=workspace[4 * partials.size :],
    )
    return batch_norm_apply(context, x, gamma, beta, mean=mean, inv_std=inv_std, residual=residual, relu=relu, out=y)


def batch_norm_finish(
    context: Context,
    partials: Any,
    tiles: int,
    *,
    dtype: str,
    origin: Any = None,
    mean: Any,
    inv_std: Any,
    running_mean: Any = None,
    running_var: Any = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    workspace: Any = None,
) -> None:
    """
    Merge the moments of tiles into the batch's statistics.

    Args:
        context: Where it runs.
        partials: Count, mean and sum of squared deviations: float32 (tiles, 3, c), flat.
        tiles: Tiles of rows.
        origin: What the means in `partials` are distances to: (c,), of the activations' type.
        mean, inv_std, running_mean, running_var, momentum, eps: As in `batch_norm_train`.
        workspace: 1-D uint8 array of `workspace.misc.batch_norm_finish_workspace` bytes. None allocates one.
    """
    channels = len(mean)
    check(np.float32, (tiles * _MOMENTS * channels,), partials=partials)
    check(np.float32, (channels,), mean=mean, inv_std=inv_std, running_mean=running_mean, running_var=running_var)
    if origin is not None:
        check(origin.dtype, (channels,), origin=origin)
    columns = -(-channels // FINISH_COLUMNS)
    slices, per_slice = merged_tiles(tiles)
    if slices:
        workspace = take_workspace(workspace, partials, batch_norm_finish_workspace(tiles, channels))
        merged = floats(workspace, slices * _MOMENTS * channels)
        context.launch(
            variant.find("batch_norm_merge", dtype),
            (columns, slices, 1),
            [partials, np.int32(tiles), np.int32(per_slice), np.int32(channels), merged],
        )
        partials, tiles = merged, slices
    context.launch(
        variant.find("batch_norm_finish", dtype),
        (columns, 1, 1),
        [
            partials, origin, np.int32(tiles), np.int32(channels), mean, inv_std, running_mean, running_var,
            np.float32(momentum), np.float32(eps),
        ],
    )  # fmt: skip


def batch_norm_apply(
    context: Context, x: Any, gamma: Any, beta: Any, *, mean: Any, inv_std: Any, residual: Any = None,
    relu: bool = False, out: Any = None,
) -> Any:  # fmt: skip
    """Normalise by given statistics: y = gamma * (x - mean) * inv_std + beta; arguments as in training."""
    statistics = {"mean": mean, "spread": inv_std, "is_variance": False}
    return _apply(context, x, gamma, beta, **statistics, eps=0.0, residual=residual, relu=relu, out=out)


def batch_norm_inference(
    context: Context,
    x: Any,
    gamma: Any,
    beta: Any,
    *,
    running_mean: Any,
    running_var: Any,
    eps: float = 1e-5,
    residual: Any = None,
    relu: bool = False,
    out: Any = None,
) -> Any:
    """Launch the kernel of `functional.batch_norm_inference`."""
    statistics = {"mean": running_mean, "spread": running_var, "is_variance": True}
    return _apply(context, x, gamma, beta, **statistics, eps=eps, residual=residual, relu=relu, out=out)


def _apply(
    context: Context, x: Any, gamma: Any, beta: Any, *, mean: Any, spread: Any, is_variance: bool, eps: float,
    residual: Any, relu: bool, out: Any,
) -> Any:  # fmt: skip
    y = of(x).empty_like(x) if out is None else out
    channels = x.shape[-1]
    check(x.dtype, x.shape, x=x, residual=residual, out=y)
    check(x.dtype, (channels,), gamma=gamma, beta=beta)
    check(np.float32, (channels,), mean=mean, spread=spread)
    rows = x.size // channels
    vector = vector_width(context, channels, *(array for array in (x, residual, y) if array is not None))
    tiles = walked_tiles(rows, channels, vector, x.itemsize, context.device)
    context.launch(
        variant.find("batch_norm_apply", dtype_of(x)),
        (tiles.tiles, tiles.blocks, 1),
        [
            x, residual, y, mean, spread, gamma, beta, *tile_arguments(rows, channels, tiles), np.float32(eps),
            np.int32(is_variance), np.int32(relu),
        ],
    )  # fmt: skip
    return y


_FOLDED_AT_ONCE = 32
_POINTERS = ("gamma", "beta", "bias", "mean", "variance", "scale", "shift")
# Fold and Folds of kernels/misc/batch_norm.cu.
_FOLD = np.dtype([(name, np.uint64) for name in _POINTERS] + [("channels", np.int32), ("eps", np.float32)])
_FOLDS = np.dtype([("norms", _FOLD, (_FOLDED_AT_ONCE,))])
_FOLD_THREADS = 256


def fold_batch_norms(
    context: Context,
    gammas: Sequence[Any],
    betas: Sequence[Any],
    biases: Sequence[Any],
    *,
    means: Sequence[Any],
    variances: Sequence[Any],
    epsilons: Sequence[float],
    scales: Sequence[Any],
    shifts: Sequence[Any],
) -> None:
    """Launch the kernel of `functional.fold_batch_norms` for each 32 norms; all but parameters is float32."""
    rows = list(zip(gammas, betas, biases, means, variances, scales, shifts, epsilons, strict=True))
    for *arrays, _ in rows:
        stored, wide = arrays[:3], arrays[3:]
        check(arrays[0].dtype, arrays[0].shape, **dict(zip(_POINTERS[:3], stored, strict=True)))
        check(np.float32, arrays[0].shape, **dict(zip(_POINTERS[3:], wide, strict=True)))
    for first in range(0, len(rows), _FOLDED_AT_ONCE):
        part = rows[first : first + _FOLDED_AT_ONCE]
        record = np.zeros((), dtype=_FOLDS)
        for at, (*arrays, eps) in enumerate(part):
            record["norms"][at] = (*(context.address(array) for array in arrays), len(arrays[0]), eps)
        blocks = -(-max(len(arrays[0]) for arrays in part) // _FOLD_THREADS)
        context.launch(variant.find("batch_norm_fold", dtype_of(part[0][0])), (blocks, len(part), 1), [record[()]])


def batch_norm_backward(
    context: Context,
    dy: Any,
    x: Any,
    gamma: Any,
    *,
    mean: Any,
    inv_std: Any,
    dgamma: Any,
    dbeta: Any,
    count: int | None = None,
    reduce: Callable[[Any], object] | None = None,  # noqa: ARG001 - see above
    out: Any = None,
    workspace: Any = None,
) -> Any:
    """
    Launch the kernels of `functional.batch_norm_backward`; statistics are float32, parameters have x's type.

    The workspace has `workspace.misc.batch_norm_backward_workspace` bytes.
    """
    dtype, channels = dtype_of(x), x.shape[-1]
    dx = of(dy).empty_like(dy) if out is None else out
    rows = _whole_batch(x, count)
    check(x.dtype, x.shape, dy=dy, x=x, out=dx)
    check(x.dtype, (channels,), gamma=gamma, dgamma=dgamma, dbeta=dbeta)
    check(np.float32, (channels,), mean=mean, inv_std=inv_std)
    sums, vector = variant.find("batch_norm_backward_sums", dtype), vector_width(context, channels, dy, x)
    resident = resident_blocks(sums, context.device.compute_capability)
    tiles = summed_tiles(rows, channels, vector, x.itemsize, context.device, blocks_per_sm=resident)
    workspace = take_workspace(workspace, x, batch_norm_backward_workspace(rows, channels, dtype, context.device))
    means = floats(workspace, 2 * channels)
    partials = floats(workspace, tiles.tiles * 2 * channels, start=2 * channels)
    context.launch(
        sums,
        (tiles.tiles, tiles.blocks, 1),
        [dy, x, mean, inv_std, partials, *tile_arguments(rows, channels, tiles)],
    )
    context.launch(
        variant.find("batch_norm_backward_finish", dtype),
        (-(-2 * channels // FINISH_COLUMNS), 1, 1),
        [partials, np.int32(tiles.tiles), np.int32(channels), np.float32(1 / max(rows, 1)), dgamma, dbeta, means],
    )
    tiles = walked_tiles(rows, channels, vector_width(context, channels, dy, x, dx), x.itemsize, context.device)
    context.launch(
        variant.find("batch_norm_backward_apply", dtype),
        (tiles.tiles, tiles.blocks, 1),
        [dy, x, dx, mean, inv_std, gamma, means, *tile_arguments(rows, channels, tiles)],
    )
    return dx


def _whole_batch(x: Any, count: int | None) -> int:
    rows = int(x.size // x.shape[-1])
    if count not in {None, rows}:
        raise InvalidArgument("count", count, f"the {rows} positions of x: kernels take no shard of a batch")
    return rows
