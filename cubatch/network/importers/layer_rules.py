"""The rules that turn a step of each kind into layers (`RULES`), and into an opaque layer where none applies."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np

from cubatch.network import layers
from cubatch.network.extents import Extents, printable
from cubatch.network.importers import attention_rules
from cubatch.network.importers.axes import Atom, Dims, is_whole, joined, laid_out, reshaped
from cubatch.network.importers.building import Builder, Rule, Value, permuted, with_channels
from cubatch.network.importers.source import Step
from cubatch.network.layer import Layer


def _conv(build: Builder, step: Step) -> Value:
    value, options = build.pixels(step, padded=True), step.options
    w = step.constants["w"]
    layer = layers.Conv2d(
        k=w.shape[0], r=w.shape[2], s=w.shape[3], stride=options["stride"], dilation=options["dilation"],
        pad=tuple(a + b for a, b in zip(options["pad"], value.pad, strict=True)), groups=options["groups"],
        bias="b" in step.constants,
    )  # fmt: skip
    arrays = {**step.constants, "w": w.transpose(0, 2, 3, 1)}
    return build.add(step, layer, value, dims="nchw", arrays=arrays)


def _linear(build: Builder, step: Step) -> Value:
    value, order = build.features(step)
    if isinstance(mixed := build.pending.get(value.layer), attention_rules.Mixed):
        return attention_rules.project(build, step, value, order, mixed)
    w = step.constants["w"]
    layer = layers.Linear(k=w.shape[0], bias="b" in step.constants)
    dims = with_channels(value, -1, w.shape[0])
    return build.add(step, layer, value, dims=dims, arrays={**step.constants, "w": permuted(w, order)})


def _batch_norm(build: Builder, step: Step) -> Value:
    value, order = build.features(step, axis=1)
    layer = layers.BatchNorm2d(eps=step.options["eps"], momentum=step.options["momentum"])
    arrays = {name: permuted(array, order) for name, array in step.constants.items()}
    return build.add(step, layer, value, arrays=arrays)


def _layer_norm(build: Builder, step: Step) -> Value:
    if step.options["axes"] != 1:
        raise build.refusal(step, "it normalizes over more than the channels")
    value, order = build.features(step)
    (features,) = build.shapes[value.layer][2:]
    if any(
        array.size > 1 and (array.size, array.shape[-1]) != (features, features) for array in step.constants.values()
    ):
        raise build.refusal(step, "its scale or bias is not one number for each channel")
    arrays = {  # a single number applies to all channels
        name: permuted(np.broadcast_to(array.reshape(-1), features), order) for name, array in step.constants.items()
    }
    return build.add(step, layers.LayerNorm(eps=step.options["eps"]), value, arrays=arrays)


def _max_pool(build: Builder, step: Step) -> Value:
    return build.add(step, _pool(build, step, layers.MaxPool2d), build.pixels(step), dims="nchw")


def _avg_pool(build: Builder, step: Step) -> Value:
    layer = _pool(build, step, layers.AvgPool2d, count_pad=step.options["count_pad"])
    return build.add(step, layer, build.pixels(step), dims="nchw")


def _pool(build: Builder, step: Step, kind: type[Layer], **more: Any) -> Layer:
    options = step.options
    if set(options["dilation"]) != {1}:
        raise build.refusal(step, "its window is dilated")
    r, s = options["window"]
    values = {"r": r, "s": s, "stride": options["stride"], "pad": options["pad"], "ceil": options["ceil"], **more}
    return kind(**values)


def _adaptive_avg_pool(build: Builder, step: Step) -> Value:
    value, (p, q) = build.pixels(step), step.options["extents"]
    h, w, _ = build.shapes[value.layer]
    if (p, q) == (1, 1):
        return build.add(step, layers.GlobalAvgPool(), value, dims="nchw")
    if (p, q) == (h, w):
        return value
    if h % p or w % q:
        raise build.refusal(step, f"its {h} x {w} pixels do not divide into {p} x {q}")
    return build.add(step, layers.AvgPool2d(r=h // p, s=w // q), value, dims="nchw")


def _mean(build: Builder, step: Step) -> Value:
    value = build.value(step)
    axes = {axis % len(value.dims) for axis in step.options["axes"]}
    averaged = tuple(atom for axis in sorted(axes) for atom in value.dims[axis])
    if not is_whole(averaged, "hw", build.shapes[value.layer]):
        raise build.refusal(
            step, "it averages over other axes than both height and width; only global average pooling can be imported"
        )
    rest = [() if axis in axes else dim for axis, dim in enumerate(value.dims)]
    dims = tuple(dim for axis, dim in enumerate(rest) if step.options["keep"] or axis not in axes)
    return build.add(step, layers.GlobalAvgPool(), value, dims=dims)


def _elementwise(kind: type[Layer]) -> Rule:
    def rule(build: Builder, step: Step) -> Value:
        return build.add(step, kind(**step.options), build.value(step))

    return rule


def _softmax(build: Builder, step: Step) -> Value:
    value, _ = build.features(step, axis=step.options["axis"])
    return build.add(step, layers.Softmax(), value)


def _identity(build: Builder, step: Step) -> Value:
    return build.values[step.reads[0]]


def _reshape(build: Builder, step: Step) -> Value:
    value = build.part(step)
    dims = reshaped(value.dims, step.shape)
    if dims is None:
        raise build.refusal(step, f"its shape {step.shape} cuts across the axes of its input")
    return attrs.evolve(value, dims=dims)


def _permute(build: Builder, step: Step) -> Value:
    value = build.part(step)
    return attrs.evolve(value, dims=tuple(value.dims[axis] for axis in step.options["order"]))


def _pad(build: Builder, step: Step) -> Value:
    value = build.pixels(step, padded=True)
    return attrs.evolve(value, pad=tuple(a + b for a, b in zip(value.pad, step.options["pad"], strict=True)))


def _add(build: Builder, step: Step) -> Value:
    if "constant" in step.constants:
        return _add_constant(build, step, step.constants["constant"])
    first, second = build.value(step), build.value(step, 1)
    if first.dims != second.dims or build.shapes[first.layer] != build.shapes[second.layer]:
        raise build.refusal(step, "its inputs have different shapes")
    return build.add(step, layers.Add(), first, second)


def _add_constant(build: Builder, step: Step, constant: np.ndarray[Any, Any]) -> Value:
    """
    Make an added constant the bias of the layer before it, or the position embedding of tokens; return the sum.

    Zeros are left out; any other constant raises UnsupportedOperator.
    """
    value = build.value(step)
    if isinstance(prepended := build.pending.get(value.layer), attention_rules.Prepended):
        return attention_rules.position(build, step, value, prepended)
    layer = build.layers.get(value.layer)
    row = _by_channel(build, value, constant)
    if attention_rules.is_projected(build, value) and row is not None and build.is_read_once(value):
        return attention_rules.project_with_bias(build, value, row)
    # Only products have a bias.
    is_product = isinstance(layer, layers.Conv2d | layers.Linear) and not layer.bias
    if row is not None and is_product and layer is not None and build.is_read_once(value):
        with_bias: dict[str, Any] = {"bias": True}
        build.replace(value.layer, attrs.evolve(layer, **with_bias), {"b": row})
        return value
    if not constant.any():  # Python's sum() begins with 0
        return value
    reason = "it adds a constant that is no bias of a convolution or linear layer before it, which nothing else reads"
    raise build.refusal(step, reason)


def _mul(build: Builder, step: Step) -> Value:
    if "constant" in step.constants:
        value = build.value(step)
        row = _by_channel(build, value, step.constants["constant"])
        if row is None:
            raise build.refusal(step, "it multiplies by a constant that is no factor for each channel")
        return build.add(step, layers.LayerScale(), value, arrays={"gamma": row})
    pair = build.value(step), build.value(step, 1)
    for x, factor in (pair, pair[::-1]):
        gate = build.layers.get(factor.layer)
        # x sigmoid(x) is one activation.
        fused = _GATED.get(type(gate)) if gate is not None and gate.inputs == (x.layer,) else None
        if fused is not None and x.dims == factor.dims:
            return build.add(step, fused(), x)
    for x, factor in (pair, pair[::-1]):
        are_images = all(each.dims == build.axes("nchw", build.shapes[each.layer]) for each in pair)
        is_factor = build.shapes[factor.layer] == (1, 1, build.shapes[x.layer][2])
        if is_factor and (are_images or x.dims == factor.dims):  # images, or features
            return build.add(step, layers.Scale(), x, factor)
    raise build.refusal(step, "neither of its inputs is a factor for each sample and channel of the other")


_GATED: dict[type[Layer], type[Layer]] = {layers.Sigmoid: layers.SiLU, layers.HardSigmoid: layers.HardSwish}


def _by_channel(build: Builder, value: Value, constant: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return a constant as a vector with one number for each channel; None if it has another shape."""
    axis, channels = build.channel_axis(value), build.shapes[value.layer][2]
    shape = (1,) * (len(value.dims) - constant.ndim) + constant.shape
    if axis is None or len(shape) != len(value.dims) or constant.size != channels or shape[axis] != channels:
        return None
    return constant.reshape(-1)


