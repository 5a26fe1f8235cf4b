"""Activation functions and their gradients on hand-written kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubatch.engine.backend import of
from cubatch.engine.native.arrays import check, dtype_of, element_grid
from cubatch.engine.native.context import Context
from cubatch.errors import InvalidArgument
from cubatch.kernels import variant

ACTIVATIONS = ("none", "relu", "relu6", "silu", "sigmoid", "hard_sigmoid", "hard_swish", "gelu")
"""In the order of `enum Activation` in kernels/common/activation.cuh."""


def activation_code(kind: str) -> int:
    """
    Return the number of an activation in the kernels.

    Example:
        >>> activation_code("relu")
        1
    """
    if kind not in ACTIVATIONS:
        raise InvalidArgument("kind", kind, "one of " + ", ".join(ACTIVATIONS))
    return ACTIVATIONS.index(kind)


def relu(context: Context, x: Any, *, out: Any = None) -> Any:
    """Launch the kernel of `functional.relu`."""
    return activation(context, x, kind="relu", out=out)


def relu_backward(context: Context, dy: Any, y: Any, *, out: Any = None) -> Any:
    """Launch the kernel of `functional.relu_backward`."""
    return activation_backward(context, dy, y, kind="relu", out=out)


def activation(context: Context, x: Any, *, kind: str, out: Any = None) -> Any:
    """Launch the kernel of `functional.activation`."""
    y = of(x).empty_like(x) if out is None else out
    check(x.dtype, x.shape, x=x, out=y)
    arguments = [x, y, np.int64(x.size), np.int32(activation_code(kind))]
    context.launch(variant.find("activation", dtype_of(x)), element_grid(x), arguments)
    return y


def activation_backward(context: Context, dy: Any, saved: Any, *, kind: str, out: Any = None) -> Any:
    """Launch the kernel of `functional.activation_backward`; `out` may also be `saved`."""
    dx = of(dy).empty_like(dy) if out is None else out
    check(dy.dtype, dy.shape, dy=dy, saved=saved, out=dx)
    arguments = [dy, saved, dx, np.int64(dy.size), np.int32(activation_code(kind))]
    context.launch(variant.find("activation_backward", dtype_of(dy)), element_grid(dy), arguments)
    return dx
