"""The known operators of ONNX files (`OPERATORS`), each in the builder's terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from cubatch.network.importers.source import DROPS_ALL, Meaning, einsum_flop, first_position, unlike

Shape = tuple[int, ...]

_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
_FLOATS = frozenset({1, 10, 11, 16})  # onnx.TensorProto: FLOAT, FLOAT16, DOUBLE, BFLOAT16


@attrs.frozen
class Call:
    """A node of an ONNX graph."""

    name: str  # its operator
    inputs: Sequence[str]  # names of its inputs; "" is an input that is left out
    attributes: Mapping[str, Any]  # attributes by name
    constants: Mapping[str, np.ndarray[Any, Any]]  # arrays that do not depend on the network's input, by name
    shapes: Mapping[str, Shape]  # known shapes of all other values, by name
    result_shape: Shape  # shape of the result
    opset: int  # version of the operators
    results: Sequence[str]  # names of all its results; "" is a result that is left out

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the attribute `name` of the node; `default` if it is not set."""
        return self.attributes.get(name, default)

    @property
    def values(self) -> list[str]:
        """Names of the inputs that depend on the network's input."""
        return [name for name in self.inputs if name and name not in self.constants]

    def constant(self, place: int) -> np.ndarray[Any, Any] | None:
        """Return the input at this position if it is constant; None if left out or dependent on the network's input."""
        return self.constants.get(self.inputs[place]) if place < len(self.inputs) else None

    def given(self, name: str, place: int) -> Any:
        """
        Return a value that newer operators take as input `place`, from 0, and older ones as the attribute `name`.

        A constant input is returned as a Python number or list, otherwise the attribute. None if the node has neither.
        """
        array = self.constant(place)
        return self.get(name) if array is None else array.tolist()

    @property
    def flop(self) -> int:
        """FLOP of its matrix products for the whole batch, those of convolutions included; 0 for other operators."""
        shapes = [
            self.constants[name].shape if name in self.constants else self.shapes.get(name) for name in self.inputs
        ]
        first, second, third = (*shapes, None, None, None)[:3]
        if not first or not second or not self.result_shape:
            return 0
        if self.name in {"MatMul", "Gemm"}:
            return 2 * first[0 if self.get("transA", 0) else -1] * math.prod(self.result_shape)
        if self.name in _RECURRENT:  # a product of each position of each sample with the matrices of each direction
            return 2 * math.prod(first[:2]) * (math.prod(second) + math.prod(third or (0,)))
        if self.name in {
            "Conv",
            "ConvTranspose",
        }:  # each output is a product with the whole window; if transposed, each input
            return 2 * math.prod(second[1:]) * math.prod(self.result_shape if self.name == "Conv" else first)
        if self.name == "Attention":  # a product of each query with each key, and one with the values
            return 4 * math.prod(first) * second[-2]
        return einsum_flop(self["equation"], [first, second]) if self.name == "Einsum" else 0


def _plain(kind: str, **options: Any) -> Callable[[Call], Meaning]:
    return lambda _: (kind, {}, options)


