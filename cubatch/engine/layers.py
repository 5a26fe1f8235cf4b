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

from cubatch.engine import backend
from cubatch.engine.place import Bound, Place
from cubatch.errors import UnsupportedLayer
from cubatch.memory.operations import Op
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
    if role in {"residual", "positive"}:  # of what the product makes
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


# Each function below calls the engine's functions on an operation's arrays.


def _conv_geometry(layer: layers.Conv2d) -> dict[str, Any]:
    return {"stride": layer.stride, "pad": layer.pad, "dilation": layer.dilation, "groups": layer.groups}


def _conv2d(at: Bound) -> None:
    at.place.operations.conv2d(
        at.reads["x0"],
        at.parameters["w"],
        None if at.op.norm else at.parameters.get("b"),
        **_conv_geometry(at.layer),
        **at.ending,
        relu=at.op.relu,
        out=at.writes["y"],
        workspace=at.workspace,
    )


def _conv2d_backward(at: Bound) -> None:
    geometry, dy = _conv_geometry(at.layer), at.reads["dy"]
    at.place.operations.conv2d_wgrad(
        at.reads["x0"], dy, dw=at.gradients["w"], db=at.gradients.get("b"), **geometry, workspace=at.workspace
    )
    if "dx0" in at.writes:
        at.place.operations.conv2d_dgrad(
            dy, at.parameters["w"], x_shape=at.x_shape(), **geometry, **at.ending, out=at.writes["dx0"],
            workspace=at.workspace,
        )  # fmt: skip


def _linear(at: Bound) -> None:
    at.place.operations.linear(
        at.reads["x0"],
        at.parameters["w"],
        None if at.op.norm else at.parameters.get("b"),
        **at.ending,
        relu=at.op.relu,
        out=at.writes["y"],
        workspace=at.workspace,
    )


def _linear_backward(at: Bound) -> None:
    dy = at.reads["dy"]
    at.place.operations.linear_wgrad(
        at.reads["x0"], dy, dw=at.gradients["w"], db=at.gradients.get("b"), workspace=at.workspace
    )
    if "dx0" in at.writes:
        at.place.operations.linear_dgrad(
            dy, at.parameters["w"], **at.ending, out=at.writes["dx0"], workspace=at.workspace
        )


def _pool_geometry(layer: layers.MaxPool2d | layers.AvgPool2d) -> dict[str, Any]:
    return {"r": layer.r, "s": layer.s, "stride": layer.stride, "pad": layer.pad, "ceil_mode": layer.ceil}


def _max_pool2d(at: Bound) -> None:
    at.place.operations.max_pool2d(
        at.reads["x0"],
        **_pool_geometry(at.layer),
        relu=at.op.relu,
        out=at.writes["y"],
        argmax=at.writes.get("argmax"),
        workspace=at.workspace,
    )


def _max_pool2d_backward(at: Bound) -> None:
    at.place.operations.max_pool2d_backward(
        at.reads["dy"],
        at.reads["argmax"],
        x_shape=at.x_shape(),
        **_pool_geometry(at.layer),
        out=at.writes["dx0"],
        workspace=at.workspace,
    )


def _avg_pool2d(at: Bound) -> None:
    at.place.operations.avg_pool2d(
        at.reads["x0"],
        **_pool_geometry(at.layer),
        count_include_pad=at.layer.count_pad,
        out=at.writes["y"],
        workspace=at.workspace,
    )


def _avg_pool2d_backward(at: Bound) -> None:
    at.place.operations.avg_pool2d_backward(
        at.reads["dy"],
        x_shape=at.x_shape(),
        **_pool_geometry(at.layer),
        count_include_pad=at.layer.count_pad,
        out=at.writes["dx0"],
        workspace=at.workspace,
    )


def _global_avg_pool(at: Bound) -> None:
    y = at.writes["y"]
    at.place.operations.global_avg_pool(at.reads["x0"], out=y.reshape(len(y), -1))


def _global_avg_pool_backward(at: Bound) -> None:
    dy = at.reads["dy"]
    at.place.operations.global_avg_pool_backward(dy.reshape(len(dy), -1), x_shape=at.x_shape(), out=at.writes["dx0"])


def _batch_norm2d(at: Bound) -> None:
    layer, place, state = at.layer, at.place, at.place.states[at.name]
    if not at.training:
        at.place.operations.batch_norm_inference(
            at.reads["x0"],
            at.parameters["gamma"],
            at.parameters["beta"],
            running_mean=state["mean"],
            running_var=state["var"],
            eps=layer.eps,
            **at.ending,
            relu=at.op.relu,
            out=at.writes["y"],
            workspace=at.workspace,
        )
        return
    mean, inv_std = at.writes["statistics"]
    keeps = place.rank == 0 and not at.op.replay
    at.place.operations.batch_norm_train(
        at.reads["x0"],
        at.parameters["gamma"],
        at.parameters["beta"],
        mean=mean,
        inv_std=inv_std,
        running_mean=state["mean"] if keeps else None,
        running_var=state["var"] if keeps else None,
        momentum=layer.momentum,
        eps=layer.eps,
        count=at.positions,
        reduce=functools.partial(place.team.sum, place.rank),
        **at.ending,
        relu=at.op.relu,
        out=at.writes["y"],
        workspace=at.workspace,
    )


