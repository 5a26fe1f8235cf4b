"""
The passes of each kind of layer: a function of the engine on the arrays of a bound operation.

Each is in the table of `layers`, which says what calls it.
"""

from __future__ import annotations

import functools
from typing import Any

from cubatch.engine.place import Bound
from cubatch.network import layers


def _conv_geometry(layer: layers.Conv2d) -> dict[str, Any]:
    return {"stride": layer.stride, "pad": layer.pad, "dilation": layer.dilation, "groups": layer.groups}


def conv2d(at: Bound) -> None:
    """Convolution, forward."""
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


def conv2d_backward(at: Bound) -> None:
    """Convolution, backward."""
    geometry, dy = _conv_geometry(at.layer), at.reads["dy"]
    at.place.operations.conv2d_wgrad(
        at.reads["x0"], dy, dw=at.gradients["w"], db=at.gradients.get("b"), **geometry, workspace=at.workspace
    )
    if "dx0" in at.writes:
        at.place.operations.conv2d_dgrad(
            dy, at.parameters["w"], x_shape=at.x_shape(), **geometry, **at.ending, out=at.writes["dx0"],
            workspace=at.workspace,
        )  # fmt: skip


def linear(at: Bound) -> None:
    """Linear layer, forward."""
    at.place.operations.linear(
        at.reads["x0"], at.parameters["w"], None if at.op.norm else at.parameters.get("b"), **at.ending,
        relu=at.op.relu, out=at.writes["y"], workspace=at.workspace,
    )  # fmt: skip


def linear_backward(at: Bound) -> None:
    """Linear layer, backward."""
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


def max_pool2d(at: Bound) -> None:
    """Max pooling, forward."""
    at.place.operations.max_pool2d(
        at.reads["x0"],
        **_pool_geometry(at.layer),
        relu=at.op.relu,
        out=at.writes["y"],
        argmax=at.writes.get("argmax"),
        workspace=at.workspace,
    )


def max_pool2d_backward(at: Bound) -> None:
    """Max pooling, backward."""
    at.place.operations.max_pool2d_backward(
        at.reads["dy"],
        at.reads["argmax"],
        x_shape=at.x_shape(),
        **_pool_geometry(at.layer),
        out=at.writes["dx0"],
        workspace=at.workspace,
    )


def avg_pool2d(at: Bound) -> None:
    """Average pooling, forward."""
    at.place.operations.avg_pool2d(
        at.reads["x0"],
        **_pool_geometry(at.layer),
        count_include_pad=at.layer.count_pad,
        out=at.writes["y"],
        workspace=at.workspace,
    )


def avg_pool2d_backward(at: Bound) -> None:
    """Average pooling, backward."""
    at.place.operations.avg_pool2d_backward(
        at.reads["dy"],
        x_shape=at.x_shape(),
        **_pool_geometry(at.layer),
        count_include_pad=at.layer.count_pad,
        out=at.writes["dx0"],
        workspace=at.workspace,
    )


def global_avg_pool(at: Bound) -> None:
    """Mean over all positions, forward."""
    y = at.writes["y"]
    at.place.operations.global_avg_pool(at.reads["x0"], out=y.reshape(len(y), -1))


def global_avg_pool_backward(at: Bound) -> None:
    """Mean over all positions, backward."""
    dy = at.reads["dy"]
    at.place.operations.global_avg_pool_backward(dy.reshape(len(dy), -1), x_shape=at.x_shape(), out=at.writes["dx0"])


def batch_norm2d(at: Bound) -> None:
    """Batch norm, forward."""
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


def batch_norm2d_backward(at: Bound) -> None:
    """Batch norm, backward."""
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


def relu(at: Bound) -> None:
    """ReLU, forward."""
    at.place.operations.relu(at.reads["x0"], out=at.writes["y"])


def relu_backward(at: Bound) -> None:
    """ReLU, backward."""
    at.place.operations.relu_backward(at.reads["dy"], at.reads["y"], out=at.writes["dx0"], workspace=at.workspace)


def activation(at: Bound) -> None:
    """Any other activation function, forward."""
    at.place.operations.activation(at.reads["x0"], kind=at.layer.type, out=at.writes["y"], workspace=at.workspace)


def activation_backward(at: Bound) -> None:
    """Any other activation function, backward."""
    saved = at.reads["y"] if "y" in at.reads else at.reads["x0"]  # whichever the layer's record names
    at.place.operations.activation_backward(
        at.reads["dy"],
        saved,
        kind=at.layer.type,
        out=at.writes["dx0"],
        workspace=at.workspace,
    )


def scale(at: Bound) -> None:
    """Factors of a sample's channels, forward."""
    at.place.operations.scale(at.reads["x0"], at.reads["x1"], out=at.writes["y"])


def scale_backward(at: Bound) -> None:
    """Factors of a sample's channels, backward."""
    at.place.operations.scale_backward(
        at.reads["dy"],
        at.reads["x0"],
        at.reads["x1"],
        dx=at.writes.get("dx0"),
        ds=at.writes.get("dx1"),
        workspace=at.workspace,
    )


def add(at: Bound) -> None:
    """Sum of branches, forward."""
    # In place, the branch that is overwritten comes first, or it would be lost before it is read.
    target = at.op.writes["y"]
    roles = sorted((f"x{i}" for i in range(at.layer.count)), key=lambda role: at.op.reads[role] != target)
    at.place.operations.add([at.reads[role] for role in roles], relu=at.op.relu, out=at.writes["y"])