def _pads(call: Call, window: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the padding of a convolution or pool as (top, bottom, left, right), also where `auto_pad` decides it."""
    automatic = call.get("auto_pad", "NOTSET")
    if automatic not in {"SAME_UPPER", "SAME_LOWER"}:
        top, left, bottom, right = call.get("pads", [0, 0, 0, 0])
        return top, bottom, left, right
    pads: list[int] = []
    for axis in (0, 1):
        size, out = call.shapes[call.inputs[0]][2 + axis], call.result_shape[2 + axis]
        reach = (window[axis] - 1) * call.get("dilations", [1, 1])[axis] + 1
        total = max(0, (out - 1) * call.get("strides", [1, 1])[axis] + reach - size)
        less = (total // 2, total - total // 2)
        pads += less if automatic == "SAME_UPPER" else less[::-1]
    top, bottom, left, right = pads
    return top, bottom, left, right


def _conv(call: Call) -> Meaning:
    w = call.constant(1)
    if w is None or w.ndim != 4:  # noqa: PLR2004
        return unlike("its filter is no constant of two dimensions")
    options = {
        "stride": tuple(call.get("strides", [1, 1])),
        "pad": _pads(call, w.shape[2:]),
        "dilation": tuple(call.get("dilations", [1, 1])),
        "groups": call.get("group", 1),
    }
    return "conv", {"w": w, "b": call.constant(2)}, options


def _gemm(call: Call) -> Meaning:
    w = call.constant(1)
    factors = call.get("alpha", 1.0), call.get("beta", 1.0)
    if w is None or call.get("transA", 0) or factors != (1.0, 1.0):
        return unlike("its weights depend on the input, or it is scaled or transposed (alpha, beta, transA)")
    w, bias = (w if call.get("transB", 0) else w.T), call.constant(2)
    if bias is not None and bias.size != 1 and (bias.size != w.shape[0] or bias.shape[-1] != w.shape[0]):
        return unlike("it adds another row to each sample")
    return "linear", {"w": w, "b": None if bias is None else np.broadcast_to(bias.reshape(-1), w.shape[:1])}, {}


def _matmul(call: Call) -> Meaning:
    w = call.constant(1)
    if w is None:
        return unlike("it multiplies two values that both depend on the input")
    if w.ndim != 2:  # noqa: PLR2004
        return unlike(f"its constant has {w.ndim} axes, and is no matrix")
    return "linear", {"w": w.T}, {}


def _batch_norm(call: Call) -> Meaning:
    arrays = {name: call.constant(place) for place, name in enumerate(("gamma", "beta", "mean", "var"), start=1)}
    is_training = call.get("training_mode", 0)
    if call.opset < 7:  # noqa: PLR2004 - versions of the operator
        is_training = not call.get("is_test", 0)
    elif call.opset < 14:  # noqa: PLR2004
        is_training = any(call.results[1:])  # it returns statistics
    if is_training or any(array is None for array in arrays.values()):
        return unlike("it is in training mode, or its statistics are no constants")
    momentum = 1 - call.get("momentum", 0.9)  # ONNX has the share of the old statistics, cubatch that of the new
    return "batch_norm", arrays, {"eps": call.get("epsilon", 1e-5), "momentum": momentum}


def _layer_norm(call: Call) -> Meaning:
    gamma, beta = call.constant(1), call.constant(2)
    if gamma is None:
        return unlike("its scale is no constant")
    rank, axis = len(call.result_shape), call.get("axis", -1)
    arrays = {"gamma": gamma, "beta": np.zeros_like(gamma) if beta is None else beta}
    return "layer_norm", arrays, {"eps": call.get("epsilon", 1e-5), "axes": rank - axis % rank}


def _pool(kind: str) -> Callable[[Call], Meaning]:
    def meaning(call: Call) -> Meaning:
        window = tuple(call["kernel_shape"])
        dilation = tuple(call.get("dilations", [1, 1]))
        if len(window) != 2:  # noqa: PLR2004
            return unlike("its window has not two dimensions")
        options = {
            "window": window,
            "stride": tuple(call.get("strides", [1, 1])),
            "pad": _pads(call, window),
            "ceil": bool(call.get("ceil_mode", 0)),
            "dilation": dilation,
        }
        return kind, {}, options | {"count_pad": bool(call.get("count_include_pad", 0))}

    return meaning


def _mean(call: Call) -> Meaning:
    axes = call.given("axes", 1)
    rank = len(call.shapes[call.inputs[0]])
    return "mean", {}, {"axes": tuple(range(rank) if axes is None else axes), "keep": bool(call.get("keepdims", 1))}


_LARGEST = {"float16": 65504.0, "bfloat16": 3.38e38}  # a bound this large is none; other types have float32's


def _clip(call: Call) -> Meaning:
    low, high = call.given("min", 1), call.given("max", 2)
    if (low, high) == (0, 6):
        return "relu6", {}, {}
    bound = call.constant(2)
    is_relu = low == 0 and (high is None or high >= _LARGEST.get("" if bound is None else bound.dtype.name, 3.4e38))
    return ("relu", {}, {}) if is_relu else unlike("its bounds are not 0 and 6")


def _hard_sigmoid(call: Call) -> Meaning:
    slope, middle = call.get("alpha", 0.2), call.get("beta", 0.5)
    has_layer = abs(slope - 1 / 6) < 1e-6 and middle == 0.5  # noqa: PLR2004 - 1 / 6 in float32
    return ("hard_sigmoid", {}, {}) if has_layer else unlike(f"its slope is {slope:g}, not 1 / 6")


def _swish(call: Call) -> Meaning:
    return ("silu", {}, {}) if call.get("alpha", 1.0) == 1.0 else unlike("it scales its sigmoid's input")


def _gelu(call: Call) -> Meaning:
    return ("gelu", {}, {}) if call.get("approximate", "none") == "none" else unlike("it approximates with tanh")


def default_softmax_axis(opset: int) -> int:
    """Return the default axis of a softmax: -1, or 1 before opset 13, where it is over all axes from 1 on."""
    return -1 if opset >= 13 else 1  # noqa: PLR2004


def _softmax(call: Call) -> Meaning:
    rank = len(call.result_shape)
    axis = call.get("axis", default_softmax_axis(call.opset)) % rank
    if call.opset < 13 and axis != rank - 1:  # noqa: PLR2004
        return unlike("it is over several axes, as before opset 13")
    return "softmax", {}, {"axis": axis}


def _dropout(call: Call) -> Meaning:
    share, mode = call.given("ratio", 1), call.constant(2)
    # Before opset 7 it drops elements unless is_test is set.
    if (mode is not None and mode.any()) or (call.opset < 7 and not call.get("is_test", 0)):  # noqa: PLR2004
        return unlike("it is in training mode")
    return unlike(DROPS_ALL) if share == 1 else ("dropout", {}, {"p": 0.5 if share is None else float(share)})


def _joined(kind: str) -> Callable[[Call], Meaning]:
    """Return a function that translates an addition or product (`kind`) of two values, or of one and a constant."""

    def meaning(call: Call) -> Meaning:
        constants = [call.constants[name] for name in call.inputs if name in call.constants]
        return kind, dict(zip(["constant"], constants, strict=False)), {}

    return meaning


def _sum(call: Call) -> Meaning:
    if len(call.inputs) > 2:  # noqa: PLR2004
        return unlike("it adds more than two values")
    return _joined("add")(call) if len(call.inputs) > 1 else ("identity", {}, {})


def _gather(call: Call) -> Meaning:
    index = call.constant(1)
    if index is None or index.ndim:
        return unlike("it takes other than one position of an axis")
    return "select", {}, {"axis": call.get("axis", 0), "index": int(index)}


def _slice(call: Call) -> Meaning:
    source = call.shapes[call.inputs[0]]
    axes = [axis for axis, (size, rest) in enumerate(zip(source, call.result_shape, strict=True)) if size != rest]
    starts, steps = call.given("starts", 1), call.given("steps", 4)
    if any(step != 1 for step in steps or ()):  # -1 turns an axis around and leaves its extent
        return unlike("it cuts several axes, or takes steps")
    if not axes:
        return "identity", {}, {}
    if len(axes) != 1 or starts is None or len(starts) != 1:
        return unlike("it cuts several axes, or takes steps")
    return "slice", {}, {"axis": axes[0], "start": first_position(starts[0], source[axes[0]])}


def _concat(call: Call) -> Meaning:
    token = call.constant(0)
    if len(call.inputs) == 2 and len(call.values) == 1 and token is not None:  # noqa: PLR2004
        return "prepend", {"token": token}, {"axis": call["axis"]}
    if len(call.values) != len(call.inputs):
        return unlike("it joins a constant")
    return ("concat" if len(call.values) > 1 else "identity"), {}, {"axis": call["axis"]}


def _transpose(call: Call) -> Meaning:
    return "permute", {}, {"order": tuple(call.get("perm", range(len(call.result_shape))[::-1]))}


def _pad(call: Call) -> Meaning:
    pads, value = call.given("pads", 1), call.given("value", 2)
    if call.get("mode", "constant") != "constant" or value not in (None, 0, [0]) or call.constant(3) is not None:
        return unlike("it pads with something else than zeros, or names its axes")
    if pads is None or len(pads) != 8 or any(pads[i] for i in (0, 1, 4, 5)) or min(pads) < 0:  # noqa: PLR2004
        return unlike("it pads other axes than height and width, or crops")
    return "pad", {}, {"pad": (pads[2], pads[6], pads[3], pads[7])}


def _cast(call: Call) -> Meaning:
    return ("identity", {}, {}) if call["to"] in _FLOATS else unlike("it rounds to whole numbers")


def part(call: Call, number: int) -> Meaning:
    """Return the meaning of result `number` of a Split node: a slice of its input."""
    axis, sizes = call.get("axis", 0), call.given("split", 1)
    if sizes is None:  # the last may be smaller
        each = -(-call.shapes[call.inputs[0]][axis] // len(call.results))
        sizes = [each] * len(call.results)
    return "slice", {}, {"axis": axis, "start": sum(sizes[:number])}


SYMMETRIC = frozenset({"Add", "Mul", "Sum", "Concat"})  # operators whose first input may be a constant

OPERATORS: dict[str, Callable[[Call], Meaning]] = {
    "Conv": _conv,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "MaxPool": _pool("max_pool"),
    "AveragePool": _pool("avg_pool"),
    "GlobalAveragePool": _plain("adaptive_avg_pool", extents=(1, 1)),
    "ReduceMean": _mean,
    "Relu": _plain("relu"),
    "Clip": _clip,
    "HardSwish": _plain("hard_swish"),
    "HardSigmoid": _hard_sigmoid,
    "Sigmoid": _plain("sigmoid"),
    "Swish": _swish,
    "Gelu": _gelu,
    "Softmax": _softmax,
    "Dropout": _dropout,
    "Add": _joined("add"),
    "Sum": _sum,
    "Mul": _joined("mul"),
    "Concat": _concat,
    "Gather": _gather,
    "Slice": _slice,
    "Pad": _pad,
    "Reshape": _plain("reshape"),
    "Flatten": _plain("reshape"),
    "Squeeze": _plain("reshape"),
    "Unsqueeze": _plain("reshape"),
    "Transpose": _transpose,
    "Identity": _plain("identity"),
    "Cast": _cast,
}
