"""What a training step calls beside the passes of layers: what attention keeps, the loss, the step of an optimiser."""

from __future__ import annotations

import attrs

from cubatch.bench.calls import Operand
from cubatch.bench.cases import Case, of_dtype, of_layer
from cubatch.errors import UnknownName
from cubatch.hardware.facts import BYTES_PER_ELEMENT
from cubatch.network.layers import Attention
from cubatch.network.passes import Pass

_STATES = {"sgd": (), "momentum": ("velocity",), "adam": ("mean", "square")}
_SCALING = Operand((4,), "scaling", "float32", is_batched=False)


def attention(layer: Attention, batch_size: int, dtype: str = "float32", *, with_bias: bool = False) -> Case:
    """
    Give attention's forward pass in training, which keeps what its backward pass reads, the weights among it.

    Args:
        layer: With its extents known.
        batch_size: Samples.
        dtype: Storage of the elements.
        with_bias: Whether the projections' biases take part.

    Example:
        >>> attention(Attention(h=197, w=1, c=192, heads=3), 32).name
        'attention 197x1x192, heads 3, n=32, fprop, keeping'
    """
    plain = of_layer(layer, Pass.FPROP, batch_size, dtype, with_bias=with_bias)
    sizes = {name: elements for name, (elements, _) in layer.saved_elements().items()}
    kept = {name: Operand((batch_size, elements)) for name, elements in sizes.items()}
    written = batch_size * sum(sizes.values()) * BYTES_PER_ELEMENT[dtype]
    scores = 3 * batch_size * sizes["weights"] * BYTES_PER_ELEMENT[dtype]  # read, written over by a softmax, and read
    return attrs.evolve(
        plain,
        name=f"{plain.name}, keeping",
        operands={**plain.operands, **kept},
        results=("out", *kept),
        lists={"keep": tuple(kept)},
        traffic_bytes=plain.traffic_bytes + written,
        moved_bytes=plain.moved_bytes + batch_size * sizes["weights"] * BYTES_PER_ELEMENT[dtype] + scores,
        cuts={"n": {**plain.cuts["n"], **dict.fromkeys(kept, 0)}},
    )


def attention_passes(
    layer: Attention, batch_size: int, dtype: str = "float32", *, with_bias: bool = False
) -> list[Case]:
    """Give attention in inference, and both passes of training; else as `attention`."""
    inference, backward = (
        of_layer(layer, pass_, batch_size, dtype, with_bias=with_bias) for pass_ in (Pass.FPROP, Pass.DGRAD)
    )
    return [inference, attention(layer, batch_size, dtype, with_bias=with_bias), backward]


def optimizer_step(name: str, parameters: int, dtype: str = "float32") -> Case:
    """
    Give a step of an optimiser over all parameters at once.

    Parameters of 16 bits have a float32 copy that the step is taken on; the gradient of a float16 loss is scaled.

    Args:
        name: "sgd", "momentum" or "adam".
        parameters: How many there are.
        dtype: Storage of the parameters and the gradient; their state is float32.

    Raises:
        UnknownName: If there is no such optimiser.

    Example:
        >>> optimizer_step("momentum", 1000, "bfloat16").moved_bytes == 1000 * (2 + 2 + 2 * 4 + 2 * 4)
        True
    """
    if name not in _STATES:
        raise UnknownName("optimizer", name, _STATES)
    itemsize, mixed = BYTES_PER_ELEMENT[dtype], BYTES_PER_ELEMENT[dtype] != BYTES_PER_ELEMENT["float32"]
    operands = {"parameters": Operand((parameters,)), "gradient": Operand((parameters,))}
    for part in _STATES[name]:
        operands[part] = Operand((parameters,), "positive" if part == "square" else "signed", "float32")
    flat = dict.fromkeys(operands, 0)
    if mixed:
        operands["master"] = Operand((parameters,), dtype="float32")
        flat["master"] = 0
    if dtype == "float16":
        operands["scaling"] = _SCALING
    # Mixed, the parameters are only written and their copy is read and written instead.
    moved = parameters * ((2 * itemsize + 8 if mixed else 3 * itemsize) + 8 * len(_STATES[name]))
    return Case(
        name=f"{name}, {parameters} parameters{of_dtype(dtype)}",
        operation=name,
        batch_size=parameters,
        dtype=dtype,
        operands=operands,
        arguments=("parameters", ("gradient",), *_STATES[name]),
        results=("parameters", *_STATES[name], *(("master",) if mixed else ())),
        updates=("master",) if mixed else (),
        # Large enough for a step to show in a check, small enough for thousands of steps on the same gradient.
        options={"lr": 1e-3, "weight_decay": 1e-4} | ({"step": 10} if name == "adam" else {}),
        traffic_bytes=moved,
        moved_bytes=moved,
        cuts={"parameters": flat},
    )


def loss_scale(parameters: int, dtype: str = "float16") -> Case:
    """
    Give the search of a scaled gradient for what is not finite, and the next scale.

    Args:
        parameters: Elements of the gradient.
        dtype: Their storage.
    """
    moved = parameters * BYTES_PER_ELEMENT[dtype]
    return Case(
        name=f"loss scale, {parameters} parameters{of_dtype(dtype)}",
        operation="update_loss_scale",
        batch_size=parameters,
        dtype=dtype,
        operands={"state": _SCALING, "gradient": Operand((parameters,))},
        arguments=("state", ("gradient",)),
        results=("state",),
        traffic_bytes=moved,
        moved_bytes=moved,
    )


def cross_entropy(rows: int, classes: int, dtype: str = "float32") -> Case:
    """
    Give softmax with cross-entropy and its gradient.

    Args:
        rows: Samples.
        classes: Of each.
        dtype: Storage of the scores.
    """
    moved = 2 * rows * classes * BYTES_PER_ELEMENT[dtype] + 4 * rows
    return Case(
        name=f"softmax cross-entropy, {rows} x {classes}{of_dtype(dtype)}",
        operation="softmax_cross_entropy",
        batch_size=rows,
        operands={
            "logits": Operand((rows, classes)),
            "labels": Operand((rows,), "counts", "int32", classes),
            "loss": Operand((1,), dtype="float64", is_batched=False),
            "dlogits": Operand((rows, classes)),
        },
        arguments=("logits", "labels"),
        results=("loss", "dlogits"),
        options={"count": rows},
        dtype=dtype,
        traffic_bytes=moved,
        moved_bytes=moved,
        terms=classes,
        cuts={"n": {"logits": 0, "labels": 0, "dlogits": 0}},
    )