def _concat(build: Builder, step: Step) -> Value:
    values = [build.value(step, i) for i in range(len(step.reads))]
    axis = step.options["axis"] % len(step.shape)
    for value in values:
        plain = laid_out("c", 1, build.shapes[value.layer])[0]
        others = [[dim for i, dim in enumerate(each.dims) if i != axis] for each in (value, values[0])]
        if value.dims[axis] != plain or others[0] != others[1]:
            raise build.refusal(step, "it does not join channels")
    dims = with_channels(values[0], axis, sum(build.shapes[value.layer][2] for value in values))
    return build.add(step, layers.Concat(), *values, dims=dims)


def keep_opaque(build: Builder, step: Step) -> Value:
    """
    Add an opaque layer for a step, with the most probable meaning of its output's axes; return its output.

    The axes are those of an input with the same number of axes, else those of images, tokens or features. With more
    than four axes, or where the batch is not the first axis alone, the last axis is channels and all others are rows.
    Without an axis for the batch, or an input, it raises UnsupportedOperator.
    """
    if not step.reads:
        raise build.refusal(step, step.options.get("reason", "it reads nothing that depends on the network's input"))
    values = [build.values[name] for name in step.reads]
    batch_axis = next((axis for axis, extent in enumerate(step.shape[:-1]) if extent % build.batch_size == 0), None)
    if step.shape[:1] == (build.batch_size,) and len(step.shape) in _LAYOUTS:
        layouts = [_layout(value.dims, len(step.shape)) for value in values]
        layout = next(filter(None, layouts), _LAYOUTS[len(step.shape)])
        sizes = dict(zip(layout, step.shape, strict=True))
        output: Extents = (sizes.get("h", 1), sizes.get("w", 1), sizes.get("c", 1))
        dims = build.axes(layout, output)
    elif batch_axis is not None:
        output, dims = _rows(step.shape, build.batch_size, batch_axis)
    else:
        raise build.refusal(step, f"its result of shape {step.shape} has no axis for the batch")
    layer = layers.Opaque(
        operator=printable(step.operator), output=output, flop=step.flop // build.batch_size, weights=step.weights
    )
    value = build.add(step, layer, *values, dims=dims)
    build.opaque.add(value.layer)
    return value


