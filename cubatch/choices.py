"""Types of arguments that accept a fixed set of texts: a type checker rejects `mode="traning"` before the code runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

Mode = Literal["inference", "training"]
Dtype = Literal["float32", "tf32", "float16", "bfloat16"]
Objective = Literal["throughput", "latency", "energy"]
Optimizer = Literal["sgd", "momentum", "adam"]
Schedule = Literal["cosine", "constant"]
Library = Literal["auto", "cubatch", "im2col"]
Measurable = Literal["auto", "cubatch", "im2col", "onnxruntime"]
Tunable = Literal[Measurable, "torch"]
Planned = Literal[Library, "torch"]
Modelled = Literal["vendor", "torch", "cubatch"]
StudyName = Literal[
    "powers-of-two", "waves", "small-batch-floor", "hyperparameter", "memory-rules", "numpy-mnist", "generalisation"
]


class HasGroups(Protocol):
    """An optimizer, such as a torch.optim.Optimizer."""

    param_groups: list[dict[str, Any]]


ModuleOptimizer = str | Callable[[Iterable[Any]], Any] | HasGroups
"""A name, a function from parameters to an optimizer or its name, or an optimizer."""
