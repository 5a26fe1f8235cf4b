"""
Batch norm over the channels of (..., c), in training and inference.

The variance is summed in a second pass, around the mean of the first. The sum of the same deviations corrects that
mean. The members of a team pass a `reduce` function that sums small arrays over all of them (`Team.sum`). Every shard
is then normalized by the statistics of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cubatch.engine import activation_functions as functions
from cubatch.engine.backend import call, of
from cubatch.engine.channel_sums import Area
from cubatch.errors import InvalidArgument

ACTIVATIONS = frozenset({"relu", "relu6", "silu", "hard_swish", "gelu"})
"""Functions behind a norm that can be undone; on a GPU those of with_activation() in kernels/common/activation.cuh."""


def check_activation(kind: str, beta: Any) -> None:
    """Raise InvalidArgument if `kind` is no activation, or the norm has no shift `beta`, which its gradient needs."""
    if kind not in ACTIVATIONS:
        raise InvalidArgument("activation", kind, "one of " + ", ".join(sorted(ACTIVATIONS)))
    if beta is None:
        raise InvalidArgument("beta", beta, "the norm's shift (c,), from which the activation's input is computed")


def batch_norm_train(
    x: Any, gamma: Any, beta: Any, *, mean: Any, inv_std: Any, running_mean: Any = None, running_var: Any = None,
    momentum: float = 0.1, eps: float = 1e-5, count: int | None = None, reduce: Callable[[Any], object] | None = None,
    residual: Any = None, relu: bool = False, activation: str | None = None, out: Any = None, workspace: Any = None,
) -> Any:  # fmt: skip
    """
    Return x normalized by each channel's mean and variance of the batch: y = gamma * (x - mean) * inv_std + beta.

    Args:
        x: Activations (..., c).
        gamma: Scale (c,).
        beta: Shift (c,).
        mean: Receives the batch's mean (c,) for the backward pass.
        inv_std: Receives 1 / sqrt(variance + eps) (c,) for the backward pass.
        running_mean, running_var: Decaying mean and unbiased variance (c,), updated. One value per channel does not
            change the variance. None leaves them to another member of a team.
        momentum: Weight of this batch in the running statistics.
        eps: Added to the variance.
        count: Positions of the whole batch; None for those of x.
        reduce: Called with a float64 array to sum it over all shards, in place. None for a single shard.
        residual: Added to y, of its shape: another branch. May be `out`.
        relu: Clamp y at zero, as the last step.
        activation: "relu" or a function of `activation`, applied to y as the last step; None: none.
        out: Where y goes; may be x if nothing reads x afterwards.
        workspace: Scratch memory, see `functional`; None allocates it.

    Example:
        >>> import numpy as np
        >>> mean, inv_std = np.empty(1), np.empty(1)
        >>> batch_norm_train(np.array([[1.0], [3.0]]), np.ones(1), np.zeros(1), mean=mean, inv_std=inv_std, eps=0.0)
        array([[-1.],
               [ 1.]])
    """
    xp, c = of(x), x.shape[-1]
    y = xp.empty_like(x) if out is None else out
    rows, target = x.reshape(-1, c), y.reshape(-1, c)
    count = len(rows) if count is None else count
    area = Area(x, workspace)
    total, spread = area.sums[0], area.sums[1]
    xp.copyto(area.sums, 0)
    for piece in area.pieces():
        area.add_up(rows[piece], total)
    if reduce is not None:
        call(reduce, total)
    xp.multiply(total, 1 / count, out=total)
    xp.copyto(mean, total)
    xp.copyto(total, 0)
    for piece in area.pieces():
        tile = area.tile(piece)
        xp.subtract(rows[piece], mean, out=tile)
        area.add_up(tile, total)
        xp.multiply(tile, tile, out=tile)
        area.add_up(tile, spread)
    if reduce is not None:
        call(reduce, area.sums)
    xp.multiply(area.sums, 1 / count, out=area.sums)
    factor, shift, _ = area.vectors
    xp.copyto(shift, total)
    xp.multiply(shift, shift, out=shift)
    xp.subtract(spread, shift, out=spread)
    xp.maximum(spread, 0, out=spread)
    xp.add(total, mean, out=total)
    xp.copyto(mean, total)
    if running_mean is not None:
        _decay(xp, running_mean, total, momentum, factor)
    xp.subtract(total, mean, out=total)
    xp.copyto(shift, total)
    if running_var is not None and count > 1:
        xp.multiply(spread, count / (count - 1), out=total)
        _decay(xp, running_var, total, momentum, factor)
    xp.add(spread, eps, out=spread)
    xp.sqrt(spread, out=spread)
    xp.divide(1, spread, out=spread)
    xp.copyto(inv_std, spread)
    # What rounding took from the mean is subtracted with the shift: rows less a rounded mean are nearly exact.
    xp.multiply(inv_std, gamma, out=factor)
    xp.multiply(shift, factor, out=shift)
    xp.subtract(beta, shift, out=shift)
    _apply(area, rows, target, mean=mean, factor=factor, shift=shift, residual=residual, relu=relu)
    return y if activation is None else _activate(y, activation)


def batch_norm_inference(
    x: Any, gamma: Any, beta: Any, *, running_mean: Any, running_var: Any, eps: float = 1e-5, residual: Any = None,
    relu: bool = False, activation: str | None = None, out: Any = None, workspace: Any = None,
) -> Any:  # fmt: skip
    """
    Return x with each channel normalized by running statistics; the arguments are those of `batch_norm_train`.

    `activation` None applies none.
    """
    xp, c = of(x), x.shape[-1]
    y = xp.empty_like(x) if out is None else out
    rows, target = x.reshape(-1, c), y.reshape(-1, c)
    area = Area(x, workspace)
    xp.add(running_var, eps, out=area.vectors[0])
    xp.sqrt(area.vectors[0], out=area.vectors[0])
    xp.divide(gamma, area.vectors[0], out=area.vectors[0])
    _apply(area, rows, target, mean=running_mean, factor=area.vectors[0], shift=beta, residual=residual, relu=relu)
    return y if activation is None else _activate(y, activation)


def fold_batch_norms(
    gammas: Sequence[Any], betas: Sequence[Any], biases: Sequence[Any], *, means: Sequence[Any],
    variances: Sequence[Any], epsilons: Sequence[float], scales: Sequence[Any], shifts: Sequence[Any],
) -> None:  # fmt: skip
    """
    Compute the factor and term with which the product before each batch norm computes the norm's result.

    gamma * (sum + bias - mean) / sqrt(variance + eps) + beta = scale * sum + shift, for each norm. `biases` are those
    of the products, None for a product without; `scales` and `shifts` receive the results, (c,).
    """
    rows = zip(gammas, betas, biases, means, variances, epsilons, scales, shifts, strict=True)
    for gamma, beta, bias, mean, variance, eps, scale, shift in rows:
        xp = of(scale)
        xp.add(variance, eps, out=scale)
        xp.sqrt(scale, out=scale)
        xp.divide(gamma, scale, out=scale)
        xp.subtract(0 if bias is None else bias, mean, out=shift)
        xp.multiply(shift, scale, out=shift)
        xp.add(shift, beta, out=shift)


def batch_norm_backward(
    dy: Any, x: Any, gamma: Any, *, mean: Any, inv_std: Any, dgamma: Any, dbeta: Any, beta: Any = None,
    activation: str | None = None, pooled: Any = None, count: int | None = None,
    reduce: Callable[[Any], object] | None = None, out: Any = None, workspace: Any = None,
) -> Any:  # fmt: skip
    """
    Compute the gradients of batch norm's input, scale and shift; return the input's.

    With xhat = (x - mean) * inv_std and means over the batch,
    dx = gamma * inv_std * (dy - mean(dy) - xhat * mean(dy * xhat)).

    Args:
        dy: Gradient of the output (..., c).
        x: The forward pass's input.
        gamma: Scale (c,).
        mean, inv_std: As the forward pass left them.
        dgamma, dbeta: Gradients of scale and shift (c,), of this shard alone.
        beta: Shift (c,), needed with `activation`.
        activation: Name of an elementwise function of the norm's result, one of ACTIVATIONS. dy is then the gradient
            of that function's result. Its slope is computed from x.
        pooled: Gradient (samples, c) of the output of a global average pool over the array whose gradient dy is. It is
            divided among the positions of each sample and added to dy. None for no pool.
        count, reduce: As in `batch_norm_train`.
        out: Where dx goes; may be dy.
        workspace: Scratch memory, see `functional`; None allocates it.
    """
    xp, c = of(dy), dy.shape[-1]
    dx = xp.empty_like(dy) if out is None else out
    rows, errors, target = x.reshape(-1, c), dy.reshape(-1, c), dx.reshape(-1, c)
    count = len(rows) if count is None else count
    area = Area(dy, workspace)
    if pooled is not None:
        share, samples = area.vectors[0], (len(dy), -1, c)
        for total, error, part in zip(pooled, dy.reshape(samples), dx.reshape(samples), strict=True):
            xp.divide(total, len(error), out=share)
            xp.add(error, share, out=part)
        errors = target
    if activation is not None:
        check_activation(activation, beta)
        xp.multiply(gamma, inv_std, out=area.vectors[0])
        for piece in area.pieces():
            tile = area.tile(piece)
            xp.subtract(rows[piece], mean, out=tile)
            xp.multiply(tile, area.vectors[0], out=tile)
            xp.add(tile, beta, out=tile)
            _undo(errors[piece], tile, kind=activation, out=target[piece])
        errors = target
    xp.copyto(area.sums, 0)
    for piece in area.pieces():
        tile = area.tile(piece)
        xp.subtract(rows[piece], mean, out=tile)
        xp.multiply(tile, inv_std, out=tile)
        xp.multiply(tile, errors[piece], out=tile)
        area.add_up(tile, area.sums[0])
        area.add_up(errors[piece], area.sums[1])
    xp.copyto(dgamma, area.sums[0])
    xp.copyto(dbeta, area.sums[1])
    if reduce is not None:
        call(reduce, area.sums)
    xp.multiply(area.sums, 1 / count, out=area.sums)
    slope, offset, factor = area.vectors
    xp.copyto(slope, area.sums[0])
    xp.multiply(slope, inv_std, out=slope)
    xp.copyto(offset, area.sums[1])
    xp.multiply(gamma, inv_std, out=factor)
    for piece in area.pieces():
        tile, part = area.tile(piece), target[piece]
        xp.subtract(rows[piece], mean, out=tile)
        xp.multiply(tile, slope, out=tile)
        xp.subtract(errors[piece], tile, out=part)
        xp.subtract(part, offset, out=part)
        xp.multiply(part, factor, out=part)
    return dx


def _activate(x: Any, kind: str) -> Any:
    return functions.relu(x, out=x) if kind == "relu" else functions.activation(x, kind=kind, out=x)


def _undo(dy: Any, x: Any, *, kind: str, out: Any) -> None:
    """Write the gradient of the input x of the activation `kind` to `out`: dy times its slope at x; x may change."""
    saved = _activate(x, kind) if kind in {"relu", "relu6"} else x  # a slope that is computed from the output
    if kind == "relu":
        functions.relu_backward(dy, saved, out=out)
    else:
        functions.activation_backward(dy, saved, kind=kind, out=out)


def _decay(xp: Any, running: Any, fresh: Any, momentum: float, row: Any) -> None:
    xp.multiply(running, 1 - momentum, out=running)
    xp.copyto(row, fresh)
    xp.multiply(row, momentum, out=row)
    xp.add(running, row, out=running)


def _apply(area: Area, rows: Any, out: Any, *, mean: Any, factor: Any, shift: Any, residual: Any, relu: bool) -> None:
    xp = of(rows)
    for piece in area.pieces():
        # The residual may lie in the output: then y is made in a tile first.
        target = out[piece] if residual is None else area.tile(piece)
        xp.subtract(rows[piece], mean, out=target)
        xp.multiply(target, factor, out=target)
        xp.add(target, shift, out=target)
        if residual is not None:
            xp.add(target, residual.reshape(rows.shape)[piece], out=out[piece])
        if relu:
            xp.maximum(out[piece], 0, out=out[piece])