_LAYOUTS = {1: "n", 2: "nc", 3: "nhc", 4: "nchw"}  # usual axes, by their number


def _layout(dims: Dims, rank: int) -> str:
    """Return the axes of an input as letters, such as "nchw"; "" unless each of `rank` axes is one letter, n first."""
    labels = ["".join(dict.fromkeys(atom.label for atom in dim)) for dim in dims]
    is_plain = len(labels) == rank and set(map(len, labels)) == {1} and len(set(labels)) == rank and labels[0] == "n"
    return "".join(labels) if is_plain else ""


def _rows(shape: tuple[int, ...], batch_size: int, batch_axis: int) -> tuple[Extents, Dims]:
    """
    Return (h, w, c) and the axes of a result whose last axis is channels and whose other axes are rows.

    The batch is the outer part of the axis `batch_axis`: its first `batch_size` positions, or blocks of positions.
    """
    rows = math.prod(shape[:-1]) // batch_size
    dims, stride = [], rows
    for axis, extent in enumerate(shape[:-1]):
        batch = [Atom("n", batch_size)] if axis == batch_axis else []
        extent_of_rows = extent // batch_size if batch else extent
        stride //= extent_of_rows
        dims.append(joined([*batch, Atom("h", extent_of_rows, stride)]))
    return (rows, 1, shape[-1]), (*dims, joined([Atom("c", shape[-1])]))


RULES: dict[str, Rule] = {
    "conv": _conv,
    "linear": _linear,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "adaptive_avg_pool": _adaptive_avg_pool,
    "mean": _mean,
    "relu": _elementwise(layers.ReLU),
    "relu6": _elementwise(layers.ReLU6),
    "hard_swish": _elementwise(layers.HardSwish),
    "hard_sigmoid": _elementwise(layers.HardSigmoid),
    "sigmoid": _elementwise(layers.Sigmoid),
    "silu": _elementwise(layers.SiLU),
    "gelu": _elementwise(layers.GELU),
    "dropout": _elementwise(layers.Dropout),
    "softmax": _softmax,
    "add": _add,
    "mul": _mul,
    "concat": _concat,
    "prepend": attention_rules.prepend,
    "attention": attention_rules.mix,
    "attention_kt": attention_rules.mix_transposed,
    "select": attention_rules.select,
    "slice": attention_rules.cut,
    "identity": _identity,
    "reshape": _reshape,
    "permute": _permute,
    "pad": _pad,
}
