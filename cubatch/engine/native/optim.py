"""
Update rules over flat arrays on hand-written kernels, a whole step in one pass.

The gradient is one array, since one member runs on a GPU. State is float32. The kernels read from the state of
`loss_scale` whether to skip a step and what to divide the gradient by, so the host never waits. They also read learning
rate and step from memory, arrays of one element; numbers are copied there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from cubatch.engine.backend import view
from cubatch.engine.loss_scale import STATE_WORDS
from cubatch.engine.native.arrays import check, element_grid, in_memory, take_workspace
from cubatch.engine.native.context import Context, dtype_of
from cubatch.engine.native.operation import operation
from cubatch.errors import InvalidArgument
from cubatch.kernels.workspace.misc import loss_scale_workspace


@operation()
def sgd(context: Context, given: SimpleNamespace) -> None:
    _step(context, "sgd", given, (), [_rate(given), given.weight_decay])


@operation()
def momentum(context: Context, given: SimpleNamespace) -> None:
    _step(context, "momentum", given, (given.velocity,), [_rate(given), given.factor, given.weight_decay])


@operation()
def adam(context: Context, given: SimpleNamespace) -> None:
    # For a decay of 0 the kernel's 1 - b^t = -expm1(t log b) is 1, as it must be.
    decays = [number for beta in given.betas for number in (beta, 1 - beta, math.log(beta) if beta else -math.inf)]
    step = in_memory(given.parameters, given.step, np.int32)
    numbers = [step, _rate(given), *decays, given.eps, given.weight_decay]
    _step(context, "adam", given, (given.mean, given.square), numbers)


@operation()
def update_loss_scale(context: Context, given: SimpleNamespace) -> None:
    """Launch the kernels of `functional.update_loss_scale`, with `workspace.misc.loss_scale_workspace` bytes."""
    state, gradient = given.state, _whole(given.gradients)
    check(np.float32, (STATE_WORDS,), state=state)
    check(gradient.dtype, gradient=gradient)
    grid, need = element_grid(gradient), loss_scale_workspace(gradient.size, dtype_of(gradient))
    flags = view(take_workspace(given.workspace, gradient, need), grid[:1], np.int32)
    context.run("find_overflow", gradient, grid, gradient, np.int64(gradient.size), flags)
    interval = float(given.interval)
    context.run("update_loss_scale", gradient, (1, 1, 1), flags, np.int64(grid[0]), state, interval)


def _rate(given: SimpleNamespace) -> Any:
    return in_memory(given.parameters, given.lr, np.float32)


def _whole(gradients: Sequence[Any]) -> Any:
    if len(gradients) != 1:
        raise InvalidArgument("gradients", f"{len(gradients)} arrays", "one array, since a GPU is one member")
    return gradients[0]


def _step(context: Context, rule: str, given: SimpleNamespace, state: Sequence[Any], numbers: Sequence[Any]) -> None:
    parameters, gradient, master = given.parameters, _whole(given.gradients), given.master
    if master is None and parameters.dtype != np.float32:
        raise InvalidArgument("master", None, f"a float32 copy of the {dtype_of(parameters)} parameters")
    check(parameters.dtype, parameters.shape, parameters=parameters, gradient=gradient)
    check(np.float32, parameters.shape, master=master, **{f"state {index}": array for index, array in enumerate(state)})
    check(np.float32, (STATE_WORDS,), scaling=given.scaling)
    values = [np.float32(number) if isinstance(number, int | float) else number for number in numbers]
    arrays = parameters, master, gradient, given.scaling, *state
    context.run(rule, parameters, element_grid(parameters), *arrays, np.int64(parameters.size), *values)
