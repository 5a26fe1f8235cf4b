"""
The passes of each kind of layer as calls of the engine: arrays, how they are passed, how a sample is cut.

A cut names an axis of every array in which the call falls apart into calls of the same kind: some images, or
some channels.  The results of a cut call are those of the whole, at these places.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs

from cubatch.kernels.padding import stored_saved_elements
from cubatch.network import layers
from cubatch.network.layer import Layer
from cubatch.network.passes import Pass

Shape = tuple[int, ...]


@attrs.frozen
class Operand:
    """
    An array of a case.

    Attributes:
        shape: Its extents.
        kind: How it is filled: uniform "signed" in [-reach, reach), "rectified", the same through ReLU6, "positive" in
            [0.5, 1.5); "counts", whole numbers from 0; "scaling", the state of a loss scale.
        dtype: Of its elements; empty for the case's.
        below: Whole numbers stay below this.
        is_batched: Whether axis 0 is the batch.
        reach: See `kind`.
        padded: Zero channels behind those that the operation is about: a batch stored with more than it has.
    """

    shape: Shape
    kind: str = "signed"
    dtype: str = ""
    below: int = 0
    is_batched: bool = True
    reach: float = 1.0
    padded: int = 0


_Facts = dict[str, Any]
T = TypeVar("T")


def keeping(work: Callable[[], T]) -> Callable[[], T]:
    """
    Return a step that keeps its last result until it is taken again.

    Libraries put results in memory of their own.  Without this, the memory would be the same for every set of arrays
    and would stay in the L2.
    """
    kept: list[T] = []

    def step() -> T:
        kept.clear()  # its memory is what the next result of this set is put into
        kept.append(work())
        return kept[0]

    return step


def _geometry(layer: layers.Conv2d) -> dict[str, Any]:
    return {"stride": layer.stride, "pad": layer.pad, "dilation": layer.dilation, "groups": layer.groups}


def _conv2d(layer: layers.Conv2d, n: int, *, pass_: Pass) -> _Facts:
    x, y = Operand((n, *layer.input_shape)), Operand((n, *layer.output_shape))
    w = Operand(layer.parameter_shapes["w"], is_batched=False)
    k, r, s, c = w.shape
    alone, depthwise = layer.groups == 1, layer.groups == layer.k == x.shape[3]
    options = _geometry(layer)
    if pass_ is Pass.FPROP:
        channels = {"c": {"x": 3, "w": 0, "out": 3}} if depthwise else {"k": {"w": 0, "out": 3}} if alone else {}
        facts = {
            "operation": "conv2d", "operands": {"x": x, "w": w, "out": y}, "arguments": ("x", "w"), "options": options,
            "terms": r * s * c, "cuts": {"n": {"x": 0, "out": 0}} | channels,
        }  # fmt: skip
        return _with_bias(facts, k, "k" if alone else "c") if layer.bias else facts
    if pass_ is Pass.DGRAD:
        channels = {"c": {"dy": 3, "w": 0, "out": 3}} if depthwise else {"c": {"w": 3, "out": 3}} if alone else {}
        return {
            "operation": "conv2d_dgrad", "operands": {"dy": y, "w": w, "out": x}, "arguments": ("dy", "w"),
            "options": options | {"x_shape": x.shape}, "terms": r * s * k // layer.groups,
            "cuts": {"n": {"dy": 0, "out": 0}} | channels,
        }  # fmt: skip
    channels = {"c": {"x": 3, "dw": 3}, "k": {"dy": 3, "dw": 0}} if alone else {}
    if depthwise:
        channels = {"c": {"x": 3, "dy": 3, "dw": 0}}
    facts = {
        "operation": "conv2d_wgrad", "operands": {"x": x, "dy": y, "dw": w}, "arguments": ("x", "dy"),
        "results": ("dw",), "options": options, "terms": math.prod(y.shape[:3]), "cuts": channels,
    }  # fmt: skip
    return _with_bias_gradient(facts, k, "k" if alone else "c") if layer.bias else facts


def _with_bias(facts: _Facts, k: int, cut: str) -> _Facts:
    """Add the bias to a forward pass; it is cut where the output channels are."""
    facts["operands"] = {"b": Operand((k,), is_batched=False), **facts["operands"]}
    facts["arguments"] = (*facts["arguments"], "b")
    return _cut_too(facts, "b", cut)


def _with_bias_gradient(facts: _Facts, k: int, cut: str) -> _Facts:
    """Add the bias's gradient to that of a filter."""
    facts["operands"] = {**facts["operands"], "db": Operand((k,), is_batched=False)}
    facts["results"] = (*facts["results"], "db")
    return _cut_too(facts, "db", cut)


