"""What a step calls in addition to the passes of layers: folded batch norms, the loss, the step of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from cubatch.bench.calls import Operand
from cubatch.bench.cases import Case, of_dtype
from cubatch.errors import UnknownName
from cubatch.hardware.facts import BYTES_PER_ELEMENT

_STATES = {"sgd": (), "momentum": ("velocity",), "adam": ("mean", "square")}
_SCALING = Operand((4,), "scaling", "float32", is_batched=False)


def optimizer_step(name: str, parameters: int, dtype: str = "float32") -> Case:
    """
    Return a step of an optimizer over all parameters at once.

    Parameters of 16 bits have a float32 copy that the step is taken on; the gradient of a float16 loss is scaled.

    Args:
        name: "sgd", "momentum" or "adam".
        parameters: How many there are.
        dtype: Storage of the parameters and the gradient; their state is float32.

    Raises:
        UnknownName: If there is no such optimizer.

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
    Return the check of a scaled gradient for values that are not finite, which sets the next scale.

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
    Return softmax with cross-entropy and its gradient.

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


def fold(channels: Sequence[int], has_bias: Sequence[bool], dtype: str = "float32") -> Case:
    """
    Return the folding of batch norms into the products before them, which begins a step of inference.

    Args:
        channels: Of each norm.
        has_bias: Whether the product before it has a bias.
        dtype: Storage of the parameters; statistics, factors and terms are float32.

    Example:
        >>> fold([64, 256], [False, True]).name
        'fold of 2 batch norms, 320 channels'
    """
    operands: dict[str, Operand] = {}
    names: dict[str, list[str | None]] = {
        part: [] for part in ("gamma", "beta", "b", "mean", "variance", "scale", "shift")
    }
    for number, (c, biased) in enumerate(zip(channels, has_bias, strict=True)):
        for part, listed in names.items():
            listed.append(None if part == "b" and not biased else f"{part}{number}")
            if listed[-1] is not None:
                kind = "positive" if part in {"gamma", "variance"} else "signed"
                wide = "" if part in {"gamma", "beta", "b"} else "float32"
                operands[listed[-1]] = Operand((c,), kind, wide, is_batched=False)
    of_norms = {part: tuple(name for name in listed if name is not None) for part, listed in names.items()}
    plain = Case(
        name=f"fold of {len(channels)} batch norms, {sum(channels)} channels{of_dtype(dtype)}",
        operation="fold_batch_norms",
        dtype=dtype,
        operands=operands,
        arguments=(of_norms["gamma"], of_norms["beta"], tuple(names["b"])),
        results=(*of_norms["scale"], *of_norms["shift"]),
        lists={
            "means": of_norms["mean"], "variances": of_norms["variance"],
            "scales": of_norms["scale"], "shifts": of_norms["shift"],
        },
        options={"epsilons": (1e-5,) * len(channels)},
        traffic_bytes=0,
        moved_bytes=0,
    )  # fmt: skip
    return attrs.evolve(plain, traffic_bytes=plain.num_bytes, moved_bytes=plain.num_bytes)
