"""
The computation of each layer in a step: an operation of the schedule, bound to its arrays once, called every step.

Binding resolves views, shapes and options in advance (`backend.prepare`). At small batches, that would otherwise take
as long as the operations. `TABLE` has a row for every kind of layer: names of functions of `functional`, which the
array library's own calls and the hand-written kernels share. Each is called with the arguments that its parameters
name. Most parameters have the same name in every layer, see `arguments`; functions of the table add the others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import attrs

from cubatch.engine import backend, functional
from cubatch.engine.place import Bound, Place
from cubatch.errors import UnsupportedLayer
from cubatch.memory.schedule_records import Op
from cubatch.network import layers
from cubatch.network.layer import Layer

Work = Callable[[], object]

_SAVED = ("qkv", "weights", "log_sums", "mixed")  # of attention, with either weights or sums


@attrs.frozen(eq=False)
class Ops:
    """The functions of `functional` that compute a type of layer."""

    # forward, backward: names of the functions of each pass; none for a pass that needs no operation
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    # returns the arguments whose names only this type has; None if it has none
    more: Callable[[Bound], dict[str, Any]] | None = None
    inference: tuple[str, ...] = ()  # names of the functions of the forward pass in inference, if they differ
    # whether the forward pass draws random numbers: it is prepared only if the device counts the steps
    draws: bool = False

    def run(self, at: Bound, given: dict[str, Any]) -> None:
        """Call the functions of the pass with `given`, arguments by name, and the arguments that only this type has."""
        names = self.backward if at.op.kind == "backward" else self.forward
        given = given | self.more(at) if self.more else given
        for name in names if at.training else self.inference or names:
            if name.endswith("_dgrad") and "out" not in given:
                continue  # of the first layer: nothing reads the gradient of its input
            options = {parameter: given[parameter] for parameter in _parameters(name) if parameter in given}
            options |= _shared_sums(at, name)
            getattr(at.place.operations, name)(**options)


def _shared_sums(at: Bound, name: str) -> dict[str, Any]:
    """
    Return further arguments of kernels by name, if a product also computes a batch norm's sums or a slope.

    A product gets the arguments of that norm, or of the activation before it, as "norm". The norm gets the product's
    results: "has_statistics" forward, "means" backward. Empty if no product computes sums or a slope.
    """
    place, norm = at.place, at.op.summed
    if "curved" in at.reads:
        bias = None if norm is None else place.gradients[norm.name]["b"]
        curve = {"kind": at.op.activation, "x": at.reads["curved"], "db": bias}
        return {} if name.endswith("_wgrad") else {"norm": curve}
    if norm is None and at.layer.has_statistics:
        is_done = at.op.kind == "forward" and "statistics" in at.reads
        return {"has_statistics": True} if is_done else {role: at.reads[role] for role in {"means"} & {*at.reads}}
    if norm is None or name.endswith("_wgrad"):
        return {}
    mean, inv_std = (at.reads | at.writes)["statistics"]
    statistics = {"mean": mean, "inv_std": inv_std}
    if at.op.kind == "forward":
        state = place.states[norm.name] if place.rank == 0 and not at.op.replay else {"mean": None, "var": None}
        running = {"running_mean": state["mean"], "running_var": state["var"]}
        layer: Any = norm.layer
        return {"norm": statistics | running | {"momentum": layer.momentum, "eps": layer.eps}}
    parameters = dict(place.parameters[norm.name]) if at.op.undoes_relu else {"gamma": None, "beta": None}
    gradients = {f"d{name}": array for name, array in place.gradients[norm.name].items()}
    return {"norm": statistics | gradients | parameters | {"x": at.reads["normed"], "means": at.writes["means"]}}


@functools.cache
def _parameters(name: str) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(functional, name)).parameters)


def check(layer: Layer, name: str) -> None:
    """Raise UnsupportedLayer for a layer that the engine cannot compute; `name` is its name in the message."""
    if TABLE.get(type(layer), NOT_WRITTEN) is NOT_WRITTEN:
        raise UnsupportedLayer(f"{name} ({layer.type})", "its computation is not written yet")


def bind(op: Op, place: Place, *, training: bool) -> Work:
    """
    Return a function without arguments that runs an operation of the schedule on its arrays.

    Args:
        op: The operation; its arrays are the buffers of `place` that it reads and writes.
        place: The shard on which the operation works.
        training: Whether statistics of the batch are used, and stored for the backward pass.

    Raises:
        ValueError: If an operation other than "accumulate" and "fold" has no layer or no workspace.
    """
    if op.kind == "accumulate":
        x0, x1, y = (place.arena[number].reshape(-1) for number in (*op.reads.values(), *op.writes.values()))
        return backend.prepare(place.operations.add, [x0, x1], out=y)
    if op.kind == "fold":
        return backend.prepare(_fold, op, place)
    if op.node is None or op.workspace is None:
        raise ValueError(f"a {op.kind} operation without a layer or a workspace cannot be bound")
    views: dict[tuple[int, tuple[int, ...]], Any] = {}

    def view(role: str, number: int) -> Any:
        """
        Return buffer `number` in the shape of a role.

        It is one array object for each buffer and shape, so that functions notice that they work in place.
        """
        array = _shaped(op, layer, role, place.arena[number])
        return views.setdefault((number, array.shape), array)

    layer = op.node.layer
    reads = {role: view(role, number) for role, number in op.reads.items()}
    writes = {role: view(role, number) for role, number in op.writes.items()}
    bound = Bound(op, layer, reads, writes, place.arena.workspace(op.workspace), place, training)
    ops, given = TABLE[type(layer)], arguments(bound)
    if ops.draws and op.kind == "forward" and place.numbers is None:
        return functools.partial(ops.run, bound, given)
    return backend.prepare(ops.run, bound, given)


def _shaped(op: Op, layer: Layer, role: str, array: Any) -> Any:
    """Return a view of a buffer with the shape that a layer expects of its role in an operation: "x0", "dy", "mask"."""
    if role in {"residual", "positive", "parts", "curved"}:  # of what the operation makes
        role = "y" if op.kind == "forward" else "x0"
    if role == "pooled":
        return array.reshape(len(array), -1)
    if role in {"y", "dy"}:
        return array.reshape(len(array), *layer.output_shape)
    if role.lstrip("d").startswith("x"):
        h, w, _ = (op.layer or layer).input_shapes[int(role.lstrip("dx"))]
        return array.reshape(len(array), h, w, -1)  # the batch may be stored in patches, with more channels
    return array.reshape(len(array), *layer.output_shape) if role in {"argmax", "mask"} else array


def _fold(op: Op, place: Place) -> None:
    products, norms = zip(*op.norms, strict=True)
    parameters, states = ([of[norm.name] for norm in norms] for of in (place.parameters, place.states))
    folded = [place.arena[op.writes[norm.name]] for norm in norms]
    place.operations.fold_batch_norms(
        [of["gamma"] for of in parameters],
        [of["beta"] for of in parameters],
        [place.parameters[product.name].get("b") for product in products],
        means=[of["mean"] for of in states],
        variances=[of["var"] for of in states],
        epsilons=[norm.layer.eps for norm in norms],
        scales=[scale for scale, _ in folded],
        shifts=[shift for _, shift in folded],
    )


def arguments(at: Bound) -> dict[str, Any]:
    """Return the arguments of a layer's functions, by the names of the parameters in `functional`."""
    op, layer = at.op, at.layer
    given = {field.name: getattr(layer, field.name) for field in attrs.fields(type(layer))}
    given |= {
        "kind": layer.type,
        "window": getattr(layer, "window", None),
        "relu": op.relu,
        "activation": op.activation,
    }
    given |= {"x_shape": at.x_shape, "workspace": at.workspace}
    given |= {**at.parameters} | {f"d{name}": array for name, array in at.gradients.items()}
    if op.norm:
        given.pop("b", None)  # the folded norm contains it
    if op.has_bias_gradient:
        given.pop("db", None)
    if "folded" in at.reads:
        given["scale"], given["shift"] = at.reads["folded"]
    roles = {"x0": ("x",), "x1": ("s",), "dx0": ("out", "dx"), "dx1": ("ds",)}
    for role, array in at.reads.items():
        given |= dict.fromkeys(roles.get(role, (role,)), array)
    for role, array in at.writes.items():
        given |= dict.fromkeys(("out",) if role == "y" else roles.get(role, (role,)), array)
    return given


