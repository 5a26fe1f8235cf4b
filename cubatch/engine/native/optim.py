"""
Update rules over flat arrays on hand-written kernels, a whole step in one pass.

Where parameters have 16 bits, the step is taken on a float32 `master` copy of them, and the state is
float32 too: a weight plus a small step would round back to the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cubatch import kernel
from cubatch.engine.native.arrays import check, dtype_of, element_grid
from cubatch.engine.native.context import Context
from cubatch.errors import InvalidArgument


def sgd(
    context: Context,
    parameters: Any,
    gradients: Sequence[Any],
    *,
    lr: float,
    weight_decay: float = 0.0,
    master: Any = None,
    workspace: Any = None,  # noqa: ARG001 - none is needed
) -> None:
    """
    Step down the gradient, as `optim.sgd`.

    Args:
        context: Where it runs.
        parameters: Flat array w, overwritten.
        gradients: The gradient, of w's type; one part, since one member runs on a GPU.
        lr: Learning rate.
        weight_decay: Coefficient of the penalty on squared weights.
        master: float32 copy of w that the step is taken on; None where w is float32 itself.
        workspace: Not used.

    Raises:
        InvalidArgument: If types differ, there are several gradients, or 16-bit parameters have no master copy.
    """
    _step(context, "sgd", parameters, gradients, (), master, [lr, weight_decay])


def momentum(
    context: Context,
    parameters: Any,
    gradients: Sequence[Any],
    velocity: Any,
    *,
    lr: float,
    factor: float = 0.9,
    weight_decay: float = 0.0,
    master: Any = None,
    workspace: Any = None,  # noqa: ARG001 - none is needed
) -> None:
    """Step along a decaying sum of gradients, as `optim.momentum`; velocity is float32, the others as in `sgd`."""
    _step(context, "momentum", parameters, gradients, (velocity,), master, [lr, factor, weight_decay])


def adam(
    context: Context,
    parameters: Any,
    gradients: Sequence[Any],
    mean: Any,
    square: Any,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    master: Any = None,
    workspace: Any = None,  # noqa: ARG001 - none is needed
) -> None:
    """Step by Adam, as `optim.adam`; mean and square are float32, the others as in `sgd`."""
    size, root = lr / (1 - betas[0] ** step), (1 - betas[1] ** step) ** 0.5
    numbers = [size, root, betas[0], 1 - betas[0], betas[1], 1 - betas[1], eps, weight_decay]
    _step(context, "adam", parameters, gradients, (mean, square), master, numbers)


def _step(
    context: Context,
    rule: str,
    parameters: Any,
    gradients: Sequence[Any],
    state: Sequence[Any],
    master: Any,
    numbers: Sequence[float],
) -> None:
    if len(gradients) != 1:
        raise InvalidArgument("gradients", len(gradients), "one array: one member runs on a GPU")
    if master is None and parameters.dtype != np.float32:
        raise InvalidArgument("master", None, f"a float32 copy of the {dtype_of(parameters)} parameters")
    check(parameters.dtype, parameters.shape, parameters=parameters, gradient=gradients[0])
    check(np.float32, parameters.shape, master=master, **{f"state {index}": array for index, array in enumerate(state)})
    context.launch(
        kernel.find(rule, dtype_of(parameters)),
        element_grid(parameters),
        [parameters, master, gradients[0], *state, np.int64(parameters.size), *map(np.float32, numbers)],
    )
