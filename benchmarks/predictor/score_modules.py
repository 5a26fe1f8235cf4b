"""
PyTorch modules: predictions of their traced steps against published times, and own times on Hopper GPUs.

    python -m benchmarks.predictor.score_modules --data DIR [--out FILE]

DIR holds CSV files of published networks.  No network was used to fit the times of operators.  The time of the host
(`operators.HOST_SECONDS`) was chosen on the published rows: "left out" scores each GPU with the time that fits all
others best.  Own rows had no part in it.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from benchmarks.modules import zoo
from benchmarks.predictor.published import find_device
from benchmarks.predictor.score_networks import BOARDS
from cubatch.errors import UnknownName
from cubatch.estimate.operators import HOST_SECONDS, Operator, TracedPrediction, predict_operators
from cubatch.estimate.vendor.algorithms import Array
from cubatch.hardware.arithmetic import peak_flops_per_second
from cubatch.hardware.facts import Device

RESULTS = Path(__file__).parents[1] / "results"
HOPPER = ("h100-sxm", "h200-sxm")
_FACTORS = np.exp(np.linspace(-1.5, 1.5, 61))  # on HOST_SECONDS
_TRACED = (2, 16, 256)  # of modules that were measured at many sizes
_DTYPES = {"fp32": "float32", "fp16": "float16"}
_PUBLISHED = (
    ("pytorch_gpu_benchmark_ryujaehun.csv", "gpu_name_reported", "batch_total", "median_ms"),
    ("deep_learning_benchmark_u39kun.csv", "gpu", "batch", "time_ms"),
)


@attrs.frozen(kw_only=True)
class Step:
    """
    A step of a module, as it was measured.

    Attributes:
        model: A classifier of torchvision, or a transformer of `benchmarks.modules.zoo`.
        mode, batch_size: Of the step.
        dtype: Type of the parameters.
        image: Height and width of the images.
        autocast: Type of automatic mixed precision.
        channels_last: Whether images are NHWC.
        optimizer: Its name; empty where the measured step ends with the gradients.
    """

    model: str
    mode: str
    batch_size: int
    dtype: str = "float32"
    image: int = 224
    autocast: str | None = None
    channels_last: bool = False
    optimizer: str = ""

    @property
    def arithmetic(self) -> str:
        """The type of the arithmetic."""
        return self.autocast or self.dtype

    def batches(self, size: int) -> Any:
        """Return a batch."""
        import torch

        if self.model in zoo.TRANSFORMERS:
            return zoo.example(self.model).repeat(size, 1)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return torch.empty(size, 3, self.image, self.image, dtype=getattr(torch, self.dtype)).to(memory_format=layout)


@functools.cache
def operators(step: Step) -> tuple[Operator, ...]:
    """Return the traced operators of a step."""
    import torch

    from cubatch.frameworks.torch_module import TorchModule

    module = zoo.build(step.model).to(getattr(torch, step.dtype))
    module = module.to(memory_format=torch.channels_last) if step.channels_last else module
    traced = TorchModule(
        module, step.batches, mode=step.mode, optimizer=step.optimizer or "sgd", autocast=step.autocast
    )
    every = traced.walk(step.batch_size, records=True).operators
    return tuple(each for each in every if step.optimizer or each.phase != "optimizer")


@attrs.frozen
class Case:
    """A measured step: its GPU, and its median time; `source` is "published" or the folder of own results."""

    source: str
    gpu: str
    step: Step
    seconds: float

    @property
    def device(self) -> Device | None:
        """The GPU; None if the catalogue does not know it, or the rate of its arithmetic."""
        try:
            device = find_device(BOARDS.get(self.gpu.lower(), self.gpu))
        except UnknownName:
            return None
        return None if peak_flops_per_second(device, self.step.arithmetic) is None else device


def published(folder: Path) -> Iterator[Case]:
    """Yield steps of single GPUs that others published, the median of a case's repeats."""
    times: dict[tuple[str, Step], list[float]] = {}
    for name, gpu, batch, time in _PUBLISHED:
        for row in _rows(folder / name):
            is_single = row.get("n_gpus", "1") == "1" and row.get("framework", "PyTorch").startswith("PyTorch")
            if is_single and row["precision"] in _DTYPES:
                mode = "training" if row["mode"].startswith("train") else "inference"
                step = Step(
                    model=row["model"].lower(), mode=mode, batch_size=int(row[batch]), dtype=_DTYPES[row["precision"]]
                )
                times.setdefault((row[gpu], step), []).append(float(row[time]) / 1e3)
    for (gpu, step), seconds in times.items():
        yield Case("published", gpu, step, float(np.median(seconds)))


def own() -> Iterator[Case]:
    """Yield the steps of PyTorch that were measured on an H100 and an H200."""
    for gpu in HOPPER:
        for path in sorted((RESULTS / gpu).glob("*.json")):
            facts = json.loads(path.read_text())
            if facts.get("library") == "torch":
                yield from _tuned(gpu, facts)
            elif facts.get("benchmark") == "module":
                yield from _exhaustive(gpu, facts)
            for stage in facts.get("stages", ()):
                yield from _trained(gpu, stage["items"]) if stage["name"] == "training" else ()


