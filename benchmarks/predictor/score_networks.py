"""Whole networks: predictions of `predict_step` against published times of frameworks."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import attrs
import numpy as np

import cubatch as cb
from benchmarks.predictor.published import find_device
from cubatch.errors import UnknownName
from cubatch.estimate.operators import Operator, predict_operators
from cubatch.estimate.step import predict_step
from cubatch.hardware.arithmetic import peak_flops_per_second
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.network.graph import as_network
from cubatch.network.layer import Layer
from cubatch.network.passes import Pass

COPY_BYTES_PER_SECOND = 2.9e9
"""Rate at which ryujaehun's steps copy their batch from pageable memory, fitted with the time of the host."""

_VGG = {
    "vgg11": ((1, 1, 2, 2, 2), False),
    "vgg13_bn": ((2, 2, 2, 2, 2), True),
    "vgg16_bn": ((2, 2, 3, 3, 3), True),
    "vgg19": ((2, 2, 4, 4, 4), False),
    "vgg19_bn": ((2, 2, 4, 4, 4), True),
}
_RESNET = {"resnet152": (3, 8, 36, 3)}
_IMAGE = (224, 224, 3)
_DTYPES = {"fp32": "float32", "fp16": "float16"}
# Board names of the sources that the catalogue does not know.
BOARDS = {"v100": "v100-sxm2-16gb", "titan v": "titan-v", "1080 ti": "gtx-1080-ti", "2080 ti": "rtx-2080-ti"}


@cache
def network(name: str) -> cb.Network | None:
    """Build a network that `cubatch.models` has not, as in torchvision; None if it is none of those here."""
    if name in cb.models.names():
        return cb.models.build(name)
    if name in _VGG:
        return cb.Network(input_shape=_IMAGE, layers=_vgg(_VGG[name][0], normed=_VGG[name][1]), name=name)
    if name in _RESNET:
        return cb.Network(input_shape=_IMAGE, layers=_resnet(_RESNET[name]), name=name)
    return None


