"""Optimizers of the same kind as a user's or a trainer's, for timed steps that must not train."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cubatch.errors import InvalidArgument
from cubatch.frameworks.lazy_torch import torch


def maker(optimizer: Any, trained: Sequence[Any]) -> Any:
    """
    Return the argument `optimizer` of a public function, or in place of an optimizer a function that copies it.

    Args:
        optimizer: A name, a function from parameters to an optimizer, or a torch.optim.Optimizer.
        trained: The parameters of the module and its loss.

    Raises:
        InvalidArgument: If the optimizer has parameters that are not in `trained`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    stepped, known = _parameters(optimizer), set(map(id, trained))
    if others := sum(key not in known for key in stepped):
        given = f"{type(optimizer).__name__} of {len(stepped)} parameters, of which the module lacks {others}"
        remedy = "Make it of module.parameters(), or pass a function from parameters to an optimizer."
        raise InvalidArgument("optimizer", given, "an optimizer of parameters of the module or its loss", remedy)
    return like(optimizer, [parameter for parameter in trained if parameter.requires_grad])


def name_of(optimizer: Any) -> str | None:
    """
    Return the name of the argument `optimizer` for a result; None for None.

    It is the text itself, the name of a function, or that of the class of an optimizer.
    """
    if optimizer is None or isinstance(optimizer, str):
        return optimizer
    return getattr(optimizer, "__name__", "a function") if callable(optimizer) else type(optimizer).__name__


def _parameters(optimizer: Any) -> dict[int, Any]:
    """Return the parameters in the groups of an optimizer, by identity."""
    return {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}


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
    stepped = _parameters(optimizer)

    def make(parameters: Iterable[Any]) -> Any:
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
