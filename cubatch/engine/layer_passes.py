"""
The calls of a layer's passes: functions of `functional`, each with the arguments that its parameters name.

Most parameters have the same name in every layer, see `arguments`. The functions behind it add the others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import attrs

from cubatch.engine import functional
from cubatch.engine.place import Bound

_SAVED = ("qkv", "weights", "mixed")


def call(at: Bound, names: Sequence[str], given: dict[str, Any]) -> None:
    """
    Call functions in order, each with those arguments that it has parameters for.

    Args:
        at: The operation with its arrays, whose backend has the functions.
        names: Names of functions in `functional`.
        given: Arguments by name.
    """
    for name in names:
        if name.endswith("_dgrad") and "out" not in given:
            continue  # of the first layer: nothing reads the gradient by its input
        options = {parameter: given[parameter] for parameter in _parameters(name) if parameter in given}
        getattr(at.place.operations, name)(**options)


@functools.cache
def _parameters(name: str) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(functional, name)).parameters)


def arguments(at: Bound) -> dict[str, Any]:
    """Return the options, arrays, parameters and gradients of a layer by the names of `functional`."""
    op, layer = at.op, at.layer
    given = {field.name: getattr(layer, field.name) for field in attrs.fields(type(layer))}
    given |= {"kind": layer.type, "window": getattr(layer, "window", None), "relu": op.relu}
    given |= {"x_shape": at.x_shape, "workspace": at.workspace}
    given |= {**at.parameters} | {f"d{name}": array for name, array in at.gradients.items()}
    if op.norm:
        given.pop("b", None)  # the folded norm contains it
    if "folded" in at.reads:
        given["scale"], given["shift"] = at.reads["folded"]
    roles = {"x0": ("x",), "x1": ("s",), "dx0": ("out", "dx"), "dx1": ("ds",)}
    for role, array in at.reads.items():
        given |= dict.fromkeys(roles.get(role, (role,)), array)
    for role, array in at.writes.items():
        given |= dict.fromkeys(("out",) if role == "y" else roles.get(role, (role,)), array)
    return given


def nothing_more(_: Bound) -> dict[str, Any]:
    """Add no arguments."""
    return {}


def batch_norm2d(at: Bound) -> dict[str, Any]:
    """Add the statistics of the batch, or in inference the running ones."""
    place, state = at.place, at.place.states[at.name]
    running = {"running_mean": state["mean"], "running_var": state["var"]}
    if not at.training:
        return running
    mean, inv_std = (at.reads | at.writes)["statistics"]
    whole_batch = {"count": at.positions, "reduce": functools.partial(place.team.sum, place.rank)}
    updates = place.rank == 0 and not at.op.replay
    return {"mean": mean, "inv_std": inv_std} | whole_batch | (running if updates else {})


def global_avg_pool(at: Bound) -> dict[str, Any]:
    """Add the array with one value for each sample and channel, without axes of pixels."""
    name, array = ("out", at.writes["y"]) if at.op.kind == "forward" else ("dy", at.reads["dy"])
    return {name: array.reshape(len(array), -1)}


def activation(at: Bound) -> dict[str, Any]:
    """Add the array that the layer's `backward_reads` names."""
    return {"saved": at.reads.get("y", at.reads.get("x0"))}


def add(at: Bound) -> dict[str, Any]:
    """Add the branches; one that the sum overwrites is the first, since it would be lost before it is read."""
    target = at.op.writes["y"]
    roles = sorted((f"x{i}" for i in range(at.layer.count)), key=lambda role: at.op.reads[role] != target)
    return {"branches": [at.reads[role] for role in roles]}


def concat(at: Bound) -> dict[str, Any]:
    """Add the branches, or their gradients."""
    numbers = range(len(at.layer.channels))
    if at.op.kind == "forward":
        return {"branches": [at.reads[f"x{i}"] for i in numbers]}
    return {"channels": at.layer.channels, "outs": [at.writes.get(f"dx{i}") for i in numbers]}


def dropout(at: Bound) -> dict[str, Any]:
    """Add the seed, which names layer and shard, so that a recomputation draws the mask of the first pass."""
    place = at.place
    step = place.clock[0] if place.numbers is None else place.numbers.passes
    return {"seed": (place.seed, place.first + place.begin, *at.name.encode()), "step": step}


def attention(at: Bound) -> dict[str, Any]:
    """Add the arrays that the forward pass keeps for the backward pass."""
    if at.op.kind == "forward":
        return {"keep": [at.writes[role] for role in _SAVED] if at.training else None}
    return {"saved": [at.reads[role] for role in _SAVED]}
