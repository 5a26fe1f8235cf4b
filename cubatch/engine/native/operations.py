"""The engine's operations on hand-written kernels, under their names in `functional`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Never

from cubatch.engine import functional
from cubatch.engine.native import (
    activation_functions,
    batch_norm,
    conv,
    layer_norm,
    linear,
    losses,
    optim,
    pointwise,
    scaling,
    self_attention,
    tokens,
    window_pooling,
)
from cubatch.engine.native.context import Context
from cubatch.errors import UnsupportedLayer

_MODULES = (
    activation_functions, batch_norm, conv, layer_norm, linear, losses, optim, pointwise, scaling, self_attention,
    tokens, window_pooling,
)  # fmt: skip


@functools.cache
def written() -> Mapping[str, Callable[..., Any]]:
    """Return the functions on hand-written kernels by their names in `functional`."""
    named = {name: getattr(module, name) for module in _MODULES for name in functional.__all__ if hasattr(module, name)}
    return MappingProxyType(named)


def operations(context: Context) -> SimpleNamespace:
    """
    Return all operations of `functional` on hand-written kernels, each bound to a context.

    An operation that has no kernel raises UnsupportedLayer when it is called.
    """
    missing = {name: functools.partial(_has_no_kernel, name) for name in functional.__all__}
    bound = {name: functools.partial(function, context) for name, function in written().items()}
    return SimpleNamespace(**missing | bound)


def _has_no_kernel(name: str, *_: object, **__: object) -> Never:
    raise UnsupportedLayer(name, "it has no hand-written kernel; library='im2col' does without")
