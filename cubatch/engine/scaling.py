"""
Factors of channels, for each sample or the same for all.

Squeeze-and-excite has factors for each sample (Hu et al., 2017, arXiv:1709.01507). The others scale a branch of a
residual network (Touvron et al., 2021, arXiv:2103.17239). The gradient of a factor is a sum over positions, computed
as a product with a vector of ones, block by block.
"""

from __future__ import annotations

from typing import Any

from cubatch.engine.backend import areas, of, take_workspace
from cubatch.engine.channel_sums import Area
from cubatch.memory.blocks import Ends, Products


def scale(x: Any, s: Any, *, out: Any = None) -> Any:
    """
    Return the channels of each sample times their factors: y[n, h, w, c] = x[n, h, w, c] * s[n, 0, 0, c].

    `out` may be x.
    """
    xp = of(x)
    y = xp.empty_like(x) if out is None else out
    xp.multiply(x, s, out=y)
    return y


def scale_backward(dy: Any, x: Any, s: Any, *, dx: Any = None, ds: Any = None, workspace: Any = None) -> None:
    """
    Compute the gradients of the input and of the factors: dx = dy * s, and ds = sum of dy * x over h and w.

    `dx` may be dy. A gradient that is None is left out.
    """
    xp, (n, h, w, c) = of(dy), dy.shape
    need = Products(itemsize=dy.itemsize, rows=h * w, channels=c)
    workspace = take_workspace(workspace, dy, need, n)
    errors, values, factors = dy.reshape(n, h * w, c), x.reshape(n, h * w, c), s.reshape(n, 1, c)
    for samples, band in need.cut(n, workspace.nbytes):
        part = errors[samples, band]
        if ds is not None:
            sums = ds.reshape(n, 1, c)[samples]
            _add_up(need, workspace, part, values[samples, band], sums, first=not band.start)
        if dx is not None:
            xp.multiply(part, factors[samples], out=dx.reshape(n, h * w, c)[samples, band])


def _add_up(need: Products, workspace: Any, dy: Any, x: Any, ds: Any, *, first: bool) -> None:
    """Add the sums of dy * x over a band of positions to `ds` (n, 1, c); the first band overwrites it."""
    xp, (samples, positions, c) = of(dy), dy.shape
    shapes = dy.shape, (1, positions), (samples, 1, c)
    tile, ones, sums = areas(workspace, need, (samples, positions), *((shape, dy.dtype) for shape in shapes))
    xp.multiply(dy, x, out=tile)
    xp.copyto(ones, 1)
    xp.matmul(ones, tile, out=ds if first else sums)
    if not first:
        xp.add(ds, sums, out=ds)


def layer_scale(x: Any, gamma: Any, *, residual: Any = None, out: Any = None, workspace: Any = None) -> Any:
    """
    Return each channel of x times its factor, the same for all samples, plus another branch: y = x * gamma + residual.

    Args:
        x: Activations (..., c).
        gamma: Factors (c,).
        residual: Added to y, of its shape. None adds nothing.
        out: Where y goes; may be x or residual.
        workspace: Scratch memory with a residual, see `functional`; None allocates it.
    """
    xp, c = of(x), x.shape[-1]
    y = xp.empty_like(x) if out is None else out
    if residual is None:
        xp.multiply(x, gamma, out=y)
        return y
    rows, target, added, need = (
        x.reshape(-1, c),
        y.reshape(-1, c),
        residual.reshape(-1, c),
        Ends(itemsize=x.itemsize, row=c),
    )
    workspace = take_workspace(workspace, x, need, len(rows))
    for piece, _ in need.cut(len(rows), workspace.nbytes):
        part = rows[piece]
        tile, _ = areas(workspace, need, (len(part), 1), (part.shape, x.dtype), (part.shape, "bool"))
        xp.multiply(part, gamma, out=tile)
        xp.add(tile, added[piece], out=target[piece])
    return y


def layer_scale_backward(dy: Any, x: Any, gamma: Any, *, dgamma: Any, out: Any = None, workspace: Any = None) -> None:
    """
    Compute the gradients of the input and of the factors: dx = dy * gamma, and dgamma = sum of dy * x.

    `out`, the gradient of x, may be dy. None leaves it out.
    """
    xp, c, area = of(dy), dy.shape[-1], Area(dy, workspace)
    rows, errors, total = x.reshape(-1, c), dy.reshape(-1, c), area.sums[0]
    xp.copyto(total, 0)
    for piece in area.pieces():
        tile = area.tile(piece)
        xp.multiply(errors[piece], rows[piece], out=tile)
        area.add_up(tile, total)
        if out is not None:
            xp.multiply(errors[piece], gamma, out=out.reshape(-1, c)[piece])
    xp.copyto(dgamma, total)
