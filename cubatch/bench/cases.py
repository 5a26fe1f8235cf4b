"""Cases: passes of layers, products, and the operations of a network's step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from cubatch.bench.calls import Blanks, Case, call_of, calls_of
from cubatch.engine.layers import TABLE
from cubatch.errors import InvalidArgument, UnknownName
from cubatch.hardware.facts import BYTES_PER_ELEMENT
from cubatch.kernels.padding import stored_saved_elements
from cubatch.kernels.workspace.misc import gradients_at_once
from cubatch.memory.plan import schedule_of
from cubatch.memory.schedule_records import Op, Schedule
from cubatch.network.graph import Network, Spec, as_network
from cubatch.network.layer import Layer, extents, without_bias
from cubatch.network.layers import Add, Attention, BatchNorm2d, Conv2d, LayerNorm, Linear, MaxPool2d
from cubatch.network.passes import Pass, linear_of

_PASSES = {pass_.layout: pass_ for pass_ in Pass}
LAYOUTS = tuple(sorted(_PASSES))
DTYPES = [name for name in BYTES_PER_ELEMENT if name != "float64"]
_OWN_TERMS = {"bias", "bias gradient", "statistics"}
_LEFT_OUT = {"type", "h", "w", "c", "k", "r", "s", "bias", "eps", "momentum"}
"""Fields of a layer that its name states in another way, or that change nothing that is measured."""

_READ_TWICE = {
    "batch_norm_train": ("x",), "batch_norm_backward": ("dy", "x"), "layer_scale_backward": ("dy",),
    "layer_norm_backward": ("dy", "x"), "tokens_backward": ("dy",),
}  # fmt: skip
"""Operands that are needed whole for a sum before their first element is needed again, unless one pass does both."""

_STATES = {"sgd": (), "momentum": ("velocity",), "adam": ("mean", "square")}
_EXTENTS = 3  # of a sample: height, width, channels


def _counted(case: Case, *, traffic: int | None = None, **facts: Any) -> Case:
    """Return the case with further fields and `traffic`, the bytes that it moves; None: each array once."""
    case = attrs.evolve(case, **facts)
    moved = case.num_bytes if traffic is None else traffic
    return attrs.evolve(case, traffic_bytes=moved, moved_bytes=moved)


def of_layer(
    # the layer, whose extents are known. The input gradient of a layer without a filter gradient includes all gradients
    layer: Layer,
    pass_: Pass,
    batch_size: int,
    dtype: str = "float32",
    *,
    with_bias: bool = False,  # whether the bias of the layer takes part
    # mode of a forward pass: "training" or "inference". By default batch norm and max pooling are those of training,
    # attention and layer norm those of inference
    mode: str = "",
    # terms that the result ends with. "folded" is scale and shift of a batch norm, "residual" a sum. "positive" is the
    # mask of a ReLU, "pooled" a global pool's gradient, and "parts" are other channels, which stay
    ending: Iterable[str] = (),
    relu: bool = False,  # whether the result is clamped at zero
    # type of another activation that a batch norm computes. Of a gradient, that behind the norm. None: none
    activation: str | None = None,
    channels: int = 0,  # channels that the input is stored with; 0 for its own
) -> Case:
    """
    Return the case of one pass of a layer at a batch size.

    Raises:
        UnknownName: If the dtype is unknown.
        InvalidArgument: If the batch size is no whole number of at least 1, or the engine has no kernel for the pass.
    """
    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, DTYPES)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidArgument("batch_size", batch_size, "a whole number of at least 1")
    if not has_case(layer, pass_):
        allowed = "a layer and pass that the engine has a kernel for"
        raise InvalidArgument("layer", f"{layer.type}, {pass_.value}", allowed)
    plain = extents(layer) if with_bias else without_bias(extents(layer))
    is_training = mode == "training" or (not mode and not isinstance(plain, Attention | LayerNorm))
    calls = calls_of(
        plain, "forward" if pass_ is Pass.FPROP else "backward", batch_size, is_training=is_training,
        ending=frozenset(ending), relu=relu, activation=activation, channels=channels,
    )  # fmt: skip
    call = next((each for each in calls if each.operation.endswith(pass_.value)), calls[0])
    return _named(_of_call(call, plain, pass_, batch_size, dtype), channels)


def _of_call(call: Case, layer: Layer, pass_: Pass, batch_size: int, dtype: str) -> Case:
    """Return the call as the case of a pass, with its FLOP and the bytes that it moves."""
    itemsize, passes = BYTES_PER_ELEMENT[dtype], [pass_]
    if isinstance(layer, Attention) and pass_ is Pass.DGRAD:
        passes.append(Pass.WGRAD)
    case = _counted(
        call, dtype=dtype, pass_=pass_, layer=layer, batch_size=batch_size,
        flops=sum(layer.pass_flops(each, batch_size) for each in passes),
    )  # fmt: skip
    elements, repeated = layer.traffic(pass_, batch_size), 0
    sizes = {name: batch_size * count for name, (count, _) in stored_saved_elements(layer).items()}
    if call.operation == "attention_backward":
        elements = sum(math.prod(operand.shape) for operand in call.operands.values())
        # Gradients of all that is saved, written and read by what follows, and the weights again.
        repeated = 3 * sizes["qkv"] + 6 * sizes["weights"] + 4 * sizes["mixed"]
    elif call.operation == "attention" and "keep" in call.arrays:
        elements += sum(sizes.values())
        # All that is kept is read again; a softmax also writes over the scores and reads them.
        repeated = sizes["qkv"] + sizes["mixed"] + 3 * sizes["weights"]
    elif call.operation == "attention":
        repeated = 2 * (sizes["qkv"] + sizes["mixed"])
    twice = () if gradients_at_once(layer) else _READ_TWICE.get(call.operation, ())
    repeated += sum(math.prod(call.operands[name].shape) for name in twice)
    ends = {"scale", "shift", "residual", "positive", "pooled"} & call.operands.keys()
    padded = sum(math.prod(each.shape) // each.shape[-1] * each.padded for each in call.operands.values())
    traffic = elements * itemsize + sum(map(case.bytes_of, ends)) + padded * itemsize
    if "parts" in call.arrays:  # only the range of channels is written
        traffic = 2 * case.bytes_of("dy")
    extra = [n for n in call.operands if n in {"argmax", "mask"} or (n == "statistics" and n in call.results)]
    moved = traffic + repeated * itemsize + sum(map(case.bytes_of, extra))
    return attrs.evolve(case, traffic_bytes=traffic, moved_bytes=moved)


def _named(case: Case, channels: int) -> Case:
    """Return the case with a descriptive name, which leaves defaults out; the input is stored with `channels`."""
    layer, facts = case.layer, case.layer.to_mapping() if case.layer else {}
    if layer is None or case.pass_ is None:
        return case
    h, w, c = layer.input_shape
    text = f"{layer.type} {h}x{w}x{c}"
    if "k" in facts:
        text += f" to {facts['k']}"
    if "r" in facts:
        text += f", {facts['r']}x{facts['s']}"
    if getattr(layer, "bias", False):
        text += ", bias"
    others = [name for name in facts if name not in _LEFT_OUT]
    text += "".join(f", {name}" if facts[name] is True else f", {name} {facts[name]}" for name in others)
    text += f", n={case.batch_size}, {case.pass_.value}{of_dtype(case.dtype)}"
    if case.operation == "batch_norm_inference" or (case.operation == "max_pool2d" and "argmax" not in case.operands):
        text += ", inference"
    if "keep" in case.arrays or ("statistics" in case.results):
        text += ", keeping"
    terms = [term for term in case.epilogue if term not in _OWN_TERMS]
    text += f", then {', '.join(terms)}" if terms else ""
    text += ", next to others" if "parts" in case.arrays else ""
    text += f", stored with {channels} channels" if channels not in {0, c} else ""
    return attrs.evolve(case, name=text)


def has_case(layer: Layer, pass_: Pass) -> bool:
    """Return whether the engine runs this pass of the layer as an operation of its own, which can be measured."""
    passes = TABLE.get(type(layer))
    if pass_ is Pass.WGRAD:
        return isinstance(layer, Conv2d | Linear)
    return passes is not None and bool(passes.forward if pass_ is Pass.FPROP else passes.backward)


def modes_of(layer: Layer, pass_: Pass) -> tuple[str, ...]:
    """Return the values of `mode` for which `of_layer` returns different cases; the first is "", the default."""
    if pass_ is Pass.FPROP and isinstance(layer, Attention | LayerNorm):
        return "", "training"
    return ("", "inference") if pass_ is Pass.FPROP and isinstance(layer, BatchNorm2d | MaxPool2d) else ("",)


def of_dtype(dtype: str) -> str:
    """Return a comma and the dtype, to end the name of a case: ", float16"; empty text for float32."""
    return "" if dtype == "float32" else f", {dtype}"


def gemm(m: int, n: int, k: int, *, layout: str = "nt", dtype: str = "float32") -> Case:
    """
    Return the case of a matrix product (m, k) x (k, n), as a pass of a linear layer.

    Args:
        m, n, k: Rows and columns of the result, and length of the sums.
        layout: "nt" is (m, k) times the transpose of (n, k), the output of a layer. "nn" is (m, k) times (k, n), the
            gradient of its input. "tn" is the transpose of (k, m) times (k, n), the gradient of its filter.

    Raises:
        InvalidArgument: If an extent is no whole number of at least 1, or the layout is unknown.

    Example:
        >>> gemm(64, 32, 16, layout="tn").name, gemm(64, 32, 16).flops
        ('gemm tn 64 x 32 x 16', 65536)
    """
    for name, extent in (("m", m), ("n", n), ("k", k)):
        if isinstance(extent, bool) or not isinstance(extent, int) or extent < 1:
            raise InvalidArgument(name, extent, "a whole number of at least 1")
    if layout not in LAYOUTS:
        raise InvalidArgument("layout", layout, "one of " + ", ".join(LAYOUTS))
    pass_ = _PASSES[layout]
    rows, c, features = linear_of(pass_, m, n, k)
    case = of_layer(Linear(c=c, k=features, bias=False), pass_, rows, dtype)
    return attrs.evolve(case, name=f"gemm {layout} {m} x {n} x {k}{of_dtype(dtype)}")


# --- the step of a network -----------------------------------------------------------------------------------------


def of_step(
    spec: Spec, mode: str, batch_size: int, dtype: str = "float32", *, optimizer: str = "momentum"
) -> list[Case]:
    """
    Return the distinct operations of one step on cubatch kernels, in the order of their first launch.

    Returns:
        list: The cases. Their `multiplicity` is the number of occurrences in a step, and `layers` names the layers.
    """
    network = as_network(spec)
    program = schedule_of(network, mode, recompute=False, library="cubatch")
    cases: dict[str, Case] = {}
    for op in program.ops:
        place = op.node.name if op.node else op.kind
        for case in _of_op(op, program, batch_size, dtype, optimizer):
            before = cases.get(case.name)
            layers = (*(before.layers if before else ()), place)
            cases[case.name] = attrs.evolve(case, multiplicity=len(layers), layers=layers)
    return list(cases.values())


def _of_op(op: Op, program: Schedule, batch_size: int, dtype: str, optimizer: str) -> Iterator[Case]:
    if op.node is None:
        yield from _of_network(op, program.network, batch_size, dtype, optimizer)
        return
    layer, stored = op.node.layer, 0
    ending = {*op.reads} & {"folded", "residual", "positive", "pooled", "parts"}
    if "x0" in op.reads and layer.convolution is not None:
        shape = program.buffers[op.reads["x0"]].shape
        stored = shape[2] if len(shape) == _EXTENTS else 0
    if op.kind == "accumulate":
        h, w, c = layer.output_shape
        yield of_layer(Add(h=h, w=w, c=c), Pass.FPROP, batch_size, dtype)
    elif op.kind == "forward":
        # The bias of a product with a folded norm is part of the shift of the norm.
        yield of_layer(
            layer, Pass.FPROP, batch_size, dtype, with_bias=op.norm is None, mode=program.mode, ending=ending,
            relu=op.relu, activation=op.activation, channels=stored,
        )  # fmt: skip
    elif has_case(layer, Pass.WGRAD):
        yield of_layer(layer, Pass.WGRAD, batch_size, dtype, with_bias=True, channels=stored)
        if "dx0" in op.writes:
            yield of_layer(layer, Pass.DGRAD, batch_size, dtype, ending=ending)
    else:
        yield of_layer(
            layer, Pass.DGRAD, batch_size, dtype, with_bias=True, ending=ending, activation=op.activation
        )  # fmt: skip


def _of_network(op: Op, network: Network, batch_size: int, dtype: str, optimizer: str) -> Iterator[Case]:
    if op.kind == "fold":
        norms = [norm.layer.input_shape[2] for _, norm in op.norms]
        yield fold(norms, ["b" in product.layer.parameter_shapes for product, _ in op.norms], dtype)
    elif op.kind == "loss":
        h, w, classes = network.output_shape
        yield cross_entropy(batch_size * h * w, classes, dtype)
    else:
        if dtype == "float16":
            yield loss_scale(network.parameters)
        yield optimizer_step(optimizer, network.parameters, dtype)


def optimizer_step(name: str, parameters: int, dtype: str = "float32") -> Case:
    """
    Return the case of a step of an optimizer over all parameters at once.

    Parameters of 16 bits have a float32 copy that the step updates; the gradient of a float16 loss is scaled. The state
    is float32.

    Raises:
        UnknownName: If the optimizer is unknown.
    """
    if name not in _STATES:
        raise UnknownName("optimizer", name, _STATES)
    blanks, itemsize = Blanks(), BYTES_PER_ELEMENT[dtype]
    is_mixed = itemsize != BYTES_PER_ELEMENT["float32"]
    shape = (parameters,)
    arguments: dict[str, Any] = {
        "parameters": blanks.array(shape, written=True),
        "gradients": [blanks.array(shape)],
        **{part: blanks.array(shape, "float32", written=True) for part in _STATES[name]},
        "master": blanks.array(shape, "float32", written=True) if is_mixed else None,
        "scaling": blanks.array((4,), "float32", kind="scaling", is_batched=False) if dtype == "float16" else None,
        # Large enough to be visible in a check, small enough for thousands of steps on the same gradient.
        "lr": 1e-3,
        "weight_decay": 1e-4,
        **({"step": 10} if name == "adam" else {}),
    }
    # Mixed, the parameters are only written, and their copy is read and written.
    traffic = parameters * ((2 * itemsize + 8 if is_mixed else 3 * itemsize) + 8 * len(_STATES[name]))
    text = f"{name}, {parameters} parameters{of_dtype(dtype)}"
    case = call_of(name, arguments, blanks)
    return _counted(case, name=text, dtype=dtype, traffic=traffic, batch_size=parameters)


def loss_scale(parameters: int, dtype: str = "float16") -> Case:
    """Return the case that checks a scaled gradient of `parameters` elements for values that are not finite."""
    blanks = Blanks()
    arguments = {
        "state": blanks.array((4,), "float32", kind="scaling", written=True, is_batched=False),
        "gradients": [blanks.array((parameters,))],
    }
    text = f"loss scale, {parameters} parameters{of_dtype(dtype)}"
    traffic = parameters * BYTES_PER_ELEMENT[dtype]
    case = call_of("update_loss_scale", arguments, blanks)
    return _counted(case, name=text, dtype=dtype, traffic=traffic, batch_size=parameters)


def cross_entropy(rows: int, classes: int, dtype: str = "float32") -> Case:
    """Return the case of softmax with cross-entropy and its gradient, for `rows` samples and `classes` classes."""
    blanks = Blanks()
    arguments = {
        "logits": blanks.array((rows, classes)),
        "labels": blanks.array((rows,), "int32", kind="counts", below=classes),
        "loss": blanks.array((1,), "float64", written=True, is_batched=False),
        "dlogits": blanks.array((rows, classes), written=True),
        "count": rows,
    }
    text = f"softmax cross-entropy, {rows} x {classes}{of_dtype(dtype)}"
    traffic = 2 * rows * classes * BYTES_PER_ELEMENT[dtype] + 4 * rows
    case = call_of("softmax_cross_entropy", arguments, blanks)
    return _counted(case, name=text, dtype=dtype, traffic=traffic, batch_size=rows)


def fold(channels: Sequence[int], has_bias: Sequence[bool], dtype: str = "float32") -> Case:
    """
    Return the case of folding batch norms into the products before them, which begins a step of inference.

    Args:
        channels: Number of channels of each norm.
        has_bias: Whether the product before each norm has a bias.
        dtype: Storage of the parameters; statistics, scales and shifts are float32.

    Example:
        >>> fold([64, 256], [False, True]).name
        'fold of 2 batch norms, 320 channels'
    """
    blanks = Blanks()

    def vectors(dtype: str = "", *, written: bool = False, given: Sequence[bool] = ()) -> list[Any]:
        return [
            blanks.array((c,), dtype, written=written, is_batched=False) if is_given else None
            for c, is_given in zip(channels, given or [True] * len(channels), strict=True)
        ]

    arguments = {
        "gammas": vectors(), "betas": vectors(), "biases": vectors(given=has_bias), "means": vectors("float32"),
        "variances": vectors("float32"), "epsilons": (1e-5,) * len(channels),
        "scales": vectors("float32", written=True), "shifts": vectors("float32", written=True),
    }  # fmt: skip
    text = f"fold of {len(channels)} batch norms, {sum(channels)} channels{of_dtype(dtype)}"
    return _counted(call_of("fold_batch_norms", arguments, blanks), name=text, dtype=dtype)