# Each function below returns the arguments whose names are particular to a kind of layer.


def _batch_norm2d(at: Bound) -> dict[str, Any]:
    """
    Return the arguments that a batch norm takes in addition to its input and parameters.

    In inference these are "running_mean" and "running_var". In training they are "mean", "inv_std", "count", "reduce".
    The first member of the team also gets "running_mean" and "running_var", which it updates.
    """
    place, state = at.place, at.place.states[at.name]
    running = {"running_mean": state["mean"], "running_var": state["var"]}
    if not at.training:
        return running
    mean, inv_std = (at.reads | at.writes)["statistics"]
    whole_batch = {"count": at.positions, "reduce": functools.partial(place.team.sum, place.rank)}
    updates = place.rank == 0 and not at.op.replay
    return {"mean": mean, "inv_std": inv_std} | whole_batch | (running if updates else {})


def _global_avg_pool(at: Bound) -> dict[str, Any]:
    """Return the argument with one value per sample and channel, (n, c): the output or its gradient."""
    name, array = ("out", at.writes["y"]) if at.op.kind == "forward" else ("dy", at.reads["dy"])
    return {name: array.reshape(len(array), -1)}


def _activation(at: Bound) -> dict[str, Any]:
    return {"saved": at.reads.get("y", at.reads.get("x0"))}


