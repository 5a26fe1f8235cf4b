"""
Pooling: one pass over the activations per tap of the window, block by block.

Max pooling stores the number of the winning tap for each output in one byte; its backward pass needs nothing else.
ReLU costs nothing here: zero competes with the taps, wins where no tap is positive and passes no gradient back. So
`conv2d` and then `max_pool2d(relu=True)` give exactly what conv, ReLU and max pool give, with less work.

Windows that leave the input are cut, not padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cubatch.engine.backend import of, take_workspace, view
from cubatch.engine.depthwise import reaches
from cubatch.errors import InvalidArgument
from cubatch.memory.blocks import Block, Flat, Pool
from cubatch.network.layers.pooling_layers import MOST_TAPS
from cubatch.network.windows import Axis, Window, pool_axes


def max_pool2d(
    x: Any, window: Window, *, relu: bool = False, out: Any = None, argmax: Any = None, workspace: Any = None
) -> Any:
    """
    Return the largest value of each window, and write its tap to `argmax`; the first of equal ones, row by row.

    Args:
        x: Activations (n, h, w, c).
        window: The window, of at most 254 taps. Padding never wins.
        relu: Clamp at zero as well.
        out: Where y goes: (n, p, q, c).
        argmax: Receives the tap of each largest value for the backward pass: uint8 (n, p, q, c), 1 + tap, or 0 for
            no tap. None: taps are not stored.
        workspace: Scratch memory, see `functional`; None allocates it.

    Raises:
        InvalidArgument: If the window has more than 254 taps.

    Example:
        >>> import numpy as np
        >>> from cubatch.network.windows import Window
        >>> x = np.array([1.0, 2.0, 3.0, -4.0]).reshape(1, 2, 2, 1)
        >>> winner = np.empty((1, 1, 1, 1), np.uint8)
        >>> max_pool2d(x, Window(2, 2), argmax=winner).item(), winner.item()
        (3.0, 3)
    """
    pool, taps = _Pool(x.shape, x, window, workspace), window.r * window.s
    if taps > MOST_TAPS:
        remedy = "Use a smaller window: the position of the largest value is stored in one byte."
        raise InvalidArgument("r * s", taps, f"at most {MOST_TAPS}", remedy)
    xp = pool.xp
    y = xp.empty(pool.out_shape, dtype=x.dtype) if out is None else out
    for samples, rows in pool.blocks:
        target = y[samples, rows]
        winners = None if argmax is None else argmax[samples, rows]
        start = 0
        if pool.is_inside and not relu:  # the first tap has no competitor
            start = 1
            xp.copyto(target, x[samples, *next(pool.windows(rows))[1]])
        else:
            xp.copyto(target, 0 if relu else -xp.inf)
        if winners is not None:
            xp.copyto(winners, start)
        for tap, (output, source) in enumerate(pool.windows(rows)):
            if tap < start:
                continue
            values, place = x[samples, *source], target[:, *output]
            if winners is not None:
                better = pool.mask(place.shape)
                xp.greater(values, place, out=better)
                codes, held = better.view(xp.uint8), winners[:, *output]
                xp.multiply(codes, xp.uint8(tap + 1), out=codes)
                xp.maximum(held, codes, out=held)  # a later tap's code is larger: the last to win stays
            xp.maximum(place, values, out=place)
    return y


def max_pool2d_backward(
    dy: Any, argmax: Any, window: Window, *, x_shape: tuple[int, int, int, int], out: Any = None, workspace: Any = None
) -> Any:
    """
    Return the gradient of max pooling's input: each window's gradient goes to the input that had the largest value.

    Args:
        dy: Gradient of the output (n, p, q, c).
        argmax: Taps that `max_pool2d` wrote. Where it wrote 0, as with `relu` for windows without a positive input, the
            gradient is dropped.
        window: As in the forward pass.
        x_shape: Shape of the forward pass's input.
        out: Where dx goes: (n, h, w, c).
        workspace: Scratch memory, see `functional`; None allocates it.
    """
    pool = _Pool(x_shape, dy, window, workspace)
    xp = pool.xp
    dx = xp.empty(x_shape, dtype=dy.dtype) if out is None else out
    if not pool.tiles_exactly:
        xp.copyto(dx, 0)
    for samples, rows in pool.blocks:
        errors, winners = dy[samples, rows], argmax[samples, rows]
        for tap, (output, source) in enumerate(pool.windows(rows)):
            error, place = errors[:, *output], dx[samples, *source]
            won = pool.mask(place.shape)
            xp.equal(winners[:, *output], xp.uint8(tap + 1), out=won)
            if pool.is_disjoint:
                xp.multiply(error, won, out=place)
            else:
                product = pool.tile(place.shape)
                xp.multiply(error, won, out=product)
                xp.add(place, product, out=place)
    return dx


def avg_pool2d(x: Any, window: Window, *, out: Any = None, workspace: Any = None) -> Any:
    """
    Return the mean of each window.

    Args:
        x: Activations (n, h, w, c).
        window: The window. Padding counts as zeros, or not at all if its `count_include_pad` is false.
        out: Where y goes: (n, p, q, c).
        workspace: Scratch memory, see `functional`; None allocates it.
    """
    pool = _Pool(x.shape, x, window, workspace)
    xp = pool.xp
    y = xp.empty(pool.out_shape, dtype=x.dtype) if out is None else out
    for samples, rows in pool.blocks:
        target = y[samples, rows]
        xp.copyto(target, 0)
        for output, source in pool.windows(rows):
            place = target[:, *output]
            xp.add(place, x[samples, *source], out=place)
        _divide(xp, target, pool.counts(rows), target)
    return y


def avg_pool2d_backward(
    dy: Any, window: Window, *, x_shape: tuple[int, int, int, int], out: Any = None, workspace: Any = None
) -> Any:
    """
    Return the gradient of average pooling's input: each window's gradient is divided among its inputs.

    The arguments are those of `max_pool2d_backward`; padding counts as in `avg_pool2d`.
    """
    pool = _Pool(x_shape, dy, window, workspace)
    xp = pool.xp
    dx = xp.empty(x_shape, dtype=dy.dtype) if out is None else out
    xp.copyto(dx, 0)
    for samples, rows in pool.blocks:
        errors = dy[samples, rows]
        share = pool.tile(errors.shape)
        _divide(xp, errors, pool.counts(rows), share)
        for output, source in pool.windows(rows):
            place = dx[samples, *source]
            xp.add(place, share[:, *output], out=place)
    return dx


def global_avg_pool(x: Any, *, out: Any = None) -> Any:
    """Return the mean of each sample's channels over all pixels: (n, h, w, c) to (n, c)."""
    xp = of(x)
    y = xp.empty((x.shape[0], x.shape[3]), dtype=x.dtype) if out is None else out
    xp.sum(x, axis=(1, 2), out=y)
    xp.divide(y, x.shape[1] * x.shape[2], out=y)
    return y


