"""
PyTorch modules: predictions of their traced steps against published times, and own times on Hopper GPUs.

    python -m benchmarks.predictor.score_modules --data DIR [--out FILE]

DIR holds CSV files of published networks: steps of 12 or 16 images (ryujaehun, u39kun), timm's on an RTX 3090 and
NVIDIA's DeepLearningExamples on V100s.  No network was used to fit the times of operators.  The time of the host
(HOST_SECONDS of `estimate/host_launches.py`) was chosen on networks.  So was its uncertainty, HOST_SD, on
every other network.  "GPU left out" scores each GPU with the time of the host that fits all
other GPUs best.  "Host known" takes the time that fits its own steps.  "Other networks" are the
rest; their coverage was known when HOST_SD was chosen.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from benchmarks.modules import zoo
from benchmarks.predictor.published import find_device
from benchmarks.predictor.score_networks import BOARDS, COPY_BYTES_PER_SECOND, gradient_operators, networks
from cubatch.errors import UnknownName
from cubatch.estimate.operators import Operator, TracedPrediction, predict_operators
from cubatch.estimate.vendor.algorithms import Array
from cubatch.hardware.arithmetic import peak_flops_per_second
from cubatch.hardware.facts import Device

RESULTS = Path(__file__).parents[1] / "results"
HOPPER = ("h100-sxm", "h200-sxm")
_FACTORS = np.exp(np.linspace(-1.5, 1.5, 61))  # on HOST_SECONDS
_TRACED = (16, 256)  # of modules that were measured at many sizes
_DTYPES = {"fp32": "float32", "fp16": "float16"}
_PUBLISHED = (
    ("pytorch_gpu_benchmark_ryujaehun.csv", "gpu_name_reported", "batch_total", "median_ms", True),
    ("deep_learning_benchmark_u39kun.csv", "gpu", "batch", "time_ms", False),
)
# Networks that torchvision has too.
_TIMM = {
    "resnet50": "resnet50", "vgg16": "vgg16", "efficientnet_b0": "efficientnet_b0", "convnext_tiny": "convnext_tiny",
    "vit_base_patch16_224": "vit_b_16", "mobilenetv2_100": "mobilenet_v2", "resnext50_32x4d": "resnext50_32x4d",
}  # fmt: skip
_EXAMPLES = {
    "ResNet-50 v1.5": "resnet50", "ResNeXt101-32x4d": "resnext101_32x4d",
    "EfficientNet efficientnet-b0": "efficientnet_b0",
}  # fmt: skip


@attrs.frozen(kw_only=True)
class Step:
    """
    A step of a module, as it was measured.

    Attributes:
        model: A classifier of torchvision, or a transformer of `benchmarks.modules.zoo`.
        mode, batch_size: Of the step.
        dtype: Type of the parameters.
        image: Height and width of the images.
        autocast: Type of automatic mixed precision; None: it is off.
        channels_last: Whether images are NHWC.
        optimizer: Its name; empty where the measured step ends with the gradients.
        keeps_gradients: Whether gradients are set to zero and added to, as PyTorch before 2.0 did.
    """

    model: str
    mode: str
    batch_size: int
    dtype: str = "float32"
    image: int = 224
    autocast: str | None = None
    channels_last: bool = False
    optimizer: str = ""
    keeps_gradients: bool = False

    @property
    def arithmetic(self) -> str:
        """The type of the arithmetic."""
        return self.autocast or self.dtype

    def batches(self, size: int) -> Any:
        """Return a batch."""
        import torch

        if self.model in zoo.TRANSFORMERS:
            return zoo.example(self.model).repeat(size, 1)
        return torch.empty(size, 3, self.image, self.image, dtype=getattr(torch, self.dtype))


def operators(step: Step) -> tuple[Operator, ...]:
    """Return the operators of a step: those of its trace in NCHW, in its own layout."""
    every, gradients = _traced(attrs.evolve(step, channels_last=False, keeps_gradients=False))
    every = [each for each in every if not (step.channels_last and each.kind == "layout")]
    if step.keeps_gradients:
        every += gradient_operators(gradients)
    return tuple(every)


@functools.cache
def _traced(step: Step) -> tuple[tuple[Operator, ...], tuple[int, ...]]:
    """Return the traced operators of a step, and the bytes of each gradient."""
    import torch

    from cubatch.frameworks.torch_module import TorchModule

    module = _module(step.model).to(getattr(torch, step.dtype))
    traced = TorchModule(
        module, step.batches, mode=step.mode, optimizer=step.optimizer or "sgd", autocast=step.autocast, records=True
    )
    every = traced.walk(step.batch_size).operators
    gradients = tuple(each.numel() * each.element_size() for each in module.parameters())
    return tuple(each for each in every if step.optimizer or each.phase != "optimizer"), gradients


def _module(name: str) -> Any:
    if name == "resnext101_32x4d":
        resnet = zoo.torchvision_package().models.resnet
        return resnet.ResNet(resnet.Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4)
    return zoo.build(name)


@attrs.frozen
class Case:
    """A measured step: its GPU, and its median time; `source` is "published" or another source of steps."""

    source: str
    gpu: str
    step: Step
    seconds: float
    copied: bool = False

    @property
    def copy_seconds(self) -> float:
        """Time to copy the batch from the host, if the measured time includes it."""
        size = self.step.batch_size * 3 * self.step.image**2 * (2 if self.step.dtype == "float16" else 4)
        return self.copied * size / COPY_BYTES_PER_SECOND

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
    times: dict[Case, list[float]] = {}
    for name, gpu, batch, time, copied in _PUBLISHED:
        for row in _rows(folder / name):
            is_single = row.get("n_gpus", "1") == "1" and row.get("framework", "PyTorch").startswith("PyTorch")
            if is_single and row["precision"] in _DTYPES:
                is_training = row["mode"].startswith("train")
                step = Step(
                    model=row["model"].lower(), mode="training" if is_training else "inference",
                    batch_size=int(row[batch]), dtype=_DTYPES[row["precision"]], keeps_gradients=is_training,
                )  # fmt: skip
                times.setdefault(Case("published", row[gpu], step, 0.0, copied), []).append(float(row[time]) / 1e3)
    for case, seconds in [*times.items(), *_timm(folder).items(), *_examples(folder).items()]:
        yield attrs.evolve(case, seconds=float(np.median(seconds)))


def _timm(folder: Path) -> dict[Case, list[float]]:
    """Return the steps of timm at the batch size with most versions of PyTorch, each with its times."""
    times: dict[Step, dict[int, list[float]]] = {}
    for mode, name in (("inference", "timm_infer_rtx3090.csv"), ("training", "timm_train_rtx3090.csv")):
        for row in _rows(folder / name):
            if row["model"] in _TIMM and row["img_size"] == "224":
                step = Step(
                    model=_TIMM[row["model"]], mode=mode, batch_size=1, autocast="float16",
                    channels_last=row["layout"] == "nhwc", optimizer="momentum" if mode == "training" else "",
                )  # fmt: skip
                by_size = times.setdefault(step, {})
                by_size.setdefault(int(row["batch"]), []).append(float(row["step_time_ms"]) / 1e3)
    chosen = {step: max(sizes, key=lambda n, sizes=sizes: (len(sizes[n]), n)) for step, sizes in times.items()}
    return {
        Case("timm", "rtx-3090", attrs.evolve(step, batch_size=n), 0.0): times[step][n] for step, n in chosen.items()
    }


def _examples(folder: Path) -> dict[Case, list[float]]:
    """Return inference of NVIDIA's examples by source file and revision; mixed precision is NHWC since ConvNets."""
    times: dict[Case, list[float]] = {}
    for row in _rows(folder / "nvidia_dle_throughput.csv"):
        is_chosen = row["framework"] == "PyTorch" and row["mode"] == "infer" and row["n_gpus"] == "1"
        if is_chosen and row["model"] in _EXAMPLES and row["batch"] and row["precision"] in {"amp", "fp32"}:
            is_mixed = row["precision"] == "amp"
            step = Step(
                model=_EXAMPLES[row["model"]], mode="inference", batch_size=int(row["batch"]),
                autocast="float16" if is_mixed else None, channels_last=is_mixed and "ConvNets" in row["source"],
            )  # fmt: skip
            gpu = "v100-sxm2-16gb" if row["gpu"] == "V100 16GB" else "v100-sxm2-32gb"
            seconds = int(row["batch"]) / float(row["throughput_img_s"])
            times.setdefault(Case("examples", gpu, step, 0.0), []).append(seconds)
    return times


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
            sizes = [case.step.batch_size] if case.source in {"published", "timm"} else _TRACED
            traced = {size: operators(attrs.evolve(case.step, batch_size=size)) for size in sizes}
            yield case, predict_operators(traced, [case.step.batch_size], device)


