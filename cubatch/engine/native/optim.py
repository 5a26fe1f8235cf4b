"""
Update rules over flat arrays on hand-written kernels, a whole step in one pass.

For parameters of 16 bits, a step changes a float32 `master` copy, and the state is float32 too. A small step added to a
16-bit weight would round to that weight. The kernels read from the state of `loss_scale` whether to skip a step and
what to divide the gradient by, so the host never waits. They also read learning rate and step from memory; numbers
are copied there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cubatch.engine.backend import view
from cubatch.engine.loss_scale import INTERVAL, STATE_WORDS
from cubatch.engine.native.arrays import check, dtype_of, element_grid, in_memory, take_workspace
from cubatch.engine.native.context import Context
from cubatch.errors import InvalidArgument
from cubatch.kernels import variant
from cubatch.kernels.workspace.misc import loss_scale_workspace


def sgd(
    context: Context,
    parameters: Any,
    gradients: Sequence[Any],
    *,
    lr: Any,
    weight_decay: float = 0.0,
    master: Any = None,
    scaling: Any = None,
) -> None:
    """
    Launch the kernel of `optim.sgd`.

    Args:
        context: Where it runs.
        parameters: Flat array w, overwritten.
        gradients: The gradient, of w's type; one array, since one member runs on a GPU.
        lr: Learning rate: a number, or a float32 array of one element.
        weight_decay: Coefficient of the penalty on squared weights.
        master: float32 copy of w that the step changes; None if w is float32.
        scaling: State of `loss_scale`, float32 (4,); None if the loss is not scaled.
    """
    numbers = [_rate(parameters, lr), weight_decay]
    _step(context, "sgd", parameters, gradients, state=(), master=master, scaling=scaling, numbers=numbers)


def momentum(
    context: Context,
    parameters: Any,
    gradients: Sequence[Any],
    velocity: Any,
    *,
    lr: Any,
    factor: float = 0.9,
    weight_decay: float = 0.0,
    master: Any = None,
    scaling: Any = None,
) -> None:
    """Launch the kernel of `optim.momentum`; velocity is float32, other arguments as in `sgd`."""
    numbers = [_rate(parameters, lr), factor, weight_decay]
    _step(
        context, "momentum", parameters, gradients, state=(velocity,), master=master, scaling=scaling, numbers=numbers
    )


def adam(
    context: Context,
    parameters: Any,
    gradients: Sequence[Any],
    mean: Any,
    square: Any,
    *,
    step: Any,
    lr: Any,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    master: Any = None,
    scaling: Any = None,
) -> None:
    """Launch the kernel of `optim.adam`; mean and square are float32, step is a number or an int32 array."""
    # For a decay of 0 the kernel's 1 - b^t = -expm1(t log b) is 1, as it must be.
    decays = [number for beta in betas for number in (beta, 1 - beta, math.log(beta) if beta else -math.inf)]
    numbers = [in_memory(parameters, step, np.int32), _rate(parameters, lr), *decays, eps, weight_decay]
    _step(context, "adam", parameters, gradients, state=(mean, square), master=master, scaling=scaling, numbers=numbers)


def update_loss_scale(
    context: Context, state: Any, gradients: Sequence[Any], *, interval: int = INTERVAL, workspace: Any = None
) -> None:
    """
    Launch the kernels of `loss_scale.update_loss_scale`.

    The workspace has `workspace.misc.loss_scale_workspace` bytes.
    """
    gradient = _whole(gradients)
    dtype = dtype_of(gradient)
    check(np.float32, (STATE_WORDS,), state=state)
    check(gradient.dtype, gradient.shape, gradient=gradient)
    grid = element_grid(gradient)
    workspace = take_workspace(workspace, gradient, loss_scale_workspace(gradient.size, dtype))
    flags = view(workspace, grid[:1], np.int32)
    context.launch(variant.find("find_overflow", dtype), grid, [gradient, np.int64(gradient.size), flags])
    arguments = [flags, np.int64(grid[0]), state, np.float32(interval)]
    context.launch(variant.find("update_loss_scale", dtype), (1, 1, 1), arguments)


def _rate(parameters: Any, lr: Any) -> Any:
    return in_memory(parameters, lr, np.float32)


def _whole(gradients: Sequence[Any]) -> Any:
    if len(gradients) != 1:
        raise InvalidArgument("gradients", len(gradients), "one array: one member runs on a GPU")
    return gradients[0]


def _step(
    context: Context,
    rule: str,
    parameters: Any,
    gradients: Sequence[Any],
    *,
    state: Sequence[Any],
    master: Any,
    scaling: Any,
    numbers: Sequence[Any],
) -> None:
    gradient = _whole(gradients)
    if master is None and parameters.dtype != np.float32:
        raise InvalidArgument("master", None, f"a float32 copy of the {dtype_of(parameters)} parameters")
    check(parameters.dtype, parameters.shape, parameters=parameters, gradient=gradient)
    check(np.float32, parameters.shape, master=master, **{f"state {index}": array for index, array in enumerate(state)})
    check(np.float32, (STATE_WORDS,), scaling=scaling)
    values = [np.float32(number) if isinstance(number, int | float) else number for number in numbers]
    context.launch(
        variant.find(rule, dtype_of(parameters)),
        element_grid(parameters),
        [parameters, master, gradient, scaling, *state, np.int64(parameters.size), *values],
    )
