"""Optimizers of the same kind as a trainer's, for timed steps that must not train."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any


def like(optimizer: Any, own: Iterable[Any], *, clip_norm: float | None = None) -> Callable[[Iterable[Any]], Any]:
    """
    Return a function from parameters to a copy of an optimizer for them, with a learning rate of 0 and no state.

    It has the same groups: parameters that are in none are not stepped.

    Args:
        optimizer: A torch.optim.Optimizer, or accelerate's wrapper of one.
        own: The parameters in whose places, in this order, those of the function are.
        clip_norm: Gradients are scaled to at most this total norm before each step; None or 0: not clipped.
    """
    if "param_groups" not in vars(optimizer):
        optimizer = optimizer.optimizer
    places = [id(parameter) for parameter in own]
    attributes = {name: value for name, value in vars(optimizer).items() if name not in ("step", "state")}
    stepped = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}

    def make(parameters: Iterable[Any]) -> Any:
        import torch

        trained = list(parameters)
        made = object.__new__(type(optimizer))
        # A step that a learning rate's schedule has wrapped would be the original's: the copy has that of its class.
        memo = {**stepped, **dict(zip(places, trained, strict=False)), id(optimizer): made}
        vars(made).update(copy.deepcopy(attributes, memo), state=defaultdict(dict))
        for group in made.param_groups:
            group["lr"] *= 0
        if clip_norm:

            def clip(*_: Any) -> None:
                torch.nn.utils.clip_grad_norm_(trained, clip_norm)

            made.register_step_pre_hook(clip)
        return made

    return make
