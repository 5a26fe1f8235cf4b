"""Common rules of thumb for batch size and memory, compared with the memory plan."""

from __future__ import annotations

from typing import Any

import attrs

from cubatch.checks import check_batch_size
from cubatch.choices import Dtype, Library, Mode, Optimizer
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.memory.fit import largest, limit_bytes
from cubatch.memory.step_footprint import Footprint, footprint_of, textbook_elements
from cubatch.network.models import SpecLike
from cubatch.workload import Workload, accumulating


@attrs.frozen(kw_only=True)
class Rule:
    """
    A rule of thumb and the value of the memory plan.

    Attributes:
        name: Name of the rule.
        formula: The rule in words.
        value: Value by the rule.
        computed: Value by the memory plan.
        unit: "bytes", "elements" or "samples".
    """

    name: str
    formula: str
    value: float
    computed: float
    unit: str

    @property
    def error(self) -> float:
        """Error of the rule, value / computed - 1: 0.1 is ten percent too high; infinite if `computed` is 0."""
        return self.value / self.computed - 1 if self.computed else float("inf")

    def to_mapping(self) -> dict[str, Any]:
        """Return the rule and its error as a plain mapping."""
        return attrs.asdict(self) | {"error": self.error}


def rules_of_thumb(
    spec: SpecLike,
    *,
    batch_size: int = 256,
    memory: int | str | None = None,
    mode: Mode = "inference",
    dtype: Dtype = "float32",
    optimizer: Optimizer = "sgd",
    recompute: bool = False,
    device: Device | str | None = None,
    library: Library = "auto",
    target_batch_size: int | None = None,
) -> list[Rule]:
    """
    Return common rules of thumb for memory and batch size, each next to what the memory plan computes.

    Args:
        spec: A layer, a network, a mapping, a model's name or a path to a spec file.
        batch_size: Samples per step, for the rules about a given batch.
        memory: Memory limit: bytes, "12GiB" or "80%", for the rule about the largest batch. The rule is omitted if
            `memory` is None or `target_batch_size` is given.
        mode, dtype, optimizer, recompute, device, library, target_batch_size: As for `footprint`, None included.

    Returns:
        list[Rule]: Name, formula, value, the plan's value, and the error.

    Raises:
        InvalidArgument: If an argument is out of range.
        DoesNotFit: If not even one sample fits into `memory`.

    Example:
        >>> rules_of_thumb("mlp", batch_size=256, mode="training", device="cpu")[0].value
        465920
    """
    size = check_batch_size(batch_size)
    work = Workload.of(
        spec, device, mode=mode, dtype=dtype, optimizer=optimizer, library=library, recompute=recompute
    )  # fmt: skip
    whole = footprint_of(accumulating(work, size, target_batch_size), size)
    if memory is None or target_batch_size is not None:
        return compare_rules(work, whole)
    limit = limit_bytes(memory, work.device)
    return compare_rules(work, whole, limit, largest(work, limit))


def compare_rules(work: Workload, whole: Footprint, limit: int = 0, most: int = 0) -> list[Rule]:
    """
    Return the rules of thumb next to what the memory plan computes.

    `most` is the largest batch size whose plan fits `limit` bytes; 0 omits the rule about it.
    """
    parameters, elements = work.spec.parameters, textbook_elements(work.spec, work.mode)
    buffers = whole.activations + whole.activation_gradients
    disk = 4 * parameters
    rules = [
        Rule(
            name="textbook count",
            formula="batch x (input + layer outputs, and their gradients in training)",
            value=elements * whole.batch_size,
            computed=buffers / BYTES_PER_ELEMENT[work.dtype],
            unit="elements",
        )
    ]
    rules += [
        Rule(name=name, formula=formula, value=factor * disk, computed=whole.total, unit="bytes")
        for name, formula, factor in (
            ("2x the file", "twice the size of the weights on disk", 2),
            ("3x the file", "weights, gradients and momentum, each the size of the file", 3),
            ("4.5x the file", "as 3x, and half as much again for activations and workspace", 4.5),
        )
    ]
    if most:
        rules.append(
            Rule(
                name="max batch formula",
                formula="memory bytes / 4 / (tensor sizes + trainable parameters)",
                value=limit // 4 // (elements + parameters),
                computed=most,
                unit="samples",
            )
        )
    return rules
