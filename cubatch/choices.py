"""Types of arguments that accept a fixed set of texts: a type checker rejects `mode="traning"` before the code runs."""

from __future__ import annotations

from typing import Literal

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
