"""The rules of thumb that people go by, beside what really fits."""

from __future__ import annotations

from typing import Any

import attrs

from cubatch.hardware import probe
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.memory.fit import limit_bytes, max_batch_size
from cubatch.memory.parts import footprint, textbook_elements
from cubatch.network import models
from cubatch.network.models import SpecLike


@attrs.frozen(kw_only=True)
class Rule:
    """
    A rule of thumb beside the computed answer.

    Attributes:
        name: What the rule is known as.
        formula: The rule in words.
        value: What it gives.
        computed: What the memory plan gives for the same question.
        unit: "bytes", "elements" or "samples".
    """

    name: str
    formula: str
    value: float
    computed: float
    unit: str

    @property
    def error(self) -> float:
        """How far the rule is off, relative to the plan: 0.1 is ten percent too high."""
        return self.value / self.computed - 1 if self.computed else float("inf")

    def to_mapping(self) -> dict[str, Any]:
        """Give the rule and its error as a plain mapping."""
        return attrs.asdict(self) | {"error": self.error}


def rules_of_thumb(
    spec: SpecLike,
    *,
    batch_size: int = 256,
    memory: int | str | None = None,
    mode: str = "training",
    dtype: str = "float32",
    optimizer: str = "sgd",
    recompute: bool = False,
    device: Device | str | None = None,
    library: str = "auto",
) -> list[Rule]:
    """
    Give the rules that people go by, beside what the plan computes.

    Args:
        spec: A layer, a network, a mapping, a model's name or a path to a spec file.
        batch_size: For the rules about a given batch.
        memory: For the rule about the largest batch; left out without it.
        mode, dtype, optimizer, recompute, device, library: As for `footprint`.

    Returns:
        list[Rule]: Name, formula, value, the plan's value, and the error.

    Raises:
        InvalidArgument: If a word or a number makes no sense.
        DoesNotFit: If not even one sample fits into `memory`.

    Example:
        >>> rules_of_thumb("mlp", batch_size=256, device="cpu")[0].value
        465920
    """
    resolved = models.resolve(spec)
    options: dict[str, Any] = {
        "mode": mode, "dtype": dtype, "optimizer": optimizer, "recompute": recompute, "device": device,
        "library": library,
    }  # fmt: skip
    whole = footprint(resolved, batch_size=batch_size, **options)
    itemsize = BYTES_PER_ELEMENT[dtype]
    elements = textbook_elements(resolved, mode)
    buffers = whole.activations + whole.activation_gradients
    disk = 4 * resolved.parameters
    rules = [
        Rule(
            name="textbook count",
            formula="batch x (input + layer outputs, and their gradients in training)",
            value=elements * whole.batch_size,
            computed=buffers / itemsize,
            unit="elements",
        )
    ]
    rules += [
        Rule(name=name, formula=formula, value=factor * disk, computed=whole.total, unit="bytes")
        for name, formula, factor in (
            ("2x the file", "twice the size of the weights on disk", 2),
            ("3x the file", "weights, gradients and momentum, each the size of the file", 3),
            ("4.5x the file", "as once measured: what is beyond 3x are activations and workspace", 4.5),
        )
    ]
    if memory is not None:
        most = max_batch_size(resolved, memory, **options)
        limit = limit_bytes(memory, probe.resolve(device, live=False))
        rules.append(
            Rule(
                name="max batch formula",
                formula="memory bytes / 4 / (tensor sizes + trainable parameters)",
                value=limit // 4 // (textbook_elements(resolved, mode) + resolved.parameters),
                computed=most,
                unit="samples",
            )
        )
    return rules