def _cut_too(facts: _Facts, name: str, cut: str) -> _Facts:
    if cut in facts["cuts"]:
        facts["cuts"] = facts["cuts"] | {cut: {**facts["cuts"][cut], name: 0}}
    return facts


def _linear(layer: layers.Linear, n: int, *, pass_: Pass) -> _Facts:
    h, width, c = layer.input_shape
    rows = n * h * width
    x, y, w = Operand((rows, c)), Operand((rows, layer.k)), Operand((layer.k, c), is_batched=False)
    if pass_ is Pass.FPROP:
        facts = {
            "operation": "linear", "operands": {"x": x, "w": w, "out": y}, "arguments": ("x", "w"), "terms": c,
            "cuts": {"rows": {"x": 0, "out": 0}, "k": {"w": 0, "out": 1}},
        }  # fmt: skip
        return _with_bias(facts, layer.k, "k") if layer.bias else facts
    if pass_ is Pass.DGRAD:
        return {
            "operation": "linear_dgrad", "operands": {"dy": y, "w": w, "out": x}, "arguments": ("dy", "w"),
            "terms": layer.k, "cuts": {"rows": {"dy": 0, "out": 0}, "c": {"w": 1, "out": 1}},
        }  # fmt: skip
    facts = {
        "operation": "linear_wgrad", "operands": {"x": x, "dy": y, "dw": w}, "arguments": ("x", "dy"),
        "results": ("dw",), "terms": rows, "cuts": {"k": {"dy": 1, "dw": 0}, "c": {"x": 1, "dw": 1}},
    }  # fmt: skip
    return _with_bias_gradient(facts, layer.k, "k") if layer.bias else facts


def _pointwise(layer: Layer, n: int, *, operation: str, backward: bool = False, kind: str = "") -> _Facts:
    shape = (n, *layer.input_shape)
    names = ("dy", "saved") if backward else ("x",)
    # Every activation function has its bends within 8; what a sigmoid saves is its output, which lies in [0, 1].
    wide = () if not kind or (backward and "sigmoid" in kind) else ("x", "saved")
    operands = {name: Operand(shape, reach=8.0 if name in wide else 1.0) for name in (*names, "out")}
    if backward and kind in {"", "relu6"}:
        operands["saved"] = attrs.evolve(operands["saved"], kind="rectified")
    return {
        "operation": operation,
        "operands": operands,
        "arguments": names,
        "options": {"kind": kind} if kind else {},
        "cuts": {"n": dict.fromkeys((*names, "out"), 0)},
    }


def _max_pool(layer: layers.MaxPool2d, n: int, *, backward: bool = False) -> _Facts:
    # 1 + tap; the gradient takes any: a tap that lies outside is simply never met.
    winners = {"argmax": Operand((n, *layer.output_shape), "counts", "uint8", layer.r * layer.s + 1)}
    return _pool(layer, n, winners, backward=backward)


def _max_pool_inference(layer: layers.MaxPool2d, n: int) -> _Facts:
    return _pool(layer, n, {}, backward=False) | {"suffix": ", inference"}


def _avg_pool(layer: layers.AvgPool2d, n: int, *, backward: bool = False) -> _Facts:
    return _pool(layer, n, {}, backward=backward)


