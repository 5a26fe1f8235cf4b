"""The engine's operations on hand-written kernels, under the names that `functional` has them by."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Never

from cubatch.engine import functional
from cubatch.engine.native import (
    activations,
    attention,
    conv,
    layer_norm,
    linear,
    losses,
    norm,
    optim,
    pointwise,
    pooling,
    scaling,
    tokens,
)  # fmt: skip
from cubatch.engine.native.context import Context
from cubatch.errors import UnsupportedLayer

_MODULES = (activations, attention, conv, layer_norm, linear, losses, norm, optim, pointwise, pooling, scaling, tokens)


def written() -> dict[str, Callable[..., Any]]:
    """Give the operations that hand-written kernels do, by name."""
    return {name: getattr(module, name) for module in _MODULES for name in functional.__all__ if hasattr(module, name)}


def operations(context: Context) -> SimpleNamespace:
    """
    Bind every operation to where it runs; each is then called as the one of `functional` of that name.

    One that no kernel does raises UnsupportedLayer when it is called.

    Args:
        context: The device, the launcher and the choice of variants.
    """
    missing = {name: functools.partial(_has_no_kernel, name) for name in functional.__all__}
    found = {name: functools.partial(function, context) for name, function in written().items()}
    return SimpleNamespace(**missing | found)


def _has_no_kernel(name: str, *_: object, **__: object) -> Never:
    raise UnsupportedLayer(name, "it has no hand-written kernel; library='im2col' does without")