def _batch_norm2d_backward(at: Bound) -> None:
    mean, inv_std = at.reads["statistics"]
    at.place.operations.batch_norm_backward(
        at.reads["dy"],
        at.reads["x0"],
        at.parameters["gamma"],
        mean=mean,
        inv_std=inv_std,
        dgamma=at.gradients["gamma"],
        dbeta=at.gradients["beta"],
        count=at.positions,
        reduce=functools.partial(at.place.team.sum, at.place.rank),
        out=at.writes.get("dx0"),
        workspace=at.workspace,
    )


def _relu(at: Bound) -> None:
    at.place.operations.relu(at.reads["x0"], out=at.writes["y"])


def _relu_backward(at: Bound) -> None:
    at.place.operations.relu_backward(at.reads["dy"], at.reads["y"], out=at.writes["dx0"], workspace=at.workspace)


def _activation(at: Bound) -> None:
    at.place.operations.activation(at.reads["x0"], kind=at.layer.type, out=at.writes["y"], workspace=at.workspace)


def _activation_backward(at: Bound) -> None:
    saved = at.reads["y"] if "y" in at.reads else at.reads["x0"]  # whichever the layer's record names
    at.place.operations.activation_backward(
        at.reads["dy"],
        saved,
        kind=at.layer.type,
        out=at.writes["dx0"],
        workspace=at.workspace,
    )


def _scale(at: Bound) -> None:
    at.place.operations.scale(at.reads["x0"], at.reads["x1"], out=at.writes["y"])


def _scale_backward(at: Bound) -> None:
    at.place.operations.scale_backward(
        at.reads["dy"],
        at.reads["x0"],
        at.reads["x1"],
        dx=at.writes.get("dx0"),
        ds=at.writes.get("dx1"),
        workspace=at.workspace,
    )


def _add(at: Bound) -> None:
    # In place, the branch that is overwritten comes first, or it would be lost before it is read.
    target = at.op.writes["y"]
    roles = sorted((f"x{i}" for i in range(at.layer.count)), key=lambda role: at.op.reads[role] != target)
    at.place.operations.add([at.reads[role] for role in roles], relu=at.op.relu, out=at.writes["y"])


def _concat(at: Bound) -> None:
    at.place.operations.concat([at.reads[f"x{i}"] for i in range(len(at.layer.channels))], out=at.writes["y"])


def _concat_backward(at: Bound) -> None:
    outs = [at.writes.get(f"dx{i}") for i in range(len(at.layer.channels))]
    at.place.operations.concat_backward(at.reads["dy"], at.layer.channels, outs=outs)


def _softmax(at: Bound) -> None:
    at.place.operations.softmax(at.reads["x0"], out=at.writes["y"], workspace=at.workspace)


def _softmax_backward(at: Bound) -> None:
    at.place.operations.softmax_backward(at.reads["dy"], at.reads["y"], out=at.writes["dx0"], workspace=at.workspace)


def _dropout(at: Bound) -> None:
    place = at.place
    # The seed names layer and shard, so that a recomputation draws the mask that the first pass drew.
    seed = (place.seed, place.begin, *at.name.encode())
    step = place.clock[0] if place.numbers is None else place.numbers.number
    place.operations.dropout(
        at.reads["x0"],
        p=at.layer.p,
        seed=seed,
        step=step,
        out=at.writes["y"],
        mask=at.writes["mask"],
        workspace=at.workspace,
    )


def _dropout_backward(at: Bound) -> None:
    at.place.operations.dropout_backward(at.reads["dy"], at.reads["mask"], p=at.layer.p, out=at.writes["dx0"])


NO_OPERATION = Ops()
"""Of a kind whose output is its input's memory: the schedule has no operation for it."""

NOT_WRITTEN = Ops()
"""Of a kind that the engine has no code for: UnsupportedLayer."""

TABLE: dict[type[Layer], Ops] = {
    layers.Conv2d: Ops(_conv2d, _conv2d_backward),
    layers.Linear: Ops(_linear, _linear_backward),
    layers.MaxPool2d: Ops(_max_pool2d, _max_pool2d_backward),
    layers.AvgPool2d: Ops(_avg_pool2d, _avg_pool2d_backward),
    layers.GlobalAvgPool: Ops(_global_avg_pool, _global_avg_pool_backward),
    layers.BatchNorm2d: Ops(_batch_norm2d, _batch_norm2d_backward),
    layers.LayerNorm: NOT_WRITTEN,
    layers.LayerScale: NOT_WRITTEN,
    layers.ReLU: Ops(_relu, _relu_backward),
    layers.ReLU6: Ops(_activation, _activation_backward),
    layers.HardSwish: Ops(_activation, _activation_backward),
    layers.HardSigmoid: Ops(_activation, _activation_backward),
    layers.Sigmoid: Ops(_activation, _activation_backward),
    layers.SiLU: Ops(_activation, _activation_backward),
    layers.GELU: NOT_WRITTEN,
    layers.Softmax: Ops(_softmax, _softmax_backward),
    layers.Dropout: Ops(_dropout, _dropout_backward, draws=True),
    layers.Flatten: NO_OPERATION,
    layers.Add: Ops(_add),  # whose gradient is passed on as it is
    layers.Scale: Ops(_scale, _scale_backward),
    layers.Concat: Ops(_concat, _concat_backward),
    layers.Tokens: NOT_WRITTEN,
    layers.ClassToken: NOT_WRITTEN,
    layers.Attention: NOT_WRITTEN,
    layers.Opaque: NOT_WRITTEN,
}
"""How each kind of layer is computed; the order is that of `LAYERS`."""
