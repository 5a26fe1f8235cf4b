"""The known operators of PyTorch's graphs (`OPERATORS`), each in the builder's terms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cubatch.network.importers.source import DROPS_ALL, Meaning, einsum_flop, first_position, unlike

_CONVOLUTIONS = frozenset(f"conv{way}{axes}d" for way in ("", "_transpose") for axes in (1, 2, 3))
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_OF_ROWS = _RECURRENT | {f"{name}_cell" for name in _RECURRENT} | {"bilinear"}


class Call:
    """
    A call of an operator, with its arguments by name and their defaults filled in.

    Args:
        torch: The package torch.
        node: The node of the graph.
        known: Tensors that do not depend on the network's input, by node.
    """

    def __init__(self, torch: Any, node: Any, known: dict[Any, Any]) -> None:
        self._node, self._known, self._seeded = node, known, torch.Tag.nondeterministic_seeded
        schema = node.target._schema.arguments if hasattr(node.target, "_schema") else ()  # noqa: SLF001 - its only name
        given = {argument.name: argument.default_value for argument in schema}
        given.update(zip(given, node.args, strict=False))
        self._arguments = {**given, **node.kwargs}
        self.read: list[Any] = []  # the nodes that it reads, in order, with repetitions
        torch.fx.node.map_arg((node.args, node.kwargs), self.read.append)
        self.values = [each for each in self.read if each not in known]

    def __getitem__(self, name: str) -> Any:
        return self._arguments[name]

    def option(self, name: str, default: Any) -> Any:
        """Return an argument; `default` if this overload of the operator lacks it."""
        return self._arguments.get(name, default)

    def constant(self, name: str) -> Any:
        """Return an argument that is a number or a constant tensor; None if it is computed from the network's input."""
        return self.known(self._arguments.get(name))

    def known(self, argument: Any) -> Any:
        """Return an argument that is a number, or the tensor of a constant node; None if it depends on the input."""
        return argument if argument is None or isinstance(argument, int | float) else self._known.get(argument)

    def is_value(self, name: str) -> bool:
        """Return whether an argument depends on the network's input."""
        return self._arguments.get(name) in self.values

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an argument that is a tensor."""
        return tuple(self._arguments[name].meta["val"].shape)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the result, which is one tensor, with the batch."""
        return tuple(self._node.meta["val"].shape)

    @property
    def is_random(self) -> bool:
        """Whether the result differs in each run; dropout and similar operators have arguments that enable it."""
        enabled = [self._arguments[name] for name in ("train", "training", "dropout_p") if name in self._arguments]
        return self._seeded in getattr(self._node.target, "tags", ()) and all(enabled)

    @property
    def is_floating(self) -> bool:
        """Whether the result holds floating-point numbers."""
        return bool(self._node.meta["val"].dtype.is_floating_point)

    @property
    def result_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the results of an operator that returns several tensors."""
        return [tuple(each.shape) for each in self._node.meta["val"]]

    @property
    def flop(self) -> int:
        """FLOP of its matrix products for the whole batch, those of convolutions included; 0 for other operators."""
        name = str(self._node.target).rpartition(".")[0].removeprefix("aten.")
        shapes = [tuple(map(int, getattr(each.meta.get("val"), "shape", ()))) for each in self.read]
        if name in {"matmul", "bmm", "mm", "linear"}:
            return 2 * shapes[0][-1] * math.prod(self.result_shape)
        if name in {"addmm", "baddbmm"}:
            return 2 * shapes[-1][-2] * math.prod(self.result_shape)
        if name in _CONVOLUTIONS:  # each output is a product with the whole window; if transposed, each input
            positions = shapes[0] if "transpose" in name else self.result_shape
            return 2 * math.prod(shapes[1][1:]) * math.prod(positions)
        if name == "scaled_dot_product_attention":
            return 4 * math.prod(shapes[0]) * shapes[1][-2]
        if name in _OF_ROWS:
            return 2 * math.prod(shapes[0][:-1]) * self._factors_of_row(name, shapes)
        return einsum_flop(self["equation"], shapes) if name == "einsum" else 0

    def _factors_of_row(self, name: str, shapes: list[tuple[int, ...]]) -> int:
        """
        Return the number of weights by which each row of the first input (a position of a sample) is multiplied.

        `name` is the operator, and `shapes` are those of its tensors.
        """
        if name == "bilinear":  # a product with each matrix, then one of each result with the second input
            outputs, _, second = shapes[2]
            return math.prod(shapes[2]) + outputs * second
        if name.endswith("_cell"):
            return math.prod(self.shape("w_ih")) + math.prod(self.shape("w_hh"))
        return sum(math.prod(shape) for shape in shapes[1:] if len(shape) == 2)  # noqa: PLR2004 - no biases, no states

    @staticmethod
    def array(tensor: Any) -> np.ndarray[Any, Any]:
        """Return a constant as a NumPy array in float32."""
        if not isinstance(tensor, int | float):
            tensor = tensor.detach().float().cpu().numpy()
        return np.asarray(tensor, dtype=np.float32)


def _pair(value: Any) -> tuple[int, int]:
    items = (value,) * 2 if isinstance(value, int) else tuple(value)
    return (items * 2)[:2]


def _quad(value: Any) -> tuple[int, int, int, int]:
    vertical, horizontal = _pair(value)
    return vertical, vertical, horizontal, horizontal


def _conv(call: Call) -> Meaning:
    w = call.constant("weight")
    if w is None or w.ndim != 4:  # noqa: PLR2004
        return unlike("its filter is no constant of two dimensions")
    stride, dilation, pad = _pair(call["stride"]), _pair(call["dilation"]), call["padding"]
    if pad == "same":  # the odd zero is at the end
        total = [dilation[i] * (w.shape[2 + i] - 1) for i in (0, 1)]
        pad = (total[0] // 2, total[0] - total[0] // 2, total[1] // 2, total[1] - total[1] // 2)
    else:
        pad = _quad(0 if pad == "valid" else pad)
    options = {"stride": stride, "pad": pad, "dilation": dilation, "groups": call["groups"]}
    return "conv", {"w": w, "b": call.constant("bias")}, options


def _linear(call: Call) -> Meaning:
    w = call.constant("weight")
    return unlike("its weights are no constants") if w is None else ("linear", {"w": w, "b": call.constant("bias")}, {})


def _matmul(call: Call) -> Meaning:
    w = call.constant("mat2") if call.option("other", None) is None else call.constant("other")
    if not call.is_value("self"):
        return unlike("its first factor does not depend on the network's input")
    if w is None:
        return unlike("it multiplies two values that both depend on the input")
    if w.ndim != 2:  # noqa: PLR2004
        return unlike(f"its constant has {w.ndim} axes, and is no matrix")
    return "linear", {"w": w.T}, {}


def _batch_norm(call: Call) -> Meaning:
    mean, var = call.constant("running_mean"), call.constant("running_var")
    if mean is None or var is None:
        return unlike("it keeps no running statistics")
    if call.option("training", False):  # noqa: FBT003 - the operator's own
        return unlike("it is in training mode")
    gamma, beta = call.constant("weight"), call.constant("bias")
    arrays = {
        "gamma": mean.new_ones(mean.shape) if gamma is None else gamma,
        "beta": mean.new_zeros(mean.shape) if beta is None else beta,
        "mean": mean,
        "var": var,
    }
    return "batch_norm", arrays, {"eps": call["eps"], "momentum": call["momentum"]}


def _layer_norm(call: Call) -> Meaning:
    gamma, beta = call.constant("weight"), call.constant("bias")
    if gamma is None:
        return unlike("it has no scale")
    arrays = {"gamma": gamma, "beta": gamma.new_zeros(gamma.shape) if beta is None else beta}
    return "layer_norm", arrays, {"eps": call["eps"], "axes": len(call["normalized_shape"])}


def _pool(call: Call, **more: Any) -> dict[str, Any]:
    window = _pair(call["kernel_size"])
    return {
        "dilation": _pair(call.option("dilation", 1)),
        "window": window,
        "stride": _pair(call["stride"]) if call["stride"] else window,
        "pad": _quad(call["padding"]),
        "ceil": call["ceil_mode"],
        **more,
    }


def _max_pool(call: Call) -> Meaning:
    return "max_pool", {}, _pool(call)


def _avg_pool(call: Call) -> Meaning:
    if call["divisor_override"] is not None:
        return unlike("it has a divisor_override")
    return "avg_pool", {}, _pool(call, count_pad=call["count_include_pad"])


def _adaptive_avg_pool(call: Call) -> Meaning:
    return "adaptive_avg_pool", {}, {"extents": call.result_shape[-2:]}


def _mean(call: Call) -> Meaning:
    dims = call.option("dim", None)
    axes = range(len(call.shape("self"))) if dims is None else dims
    return "mean", {}, {"axes": tuple(axes), "keep": call.option("keepdim", False)}  # noqa: FBT003 - as above


def _joined(kind: str) -> Callable[[Call], Meaning]:
    """Return a function that translates an addition or product (`kind`) of two values, or of one and a constant."""

    def meaning(call: Call) -> Meaning:
        if call.option("alpha", 1) != 1:
            return unlike("it scales its second input")
        constants = [call.constant(name) for name in ("self", "other") if not call.is_value(name)]
        if any(each is None for each in constants):
            return unlike("its constant is no real number")
        return kind, dict(zip(["constant"], constants, strict=False)), {}

    return meaning


def _concat(call: Call) -> Meaning:
    token = call.known(call["tensors"][0])
    if len(call["tensors"]) == 2 and len(call.values) == 1 and token is not None:  # noqa: PLR2004
        return "prepend", {"token": token}, {"axis": call["dim"]}
    if len(call.values) != len(call["tensors"]):
        return unlike("it joins a constant")
    return ("concat" if len(call.values) > 1 else "identity"), {}, {"axis": call["dim"]}


def _slice(call: Call) -> Meaning:
    if call.result_shape == call.shape("self"):
        return "identity", {}, {}
    if call["step"] != 1:
        return unlike("it takes steps")
    return _narrow(call)


def _narrow(call: Call) -> Meaning:
    if call.is_value("start"):
        return unlike("where it begins depends on the input")
    start = first_position(int(call.constant("start") or 0), call.shape("self")[call["dim"]])
    return "slice", {}, {"axis": call["dim"], "start": start}


def _attention(call: Call) -> Meaning:
    if any(call.option(name, None) for name in ("attn_mask", "is_causal", "scale", "enable_gqa")):
        return unlike("it has a mask, or a scale of its own")
    if call.option("dropout_p", 0):
        return unlike("it drops some of its weights, in evaluation, too")
    return "attention", {}, {}


def _gelu(call: Call) -> Meaning:
    return unlike("it approximates with tanh") if call["approximate"] != "none" else ("gelu", {}, {})


def _clamp(low: str, high: str) -> Callable[[Call], Meaning]:
    def meaning(call: Call) -> Meaning:
        bounds = call.option(low, None), call.option(high, None)
        if bounds == (0, 6):
            return "relu6", {}, {}
        return ("relu", {}, {}) if bounds == (0, None) else unlike("its bounds are not 0 and 6")

    return meaning


def _dropout(call: Call) -> Meaning:
    if call.option("train", False):  # noqa: FBT003 - as above
        return unlike("it drops in evaluation, too")
    return unlike(DROPS_ALL) if call["p"] == 1 else ("dropout", {}, {"p": float(call["p"])})


def _permute(call: Call) -> Meaning:
    return "permute", {}, {"order": tuple(call["dims"])}


def _transpose(call: Call) -> Meaning:
    order = list(range(len(call.result_shape)))
    first, second = call["dim0"], call["dim1"]
    order[first], order[second] = order[second], order[first]
    return "permute", {}, {"order": tuple(order)}


def _pad(call: Call) -> Meaning:
    pad = [*call["pad"], 0, 0, 0, 0][:4]
    if call.option("mode", "constant") != "constant" or call.option("value", None) not in {None, 0}:
        return unlike("it pads with something else than zeros")
    if any(call["pad"][4:]) or min(pad) < 0:
        return unlike("it pads other axes than height and width, or crops")
    left, right, top, bottom = pad
    return "pad", {}, {"pad": (top, bottom, left, right)}


def _plain(kind: str, **arguments: str) -> Callable[[Call], Meaning]:
    """
    Return a function that translates a call to a layer of this kind.

    `arguments` has, by option of the layer, the name of the call's argument.
    """
    return lambda call: (kind, {}, {option: call[name] for option, name in arguments.items()})


def part(call: Call, name: str, number: int) -> Meaning:
    """
    Return the meaning of result `number` of an operator with several results: a part of its input.

    An operator that is not in `SEVERAL` has no layer.
    """
    if name not in SEVERAL:
        return "", {}, {}
    axis = call["dim"]
    if name == "aten.unbind":
        return "select", {}, {"axis": axis, "index": number}
    return "slice", {}, {"axis": axis, "start": sum(shape[axis] for shape in call.result_shapes[:number])}


def _cast(call: Call) -> Meaning:
    return ("identity", {}, {}) if call.is_floating else unlike("it rounds to whole numbers")


SEVERAL = frozenset({"aten.unbind", "aten.chunk", "aten.split", "aten.split_with_sizes"})  # each result is a part

_BY_KIND: dict[Callable[[Call], Meaning], tuple[str, ...]] = {
    _conv: ("conv2d",),
    _linear: ("linear",),
    _matmul: ("matmul", "mm"),
    _batch_norm: ("batch_norm",),
    _layer_norm: ("layer_norm",),
    _max_pool: ("max_pool2d",),
    _avg_pool: ("avg_pool2d",),
    _adaptive_avg_pool: ("adaptive_avg_pool2d",),
    _mean: ("mean",),
    _plain("relu"): ("relu", "relu_"),
    _plain("relu6"): ("relu6", "relu6_"),
    _clamp("min_val", "max_val"): ("hardtanh", "hardtanh_"),
    _clamp("min", "max"): ("clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_"),
    _plain("hard_swish"): ("hardswish", "hardswish_"),
    _plain("hard_sigmoid"): ("hardsigmoid", "hardsigmoid_"),
    _plain("sigmoid"): ("sigmoid", "sigmoid_"),
    _plain("silu"): ("silu", "silu_"),
    _gelu: ("gelu", "gelu_"),
    _plain("softmax", axis="dim"): ("softmax", "_softmax"),
    _dropout: ("dropout", "dropout_", "feature_dropout", "feature_dropout_"),
    _joined("add"): ("add", "add_"),
    _joined("mul"): ("mul", "mul_"),
    _concat: ("cat", "concat"),
    _attention: ("scaled_dot_product_attention",),
    _plain("select", axis="dim", index="index"): ("select",),
    _slice: ("slice",),
    _narrow: ("narrow",),
    _pad: ("pad", "constant_pad_nd"),
    _plain("reshape"): ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "_unsafe_view"),
    _permute: ("permute",),
    _transpose: ("transpose",),
    _plain("identity"): ("contiguous", "clone", "alias", "detach", "lift_fresh_copy"),
    _cast: ("to", "_to_copy"),
}
OPERATORS: dict[str, Callable[[Call], Meaning]] = {
    f"aten.{name}": meaning for meaning, names in _BY_KIND.items() for name in names
}