def _pool(layer: layers.MaxPool2d | layers.AvgPool2d, n: int, winners: dict[str, Operand], *, backward: bool) -> _Facts:
    options: dict[str, Any] = {"window": layer.window}
    x, y, taps = Operand((n, *layer.input_shape)), Operand((n, *layer.output_shape)), layer.r * layer.s
    facts: _Facts = {"operation": layer.type, "terms": taps, "extra_bytes": math.prod(y.shape) if winners else 0}
    if not backward:
        operands = {"x": x, "out": y} | winners
        facts |= {"operands": operands, "arguments": ("x",), "results": ("out", *winners), "options": options}
    else:
        operands = {"dy": y} | winners | {"out": x}
        facts |= {
            "operation": f"{layer.type}_backward", "operands": operands, "arguments": ("dy", *winners),
            "options": options | {"x_shape": x.shape},
        }  # fmt: skip
    return facts | {"cuts": {"n": dict.fromkeys(operands, 0)}}


def _global_pool(layer: layers.GlobalAvgPool, n: int, *, backward: bool = False) -> _Facts:
    h, w, c = layer.input_shape
    x, y = Operand((n, h, w, c)), Operand((n, c))
    operands = {"dy": y, "out": x} if backward else {"x": x, "out": y}
    return {
        "operation": "global_avg_pool" + ("_backward" if backward else ""),
        "operands": operands,
        "arguments": ("dy",) if backward else ("x",),
        "options": {"x_shape": x.shape} if backward else {},
        "terms": h * w,
        "cuts": {"n": dict.fromkeys(operands, 0)},
    }


def _statistics(c: int) -> dict[str, Operand]:
    """Mean and scale of each channel, which are float32 for every storage type."""
    return {
        "mean": Operand((c,), dtype="float32", is_batched=False),
        "inv_std": Operand((c,), "positive", dtype="float32", is_batched=False),
    }


def _batch_norm(layer: layers.BatchNorm2d, n: int) -> _Facts:
    h, w, c = layer.input_shape
    operands = {"x": Operand((n, h, w, c))} | {
        name: Operand((c,), kind, is_batched=False) for name, kind in (("gamma", "positive"), ("beta", "signed"))
    }
    operands |= _statistics(c)
    operands["out"] = operands["x"]
    return {
        "operation": "batch_norm_train", "operands": operands, "arguments": ("x", "gamma", "beta"),
        "results": ("out", "mean", "inv_std"), "options": {"eps": layer.eps}, "terms": n * h * w,
        "cuts": {"c": {name: 3 if name in {"x", "out"} else 0 for name in operands}},
        # x is needed whole for its mean and variance before its first element can be normalised.
        "repeated": n * h * w * c,
    }  # fmt: skip


def _batch_norm_inference(layer: layers.BatchNorm2d, n: int) -> _Facts:
    c = layer.input_shape[2]
    x, of_channel = Operand((n, *layer.input_shape)), functools.partial(Operand, (c,), is_batched=False)
    operands = {
        "x": x, "gamma": of_channel("positive"), "beta": of_channel(), "running_mean": of_channel(dtype="float32"),
        "running_var": of_channel("positive", "float32"), "out": x,
    }  # fmt: skip
    return {
        "operation": "batch_norm_inference", "operands": operands, "arguments": ("x", "gamma", "beta"),
        "options": {"eps": layer.eps}, "suffix": ", inference",
        "cuts": {"c": {name: 3 if name in {"x", "out"} else 0 for name in operands}, "n": {"x": 0, "out": 0}},
    }  # fmt: skip


def _batch_norm_backward(layer: layers.BatchNorm2d, n: int) -> _Facts:
    h, w, c = layer.input_shape
    operands = {"dy": Operand((n, h, w, c)), "x": Operand((n, h, w, c))} | {
        name: Operand((c,), kind, is_batched=False)
        for name, kind in (
            ("gamma", "positive"), ("dgamma", "signed"), ("dbeta", "signed")
        )
    }  # fmt: skip
    operands |= _statistics(c)
    operands["out"] = operands["x"]
    return {
        "operation": "batch_norm_backward", "operands": operands, "arguments": ("dy", "x", "gamma"),
        "results": ("out", "dgamma", "dbeta"), "terms": n * h * w,
        "cuts": {"c": {name: 3 if name in {"dy", "x", "out"} else 0 for name in operands}},
        "repeated": 2 * n * h * w * c,  # both sums over dy and x before the first element of dx
    }  # fmt: skip


