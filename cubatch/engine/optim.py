"""
Update rules over flat arrays, in place, piece by piece.

All parameters of a network lie in one array and so do their gradients, so an optimizer step is one call. Members of a
team each take a range. A gradient may come in several parts, one for each member, which are added up. The formulas are
PyTorch's.

For parameters of 16 bits, a step changes a float32 `master` copy, and the state is float32 too. A small step added to a
16-bit weight would round to that weight. A gradient of a scaled loss is divided by the scale first. A step is skipped
if its gradient is not finite: see `loss_scale`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cubatch.engine.backend import of, take_workspace, view
from cubatch.engine.loss_scale import SKIPPED, UNSCALE
from cubatch.memory.blocks import Flat

_HOST_BYTES = 1 << 18
"""Largest workspace on the CPU: a piece with its parameters, gradient and state stays in the L2."""


def sgd(
    parameters: Any, gradients: Sequence[Any], *, lr: float, weight_decay: float = 0.0, master: Any = None,
    scaling: Any = None, workspace: Any = None,
) -> None:  # fmt: skip
    """
    Update parameters by gradient descent: w -= lr * (g + weight_decay * w).

    Args:
        parameters: Flat array w, overwritten.
        gradients: Parts of g, each as long as w; they are added.
        lr: Learning rate.
        weight_decay: Coefficient of the penalty on squared weights.
        master: float32 copy of w that the step changes; None if w is float32 or wider.
        scaling: State of `loss_scale`; None if the loss is not scaled.
        workspace: Scratch memory, see `functional`; None allocates it.
    """
    xp = of(parameters)
    for _, weights, total, _ in _pieces(
        parameters, gradients, workspace, weight_decay=weight_decay, master=master, scaling=scaling
    ):
        xp.multiply(total, lr, out=total)
        xp.subtract(weights, total, out=weights)


def momentum(
    parameters: Any, gradients: Sequence[Any], velocity: Any, *, lr: float, factor: float = 0.9,
    weight_decay: float = 0.0, master: Any = None, scaling: Any = None, workspace: Any = None,
) -> None:  # fmt: skip
    """
    Update parameters by a decaying sum of gradients: v = factor * v + g + weight_decay * w; w -= lr * v.

    `velocity` is the flat array v, zero before the first step. The others are as in `sgd`.
    """
    xp = of(parameters)
    for piece, weights, total, _ in _pieces(
        parameters, gradients, workspace, weight_decay=weight_decay, master=master, scaling=scaling
    ):
        speed = velocity[piece]
        xp.multiply(speed, factor, out=speed)
        xp.add(speed, total, out=speed)
        xp.multiply(speed, lr, out=total)
        xp.subtract(weights, total, out=weights)


def adam(
    parameters: Any, gradients: Sequence[Any], mean: Any, square: Any, *, step: int, lr: float,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, master: Any = None,
    scaling: Any = None, workspace: Any = None,
) -> None:  # fmt: skip
    """
    Update parameters by Adam (Kingma and Ba, 2015, algorithm 1), with the penalty in the gradient as in PyTorch.

        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g^2
        w -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

    Args:
        mean: Flat array m, zero before the first step; overwritten.
        square: Flat array v, zero before the first step; overwritten.
        step: Number of the step, from 1; t is this number, less the steps that `scaling` counts as skipped.
        betas: b1 and b2.
        eps: Added to the denominator.
        parameters, gradients, lr, weight_decay, master, scaling: As in `sgd`.
        workspace: Scratch memory, see `functional`; None allocates it.
    """
    xp = of(parameters)
    if scaling is not None:
        step = max(1, step - int(scaling[SKIPPED]))  # even the first may be skipped
    size, root = lr / (1 - betas[0] ** step), (1 - betas[1] ** step) ** 0.5
    for piece, weights, total, spare in _pieces(
        parameters, gradients, workspace, weight_decay=weight_decay, master=master, scaling=scaling
    ):
        m, v = mean[piece], square[piece]
        xp.multiply(m, betas[0], out=m)
        xp.multiply(total, 1 - betas[0], out=spare)
        xp.add(m, spare, out=m)
        xp.multiply(v, betas[1], out=v)
        xp.multiply(total, total, out=total)
        xp.multiply(total, 1 - betas[1], out=total)
        xp.add(v, total, out=v)
        xp.sqrt(v, out=total)
        xp.divide(total, root, out=total)
        xp.add(total, eps, out=total)
        xp.divide(m, total, out=total)
        xp.multiply(total, size, out=total)
        xp.subtract(weights, total, out=weights)


def _pieces(
    parameters: Any, gradients: Sequence[Any], workspace: Any, *, weight_decay: float, master: Any, scaling: Any
) -> Iterator[tuple[slice, Any, Any, Any]]:
    """
    Yield (range, weights, total gradient, scratch array) for each piece of the flat parameters.

    The weights are those of `master`, a float32 copy, if it is not None. The total gradient is the sum of `gradients`,
    times the loss's unscale factor in `scaling`, plus `weight_decay` times the weights.

    The caller may overwrite gradient and scratch array. After each piece, its weights are rounded to the parameters if
    they are a separate array.  Nothing is yielded if the step is skipped.
    """
    whole = parameters if master is None else master
    xp, item = of(whole), whole.itemsize
    if scaling is not None and not scaling[UNSCALE]:
        return
    pair = Flat(itemsize=2 * item)
    workspace = take_workspace(workspace, whole, pair, len(whole))
    available = min(workspace.nbytes, _HOST_BYTES) if isinstance(whole, np.ndarray) else workspace.nbytes
    first, *others = gradients
    for piece, _ in pair.cut(len(whole), available):
        shape, weights = (piece.stop - piece.start,), whole[piece]
        total = view(workspace, shape, whole.dtype)
        spare = view(workspace, shape, whole.dtype, offset=shape[0] * item)
        if others:
            xp.add(first[piece], others[0][piece], out=total, dtype=whole.dtype)
            for other in others[1:]:
                xp.add(total, other[piece], out=total)
        else:
            xp.copyto(total, first[piece])
        if scaling is not None:
            xp.multiply(total, scaling[UNSCALE], out=total)
        if weight_decay:
            xp.multiply(weights, weight_decay, out=spare)
            xp.add(total, spare, out=total)
        yield piece, weights, total, spare
        if master is not None:
            xp.copyto(parameters[piece], weights, casting="same_kind")