def _add(at: Bound) -> dict[str, Any]:
    """Return the addends as "branches"; one that the sum overwrites comes first, before it would be lost."""
    target = at.op.writes["y"]
    roles = sorted((f"x{i}" for i in range(at.layer.count)), key=lambda role: at.op.reads[role] != target)
    return {"branches": [at.reads[role] for role in roles]}


def _concat(at: Bound) -> dict[str, Any]:
    numbers = range(len(at.layer.channels))
    if at.op.kind == "forward":
        return {"branches": [at.reads[f"x{i}"] for i in numbers]}
    return {"channels": at.layer.channels, "outs": [at.writes.get(f"dx{i}") for i in numbers]}


def _dropout(at: Bound) -> dict[str, Any]:
    """Return "seed" and "step"; the seed contains layer and shard, so that recomputing draws the same mask."""
    place = at.place
    step = place.clock[0] if place.numbers is None else place.numbers.passes
    return {"seed": (place.seed, place.first + place.begin, *at.name.encode()), "step": step}


def _attention(at: Bound) -> dict[str, Any]:
    held = at.writes if at.op.kind == "forward" else at.reads
    saved = [held[role] for role in _SAVED if role in held]
    return {"keep": saved if at.training else None} if at.op.kind == "forward" else {"saved": saved}


NO_OPERATION = Ops()
"""For a kind whose output is its input's memory: the schedule has no operation for it."""

NOT_WRITTEN = Ops()
"""For a kind that the engine cannot compute: UnsupportedLayer."""


def _ops(name: str, more: Callable[[Bound], dict[str, Any]] | None = None, **options: Any) -> Ops:
    """Return the functions of a type of layer: `name`, and `name`_backward for all gradients; `more` None: none."""
    return Ops((name,), (f"{name}_backward",), more, **options)


TABLE: dict[type[Layer], Ops] = {
    layers.Conv2d: Ops(("conv2d",), ("conv2d_wgrad", "conv2d_dgrad")),
    layers.Linear: Ops(("linear",), ("linear_wgrad", "linear_dgrad")),
    layers.MaxPool2d: _ops("max_pool2d"),
    layers.AvgPool2d: _ops("avg_pool2d"),
    layers.GlobalAvgPool: _ops("global_avg_pool", _global_avg_pool),
    layers.BatchNorm2d: Ops(("batch_norm_train",), ("batch_norm_backward",), _batch_norm2d, ("batch_norm_inference",)),
    layers.LayerNorm: _ops("layer_norm"),
    layers.LayerScale: _ops("layer_scale"),
    layers.ReLU: _ops("relu"),
    **dict.fromkeys(
        (layers.ReLU6, layers.HardSwish, layers.HardSigmoid, layers.Sigmoid, layers.SiLU, layers.GELU),
        _ops("activation", _activation),
    ),
    layers.Softmax: _ops("softmax"),
    layers.Dropout: _ops("dropout", _dropout, draws=True),
    layers.Flatten: NO_OPERATION,
    layers.Add: Ops(("add",), more=_add),  # each branch's gradient is the sum's
    layers.Scale: _ops("scale"),
    layers.Concat: _ops("concat", _concat),
    layers.Slice: _ops("slice_channels"),
    layers.Tokens: _ops("tokens"),
    layers.ClassToken: _ops("class_token"),
    layers.Attention: _ops("attention", _attention),
    layers.Opaque: NOT_WRITTEN,
}
"""The functions of each kind of layer, in the order of `LAYERS`."""