def _layer_norm(layer: layers.LayerNorm, n: int, *, backward: bool = False) -> _Facts:
    h, w, c = layer.input_shape
    x, of_channel = Operand((n, h, w, c)), functools.partial(Operand, (c,), is_batched=False)
    gamma = of_channel(kind="positive")
    if not backward:
        operands = {"x": x, "gamma": gamma, "beta": of_channel(), "out": x}
        return {
            "operation": "layer_norm", "operands": operands, "arguments": ("x", "gamma", "beta"),
            "options": {"eps": layer.eps}, "terms": c, "cuts": {"n": {"x": 0, "out": 0}},
        }  # fmt: skip
    # Of any means and inverse deviations: none of its sums is less exact where they are not those of x.
    statistics = Operand((2, n * h * w), "positive", "float32", is_batched=False)
    operands = {"dy": x, "x": x, "gamma": gamma, "statistics": statistics, "out": x}
    return {
        "operation": "layer_norm_backward", "operands": operands | {"dgamma": of_channel(), "dbeta": of_channel()},
        "arguments": ("dy", "x", "gamma"), "results": ("out", "dgamma", "dbeta"), "terms": max(c, n * h * w),
        "cuts": {},
        "repeated": 2 * n * h * w * c,  # dx and the parameters' gradients are two launches
    }  # fmt: skip


def _layer_norm_keeping(layer: layers.LayerNorm, n: int) -> _Facts:
    h, w, _ = layer.input_shape
    facts = _layer_norm(layer, n)
    statistics = {"statistics": Operand((2, n, h * w), dtype="float32", is_batched=False)}
    return facts | {
        "operands": facts["operands"] | statistics, "results": ("out", "statistics"), "suffix": ", keeping",
        "cuts": {"n": {"x": 0, "out": 0, "statistics": 1}}, "extra_bytes": 8 * n * h * w,
    }  # fmt: skip


def _layer_scale(layer: layers.LayerScale, n: int, *, backward: bool = False) -> _Facts:
    h, w, c = layer.input_shape
    x, gamma = Operand((n, h, w, c)), Operand((c,), is_batched=False)
    if not backward:
        return {
            "operation": "layer_scale", "operands": {"x": x, "gamma": gamma, "out": x}, "arguments": ("x", "gamma"),
            "cuts": {"n": {"x": 0, "out": 0}},
        }  # fmt: skip
    return {
        "operation": "layer_scale_backward", "operands": {"dy": x, "x": x, "gamma": gamma, "out": x, "dgamma": gamma},
        "arguments": ("dy", "x", "gamma"), "results": ("out", "dgamma"), "terms": n * h * w,
        "cuts": {"c": {"dy": 3, "x": 3, "out": 3, "gamma": 0, "dgamma": 0}}, "repeated": n * h * w * c,
    }  # fmt: skip


def _add(layer: layers.Add, n: int) -> _Facts:
    names = tuple(f"x{index}" for index in range(layer.count))
    return {
        "operation": "add", "operands": {name: Operand((n, *layer.input_shape)) for name in (*names, "out")},
        "arguments": (names,), "cuts": {"n": dict.fromkeys((*names, "out"), 0)}, "terms": layer.count,
    }  # fmt: skip


def _concat(layer: layers.Concat, n: int) -> _Facts:
    operands = {f"x{index}": Operand((n, *shape)) for index, shape in enumerate(layer.input_shapes)}
    names = tuple(operands)
    operands["out"] = Operand((n, *layer.output_shape))
    return {
        "operation": "concat", "operands": operands, "arguments": (names,), "cuts": {"n": dict.fromkeys(operands, 0)},
    }  # fmt: skip


