"""The memory of a step of a PyTorch module, part by part, from a trace without data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from cubatch.frameworks.torch_memory import Walk
from cubatch.shown import Shown


@attrs.frozen(kw_only=True)
class ModuleFootprint(Shown):
    """
    The tensors of a step of a PyTorch module at the moment when they take the most memory, in bytes.

    The parts add up to the total. Tensors that share memory, such as tied weights, count once. Not included: workspaces
    inside an operation, the rounding of PyTorch's allocator, and what the process and its libraries take.

    Attributes:
        name: The class of the module.
        mode: "inference" or "training".
        batch_size: Samples of the batch.
        weights: Parameters and buffers.
        inputs: The batch.
        gradients: Gradients of the parameters; 0 in inference and of frozen parameters.
        optimizer: The state of the optimizer.
        activations: All others: outputs, values saved for the backward pass, their gradients, temporary results.
        total: The peak of the step.
        by_submodule: The bytes of `activations` by the submodule that made them, most first. The name is the one of
            `named_modules`; it is empty for the module itself, the loss and the optimizer.
    """

    name: str
    mode: str
    batch_size: int
    weights: int
    inputs: int
    gradients: int
    optimizer: int
    activations: int
    total: int
    by_submodule: Mapping[str, int] = attrs.field(hash=False)

    @classmethod
    def of(cls, name: str, mode: str, batch_size: int, walk: Walk) -> ModuleFootprint:
        """Return the footprint of a traced step."""
        by_submodule = dict(sorted(walk.activations.items(), key=lambda item: -item[1]))
        return cls(
            name=name, mode=mode, batch_size=batch_size, **walk.parts, activations=sum(by_submodule.values()),
            total=walk.peak_bytes, by_submodule=by_submodule,
        )  # fmt: skip

    def to_mapping(self) -> dict[str, Any]:
        """Return the footprint as a plain mapping, for JSON."""
        return attrs.asdict(self)
