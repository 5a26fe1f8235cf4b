"""
Layer norm: normalization over the channels of each position (Ba et al., 2016, arXiv:1607.06450).

A row's sum is a product with a vector of ones. The variance is summed around the mean, after the mean of the deviations
has corrected it. So the variance is accurate even if the mean is large compared with the deviations.
"""

from __future__ import annotations

from typing import Any

from cubatch.engine.backend import of, view
from cubatch.engine.channel_sums import Area
from cubatch.memory.blocks import RowNorm


def layer_norm(
    x: Any, gamma: Any, beta: Any, *, eps: float = 1e-6, statistics: Any = None, out: Any = None, workspace: Any = None
) -> Any:
    """
    Return x normalized by the mean and variance of each position's channels: y = gamma * (x - mean) * inv_std + beta.

    Args:
        x: Activations (..., c).
        gamma: Scale (c,).
        beta: Shift (c,).
        eps: Added to the variance.
        statistics: Receives mean and 1 / sqrt(variance + eps) of each position for the backward pass, all means first.
            None keeps none.
        out: Where y goes; not x.
        workspace: Scratch memory, see `functional`; None allocates it.
    """
    xp, c = of(x), x.shape[-1]
    y = xp.empty_like(x) if out is None else out
    rows, target = x.reshape(-1, c), y.reshape(-1, c)
    area, saved = _Area(x, workspace), _by_kind(statistics)
    xp.copyto(area.weights, 1 / c)
    for piece in area.pieces():
        part, (mean, spread), (squares, _) = target[piece], area.columns(piece), area.tiles(piece)
        xp.matmul(rows[piece], area.weights, out=mean)
        xp.subtract(rows[piece], mean[:, None], out=part)
        xp.matmul(part, area.weights, out=spread)
        xp.subtract(part, spread[:, None], out=part)
        if saved is not None:
            xp.add(mean, spread, out=mean)
            xp.copyto(saved[0, piece], mean)
        xp.multiply(part, part, out=squares)
        xp.matmul(squares, area.weights, out=spread)
        xp.add(spread, eps, out=spread)
        xp.sqrt(spread, out=spread)
        xp.divide(1, spread, out=spread)
        if saved is not None:
            xp.copyto(saved[1, piece], spread)
        xp.multiply(part, spread[:, None], out=part)
        xp.multiply(part, gamma, out=part)
        xp.add(part, beta, out=part)
    return y


def layer_norm_backward(
    dy: Any, x: Any, gamma: Any, *, statistics: Any, dgamma: Any, dbeta: Any, residual: Any = None, out: Any = None,
    workspace: Any = None,
) -> Any:  # fmt: skip
    """
    Compute the gradients of layer norm's input, scale and shift; return the input's.

    With xhat = (x - mean) * inv_std and g = gamma * dy,
    dx = inv_std * (g - mean(g) - xhat * mean(g * xhat)) + residual. Means are over the channels of a position.

    Args:
        dy: Gradient of the output (..., c).
        x: The forward pass's input.
        gamma: Scale (c,).
        statistics: As the forward pass kept them.
        dgamma, dbeta: Overwritten with the gradients of scale and shift (c,).
        residual: Added to dx, of its shape: the gradient from other readers of x. May be `out`.
        out: Where dx goes; may be dy.
        workspace: Scratch memory, see `functional`; None allocates it.
    """
    xp, c = of(dy), dy.shape[-1]
    dx = xp.empty_like(dy) if out is None else out
    rows, errors, target = x.reshape(-1, c), dy.reshape(-1, c), dx.reshape(-1, c)
    area, (means, factors) = _Area(dy, workspace), _by_kind(statistics)
    xp.copyto(area.sums, 0)
    xp.multiply(gamma, 1 / c, out=area.weights)
    for piece in area.pieces():
        (slope, offset), (normed, products), factor = area.columns(piece), area.tiles(piece), factors[piece][:, None]
        xp.subtract(rows[piece], means[piece][:, None], out=normed)
        xp.multiply(normed, factor, out=normed)
        xp.multiply(normed, errors[piece], out=products)
        area.add_up(products, area.sums[0])
        area.add_up(errors[piece], area.sums[1])
        xp.matmul(products, area.weights, out=slope)
        xp.matmul(errors[piece], area.weights, out=offset)
        part = target[piece] if residual is None else products  # the residual may lie there
        xp.multiply(errors[piece], gamma, out=part)
        xp.multiply(normed, slope[:, None], out=normed)
        xp.subtract(part, normed, out=part)
        xp.subtract(part, offset[:, None], out=part)
        xp.multiply(part, factor, out=part)
        if residual is not None:
            xp.add(part, residual.reshape(-1, c)[piece], out=target[piece])
    xp.copyto(dgamma, area.sums[0])
    xp.copyto(dbeta, area.sums[1])
    return dx


def _by_kind(statistics: Any) -> Any:
    """Return a view of the statistics as a row of means and a row of inverse deviations; None for None."""
    return None if statistics is None else statistics.reshape(2, -1)


class _Area(Area):
    """Scratch memory of one call, and the blocks of positions that it allows."""

    def __init__(self, like: Any, workspace: Any) -> None:
        super().__init__(like, workspace, RowNorm(itemsize=like.itemsize, channels=like.shape[-1]), vectors=2)
        (self.weights,) = self.vectors

    def columns(self, piece: slice) -> Any:
        """Return a view (2, positions) of the scratch memory with two numbers for each of a block's positions."""
        return view(self._workspace, (2, piece.stop - piece.start), self._dtype, offset=self._at[0])

    def tiles(self, piece: slice) -> Any:
        return view(self._workspace, (2, piece.stop - piece.start, self._c), self._dtype, offset=self._at[1])
