"""
Batch norm on hand-written kernels: moments of tiles of rows, merged in one order, then one pass over the elements.

Statistics are float32, parameters have x's type. On a GPU one member receives the whole batch: `count` is its number of
positions, and `reduce` is never called.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from cubatch.engine.batch_norm import check_activation
from cubatch.engine.native.activation_functions import activation_code
from cubatch.engine.native.arrays import check, floats, summing_kernel, take_workspace, tile_arguments, vector_width
from cubatch.engine.native.context import Context, dtype_of
from cubatch.engine.native.operation import operation
from cubatch.engine.native.reductions import finish_gradients, finish_grid
from cubatch.errors import InvalidArgument
from cubatch.kernels import variant
from cubatch.kernels.resources import resident_blocks
from cubatch.kernels.variant import Kernel
from cubatch.kernels.workspace import misc

_MOMENTS = 3


@operation(out=lambda given: given.x.shape)
def batch_norm_train(context: Context, given: SimpleNamespace, *, has_statistics: bool = False) -> Any:
    """
    Launch the kernels of `functional.batch_norm_train` in `workspace.misc.batch_norm_workspace` bytes; return y.

    `has_statistics` is whether mean and inv_std are those of the batch already: see `norm_sums`.
    """
    x, gamma, beta, channels = given.x, given.gamma, given.beta, given.x.shape[-1]
    _whole_batch(x, given.count)
    statistics = {name: getattr(given, name) for name in ("mean", "inv_std")}
    running = {name: getattr(given, name) for name in ("running_mean", "running_var")}
    # All that the three steps check, before the first is launched.
    check(x.dtype, x.shape, x=x, residual=given.residual)
    check(x.dtype, (channels,), gamma=gamma, beta=beta)
    check(np.float32, (channels,), **statistics, **running)
    if not has_statistics:
        numbers = {"momentum": given.momentum, "eps": given.eps}
        batch_norm_statistics(context, x, **statistics, **running, **numbers, workspace=given.workspace)
    return batch_norm_apply(
        context, x, gamma, beta, **statistics, residual=given.residual, relu=given.relu, activation=given.activation,
        out=given.out,
    )  # fmt: skip


def batch_norm_statistics(context: Context, x: Any, *, workspace: Any, **results: Any) -> None:
    """
    Compute mean and 1 / sqrt(variance + eps) of a batch (..., c), and update running statistics.

    Args:
        x: The batch.
        workspace: 1-D uint8 array of `workspace.misc.batch_norm_workspace` bytes. None allocates one.
        results: mean, inv_std, running_mean, running_var, momentum and eps as in `functional.batch_norm_train`.
    """
    dtype, channels = dtype_of(x), x.shape[-1]
    rows = x.size // channels
    sums = summing_kernel(context, "batch_norm_statistics", x, rows)
    tiles = _summed_tiles(context, sums, x, vector_width(context, channels, x))
    workspace = take_workspace(workspace, x, misc.batch_norm_workspace(rows, channels, dtype, context.device))
    partials = floats(workspace, tiles.tiles * _MOMENTS * channels)
    grid = (tiles.tiles, tiles.blocks, 1)
    context.launch(sums, grid, [x, partials, *tile_arguments(rows, channels, tiles)])
    batch_norm_finish(
        context, partials, tiles.tiles, dtype=dtype, origin=x.reshape(-1)[:channels], **results,
        workspace=workspace[4 * partials.size :],
    )  # fmt: skip


def batch_norm_finish(
    context: Context, partials: Any, tiles: int, *, dtype: str, origin: Any = None, mean: Any, inv_std: Any,
    running_mean: Any = None, running_var: Any = None, momentum: float = 0.1, eps: float = 1e-5, workspace: Any = None,
) -> None:  # fmt: skip
    """
    Compute mean and 1 / sqrt(variance + eps) of a batch from moments of its tiles, and update running statistics.

    Args:
        partials: Count, mean and sum of squared deviations: float32 (tiles, 3, c), flat.
        origin: Value (c,) that the means in `partials` are relative to, of the activations' type; None for zero.
        mean, inv_std, running_mean, running_var, momentum, eps: As in `functional.batch_norm_train`.
        workspace: 1-D uint8 array of `workspace.misc.batch_norm_finish_workspace` bytes. None allocates one.
    """
    channels = len(mean)
    check(np.float32, (tiles * _MOMENTS * channels,), partials=partials)
    check(np.float32, (channels,), mean=mean, inv_std=inv_std, running_mean=running_mean, running_var=running_var)
    if origin is not None:
        check(origin.dtype, (channels,), origin=origin)
    grid, (slices, per_slice) = finish_grid(channels), misc.merged_tiles(tiles)
    if slices:
        workspace = take_workspace(workspace, partials, misc.batch_norm_finish_workspace(tiles, channels))
        merged = floats(workspace, slices * _MOMENTS * channels)
        numbers = [partials, tiles, per_slice, channels, merged]
        context.launch(variant.find("batch_norm_merge", dtype), (grid[0], slices, 1), numbers)
        partials, tiles = merged, slices
    statistics = [mean, inv_std, running_mean, running_var, float(momentum), float(eps)]
    context.launch(variant.find("batch_norm_finish", dtype), grid, [partials, origin, tiles, channels, *statistics])


def batch_norm_apply(
    context: Context, x: Any, gamma: Any, beta: Any, *, mean: Any, inv_std: Any, residual: Any = None,
    relu: bool = False, activation: str | None = None, out: Any = None,
) -> Any:  # fmt: skip
    """
    Return x normalized by given statistics: y = gamma * (x - mean) * inv_std + beta.

    The arguments are those of `functional.batch_norm_train`; `activation` None applies none.
    """
    arrays = x, residual, out, mean, inv_std, gamma, beta
    return _apply(context, arrays, eps=0.0, is_variance=False, relu=relu, activation=activation)


@operation(out=lambda given: given.x.shape)
def batch_norm_inference(context: Context, given: SimpleNamespace) -> Any:
    arrays = (
        given.x, given.residual, given.out, given.running_mean, given.running_var, given.gamma, given.beta
    )  # fmt: skip
    return _apply(
        context, arrays, eps=given.eps, is_variance=True, relu=given.relu, activation=given.activation
    )  # fmt: skip


def _apply(
    context: Context, arrays: tuple[Any, ...], *, eps: float, is_variance: bool, relu: bool, activation: str | None
) -> Any:  # fmt: skip
    x, residual, y, mean, spread, gamma, beta = arrays
    channels = x.shape[-1]
    check(x.dtype, x.shape, x=x, residual=residual, out=y)
    check(x.dtype, (channels,), gamma=gamma, beta=beta)
    check(np.float32, (channels,), mean=mean, spread=spread)
    rows, vector = x.size // channels, vector_width(context, channels, x, residual, y)
    tiles = misc.walked_tiles(rows, channels, vector, x.itemsize, context.device)
    numbers, grid = (*tile_arguments(rows, channels, tiles), float(eps), is_variance), (tiles.tiles, tiles.blocks, 1)
    if activation is None:
        context.run("batch_norm_apply", x, grid, *arrays, *numbers, relu)
    else:
        context.run("batch_norm_activate", x, grid, *arrays, *numbers, _activation_code(activation, beta))
    return y


def _activation_code(kind: str, beta: Any) -> int:
    check_activation(kind, beta)
    return activation_code(kind)


_FOLDED_AT_ONCE = 32
_POINTERS = ("gamma", "beta", "bias", "mean", "variance", "scale", "shift")
# Fold and Folds of kernels/misc/batch_norm.cu.
_FOLD = np.dtype([(name, np.uint64) for name in _POINTERS] + [("channels", np.int32), ("eps", np.float32)])
_FOLDS = np.dtype([("norms", _FOLD, (_FOLDED_AT_ONCE,))])
_FOLD_THREADS = 256


@operation()
def fold_batch_norms(context: Context, given: SimpleNamespace) -> None:
    """
    Launch the kernel of `functional.fold_batch_norms` for each 32 norms; all arrays but the parameters are float32.
    """
    columns = (given.gammas, given.betas, given.biases, given.means, given.variances, given.scales, given.shifts)
    rows = list(zip(*columns, given.epsilons, strict=True))
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
        context.run("batch_norm_fold", part[0][0], (blocks, len(part), 1), record[()])


@operation(out=lambda given: given.dy.shape)
def batch_norm_backward(context: Context, given: SimpleNamespace, *, means: Any = None) -> Any:
    """
    Launch the kernels of `functional.batch_norm_backward` in `batch_norm_backward_workspace` bytes; return dx.

    `means` (2, c), if given, are those that `gradient_sums` computes: see `norm_sums`. Then dgamma and dbeta have been
    computed too.
    """
    dy, x, gamma, mean, inv_std, dx = given.dy, given.x, given.gamma, given.mean, given.inv_std, given.out
    channels, rows = x.shape[-1], _whole_batch(x, given.count)
    check(x.dtype, x.shape, dy=dy, x=x, out=dx)
    check(x.dtype, (channels,), gamma=gamma, dgamma=given.dgamma, dbeta=given.dbeta)
    check(np.float32, (channels,), mean=mean, inv_std=inv_std)
    check(x.dtype, (channels,), beta=given.beta)
    check(x.dtype, (len(x), channels), pooled=given.pooled)
    # Kernels that also compute an activation's slope take more registers: separate ones, so that others stay as fast.
    pooled, curve = given.pooled, []
    if given.activation is not None:
        curve = [given.beta, _activation_code(given.activation, given.beta), pooled, rows // len(x)]
    elif pooled is not None:  # the slope of none, which needs no shift
        curve = [gamma, activation_code("none"), pooled, rows // len(x)]
    if means is None:
        need = misc.batch_norm_backward_workspace(rows, channels, dtype_of(x), context.device)
        workspace = take_workspace(given.workspace, x, need)
        means = floats(workspace, 2 * channels)
        gradient_sums(
            context, dy, x, mean=mean, inv_std=inv_std, dgamma=given.dgamma, dbeta=given.dbeta, means=means,
            curve=[gamma, *curve] if curve else [], workspace=workspace[4 * means.size :],
        )  # fmt: skip
    stem = "batch_norm_slope" if curve else "batch_norm_backward"
    vector = vector_width(context, channels, dy, x, dx, pooled)
    tiles = misc.walked_tiles(rows, channels, vector, x.itemsize, context.device)
    numbers, grid = tile_arguments(rows, channels, tiles), (tiles.tiles, tiles.blocks, 1)
    context.run(f"{stem}_apply", x, grid, dy, x, dx, mean, inv_std, gamma, means, *numbers, *curve)
    return dx


def gradient_sums(
    context: Context, dy: Any, x: Any, *, mean: Any, inv_std: Any, dgamma: Any, dbeta: Any, means: Any,
    curve: Sequence[Any] = (), workspace: Any,
) -> None:  # fmt: skip
    """
    Compute the gradients of a norm's parameters, and the means over the batch of dy * xhat and dy, float32 (2, c).

    `curve` has gamma, beta and the code of an activation behind the norm, whose slope is applied to dy. Then follow the
    gradient (samples, c) of a global pool or None, and the pixels of a sample. It is empty for neither. The workspace
    has `batch_norm_backward_workspace` bytes, less those of `means`.
    """
    channels = x.shape[-1]
    rows = x.size // channels
    sums = summing_kernel(context, "batch_norm_slope_sums" if curve else "batch_norm_backward_sums", x, rows)
    pooled = curve[3] if curve else None
    tiles = _summed_tiles(context, sums, x, vector_width(context, channels, dy, x, pooled))
    partials = floats(workspace, tiles.tiles * 2 * channels)
    numbers = tile_arguments(rows, channels, tiles)
    context.launch(sums, (tiles.tiles, tiles.blocks, 1), [dy, x, mean, inv_std, partials, *numbers, *curve])
    finish_gradients(context, x, partials, means=means, dgamma=dgamma, dbeta=dbeta)


def _summed_tiles(context: Context, sums: Kernel, x: Any, vector: int) -> misc.ColumnTiles:
    """Return how the rows of x are divided among the blocks of a kernel that sums them: as many as the SMs hold."""
    resident, channels = resident_blocks(sums, context.device.compute_capability), x.shape[-1]
    return misc.summed_tiles(
        x.size // channels, channels, vector, x.itemsize, context.device, blocks_per_sm=resident
    )  # fmt: skip


def _whole_batch(x: Any, count: int | None) -> int:
    rows = int(x.size // x.shape[-1])
    if count not in {None, rows}:
        raise InvalidArgument("count", count, f"the {rows} positions of x: kernels take no shard of a batch")
    return rows
