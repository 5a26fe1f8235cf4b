"""Activation functions and their gradients on hand-written kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cubatch.engine.native.arrays import check, element_grid
from cubatch.engine.native.context import Context
from cubatch.engine.native.operation import operation
from cubatch.errors import InvalidArgument

ACTIVATIONS = ("none", "relu", "relu6", "silu", "sigmoid", "hard_sigmoid", "hard_swish", "gelu")
"""In the order of `enum Activation` in kernels/common/activation.cuh."""


def activation_code(kind: str) -> int:
    """Return the number of an activation function in the kernels; raise InvalidArgument if it is not in ACTIVATIONS."""
    if kind not in ACTIVATIONS:
        raise InvalidArgument("kind", kind, "one of " + ", ".join(ACTIVATIONS))
    return ACTIVATIONS.index(kind)


@operation()
def relu(context: Context, given: SimpleNamespace) -> Any:
    return activation(context, given.x, kind="relu", out=given.out)


@operation()
def relu_backward(context: Context, given: SimpleNamespace) -> Any:
    return activation_backward(context, given.dy, given.y, kind="relu", out=given.out)


@operation(out=lambda given: given.x.shape)
def activation(context: Context, given: SimpleNamespace) -> Any:
    x, y = given.x, given.out
    check(x.dtype, x=x)
    context.run("activation", x, element_grid(x), x, y, np.int64(x.size), activation_code(given.kind))
    return y


@operation(out=lambda given: given.dy.shape)
def activation_backward(context: Context, given: SimpleNamespace) -> Any:
    dy, saved, dx = given.dy, given.saved, given.out
    check(dy.dtype, dy.shape, dy=dy, saved=saved)
    numbers = np.int64(dy.size), activation_code(given.kind)
    context.run("activation_backward", dy, element_grid(dy), dy, saved, dx, *numbers)
    return dx
