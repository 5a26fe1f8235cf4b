"""
Element by element: dropout, sums of branches, concatenation and slices of channels.

Flat arrays are processed in pieces that fit the scratch memory, so that random numbers are stored for one piece only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cubatch.engine.backend import call, of, random_generator, take_workspace, view
from cubatch.errors import InvalidArgument
from cubatch.memory.blocks import Flat

_DRAW_BYTES = 4
"""A random number is a float32, for activations of any type."""


def dropout(
    x: Any, *, p: float, seed: Any, step: int = 0, out: Any = None, mask: Any = None, workspace: Any = None
) -> Any:
    """
    Return x with each element zeroed with probability p, or else scaled by 1 / (1 - p), and the mask.

    Args:
        p: Probability that an element is dropped, in [0, 1).
        seed: Whole number or a sequence of whole numbers. Shards of a batch must pass different seeds.
        step: Number of the step; seed and step determine the mask.
        out: Where y goes; may be x.
        mask: Receives the mask: bool, true where x is kept. None allocates it.
        workspace: Scratch memory, see `functional`; None allocates it.

    Returns:
        y and the mask.
    """
    if not 0 <= p < 1:
        raise InvalidArgument("p", p, "at least 0 and less than 1")
    xp = of(x)
    y = xp.empty_like(x) if out is None else out
    mask = xp.empty(x.shape, dtype=xp.bool_) if mask is None else mask
    numbers = Flat(itemsize=_DRAW_BYTES)
    workspace = take_workspace(workspace, x, numbers, x.size)
    generator = random_generator(x, (*(seed if isinstance(seed, Sequence) else (seed,)), step))
    source, target, flags = x.reshape(-1), y.reshape(-1), mask.reshape(-1)
    for piece, _ in numbers.cut(x.size, workspace.nbytes):
        part = target[piece]
        draws = view(workspace, part.shape, xp.float32)
        call(generator.random, size=draws.shape, dtype=xp.float32, out=draws)  # CuPy takes its size from no array
        xp.greater_equal(draws, xp.float32(p), out=flags[piece])
        xp.multiply(source[piece], flags[piece], out=part)
        xp.multiply(part, 1 / (1 - p), out=part)
    return y, mask


def dropout_backward(dy: Any, mask: Any, *, p: float, out: Any = None) -> Any:
    """Return the gradient of dropout's input: dy / (1 - p) where the mask is true, else zero; `out` may be dy."""
    xp = of(dy)
    dx = xp.empty_like(dy) if out is None else out
    xp.multiply(dy, mask, out=dx)
    xp.multiply(dx, 1 / (1 - p), out=dx)
    return dx


def add(branches: Sequence[Any], *, relu: bool = False, out: Any = None) -> Any:
    """
    Return the sum of two or more arrays of one shape, clamped at zero if `relu`; `out` may be the first of them.

    Without `relu` the gradient of each array is that of the sum.
    """
    first, second, *others = branches
    xp = of(first)
    y = xp.empty_like(first) if out is None else out
    xp.add(first, second, out=y)
    for other in others:
        xp.add(y, other, out=y)
    if relu:
        xp.maximum(y, 0, out=y)
    return y


def concat(branches: Sequence[Any], *, out: Any = None) -> Any:
    """Return branches joined along the channels, the last axis."""
    xp, first = of(branches[0]), branches[0]
    channels = sum(branch.shape[-1] for branch in branches)
    y = xp.empty((*first.shape[:-1], channels), dtype=first.dtype) if out is None else out
    start = 0
    for branch in branches:
        xp.copyto(y[..., start : start + branch.shape[-1]], branch)
        start += branch.shape[-1]
    return y


def concat_backward(dy: Any, channels: Sequence[int], *, outs: Sequence[Any]) -> None:
    """
    Copy the channels of a gradient into the gradients of the concatenated branches.

    Args:
        dy: Gradient of the concatenation (..., sum of channels).
        channels: Number of channels of each branch.
        outs: Receive each branch's gradient; None for a branch that needs none.

    Example:
        >>> import numpy as np
        >>> second = np.empty((1, 2))
        >>> concat_backward(np.array([[1.0, 2.0, 3.0]]), [1, 2], outs=[None, second])
        >>> second
        array([[2., 3.]])
    """
    xp, start = of(dy), 0
    for width, out in zip(channels, outs, strict=True):
        if out is not None:
            xp.copyto(out, dy[..., start : start + width])
        start += width


def slice_channels(x: Any, start: int, end: int, *, out: Any = None) -> Any:
    """Return a copy of the channels from `start` to `end` - 1, the last axis."""
    xp = of(x)
    y = xp.empty((*x.shape[:-1], end - start), dtype=x.dtype) if out is None else out
    xp.copyto(y, x[..., start:end])
    return y


def slice_channels_backward(dy: Any, start: int, *, parts: Any = None, out: Any) -> Any:
    """
    Return the gradient of a slice's input: dy in the range; elsewhere zero, or the gradients from other ranges.

    Args:
        dy: Gradient of the range (..., end - start).
        start: First channel of the range.
        parts: Gradient from other ranges, of dx's shape; may be `out`. None for zero.
        out: Where dx goes, (..., c).

    Example:
        >>> import numpy as np
        >>> slice_channels_backward(np.array([[2.0, 3.0]]), 1, out=np.empty((1, 4)))
        array([[0., 2., 3., 0.]])
    """
    xp, end = of(dy), start + dy.shape[-1]
    if parts is None:
        xp.copyto(out[..., :start], 0)
        xp.copyto(out[..., end:], 0)
    elif parts is not out:
        xp.copyto(out, parts)
    xp.copyto(out[..., start:end], dy)
    return out