def _concat_backward(layer: layers.Concat, n: int) -> _Facts:
    operands = {f"dx{index}": Operand((n, *shape)) for index, shape in enumerate(layer.input_shapes)}
    names = tuple(operands)
    operands["dy"] = Operand((n, *layer.output_shape))
    return {
        "operation": "concat_backward", "operands": operands, "arguments": ("dy",), "results": names,
        "lists": {"outs": names}, "options": {"channels": tuple(shape[2] for shape in layer.input_shapes)},
        "cuts": {"n": dict.fromkeys(operands, 0)},
    }  # fmt: skip


def _tokens(layer: layers.Tokens, n: int) -> _Facts:
    x, y, parameters = _pixels_and_tokens(layer, n)
    return {
        "operation": "tokens", "operands": {"x": x, **parameters, "out": y}, "arguments": ("x", *parameters),
        "cuts": {"n": {"x": 0, "out": 0}}, "terms": 2,
    }  # fmt: skip


def _tokens_backward(layer: layers.Tokens, n: int) -> _Facts:
    x, y, parameters = _pixels_and_tokens(layer, n)
    gradients = {f"d{name}": operand for name, operand in parameters.items()}
    return {
        "operation": "tokens_backward", "operands": {"dy": y, "out": x, **gradients}, "arguments": ("dy",),
        "results": ("out", *gradients), "cuts": {}, "terms": n,
        "repeated": math.prod(y.shape),  # the sums and the copy are two launches
    }  # fmt: skip


def _pixels_and_tokens(layer: layers.Tokens, n: int) -> tuple[Operand, Operand, dict[str, Operand]]:
    shapes = layer.parameter_shapes
    parameters = {name: Operand(shapes[name], is_batched=False) for name in ("token", "position")}
    return Operand((n, *layer.input_shape)), Operand((n, *layer.output_shape)), parameters


def _class_token(layer: layers.ClassToken, n: int, *, backward: bool = False) -> _Facts:
    x, y = Operand((n, *layer.input_shape)), Operand((n, *layer.output_shape))
    return {
        "operation": "class_token" + ("_backward" if backward else ""),
        "operands": {"dy": y, "out": x} if backward else {"x": x, "out": y},
        "arguments": ("dy",) if backward else ("x",), "options": {"x_shape": x.shape} if backward else {},
        "cuts": {"n": dict.fromkeys(("dy" if backward else "x", "out"), 0)},
    }  # fmt: skip


def _slice(layer: layers.Slice, n: int, *, backward: bool = False) -> _Facts:
    x, y = Operand((n, *layer.input_shape)), Operand((n, *layer.output_shape))
    operands = {"dy": y, "out": x} if backward else {"x": x, "out": y}
    return {
        "operation": "slice_channels_backward" if backward else "slice_channels", "operands": operands,
        "arguments": tuple(operands)[:-1], "options": {"start": layer.start} | ({} if backward else {"end": layer.end}),
        "cuts": {"n": dict.fromkeys(operands, 0)},
    }  # fmt: skip


def _dropout(layer: layers.Dropout, n: int) -> _Facts:
    shape = (n, *layer.input_shape)
    return {
        "operation": "dropout", "arguments": ("x",), "results": ("out", "mask"),
        "operands": {"x": Operand(shape), "out": Operand(shape), "mask": Operand(shape, "counts", "uint8", 2)},
        "options": {"p": layer.p, "seed": 0}, "extra_bytes": math.prod(shape), "cuts": {},
    }  # fmt: skip


def _dropout_backward(layer: layers.Dropout, n: int) -> _Facts:
    shape = (n, *layer.input_shape)
    operands = {"dy": Operand(shape), "mask": Operand(shape, "counts", "uint8", 2), "out": Operand(shape)}
    return {
        "operation": "dropout_backward", "operands": operands, "arguments": ("dy", "mask"), "options": {"p": layer.p},
        "extra_bytes": math.prod(shape), "cuts": {"n": dict.fromkeys(operands, 0)},
    }  # fmt: skip