def _vgg(repeats: tuple[int, ...], *, normed: bool) -> list[Layer]:
    layers: list[Layer] = []
    for count, k in zip(repeats, (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            layers += [cb.Conv2d(k=k, r=3, s=3, pad=1), *[cb.BatchNorm2d()] * normed, cb.ReLU()]
        layers.append(cb.MaxPool2d(r=2, s=2, stride=2))
    return [*layers, cb.Flatten(), cb.Linear(k=4096), cb.ReLU(), cb.Linear(k=4096), cb.ReLU(), cb.Linear(k=1000)]


def _resnet(repeats: tuple[int, ...]) -> list[Layer]:
    layers: list[Layer] = [cb.Conv2d(k=64, r=7, s=7, stride=2, pad=3, bias=False), cb.BatchNorm2d(), cb.ReLU()]
    layers.append(cb.MaxPool2d(name="0", r=3, s=3, stride=2, pad=1))
    last, wide = "0", 64
    for stage, count in enumerate(repeats):
        for number in range(count):
            name, k = f"{stage}.{number}", 64 << stage
            step = 2 if stage and not number else 1
            for part, (out, taps, stride) in enumerate(((k, 1, 1), (k, 3, step), (4 * k, 1, 1))):
                reads = {"inputs": [last]} if part == 0 else {}
                layers.append(cb.Conv2d(k=out, r=taps, s=taps, stride=stride, pad=taps // 2, bias=False, **reads))
                layers.append(cb.BatchNorm2d(name=f"{name}.{part}"))
                layers += [cb.ReLU()] * (part < 2)
            skip = last
            if wide != 4 * k:
                layers.append(cb.Conv2d(k=4 * k, r=1, s=1, stride=step, bias=False, inputs=[last]))
                layers.append(cb.BatchNorm2d(name=f"{name}.skip"))
                skip, wide = f"{name}.skip", 4 * k
            layers += [cb.Add(inputs=[f"{name}.2", skip]), cb.ReLU(name=name)]
            last = name
    return [*layers, cb.GlobalAvgPool(), cb.Linear(k=1000)]


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def gradient_operators(sizes: Iterable[int]) -> list[Operator]:
    """Return the operators that set gradients to zero and add to them, as before PyTorch 2.0; `sizes` are in bytes."""
    zero = Operator("zero_", "bytes", "backward", Pass.FPROP, "float32")
    every = list(sizes)
    return [
        *(attrs.evolve(zero, written_bytes=size) for size in every),
        *(attrs.evolve(zero, name="add_", read_bytes=2 * size, written_bytes=size) for size in every),
    ]


def _other_seconds(spec: cb.Network, device: Device, mode: str, dtype: str) -> float:
    """Return the seconds of a published training step in which gradients are set to zero and added to."""
    if mode == "inference":
        return 0.0
    shapes = [shape for node in as_network(spec).nodes for shape in node.layer.parameter_shapes.values()]
    every = gradient_operators(math.prod(shape) * BYTES_PER_ELEMENT[dtype] for shape in shapes)
    return float(predict_operators({1: every}, [1], device).step.seconds[0])


def _published(folder: Path) -> list[tuple[str, str, str, str, int, bool, float]]:
    """Read (GPU, model, mode, dtype, batch, whether it is copied, seconds) of single GPUs, the median of repeats."""
    cases: dict[tuple[str, str, str, str, int, bool], list[float]] = {}
    for name, gpu, batch, time, copied in (
        ("pytorch_gpu_benchmark_ryujaehun.csv", "gpu_name_reported", "batch_total", "median_ms", True),
        ("deep_learning_benchmark_u39kun.csv", "gpu", "batch", "time_ms", False),
    ):
        for row in _rows(folder / name):
            is_single = row.get("n_gpus", "1") == "1" and row.get("framework", "PyTorch").startswith("PyTorch")
            if is_single and row["precision"] in _DTYPES and network(row["model"].lower()) is not None:
                mode = "training" if row["mode"].startswith("train") else "inference"
                key = (row[gpu], row["model"].lower(), mode, _DTYPES[row["precision"]], int(row[batch]), copied)
                cases.setdefault(key, []).append(float(row[time]) / 1e3)
    return [(*key, float(np.median(times))) for key, times in cases.items()]


def _device(name: str) -> Device | None:
    """Find a GPU; None if the catalogue does not know it."""
    try:
        return find_device(BOARDS.get(name.lower(), name))
    except UnknownName:
        return None


def networks(folder: Path) -> dict[str, Mapping[str, object]]:
    """
    Return the errors of whole networks against published times, and the share inside their interval.

    Published steps also copy the batch to the device. In training they set gradients to zero and add to them. The
    seconds of both are added to the predictions here. The loss is left out.
    """
    groups: dict[str, list[tuple[float, bool]]] = {}
    for gpu, model, mode, dtype, batch, copied, measured in _published(folder):
        spec = network(model)
        device = _device(gpu)
        if spec is not None and device is not None and peak_flops_per_second(device, dtype) is not None:
            step = predict_step(spec, [batch], device, mode=mode, dtype=dtype, library="torch")
            other = _other_seconds(spec, device, mode, dtype)
            other += copied * batch * math.prod(_IMAGE) * BYTES_PER_ELEMENT[dtype] / COPY_BYTES_PER_SECOND
            inside = bool(step.low[0] <= measured - other <= step.high[0])
            ratio = (float(step.seconds[0]) + other) / measured
            groups.setdefault(f"networks, {mode}, {dtype}", []).append((ratio, inside))
    return {
        name: {
            "cases": len(rows),
            "mean_error": round(100 * float(np.mean([abs(ratio - 1) for ratio, _ in rows])), 1),
            "bias_of_network": round(100 * (float(np.exp(np.mean(np.log([ratio for ratio, _ in rows])))) - 1), 1),
            "inside_interval": round(100 * float(np.mean([inside for _, inside in rows])), 1),
        }
        for name, rows in sorted(groups.items())
    }