def modules(folder: Path) -> dict[str, Mapping[str, object]]:
    """
    Return the errors of predicted steps of modules, and the share inside their interval.

    Published steps of 12 or 16 images have a loss but no optimizer, and some include the copy of the batch to the GPU.
    """
    rows = list(predicted([*published(folder), *own()]))
    copies = np.array([case.copy_seconds for case, _ in rows])
    measured = np.array([case.seconds for case, _ in rows])
    host = np.array([float(each.host_seconds[0]) for _, each in rows])
    whole = np.array([float(each.step.seconds[0]) for _, each in rows])
    spans = np.array([float(each.step.high[0] / each.step.seconds[0]) for _, each in rows])
    boards = np.array([str(case.device) for case, _ in rows])
    kinds = np.array([f"{case.source}, {case.step.mode}, {case.step.arithmetic}" for case, _ in rows])
    left_out, own_host = _refitted(whole, host, measured - copies, boards=boards)
    off = np.log((measured - copies) / left_out)
    inside = np.abs(off) <= np.log(spans)
    names = sorted({case.step.model for case, _ in rows})
    other = np.array([names.index(case.step.model) % 2 == 1 for case, _ in rows])
    scores: dict[str, Mapping[str, object]] = {}
    for kind in sorted(set(kinds)):
        of = kinds == kind
        scores[f"modules, {kind}"] = _summary((whole + copies)[of] / measured[of])
        scores[f"modules, {kind}, GPU left out"] = _summary((left_out + copies)[of] / measured[of]) | {
            "inside_interval": round(100 * float(inside[of].mean()), 1),
            "half_interval": round(float(np.median(spans[of])), 2),
        }
        scores[f"modules, {kind}, host known"] = _summary((own_host + copies)[of] / measured[of])
    scores["modules, between GPUs"] = _between_gpus([case for case, _ in rows], off / np.log(spans), boards)
    halves = np.array([case.step.arithmetic in {"float16", "bfloat16"} for case, _ in rows])
    for name, of in (("float32", ~halves), ("16 bits", halves)):
        for group, chosen in (("networks of HOST_SD", ~other), ("other networks", other)):
            held = of & chosen
            scores[f"modules, intervals, {name}, {group}"] = {
                "cases": int(held.sum()), "inside_interval": round(100 * float(inside[held].mean()), 1),
                "half_interval": round(float(np.median(spans[held])), 2),
            }  # fmt: skip
    return scores