def _softmax(layer: layers.Softmax, n: int, *, backward: bool = False) -> _Facts:
    operands = {name: Operand((n, *layer.input_shape)) for name in (("dy", "y") if backward else ("x",))}
    operands["out"] = Operand((n, *layer.input_shape))
    return {
        "operation": "softmax_backward" if backward else "softmax", "operands": operands,
        "arguments": tuple(operands)[:-1], "terms": layer.input_shape[2], "cuts": {"n": dict.fromkeys(operands, 0)},
    }  # fmt: skip


def _scale(layer: layers.Scale, n: int, *, backward: bool = False) -> _Facts:
    h, w, c = layer.input_shape
    x, s = Operand((n, h, w, c)), Operand((n, 1, 1, c))
    operands = {"dy": x, "x": x, "s": s, "dx": x, "ds": s} if backward else {"x": x, "s": s, "out": x}
    return {
        "operation": "scale_backward" if backward else "scale",
        "operands": operands,
        "arguments": ("dy", "x", "s") if backward else ("x", "s"),
        "results": ("dx", "ds") if backward else ("out",),
        "terms": h * w if backward else 1,
        "cuts": {"n": dict.fromkeys(operands, 0)},
    }


def _attention(layer: layers.Attention, n: int) -> _Facts:
    x, parameters = _tokens_and_weights(layer, n)
    return {
        "operation": "attention", "operands": {"x": x, **parameters, "out": x}, "arguments": ("x",),
        "options": {"heads": layer.heads}, "terms": x.shape[2], "cuts": {"n": {"x": 0, "out": 0}},
        "repeated": 2 * sum(layer.saved_elements()[name][0] for name in ("qkv", "mixed")) * n,
    }  # fmt: skip


def _attention_keeping(layer: layers.Attention, n: int) -> _Facts:
    facts, sizes = _attention(layer, n), {name: count for name, (count, _) in stored_saved_elements(layer).items()}
    kept = {name: Operand((n, elements)) for name, elements in sizes.items()}
    return facts | {
        "operands": facts["operands"] | kept, "results": ("out", *kept), "lists": {"keep": tuple(kept)},
        "cuts": {"n": {**facts["cuts"]["n"], **dict.fromkeys(kept, 0)}}, "suffix": ", keeping",
        "traffic": layer.traffic(Pass.FPROP, n) + n * sum(sizes.values()),
        # The others are read again; the scores are read, written over by a softmax, and read.
        "repeated": n * (sizes["qkv"] + sizes["mixed"] + 3 * sizes["weights"]),
    }  # fmt: skip


def _attention_backward(layer: layers.Attention, n: int) -> _Facts:
    x, parameters = _tokens_and_weights(layer, n)
    sizes = {name: elements for name, (elements, _) in stored_saved_elements(layer).items()}
    saved = {name: Operand((n, elements)) for name, elements in sizes.items()}
    gradients = {f"d{name}": Operand(operand.shape, is_batched=False) for name, operand in parameters.items()}
    used = {name: operand for name, operand in parameters.items() if name.startswith("w")}
    qkv, weights, mixed = (n * elements for elements in sizes.values())
    operands = {"dy": x, "x": x, **used, **saved, "out": x, **gradients}
    return {
        "operation": "attention_backward", "operands": operands, "arguments": ("dy", "x", *used),
        "results": ("out", *gradients), "lists": {"saved": tuple(saved)}, "options": {"heads": layer.heads},
        "terms": max(3 * x.shape[2], n * x.shape[1]),
        "cuts": {"n": dict.fromkeys(("dy", "x", *saved, "out"), 0)}, "prepare": "attention",
        "flops": sum(layer.pass_flops(pass_, n) for pass_ in (Pass.DGRAD, Pass.WGRAD)),
        "traffic": sum(math.prod(operand.shape) for operand in operands.values()),
        # Gradients of all that is saved, written and read by what follows; the weights again.
        "repeated": 3 * qkv + 6 * weights + 4 * mixed,
    }  # fmt: skip


