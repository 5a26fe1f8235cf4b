"""
Batch sizes at several lengths and resolutions: what autotune_extents() recommends, and what a sweep then finds.

    python -m benchmarks.bench_extents --out FILE [--workload onnx]

For each workload one search has 1.5 times the budget of a single extent.  Then plain loops take turns in shuffled
rounds: at the recommended size, and at powers of two up to the largest measured one.  The loss is the distance of the
recommended size from the fastest; the error compares the reported rate with that of the plain loop.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

import cubatch as cb
from benchmarks.provenance import on_cpu, write

WORDS = 1000
EXTENT_FACTOR = 1.5  # budget of all extents together, in budgets of one


@attrs.frozen(kw_only=True)
class Workload:
    """
    A model with a second axis.

    Attributes:
        name, axis, extents: The model and its axis.
        module: What runs.
        batches: Makes the inputs of a batch size and an extent.
        is_onnx: Whether it runs in ONNX Runtime.
    """

    name: str
    axis: str
    extents: Sequence[int]
    module: nn.Module
    batches: Callable[..., torch.Tensor]
    is_onnx: bool = False


class Encoder(nn.Module):
    """A text encoder, or with a causal mask a decoder."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.words, self.causal = nn.Embedding(WORDS, 128), causal
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a vector for each token."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]) if self.causal else None
        return self.layers(self.words(tokens), mask=mask, is_causal=self.causal)


class Mixer(nn.Module):
    """Words, averaged with their neighbors: a text model without attention, for ONNX."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 128)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Conv1d(128, 128, 5, padding=2), nn.GELU()) for _ in range(3)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a vector for each text."""
        return self.layers(self.words(tokens).transpose(1, 2)).mean(2)


def texts(n: int, sequence: int) -> torch.Tensor:
    """Return token ids of texts."""
    return torch.randint(0, WORDS, (n, sequence))


def images(n: int, width: int) -> torch.Tensor:
    """Return square images."""
    return torch.rand(n, 3, width, width)


def workloads() -> list[Workload]:
    """Return the models, with random weights."""
    torch.manual_seed(0)
    convolutions = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    lengths = (32, 128, 256)
    return [
        Workload(name="decoder", axis="sequence", extents=lengths, module=Encoder(causal=True), batches=texts),
        Workload(name="encoder", axis="sequence", extents=lengths, module=Encoder(causal=False), batches=texts),
        Workload(name="images", axis="width", extents=(48, 96, 160), module=convolutions, batches=images),
        Workload(name="onnx", axis="sequence", extents=lengths, module=Mixer(), batches=texts, is_onnx=True),
    ]


def step_of(workload: Workload, path: str) -> Callable[[torch.Tensor], Any]:
    """Return what runs a batch."""
    if not workload.is_onnx:
        return workload.module
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(None, {"tokens": batch.numpy()})


def rate_of(step: Callable[[torch.Tensor], Any], batch: torch.Tensor, seconds: float) -> float:
    """Return samples per second of a plain loop."""
    count, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds or not count:
        step(batch)
        count += len(batch)
    return count / spent


@torch.inference_mode()
def sweep(workload: Workload, path: str, result: cb.ExtentsResult, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Return the sweep at each extent."""
    step, rows = step_of(workload, path), []
    for extent, tuned in result.results.items():
        most = tuned.largest_measured or 1
        sizes = sorted({2**place for place in range(most.bit_length())} | {tuned.batch_size or 1})
        rates: dict[int, list[float]] = {n: [] for n in sizes}
        for turn in range(rounds):
            for n in random.Random(turn).sample(sizes, len(sizes)):
                batch = workload.batches(n, **{workload.axis: extent})
                step(batch)
                rates[n].append(rate_of(step, batch, seconds))
        medians = {n: statistics.median(each) for n, each in rates.items()}
        chosen = medians[tuned.batch_size or 1]
        rows.append({
            "extent": extent, "recommended": tuned.batch_size, "reported": tuned.samples_per_second,
            "seconds": tuned.seconds_spent, "rate": chosen, "loss": 1 - chosen / max(medians.values()),
            "rates": {str(n): each for n, each in rates.items()},
        })  # fmt: skip
    return rows


def main() -> None:
    """Run the benchmark and write its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workload", choices=[each.name for each in workloads()], help="only this one")
    parser.add_argument("--budget", type=float, default=10.0, help="of one extent")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn in the sweep")
    parser.add_argument("--rounds", type=int, default=5)
    options, rows = parser.parse_args(), []
    for workload in workloads():
        if options.workload not in (None, workload.name):
            continue
        workload.module.eval()
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
            path = str(Path(folder) / "model.onnx")
            given: dict[str, Any] = {"batches": workload.batches}
            if workload.is_onnx:
                axes = {"tokens": {0: "batch", 1: workload.axis}}
                torch.onnx.export(workload.module, (texts(2, 32),), path, input_names=["tokens"], dynamic_axes=axes,
                                  dynamo=False)  # fmt: skip
                given = {"device": "cpu", "store": False}
            subject = path if workload.is_onnx else workload.module
            began = time.perf_counter()
            result = cb.autotune_extents(
                subject, {workload.axis: workload.extents}, budget=EXTENT_FACTOR * options.budget, max_batch_size=256,
                **given,
            )  # fmt: skip
            wall = time.perf_counter() - began
            rows.append({
                "workload": workload.name, "axis": workload.axis, "wall_seconds": wall,
                "token_budget": result.token_budget,
                "extents": sweep(workload, path, result, options.seconds, options.rounds),
            })  # fmt: skip
        for row in rows[-1]["extents"]:
            ratio = (row["reported"] or 0.0) / row["rate"]
            print(
                f"{workload.name} {row['extent']}: {row['recommended']}, loss {100 * row['loss']:.1f} %, "
                f"reported {ratio:.2f} of a plain loop, {row['seconds']:.1f} s",
                flush=True,
            )
    if options.out:
        write(options.out, {**on_cpu("extents"), "rows": rows})


if __name__ == "__main__":
    main()
