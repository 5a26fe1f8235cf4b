"""The engine's operations on hand-written kernels, under the names that `functional` has them by."""

from __future__ import annotations

import functools
from types import SimpleNamespace

from cubatch.engine import functional
from cubatch.engine.native import activations, conv, linear, losses, norm, optim, pointwise, pooling, scaling
from cubatch.engine.native.context import Context

_MODULES = (activations, conv, linear, losses, norm, optim, pointwise, pooling, scaling)


def operations(context: Context) -> SimpleNamespace:
    """
    Bind every operation to where it runs; each is then called as the one of `functional` of that name.

    Args:
        context: The device, the launcher and the choice of variants.
    """
    found = {name: getattr(module, name) for module in _MODULES for name in functional.__all__ if hasattr(module, name)}
    return SimpleNamespace(**{name: functools.partial(function, context) for name, function in found.items()})
