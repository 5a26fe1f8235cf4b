"""
What each layer does in a step: an operation of the schedule, bound to its arrays once, called in every step.

Binding resolves views, shapes and options in advance (`backend.prepare`). At small batches, that would otherwise take
as long as the operations. `TABLE` has a row for every kind of layer, the same for the array library's own calls and
for the hand-written kernels.
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
    The functions of `functional` that compute a kind of layer.

    Attributes:
        forward, backward: Names of the functions of each pass; none for a pass that needs no operation.
        inference: Those of the forward pass in inference, if they differ.
        more: Returns the arguments whose names are particular to this kind.
        draws: Whether the forward pass draws random numbers: it is prepared only if the device counts the steps.
    """

    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    more: Callable[[Bound], dict[str, Any]] = layer_passes.nothing_more
    inference: tuple[str, ...] = ()
    draws: bool = False

    def run(self, at: Bound, given: dict[str, Any]) -> None:
        """Call the functions of an operation's pass, with the given arguments and those of this kind."""
        names = self.backward if at.op.kind == "backward" else self.forward
        layer_passes.call(at, names if at.training else self.inference or names, given | self.more(at))


def check(layer: Layer, name: str) -> None:
    """Raise UnsupportedLayer for a layer that the engine cannot compute."""
    if TABLE.get(type(layer), NOT_WRITTEN) is NOT_WRITTEN:
        raise UnsupportedLayer(f"{name} ({layer.type})", "its computation is not written yet")


def bind(op: Op, place: Place, *, training: bool) -> Work:
    """
    Bind an operation of layers to its arrays.

    Args:
        op: The operation.
        place: The shard that it works on.
        training: Whether statistics of the batch are used, and kept.

    Returns:
        Callable: Does the operation; takes no arguments.
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
        """Return one array object for each buffer and shape, so that functions notice that they work in place."""
        array = _shaped(op, layer, role, place.arena[number])
        return views.setdefault((number, array.shape), array)

    layer = op.node.layer
    reads = {role: view(role, number) for role, number in op.reads.items()}
    writes = {role: view(role, number) for role, number in op.writes.items()}
    bound = Bound(op, layer, reads, writes, place.arena.workspace(op.workspace), place, training)
    ops, given = TABLE[type(layer)], layer_passes.arguments(bound)
    if ops.draws and op.kind == "forward" and place.numbers is None:
        return functools.partial(ops.run, bound, given)
    return backend.prepare(ops.run, bound, given)


def _shaped(op: Op, layer: Layer, role: str, array: Any) -> Any:
    """Return an array with the extents that the layer expects: flatten is only another view of a buffer."""
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
"""For a kind whose output is its input's memory: the schedule has no operation for it."""

NOT_WRITTEN = Ops()
"""For a kind that the engine cannot compute: UnsupportedLayer."""


def _ops(name: str, more: Callable[[Bound], dict[str, Any]] = layer_passes.nothing_more, **options: Any) -> Ops:
    """Return the row of a kind whose gradients are computed by one function."""
    return Ops((name,), (f"{name}_backward",), more, **options)


TABLE: dict[type[Layer], Ops] = {
    layers.Conv2d: Ops(("conv2d",), ("conv2d_wgrad", "conv2d_dgrad")),
    layers.Linear: Ops(("linear",), ("linear_wgrad", "linear_dgrad")),
    layers.MaxPool2d: _ops("max_pool2d"),
    layers.AvgPool2d: _ops("avg_pool2d"),
    layers.GlobalAvgPool: _ops("global_avg_pool", layer_passes.global_avg_pool),
    layers.BatchNorm2d: Ops(
        ("batch_norm_train",), ("batch_norm_backward",), layer_passes.batch_norm2d, ("batch_norm_inference",)
    ),
    layers.LayerNorm: _ops("layer_norm"),
    layers.LayerScale: _ops("layer_scale"),
    layers.ReLU: _ops("relu"),
    **dict.fromkeys(
        (layers.ReLU6, layers.HardSwish, layers.HardSigmoid, layers.Sigmoid, layers.SiLU, layers.GELU),
        _ops("activation", layer_passes.activation),
    ),
    layers.Softmax: _ops("softmax"),
    layers.Dropout: _ops("dropout", layer_passes.dropout, draws=True),
    layers.Flatten: NO_OPERATION,
    layers.Add: Ops(("add",), more=layer_passes.add),  # each branch's gradient is the sum's
    layers.Scale: _ops("scale"),
    layers.Concat: _ops("concat", layer_passes.concat),
    layers.Slice: _ops("slice_channels"),
    layers.Tokens: _ops("tokens"),
    layers.ClassToken: _ops("class_token"),
    layers.Attention: _ops("attention", layer_passes.attention),
    layers.Opaque: NOT_WRITTEN,
}
"""The functions of each kind of layer, in the order of `LAYERS`."""
