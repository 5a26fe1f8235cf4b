"""
Tokens: how a vision transformer begins and ends (Dosovitskiy et al., 2020, arXiv:2010.11929).

A learned class token is put before the pixels, and a learned position is added to each. At the end only the class
token is read.
"""

from __future__ import annotations

from typing import Any

from cubatch.engine.backend import of


def tokens(x: Any, token: Any, position: Any, *, out: Any = None) -> Any:
    """
    Return the class token followed by the pixels of each sample, with a position added to each.

    Args:
        x: Activations (n, ..., c): t positions.
        token: The class token (c,).
        position: The positions (t + 1, c).
        out: Where y goes: (t + 1) c elements for each sample. None allocates (n, t + 1, 1, c).

    Example:
        >>> import numpy as np
        >>> tokens(np.array([[[5.0]]]), np.array([1.0]), np.array([[0.25], [0.5]])).ravel()
        array([1.25, 5.5 ])
    """
    xp, n, (count, c) = of(x), len(x), position.shape
    y = xp.empty((n, count, 1, c), dtype=x.dtype) if out is None else out
    rows = y.reshape(n, count, c)
    xp.add(token, position[0], out=rows[:, 0])
    xp.add(x.reshape(n, count - 1, c), position[1:], out=rows[:, 1:])
    return y


def tokens_backward(
    dy: Any,  # gradient of the output, (t + 1) c elements for each sample
    *,
    dtoken: Any,  # gradient of the class token (c,)
    dposition: Any,  # gradient of the positions (t + 1, c)
    out: Any = None,  # gradient of the pixels: t c elements for each sample. None leaves it out
    workspace: Any = None,  # noqa: ARG001
) -> None:
    """Compute the gradients of the pixels, the class token and the positions."""
    xp, n, (count, c) = of(dy), len(dy), dposition.shape
    rows = dy.reshape(n, count, c)
    xp.sum(rows, axis=0, out=dposition)
    xp.copyto(dtoken, dposition[0])
    if out is not None:
        xp.copyto(out.reshape(n, count - 1, c), rows[:, 1:])


def class_token(x: Any, *, out: Any = None) -> Any:
    """Return the first position of each sample of (n, h, w, c); without `out`, allocate (n, 1, 1, c)."""
    xp, (n, *_, c) = of(x), x.shape
    y = xp.empty((n, 1, 1, c), dtype=x.dtype) if out is None else out
    xp.copyto(y.reshape(n, c), x.reshape(n, -1, c)[:, 0])
    return y


def class_token_backward(dy: Any, *, x_shape: tuple[int, ...], out: Any = None) -> Any:
    """Return the gradient of the input (n, h, w, c): dy at the first position, zero at the others."""
    xp, (n, *_, c) = of(dy), x_shape
    dx = xp.empty(x_shape, dtype=dy.dtype) if out is None else out
    rows = dx.reshape(n, -1, c)
    xp.copyto(rows[:, 0], dy.reshape(n, c))
    xp.copyto(rows[:, 1:], 0)
    return dx