def global_avg_pool_backward(
    dy: Any, *, x_shape: tuple[int, int, int, int], residual: Any = None, out: Any = None, workspace: Any = None
) -> Any:
    """
    Return the gradient of the input: dy / (h * w) at each pixel, plus the residual if there is one.

    Args:
        dy: Gradient of the output (n, c).
        x_shape: Shape of the forward pass's input, (n, h, w, c).
        residual: Added to dx, of its shape: the gradient from other readers of the input. May be `out`.
        out: Where dx goes: (n, h, w, c).
        workspace: Scratch memory with a residual, see `functional`; None allocates it.

    Example:
        >>> import numpy as np
        >>> dy, others = np.array([[6.0]]), np.ones((1, 2, 1, 1))
        >>> global_avg_pool_backward(dy, x_shape=(1, 2, 1, 1), residual=others).ravel().tolist()
        [4.0, 4.0]
    """
    xp, (n, c), pixels = of(dy), dy.shape, x_shape[1] * x_shape[2]
    dx = xp.empty(x_shape, dtype=dy.dtype) if out is None else out
    errors = dy.reshape(n, 1, 1, c)
    if residual is None:
        xp.divide(errors, pixels, out=dx)
        return dx
    need = Flat(itemsize=c * dy.itemsize)
    workspace = take_workspace(workspace, dy, need, n)
    for samples, _ in need.cut(n, workspace.nbytes):
        share = view(workspace, errors[samples].shape, dy.dtype)
        xp.divide(errors[samples], pixels, out=share)
        xp.add(residual[samples], share, out=dx[samples])
    return dx


class _Pool:
    """Geometry of one pooling call, its scratch memory, and the blocks of samples and rows that fit the memory."""

    def __init__(self, x_shape: tuple[int, int, int, int], like: Any, window: Window, workspace: Any) -> None:
        n, h, w, c = x_shape
        self.xp, self._dtype, self._window = of(like), like.dtype, window
        self._axes = v, q = pool_axes((h, w), window)
        self.out_shape = (n, v.out, q.out, c)
        self.is_inside = not (v.reaches_out or q.reaches_out)
        self.is_disjoint = all(axis.stride >= axis.taps for axis in self._axes)
        self.tiles_exactly = self.is_inside and all(a.stride == a.taps and a.size == a.out * a.taps for a in self._axes)
        need = Pool(itemsize=like.itemsize, rows=v.out, vertical=v, horizontal=q, channels=c)
        self._workspace = take_workspace(workspace, like, need, n)
        self.blocks: tuple[Block, ...] = need.cut(n, self._workspace.nbytes)
        # The first block is a largest one.
        samples, rows = self.blocks[0] if self.blocks else (slice(0, 1), slice(0, 1))
        self._mask_at = need.offsets(samples.stop, rows.stop)[1]

    def windows(self, rows: slice) -> Iterator[Any]:
        return reaches(*self._axes, rows)

    def tile(self, shape: tuple[int, ...]) -> Any:
        return view(self._workspace, shape, self._dtype)

    def mask(self, shape: tuple[int, ...]) -> Any:
        return view(self._workspace, shape, self.xp.bool_, offset=self._mask_at)

    def counts(self, rows: slice) -> tuple[list[int], list[int]]:
        """Return the number of inputs, counted padding included, in each row and in each column of windows."""
        v, h = self._axes
        top, bottom, left, right = self._window.pad if self._window.count_include_pad else (0, 0, 0, 0)
        return _counts(v, range(rows.start, rows.stop), top, bottom), _counts(h, range(h.out), left, right)


def _counts(axis: Axis, outputs: range, before: int, after: int) -> list[int]:
    firsts = [output * axis.stride + axis.offset for output in outputs]
    return [min(first + axis.taps, axis.size + after) - max(first, -before) for first in firsts]


def _divide(xp: Any, values: Any, counts: tuple[list[int], list[int]], out: Any) -> None:
    """Write values divided by the number of inputs in each window: `counts` of its row times that of its column."""
    rows, columns = counts
    if len(set(rows)) == len(set(columns)) == 1:
        xp.divide(values, rows[0] * columns[0], out=out)
        return
    xp.divide(values, xp.asarray(rows, dtype=out.dtype)[:, None, None], out=out)
    xp.divide(out, xp.asarray(columns, dtype=out.dtype)[:, None], out=out)
