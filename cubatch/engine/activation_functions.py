"""
Activation functions and their gradients, element by element: ReLU, ReLU6, sigmoid, SiLU, GELU, hard sigmoid and swish.

Flat arrays are processed in pieces that fit the scratch memory, so that intermediate values stay in the cache.
Where a curve is flat the gradient is zero, even for an infinite gradient of the output. At a kink the slope is
PyTorch's: zero where one of the sides is flat, and one for hard swish at 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cubatch.engine.backend import areas, gate, of, take_workspace, view
from cubatch.errors import InvalidArgument
from cubatch.memory.blocks import Curve, Flat


def relu(x: Any, *, out: Any = None) -> Any:
    """Return x with its negative elements replaced by zero, in `out`, which may be x; None allocates it."""
    xp = of(x)
    y = xp.empty_like(x) if out is None else out
    xp.maximum(x, 0, out=y)
    return y


def relu_backward(dy: Any, y: Any, *, out: Any = None, workspace: Any = None) -> Any:
    """
    Return the gradient of ReLU's input: dy where ReLU's output is positive (or NaN, as in PyTorch), else zero.

    Args:
        dy, y: Gradient of ReLU's output, and that output, of one shape.
        out: Where dx goes; may be dy or y.
        workspace: Scratch memory, see `functional`; None allocates it.
    """
    xp = of(dy)
    dx = xp.empty_like(dy) if out is None else out
    flags = Flat(itemsize=1)
    workspace = take_workspace(workspace, dy, flags, dy.size)
    errors, results, target = dy.reshape(-1), y.reshape(-1), dx.reshape(-1)
    for piece, _ in flags.cut(dy.size, workspace.nbytes):
        passing = view(workspace, (piece.stop - piece.start,), xp.bool_)
        xp.not_equal(results[piece], 0, out=passing)
        gate(errors[piece], passing, target[piece])
    return dx


def activation(x: Any, *, kind: str, out: Any = None, workspace: Any = None) -> Any:
    """
    Return an activation function of each element of x.

    With sigmoid(x) = 1 / (1 + exp(-x)) and hard(x) = min(max(x + 3, 0), 6) / 6, the kinds are PyTorch's:

        relu6          min(max(x, 0), 6)
        sigmoid        sigmoid(x)
        silu           x * sigmoid(x)
        hard_sigmoid   hard(x)
        hard_swish     x * hard(x)
        gelu           x * (1 + erf(x / sqrt(2))) / 2

    Args:
        kind: Name of the function in this table; any other raises InvalidArgument.
        out: Where y goes; may be x.
        workspace: Scratch memory, see `functional`; None allocates it.

    Example:
        >>> activation(np.array([-4.0, 0.0, 2.0]), kind="hard_sigmoid").round(3)
        array([0.   , 0.5  , 0.833])
    """
    forward, _ = _curve(kind)
    xp = of(x)
    y = xp.empty_like(x) if out is None else out
    source, target = x.reshape(-1), y.reshape(-1)
    with np.errstate(over="ignore"):  # exp(-x) may be infinite: 1 / (1 + inf) is the right answer
        for piece, *scratch in _pieces(x, workspace):
            forward(xp, source[piece], target[piece], scratch)
    return y


def activation_backward(dy: Any, saved: Any, *, kind: str, out: Any = None, workspace: Any = None) -> Any:
    """
    Return the gradient of an activation function's input: dy times the slope.

    Args:
        dy: Gradient of the function's output.
        saved: The function's output for "relu6", "sigmoid" and "hard_sigmoid"; its input for "silu", "hard_swish" and
            "gelu".
        kind: Name of the function, as in `activation`.
        out: Where dx goes; may be dy.
        workspace: Scratch memory, see `functional`; None allocates it.

    Example:
        >>> activation_backward(np.array([8.0, 8.0]), np.array([0.25, 1.0]), kind="sigmoid")
        array([1.5, 0. ])
    """
    _, backward = _curve(kind)
    xp = of(dy)
    dx = xp.empty_like(dy) if out is None else out
    errors, values, target = dy.reshape(-1), saved.reshape(-1), dx.reshape(-1)
    with np.errstate(over="ignore"):
        for piece, *scratch in _pieces(dy, workspace):
            backward(xp, errors[piece], values[piece], target[piece], scratch)
    return dx


# Each function below takes the module, a piece of each array, and two scratch arrays of the piece's size.


def _relu6(xp: Any, x: Any, y: Any, _: Any) -> None:
    xp.clip(x, 0, 6, out=y)


def _relu6_backward(xp: Any, dy: Any, y: Any, dx: Any, scratch: Any) -> None:
    passing, below = (_flags(xp, tile) for tile in scratch)
    xp.not_equal(y, 0, out=passing)  # of what lies in [0, 6] or is NaN
    xp.not_equal(y, 6, out=below)
    xp.logical_and(passing, below, out=passing)
    gate(dy, passing, dx)


def _sigmoid(xp: Any, x: Any, y: Any, _: Any) -> None:
    _one_plus_exp(xp, x, y)
    xp.reciprocal(y, out=y)


def _sigmoid_backward(xp: Any, dy: Any, y: Any, dx: Any, scratch: Any) -> None:
    slope, _ = scratch
    xp.subtract(1, y, out=slope)
    xp.multiply(slope, y, out=slope)
    xp.multiply(dy, slope, out=dx)


def _silu(xp: Any, x: Any, y: Any, scratch: Any) -> None:
    tile, _ = scratch
    _one_plus_exp(xp, x, tile)
    xp.divide(x, tile, out=y)


def _silu_backward(xp: Any, dy: Any, x: Any, dx: Any, scratch: Any) -> None:
    """Write dy times the slope s (1 + x (1 - s)) to dx, with s = sigmoid(x); `scratch` are two arrays like x."""
    sigmoid, slope = scratch
    _sigmoid(xp, x, sigmoid, None)
    xp.subtract(1, sigmoid, out=slope)
    xp.multiply(slope, x, out=slope)
    xp.add(slope, 1, out=slope)
    xp.multiply(slope, sigmoid, out=slope)
    xp.multiply(dy, slope, out=dx)


def _hard_sigmoid(xp: Any, x: Any, y: Any, _: Any) -> None:
    xp.add(x, 3, out=y)
    xp.clip(y, 0, 6, out=y)
    xp.divide(y, 6, out=y)


def _hard_sigmoid_backward(xp: Any, dy: Any, y: Any, dx: Any, scratch: Any) -> None:
    above, below = (_flags(xp, tile) for tile in scratch)
    xp.greater(y, 0, out=above)
    xp.less(y, 1, out=below)
    xp.logical_and(above, below, out=above)
    gate(dy, above, dx)
    xp.divide(dx, 6, out=dx)


def _hard_swish(xp: Any, x: Any, y: Any, scratch: Any) -> None:
    tile, _ = scratch
    _hard_sigmoid(xp, x, tile, None)
    xp.multiply(x, tile, out=y)


def _hard_swish_backward(xp: Any, dy: Any, x: Any, dx: Any, scratch: Any) -> None:
    """Write dy times the slope to dx: 0 for x up to -3, x / 3 + 1 / 2 for x below 3, else 1."""
    slope, flags = scratch[0], _flags(xp, scratch[1])
    xp.divide(x, 3, out=slope)
    xp.subtract(slope, 0.5, out=slope)
    xp.less(x, 3, out=flags)
    gate(slope, flags, slope)
    xp.add(slope, 1, out=slope)
    xp.greater(x, -3, out=flags)
    gate(dy, flags, dx)
    xp.multiply(dx, slope, out=dx)


def _gelu(xp: Any, x: Any, y: Any, scratch: Any) -> None:
    """Write x Phi(x) = max(x, 0) - |x| (1 - Phi(|x|)) to y, with Phi the normal distribution function."""
    spare, tail = scratch
    _mills_ratio(xp, x, spare, tail)
    _normal_exp(xp, x, spare)
    xp.multiply(tail, spare, out=tail)
    xp.abs(x, out=spare)
    xp.multiply(tail, spare, out=tail)
    xp.maximum(x, 0, out=y)
    xp.subtract(y, tail, out=y)


def _gelu_backward(xp: Any, dy: Any, x: Any, dx: Any, scratch: Any) -> None:
    """
    Write dy times the slope to dx: (1 + sign(x)) / 2 + sign(x) * (|x| f(x) - (1 - Phi(|x|))).

    Phi is the normal distribution function, and f its derivative.
    """
    spare, slope = scratch
    _mills_ratio(xp, x, spare, slope)
    xp.abs(x, out=spare)
    xp.multiply(spare, 1 / math.sqrt(2 * math.pi), out=spare)
    xp.subtract(spare, slope, out=slope)
    _normal_exp(xp, x, spare)
    xp.multiply(slope, spare, out=slope)
    xp.sign(x, out=spare)
    xp.multiply(slope, spare, out=slope)
    xp.add(spare, 1, out=spare)
    xp.multiply(spare, 0.5, out=spare)
    xp.add(slope, spare, out=slope)
    xp.multiply(dy, slope, out=dx)


_CURVES: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "relu6": (_relu6, _relu6_backward),
    "sigmoid": (_sigmoid, _sigmoid_backward),
    "silu": (_silu, _silu_backward),
    "hard_sigmoid": (_hard_sigmoid, _hard_sigmoid_backward),
    "hard_swish": (_hard_swish, _hard_swish_backward),
    "gelu": (_gelu, _gelu_backward),
}

# The tail 1 - Phi(a) of the normal distribution over exp(-a^2 / 2) is t P(t) with t = 1 / (1 + s a), for a of 0 and
# more, as Hastings has it (1955, sheet 43; Abramowitz and Stegun, 7.1.26).  Here (s, coefficients of P from the
# constant on), by bytes of an element: interpolated in Chebyshev points of t up to a = 4.5, or 7, with 50 digits, so
# that the tail is off by at most 9.2e-10, or 2.3e-18, before rounding.
_MILLS = {
    4: (
        0.28,
        (
            0.11089408949412498, 0.12205255012421118, 0.04572627071608623, 0.26327111666869285, -0.2746226214869195,
            0.4178466496191882, -0.2269092492583295, 0.04174119503924067,
        ),
    ),
    8: (
        0.2,
        (
            0.07978628520096305, 0.0798470432170212, 0.07585724838975709, 0.07601338558877646, 0.029412434975315958,
            0.17677043627077707, -0.35124433731615556, 0.9508921325284995, -1.712392371509105, 2.5415468487782533,
            -2.902738011343643, 2.557354106725106, -1.6871692504582052, 0.790316166798767, -0.2460588873118293,
            0.04563189925571147, -0.0038251297900103345,
        ),
    ),
}  # fmt: skip


def _mills_ratio(xp: Any, x: Any, spare: Any, out: Any) -> None:
    """Write (1 - Phi(|x|)) / exp(-x^2 / 2) to `out`, with the normal distribution function Phi; overwrite `spare`."""
    s, (*lower, highest) = _MILLS[x.itemsize]
    xp.abs(x, out=spare)
    xp.multiply(spare, s, out=spare)
    xp.add(spare, 1, out=spare)
    xp.reciprocal(spare, out=spare)
    xp.multiply(spare, highest, out=out)
    for coefficient in reversed(lower):
        xp.add(out, coefficient, out=out)
        xp.multiply(out, spare, out=out)


def _normal_exp(xp: Any, x: Any, out: Any) -> None:
    xp.multiply(x, x, out=out)
    xp.multiply(out, -0.5, out=out)
    xp.exp(out, out=out)


def _curve(kind: str) -> tuple[Callable[..., None], Callable[..., None]]:
    if kind not in _CURVES:
        raise InvalidArgument("kind", kind, "one of " + ", ".join(_CURVES))
    return _CURVES[kind]


def _pieces(like: Any, workspace: Any) -> Iterator[tuple[slice, Any, Any]]:
    """
    Yield (range, scratch, scratch) for each piece of a flat array like `like`; the pieces follow one another.

    Both scratch arrays have the size of the piece and lie in `workspace`, a 1-D uint8 array; None allocates it.
    """
    need = Curve(itemsize=like.itemsize)
    workspace = take_workspace(workspace, like, need, like.size)
    for piece, _ in need.cut(like.size, workspace.nbytes):
        count = piece.stop - piece.start
        yield piece, *areas(workspace, need, (count, 1), *[((count,), like.dtype)] * 2)


def _one_plus_exp(xp: Any, x: Any, out: Any) -> None:
    """Write 1 + exp(-x) to `out`, which may be x."""
    xp.negative(x, out=out)
    xp.exp(out, out=out)
    xp.add(out, 1, out=out)


def _flags(xp: Any, tile: Any) -> Any:
    return tile.view(xp.bool_)[: tile.size]
