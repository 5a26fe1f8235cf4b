"""Optimizers of the same kind as a trainer's, for timed steps that must not train."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any


def like(optimizer: Any, *, clip_norm: float | None = None) -> Callable[[Iterable[Any]], Any]:
    """
    Return a function from parameters to an optimizer of the same class and options, with a learning rate of 0.

    If the class rejects a learning rate of 0, the rate is that of `optimizer`.

    Args:
        optimizer: A torch.optim.Optimizer.
        clip_norm: Gradients are scaled to at most this total norm before each step; None or 0: not clipped.
    """
    kind: Any = type(optimizer)
    options = {name: value for name, value in optimizer.defaults.items() if name in inspect.signature(kind).parameters}

    def make(parameters: Iterable[Any]) -> Any:
        import torch

        trained = list(parameters)
        try:
            made = kind(trained, **options | ({"lr": 0.0} if options.get("lr") else {}))
        except ValueError:  # some reject a rate of 0
            made = kind(trained, **options)
        if clip_norm:

            def clip(*_: Any) -> None:
                torch.nn.utils.clip_grad_norm_(trained, clip_norm)

            made.register_step_pre_hook(clip)
        return made

    return make