def _tokens_and_weights(layer: layers.Attention, n: int) -> tuple[Operand, dict[str, Operand]]:
    """Return the input, and projections that make queries and keys, and so scores, of order one."""
    h, w, c = layer.input_shape
    shapes, reach = layer.parameter_shapes, 3 / math.sqrt(c)
    return Operand((n, h * w, c)), {name: Operand(shapes[name], is_batched=False, reach=reach) for name in shapes}


_CURVES: Sequence[type[Layer]] = (
    layers.ReLU6, layers.Sigmoid, layers.SiLU, layers.HardSigmoid, layers.HardSwish, layers.GELU,
)  # fmt: skip
BUILDERS: dict[tuple[type[Layer], Pass], Callable[[Any, int], _Facts]] = {
    **{(layers.Conv2d, pass_): functools.partial(_conv2d, pass_=pass_) for pass_ in Pass},
    **{(layers.Linear, pass_): functools.partial(_linear, pass_=pass_) for pass_ in Pass},
    (layers.ReLU, Pass.FPROP): functools.partial(_pointwise, operation="relu"),
    (layers.ReLU, Pass.DGRAD): functools.partial(_pointwise, operation="relu_backward", backward=True),
    **{(kind, Pass.FPROP): functools.partial(_pointwise, operation="activation", kind=kind.type) for kind in _CURVES},
    **{
        (kind, Pass.DGRAD): functools.partial(
            _pointwise, operation="activation_backward", backward=True, kind=kind.type
        )
        for kind in _CURVES
    },
    (layers.MaxPool2d, Pass.FPROP): _max_pool,
    (layers.MaxPool2d, Pass.DGRAD): functools.partial(_max_pool, backward=True),
    (layers.AvgPool2d, Pass.FPROP): _avg_pool,
    (layers.AvgPool2d, Pass.DGRAD): functools.partial(_avg_pool, backward=True),
    (layers.GlobalAvgPool, Pass.FPROP): _global_pool,
    (layers.GlobalAvgPool, Pass.DGRAD): functools.partial(_global_pool, backward=True),
    (layers.BatchNorm2d, Pass.FPROP): _batch_norm,
    (layers.BatchNorm2d, Pass.DGRAD): _batch_norm_backward,
    (layers.LayerNorm, Pass.FPROP): _layer_norm,
    (layers.LayerNorm, Pass.DGRAD): functools.partial(_layer_norm, backward=True),
    (layers.LayerScale, Pass.FPROP): _layer_scale,
    (layers.LayerScale, Pass.DGRAD): functools.partial(_layer_scale, backward=True),
    (layers.Add, Pass.FPROP): _add,
    (layers.Concat, Pass.FPROP): _concat,
    (layers.Concat, Pass.DGRAD): _concat_backward,
    (layers.Tokens, Pass.FPROP): _tokens,
    (layers.Tokens, Pass.DGRAD): _tokens_backward,
    (layers.ClassToken, Pass.FPROP): _class_token,
    (layers.ClassToken, Pass.DGRAD): functools.partial(_class_token, backward=True),
    (layers.Slice, Pass.FPROP): _slice,
    (layers.Slice, Pass.DGRAD): functools.partial(_slice, backward=True),
    (layers.Dropout, Pass.FPROP): _dropout,
    (layers.Dropout, Pass.DGRAD): _dropout_backward,
    (layers.Softmax, Pass.FPROP): _softmax,
    (layers.Softmax, Pass.DGRAD): functools.partial(_softmax, backward=True),
    (layers.Scale, Pass.FPROP): _scale,
    (layers.Scale, Pass.DGRAD): functools.partial(_scale, backward=True),
    (layers.Attention, Pass.FPROP): _attention,
    (layers.Attention, Pass.DGRAD): _attention_backward,
}
VARIANTS: dict[tuple[type[Layer], str], Callable[[Any, int], _Facts]] = {
    (layers.Attention, "training"): _attention_keeping,
    (layers.LayerNorm, "training"): _layer_norm_keeping,
    (layers.BatchNorm2d, "inference"): _batch_norm_inference,
    (layers.MaxPool2d, "inference"): _max_pool_inference,
}
"""Forward passes that differ by mode from those in `BUILDERS`."""
