"""
Layer norm: normalisation over the channels of each position (Ba et al., 2016, arXiv:1607.06450).

A row's sum is a product with a vector of ones.  The variance is summed around the mean, once that was corrected by
the mean of the deviations from it, so that it is good however many deviations the mean is away from zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cubatch.engine.backend import of, take_workspace, view
from cubatch.memory.blocks import RowNorm

if TYPE_CHECKING:
    from collections.abc import Iterator


def layer_norm(
    x: Any, gamma: Any, beta: Any, *, eps: float = 1e-6, statistics: Any = None, out: Any = None, workspace: Any = None
) -> Any:
    """
    Normalise each position by the mean and variance of its channels: y = gamma * (x - mean) * inv_std + beta.

    Args:
        x: Activations (..., c), C-contiguous.
        gamma: Scale (c,).
        beta: Shift (c,).
        eps: Added to the variance.
        statistics: Where mean and 1 / sqrt(variance + eps) go for the backward pass: two numbers for each position,
            C-contiguous, first all means. None keeps none.
        out: Where y goes; not x. None allocates it.
        workspace: 1-D uint8 array for a block of positions. None allocates one.

    Returns:
        y, which is `out` where that was given.

    Example:
        >>> import numpy as np
        >>> layer_norm(np.array([[1.0, 3.0]]), np.ones(2), np.zeros(2), eps=0.0)
        array([[-1.,  1.]])
    """
    xp, c = of(x), x.shape[-1]
    y = xp.empty_like(x) if out is None else out
    rows, target = x.reshape(-1, c), y.reshape(-1, c)
    area, kept = _Area(x, workspace), _by_kind(statistics)
    xp.copyto(area.weights, 1 / c)
    for piece in area.pieces():
        part, (mean, spread), (squares, _) = target[piece], area.columns(piece), area.tiles(piece)
        xp.matmul(rows[piece], area.weights, out=mean)
        xp.subtract(rows[piece], mean[:, None], out=part)
        xp.matmul(part, area.weights, out=spread)
        xp.subtract(part, spread[:, None], out=part)
        if kept is not None:
            xp.add(mean, spread, out=mean)
            xp.copyto(kept[0, piece], mean)
        xp.multiply(part, part, out=squares)
        xp.matmul(squares, area.weights, out=spread)
        xp.add(spread, eps, out=spread)
        xp.sqrt(spread, out=spread)
        xp.divide(1, spread, out=spread)
        if kept is not None:
            xp.copyto(kept[1, piece], spread)
        xp.multiply(part, spread[:, None], out=part)
        xp.multiply(part, gamma, out=part)
        xp.add(part, beta, out=part)
    return y


def layer_norm_backward(
    dy: Any,
    x: Any,
    gamma: Any,
    *,
    statistics: Any,
    dgamma: Any,
    dbeta: Any,
    out: Any = None,
    workspace: Any = None,
) -> Any:
    """
    Give the gradients by layer norm's input, scale and shift.

    With xhat = (x - mean) * inv_std, g = gamma * dy and means over the channels of a position,
    dx = inv_std * (g - mean(g) - xhat * mean(g * xhat)).

    Args:
        dy: Gradient by the output (..., c), C-contiguous.
        x: The forward pass's input.
        gamma: Scale (c,).
        statistics: What the forward pass kept.
        dgamma: Where the gradient by the scale goes: (c,). Overwritten.
        dbeta: Where the gradient by the shift goes: (c,). Overwritten.
        out: Where dx goes; may be dy. None allocates it.
        workspace: 1-D uint8 array for a block of positions. None allocates one.

    Returns:
        dx, which is `out` where that was given.
    """
    xp, c = of(dy), dy.shape[-1]
    dx = xp.empty_like(dy) if out is None else out
    rows, errors, target = x.reshape(-1, c), dy.reshape(-1, c), dx.reshape(-1, c)
    area, (means, factors) = _Area(dy, workspace), _by_kind(statistics)
    xp.copyto(area.sums, 0)
    xp.multiply(gamma, 1 / c, out=area.weights)
    for piece in area.pieces():
        part, (slope, offset), (normed, products) = target[piece], area.columns(piece), area.tiles(piece)
        factor = factors[piece][:, None]
        xp.subtract(rows[piece], means[piece][:, None], out=normed)
        xp.multiply(normed, factor, out=normed)
        xp.multiply(normed, errors[piece], out=products)
        area.add_up(products, area.sums[0])
        area.add_up(errors[piece], area.sums[1])
        xp.matmul(products, area.weights, out=slope)
        xp.matmul(errors[piece], area.weights, out=offset)
        xp.multiply(errors[piece], gamma, out=part)
        xp.multiply(normed, slope[:, None], out=normed)
        xp.subtract(part, normed, out=part)
        xp.subtract(part, offset[:, None], out=part)
        xp.multiply(part, factor, out=part)
    xp.copyto(dgamma, area.sums[0])
    xp.copyto(dbeta, area.sums[1])
    return dx


def _by_kind(statistics: Any) -> Any:
    """View what is kept of each position as a row of means and one of inverse deviations."""
    return None if statistics is None else statistics.reshape(2, -1)


class _Area:
    """The scratch memory of one call, and the blocks of positions that it allows."""

    def __init__(self, like: Any, workspace: Any) -> None:
        c, count = like.shape[-1], like.size // like.shape[-1]
        self._xp, self._c, self._dtype = of(like), c, like.dtype
        need = RowNorm(itemsize=like.itemsize, channels=c)
        self._workspace = take_workspace(workspace, like, need, count)
        self._blocks = need.cut(count, self._workspace.nbytes)
        most = self._blocks[0][0].stop if self._blocks else 0  # the first block is a largest one
        sums_at, vectors_at, ones_at, self._columns_at, self._tiles_at = need.offsets(most, 1)
        self.sums = view(self._workspace, (2, c), "float64", offset=sums_at)
        self._partial, self.weights = view(self._workspace, (2, c), self._dtype, offset=vectors_at)
        self._ones = view(self._workspace, (most,), self._dtype, offset=ones_at)
        self._xp.copyto(self._ones, 1)

    def pieces(self) -> Iterator[slice]:
        """Cut the positions into blocks."""
        return (piece for piece, _ in self._blocks)

    def columns(self, piece: slice) -> Any:
        """View two areas for a number of each of a block's positions."""
        return view(self._workspace, (2, piece.stop - piece.start), self._dtype, offset=self._columns_at)

    def tiles(self, piece: slice) -> Any:
        """View two areas for a block's values."""
        return view(self._workspace, (2, piece.stop - piece.start, self._c), self._dtype, offset=self._tiles_at)

    def add_up(self, rows: Any, total: Any) -> None:
        """Add the sum of a block's rows to a total."""
        self._xp.matmul(self._ones[: len(rows)], rows, out=self._partial)
        self._xp.add(total, self._partial, out=total)