def _tuned(gpu: str, facts: Mapping[str, Any]) -> Iterator[Case]:
    """Yield the sizes of a tuning run of a module of the zoo."""
    for row in facts["measurements"]:
        if row["latency_seconds"] is not None:
            step = Step(
                model=facts["spec"]["name"].rpartition(":")[2], mode=facts["mode"], batch_size=row["batch_size"],
                image=zoo.IMAGE[1], optimizer=facts["optimizer"],
            )  # fmt: skip
            yield Case(gpu, gpu, step, row["latency_seconds"])


def _exhaustive(gpu: str, facts: Mapping[str, Any]) -> Iterator[Case]:
    """Yield the sizes of an exhaustive sweep of modules of the zoo."""
    for row in facts["rows"]:
        for size, rate in row["samples_per_second"].items():
            step = Step(
                model=row["module"], mode=row["mode"], batch_size=int(size), image=zoo.IMAGE[1], optimizer="sgd"
            )  # fmt: skip
            yield Case(gpu, gpu, step, int(size) / rate)


def _trained(gpu: str, items: Sequence[Mapping[str, Any]]) -> Iterator[Case]:
    """Yield training steps with automatic mixed precision."""
    for item in items:
        for name, rate in (item.get("images_per_second") or {}).items():
            if name.startswith("PyTorch eager, channels_last"):
                step = Step(
                    model=item["network"], mode="training", batch_size=item["batch_size"], autocast=item["dtype"],
                    channels_last=True, optimizer="momentum",
                )  # fmt: skip
                yield Case(gpu, gpu, step, item["batch_size"] / rate)


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def predicted(cases: Sequence[Case]) -> Iterator[tuple[Case, TracedPrediction]]:
    """Yield the cases on known GPUs with their predictions."""
    for case in cases:
        if (device := case.device) is not None:
            sizes = [case.step.batch_size] if case.source == "published" else _TRACED
            traced = {size: operators(attrs.evolve(case.step, batch_size=size)) for size in sizes}
            yield case, predict_operators(traced, [case.step.batch_size], device)


def modules(folder: Path) -> dict[str, Mapping[str, object]]:
    """
    Return the errors of predicted steps of modules, and the share inside their interval.

    Published steps of training have neither loss nor optimizer, and include the copy of the batch to the GPU.
    """
    rows = list(predicted([*published(folder), *own()]))
    measured = np.array([case.seconds for case, _ in rows])
    host = np.array([float(each.host_seconds[0]) for _, each in rows])
    whole = np.array([float(each.step.seconds[0]) for _, each in rows])
    inside = np.array([each.step.low[0] <= case.seconds <= each.step.high[0] for case, each in rows])
    boards = np.array([str(case.device) for case, _ in rows])
    is_published = np.array([case.source == "published" for case, _ in rows])
    kinds = np.array([f"{case.source}, {case.step.mode}, {case.step.arithmetic}" for case, _ in rows])
    left_out = _left_out(whole, host, measured, boards=boards, fitted=is_published)
    scores = {}
    for kind in sorted(set(kinds)):
        of = kinds == kind
        scores[f"modules, {kind}"] = _summary(whole[of] / measured[of]) | {
            "inside_interval": round(100 * float(inside[of].mean()), 1)
        }
        scores[f"modules, {kind}, GPU left out"] = _summary(left_out[of] / measured[of])
    return scores


def _left_out(whole: Array, host: Array, measured: Array, *, boards: np.ndarray, fitted: np.ndarray) -> Array:
    """Return predictions of each GPU with the time of the host that fits all other GPUs best."""
    kernels = np.sqrt(np.maximum(whole**2 - host**2, 0.0))
    out = np.zeros(len(whole))
    for board in set(boards):
        others = fitted & (boards != board)

        def error(factor: float, others: np.ndarray = others) -> float:
            logs = np.abs(np.log(np.hypot(kernels, factor * host) / measured))
            return float(np.mean([logs[others & (boards == each)].mean() for each in set(boards[others])]))

        best = min(_FACTORS, key=error)
        print(f"{board} left out: {1e6 * best * HOST_SECONDS:.0f} us to launch an operator")
        out[boards == board] = np.hypot(kernels, best * host)[boards == board]
    return out


def _summary(ratios: Array) -> dict[str, object]:
    return {
        "cases": len(ratios),
        "mean_error": round(100 * float(np.mean(np.abs(ratios - 1))), 1),
        "bias": round(100 * (float(np.exp(np.mean(np.log(ratios)))) - 1), 1),
    }


def main() -> None:
    """Print the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the CSV files")
    parser.add_argument("--out", type=Path, help="write the scores there as JSON")
    arguments = parser.parse_args()
    scores = modules(arguments.data)
    for name, score in scores.items():
        print(name, score)
    if arguments.out:
        from benchmarks.provenance import provenance, write

        facts = {"schema": 1, "benchmark": "predictor-modules", **provenance(), "scores": scores}
        write(arguments.out, facts)


if __name__ == "__main__":
    main()
