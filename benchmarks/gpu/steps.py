"""
Steps of networks whose operations the GPU pass times: each operation that the schedule launches, with its count.

A case that several steps have is timed once.  The results of a step are added up by the count of each case.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import attrs

from cubatch.bench.calls import Case
from cubatch.bench.cases import of_step
from cubatch.errors import InvalidArgument
from cubatch.hardware.facts import Device
from cubatch.network import models


@attrs.frozen
class Step:
    """
    A step of a network.

    Attributes:
        network: Its name in `cubatch models`.
        mode: "training" (with momentum) or "inference".
        batch_size: Samples.
        dtype: Storage of the elements.
    """

    network: str
    mode: str
    batch_size: int
    dtype: str = "float16"

    @property
    def name(self) -> str:
        """Return the name for `--only`: "resnet50, training, batch 256, float16"."""
        return f"{self.network}, {self.mode}, batch {self.batch_size}, {self.dtype}"

    @functools.cached_property
    def cases(self) -> tuple[Case, ...]:
        """Return its distinct operations; their layers are named with network and mode."""
        listed = of_step(models.build(self.network), self.mode, self.batch_size, self.dtype)
        place = f"{self.network}/{self.mode}"
        return tuple(attrs.evolve(case, layers=tuple(f"{place}/{layer}" for layer in case.layers)) for case in listed)


BATCHES = {
    "resnet50": (256, 32),
    "convnext-tiny": (128,),
    "vit-base": (128,),
    "efficientnet-b0": (256, 32),
    "mobilenet-v3-large": (256, 32),
    "deit-tiny": (256,),
}
"""Batch sizes of the networks whose steps are timed, as wholes against PyTorch too."""

_MODES = ("training", "inference")
STEPS = (
    *(Step(name, mode, sizes[0]) for mode in _MODES for name, sizes in BATCHES.items()),
    *(Step(name, mode, size) for mode in _MODES for name, (_, *sizes) in BATCHES.items() for size in sizes),
    *(Step("resnet50", mode, size, "float32") for mode in _MODES for size in (32, 256)),
    Step("mobilenet-v3-large", "training", 256, "float32"),
    Step("vgg16", "training", 32, "float32"),
    *(Step("resnet50", "training", 256, dtype) for dtype in ("bfloat16", "tf32")),
    *(Step("vit-base", mode, 128, dtype) for dtype in ("bfloat16", "float32") for mode in _MODES),
)  # fmt: skip
"""The most valuable first."""


def step_named(name: str) -> Step:
    """
    Return the step of a name.

    Raises:
        InvalidArgument: If there is no such step.
    """
    for step in STEPS:
        if step.name == name:
            return step
    raise InvalidArgument("step", name, "one of: " + "; ".join(step.name for step in STEPS))


def merged(steps: Iterable[Step], device: Device) -> list[tuple[Case, Sequence[str]]]:
    """
    List the distinct cases of steps, each with the names of its steps.

    Steps keep their order.  In a step, the operations with the largest share of the least time come first.

    Args:
        steps: The steps.
        device: The GPU of the roofline.
    """

    def at_best(case: Case) -> float:
        return case.multiplicity * (case.roofline_seconds(device) or case.moved_bytes)

    merged_cases: dict[str, tuple[Case, list[str]]] = {}
    for step in steps:
        for case in sorted(step.cases, key=at_best, reverse=True):
            before, names = merged_cases.get(case.name, (case, []))
            layers = tuple(dict.fromkeys((*before.layers, *case.layers)))
            evolved = attrs.evolve(before, layers=layers, multiplicity=len(layers))
            merged_cases[case.name] = evolved, [*names, step.name]
    return list(merged_cases.values())
