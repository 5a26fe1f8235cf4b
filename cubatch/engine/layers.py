"""
What each layer does in a step: an operation of the schedule, bound to its arrays once, called every step.

Binding resolves views, shapes and options beforehand (`backend.prepare`), since at small batches the
time between two array operations costs as much as the operations.  `TABLE` has a row for every kind of
layer, the same for the array library's own calls and for the hand-written kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs

from cubatch.engine import backend, layer_passes
from cubatch.engine.place import Bound, Place
from cubatch.errors import UnsupportedLayer
from cubatch.memory.schedule_records import Op
from cubatch.network import layers
from cubatch.network.layer import Layer

Work = Callable[[], object]


@attrs.frozen(eq=False)
class Ops:
    """
    How a kind of layer is computed.

    Attributes:
        forward, backward: Do the pass on the arrays of a bound operation; None for a pass that is no operation.
        draws: The forward pass draws anew in every step, so that it cannot be prepared where the host has its number.
    """

    forward: Callable[[Bound], None] | None = None
    backward: Callable[[Bound], None] | None = None
    draws: bool = False


def check(layer: Layer, name: str) -> None:
    """Raise UnsupportedLayer for a layer that the engine has no code for."""
    if TABLE.get(type(layer), NOT_WRITTEN) is NOT_WRITTEN:
        raise UnsupportedLayer(f"{name} ({layer.type})", "its computation is not written yet")


def bind(op: Op, place: Place, *, training: bool) -> Work:
    """
    Bind an operation of layers to its arrays.

    Args:
        op: The operation.
        place: Whose shard it works on.
        training: Whether statistics of the batch are used, and kept.

    Returns:
        Callable: Does the operation; takes nothing.
    """
    if op.kind == "accumulate":
        x0, x1, y = (place.arena[number].reshape(-1) for number in (*op.reads.values(), *op.writes.values()))
        return backend.prepare(place.operations.add, [x0, x1], out=y)
    if op.kind == "fold":
        return backend.prepare(_fold, op, place)
    if op.node is None or op.workspace is None:
        raise ValueError(f"a {op.kind} operation has nothing to bind")
    views: dict[tuple[int, tuple[int, ...]], Any] = {}

    def view(role: str, number: int) -> Any:
        """One array object for a buffer of one shape, so that a function sees when it works in place."""
        array = _shaped(op, layer, role, place.arena[number])
        return views.setdefault((number, array.shape), array)

    layer = op.node.layer
    reads = {role: view(role, number) for role, number in op.reads.items()}
    writes = {role: view(role, number) for role, number in op.writes.items()}
    bound = Bound(op, layer, reads, writes, place.arena.workspace(op.workspace), place, training)
    ops = TABLE[type(layer)]
    work = ops.forward if op.kind == "forward" else ops.backward
    if work is None:
        raise ValueError(f"{layer.type} has no {op.kind} operation")
    if ops.draws and op.kind == "forward" and place.numbers is None:
        return functools.partial(work, bound)
    return backend.prepare(work, bound)


def _shaped(op: Op, layer: Layer, role: str, array: Any) -> Any:
    """Give an array the extents that the layer knows it by: flatten is only another view of a buffer."""
    if role in {"residual", "positive", "parts"}:  # of what the operation makes
        role = "y" if op.kind == "forward" else "x0"
    if role in {"y", "dy"}:
        return array.reshape(len(array), *layer.output_shape)
    if role.lstrip("d").startswith("x"):
        h, w, _ = layer.input_shapes[int(role.lstrip("dx"))]
        return array.reshape(len(array), h, w, -1)  # the batch may be stored with more channels than it has
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


NO_OPERATION = Ops()
"""Of a kind whose output is its input's memory: the schedule has no operation for it."""

NOT_WRITTEN = Ops()
"""Of a kind that the engine has no code for: UnsupportedLayer."""

TABLE: dict[type[Layer], Ops] = {
    layers.Conv2d: Ops(layer_passes.conv2d, layer_passes.conv2d_backward),
    layers.Linear: Ops(layer_passes.linear, layer_passes.linear_backward),
    layers.MaxPool2d: Ops(layer_passes.max_pool2d, layer_passes.max_pool2d_backward),
    layers.AvgPool2d: Ops(layer_passes.avg_pool2d, layer_passes.avg_pool2d_backward),
    layers.GlobalAvgPool: Ops(layer_passes.global_avg_pool, layer_passes.global_avg_pool_backward),
    layers.BatchNorm2d: Ops(layer_passes.batch_norm2d, layer_passes.batch_norm2d_backward),
    layers.LayerNorm: Ops(layer_passes.layer_norm, layer_passes.layer_norm_backward),
    layers.LayerScale: Ops(layer_passes.layer_scale, layer_passes.layer_scale_backward),
    layers.ReLU: Ops(layer_passes.relu, layer_passes.relu_backward),
    layers.ReLU6: Ops(layer_passes.activation, layer_passes.activation_backward),
    layers.HardSwish: Ops(layer_passes.activation, layer_passes.activation_backward),
    layers.HardSigmoid: Ops(layer_passes.activation, layer_passes.activation_backward),
    layers.Sigmoid: Ops(layer_passes.activation, layer_passes.activation_backward),
    layers.SiLU: Ops(layer_passes.activation, layer_passes.activation_backward),
    layers.GELU: Ops(layer_passes.activation, layer_passes.activation_backward),
    layers.Softmax: Ops(layer_passes.softmax, layer_passes.softmax_backward),
    layers.Dropout: Ops(layer_passes.dropout, layer_passes.dropout_backward, draws=True),
    layers.Flatten: NO_OPERATION,
    layers.Add: Ops(layer_passes.add),  # whose gradient is passed on as it is
    layers.Scale: Ops(layer_passes.scale, layer_passes.scale_backward),
    layers.Concat: Ops(layer_passes.concat, layer_passes.concat_backward),
    layers.Slice: Ops(layer_passes.slice_channels, layer_passes.slice_channels_backward),
    layers.Tokens: Ops(layer_passes.tokens, layer_passes.tokens_backward),
    layers.ClassToken: Ops(layer_passes.class_token, layer_passes.class_token_backward),
    layers.Attention: Ops(layer_passes.attention, layer_passes.attention_backward),
    layers.Opaque: NOT_WRITTEN,
}
"""How each kind of layer is computed; the order is that of `LAYERS`."""
