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
    Give the number that kernels know an activation by.

    Raises:
        InvalidArgument: If the kind is not known.

    Example:
        >>> activation_code("relu")
        1
    """
    if kind not in ACTIVATIONS:
        raise InvalidArgument("kind", kind, "one of " + ", ".join(ACTIVATIONS))
    return ACTIVATIONS.index(kind)


def relu(context: Context, x: Any, *, out: Any = None) -> Any:
    """Clamp at zero; `out` may be x."""
    return activation(context, x, kind="relu", out=out)


def relu_backward(context: Context, dy: Any, y: Any, *, out: Any = None, workspace: Any = None) -> Any:
    """Pass the gradient where ReLU's output is not 0; as `functional.relu_backward`."""
    return activation_backward(context, dy, y, kind="relu", out=out, workspace=workspace)


def activation(
    context: Context,
    x: Any,
    *,
    kind: str,
    out: Any = None,
    workspace: Any = None,  # noqa: ARG001 - none is needed
) -> Any:
    """
    Apply an activation function; arguments and result are those of `functional.activation`.

    Raises:
        InvalidArgument: If the kind is not known or types differ.
    """
    y = of(x).empty_like(x) if out is None else out
    check(x.dtype, x.shape, x=x, out=y)
    arguments = [x, y, np.int64(x.size), np.int32(activation_code(kind))]
    context.launch(variant.find("activation", dtype_of(x)), element_grid(x), arguments)
    return y


def activation_backward(
    context: Context,
    dy: Any,
    saved: Any,
    *,
    kind: str,
    out: Any = None,
    workspace: Any = None,  # noqa: ARG001 - none is needed
) -> Any:
    """
    Give the gradient by an activation function's input; as `functional.activation_backward`.

    `out` may be dy, or saved.

    Raises:
        InvalidArgument: If the kind is not known or types differ.
    """
    dx = of(dy).empty_like(dy) if out is None else out
    check(dy.dtype, dy.shape, dy=dy, saved=saved, out=dx)
    arguments = [dy, saved, dx, np.int64(dy.size), np.int32(activation_code(kind))]
    context.launch(variant.find("activation_backward", dtype_of(dy)), element_grid(dy), arguments)
    return dx