def concat(at: Bound) -> None:
    """Branches side by side, forward."""
    at.place.operations.concat([at.reads[f"x{i}"] for i in range(len(at.layer.channels))], out=at.writes["y"])


def concat_backward(at: Bound) -> None:
    """Branches side by side, backward."""
    outs = [at.writes.get(f"dx{i}") for i in range(len(at.layer.channels))]
    at.place.operations.concat_backward(at.reads["dy"], at.layer.channels, outs=outs)


def slice_channels(at: Bound) -> None:
    """A range of the channels, forward."""
    at.place.operations.slice_channels(at.reads["x0"], at.layer.start, at.layer.end, out=at.writes["y"])


def slice_channels_backward(at: Bound) -> None:
    """A range of the channels, backward."""
    at.place.operations.slice_channels_backward(
        at.reads["dy"], at.layer.start, parts=at.reads.get("parts"), out=at.writes["dx0"]
    )


def softmax(at: Bound) -> None:
    """Softmax, forward."""
    at.place.operations.softmax(at.reads["x0"], out=at.writes["y"], workspace=at.workspace)


def softmax_backward(at: Bound) -> None:
    """Softmax, backward."""
    at.place.operations.softmax_backward(at.reads["dy"], at.reads["y"], out=at.writes["dx0"], workspace=at.workspace)


def dropout(at: Bound) -> None:
    """Dropout, forward."""
    place = at.place
    # The seed names layer and shard, so that a recomputation draws the mask that the first pass drew.
    seed = (place.seed, place.first + place.begin, *at.name.encode())
    step = place.clock[0] if place.numbers is None else place.numbers.passes
    place.operations.dropout(
        at.reads["x0"],
        p=at.layer.p,
        seed=seed,
        step=step,
        out=at.writes["y"],
        mask=at.writes["mask"],
        workspace=at.workspace,
    )


def dropout_backward(at: Bound) -> None:
    """Dropout, backward."""
    at.place.operations.dropout_backward(at.reads["dy"], at.reads["mask"], p=at.layer.p, out=at.writes["dx0"])


def layer_norm(at: Bound) -> None:
    """Layer norm, forward."""
    at.place.operations.layer_norm(
        at.reads["x0"],
        at.parameters["gamma"],
        at.parameters["beta"],
        eps=at.layer.eps,
        statistics=at.writes.get("statistics"),
        out=at.writes["y"],
        workspace=at.workspace,
    )


def layer_norm_backward(at: Bound) -> None:
    """Layer norm, backward."""
    at.place.operations.layer_norm_backward(
        at.reads["dy"],
        at.reads["x0"],
        at.parameters["gamma"],
        statistics=at.reads["statistics"],
        dgamma=at.gradients["gamma"],
        dbeta=at.gradients["beta"],
        out=at.writes.get("dx0"),
        workspace=at.workspace,
    )


def layer_scale(at: Bound) -> None:
    """Factors of channels, forward."""
    at.place.operations.layer_scale(at.reads["x0"], at.parameters["gamma"], out=at.writes["y"])


def layer_scale_backward(at: Bound) -> None:
    """Factors of channels, backward."""
    at.place.operations.layer_scale_backward(
        at.reads["dy"],
        at.reads["x0"],
        at.parameters["gamma"],
        dgamma=at.gradients["gamma"],
        out=at.writes.get("dx0"),
        workspace=at.workspace,
    )


def tokens(at: Bound) -> None:
    """Pixels to tokens, forward."""
    at.place.operations.tokens(at.reads["x0"], at.parameters["token"], at.parameters["position"], out=at.writes["y"])


def tokens_backward(at: Bound) -> None:
    """Pixels to tokens, backward."""
    gradients = at.gradients
    at.place.operations.tokens_backward(
        at.reads["dy"],
        dtoken=gradients["token"],
        dposition=gradients["position"],
        out=at.writes.get("dx0"),
        workspace=at.workspace,
    )


def class_token(at: Bound) -> None:
    """The first token, forward."""
    at.place.operations.class_token(at.reads["x0"], out=at.writes["y"])


def class_token_backward(at: Bound) -> None:
    """The first token, backward."""
    at.place.operations.class_token_backward(at.reads["dy"], x_shape=at.x_shape(), out=at.writes["dx0"])


_SAVED = ("qkv", "weights", "mixed")


def attention(at: Bound) -> None:
    """Attention, forward."""
    p = at.parameters
    at.place.operations.attention(
        at.reads["x0"],
        p["w_in"],
        p["w_out"],
        p.get("b_in"),
        p.get("b_out"),
        heads=at.layer.heads,
        keep=[at.writes[role] for role in _SAVED] if at.training else None,
        out=at.writes["y"],
        workspace=at.workspace,
    )


def attention_backward(at: Bound) -> None:
    """Attention, backward."""
    g = at.gradients
    at.place.operations.attention_backward(
        at.reads["dy"],
        at.reads["x0"],
        at.parameters["w_in"],
        at.parameters["w_out"],
        heads=at.layer.heads,
        saved=[at.reads[role] for role in _SAVED],
        dw_in=g["w_in"],
        dw_out=g["w_out"],
        db_in=g.get("b_in"),
        db_out=g.get("b_out"),
        out=at.writes.get("dx0"),
        workspace=at.workspace,
    )