def _refitted(whole: Array, host: Array, measured: Array, *, boards: np.ndarray) -> tuple[Array, Array]:
    """Return predictions of each GPU with the time of the host that fits all other GPUs best, or its own steps."""
    kernels = np.sqrt(np.maximum(whole**2 - host**2, 0.0))
    logs = np.abs(np.log(np.hypot(kernels, _FACTORS[:, None] * host) / np.maximum(measured, 1e-9)))
    by_board = {each: logs[:, boards == each].mean(axis=1) for each in sorted(set(boards))}
    out, known = np.zeros((2, len(whole)))
    for board in by_board:
        best = _FACTORS[np.argmin(np.mean([errors for each, errors in by_board.items() if each != board], axis=0))]
        own = _FACTORS[np.argmin(by_board[board])]
        print(f"{board} left out: {best:.2f} times HOST_SECONDS; its own steps take {own:.2f} times")
        out[boards == board] = np.hypot(kernels, best * host)[boards == board]
        known[boards == board] = np.hypot(kernels, own * host)[boards == board]
    return out, known


def _between_gpus(cases: Sequence[Case], errors: Array, boards: np.ndarray) -> dict[str, object]:
    """Return the correlation of the errors of one published step on two GPUs, in half intervals, over all pairs."""
    by_step: dict[Step, dict[str, float]] = {}
    for case, error, board in zip(cases, errors, boards, strict=True):
        if case.source == "published":
            by_step.setdefault(case.step, {})[board] = error
    pairs = np.array([pair for each in by_step.values() for pair in itertools.combinations(each.values(), 2)])
    return {
        "pairs": len(pairs),
        "correlation": round(float(2 * np.prod(pairs, axis=1).sum() / (pairs**2).sum()), 2),
    }


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
    scores = {**modules(arguments.data), **networks(arguments.data)}
    for name, score in scores.items():
        print(name, score)
    if arguments.out:
        from benchmarks.provenance import provenance, write

        facts = {"schema": 1, "benchmark": "predictor-modules", **provenance(), "scores": scores}
        write(arguments.out, facts)


if __name__ == "__main__":
    main()
