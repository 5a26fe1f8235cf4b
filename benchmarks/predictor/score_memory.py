"""
The memory that `cb.footprint` predicts for training steps on GPUs, against published measurements.

    python -m benchmarks.predictor.score_memory --data DIR [--json FILE]

DIR holds two CSV files of steps in float32.  WSShiro/vramexp has what PyTorch's allocator gave to tensors and what it
reserved, on a card of 24 GB of which other programs held a part.  Tensors that earlier cells of its notebook held are
subtracted from both.  GPUMemNet has the most memory that the process took
on an unnamed GPU of about 40 GB, for models of timm.  Those that torchvision has too are compared, without rows that
the file flags.  Their optimizer is not documented; momentum is assumed.

No step is run: modules are on the "meta" device.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

import cubatch as cb
from benchmarks.modules import zoo
from benchmarks.provenance import on_cpu, write
from cubatch.hardware import context_overhead

IMAGE = (3, 224, 224)
_MIB = 2**20
_CARD = 24 * 1024  # MiB
_VRAMEXP = {
    "ResNet-50 (10 classes)": ("resnet50", 1141.6), "VGG16-BN (10 classes)": ("vgg16_bn", 537.1),
    "ViT-B/16 (10 classes)": ("vit_b_16", 1563.3),
}  # fmt: skip
"""
Name in torchvision by published model, and the MiB of tensors that the notebook prints before training ("Initial").

They are the model's weights and what earlier models left: vramexp1.ipynb trains VGG16-BN, ResNet-50 and ViT-B/16 in
one process and frees none.
"""
_GPUMEMNET = {
    "resnet101": "resnet101", "resnext50_32x4d": "resnext50_32x4d", "wide_resnet50_2": "wide_resnet50_2",
    "vgg16": "vgg16", "vgg16_bn": "vgg16_bn", "mobilenetv2_100": "mobilenet_v2", "efficientnet_b0": "efficientnet_b0",
    "convnext_tiny": "convnext_tiny",
}  # fmt: skip
_BATCHES = (8, 128)


def rows(data: Path) -> Iterator[dict[str, Any]]:
    """Yield for each published figure its source, model, batch size, what it counts, and measured and predicted MiB."""
    for row in _read(data / "memory_vramexp_measured.csv"):
        if row["model"] not in _VRAMEXP:
            continue
        name, held = _VRAMEXP[row["model"]]
        held -= _weight_mib(name, num_classes=10)
        reserved, used = float(row["reserved_MiB"]), float(row["nvml_device_used_after_MiB"])
        gpu = cb.device("rtx-4090")
        free = round((_CARD - used + reserved - held) * _MIB)  # for the allocator
        gpu = attrs.evolve(gpu, memory_bytes=free + context_overhead.overhead_bytes(gpu))
        predicted = _footprint(name, int(row["batch"]), gpu, optimizer="sgd", num_classes=10)
        about = {"source": "vramexp", "model": row["model"], "batch_size": int(row["batch"])}
        within = predicted.total - predicted.overhead
        counted = {"allocated": within - predicted.allocator, "reserved": within}
        for what, measured in {"allocated": float(row["peak_allocated_MiB"]), "reserved": reserved}.items():
            yield {**about, "counted": what, "measured": measured - held, "predicted": counted[what] / _MIB}
    for row in _read(data / "memory_gpumemnet_timm_measured.csv"):
        if row["model"] not in _GPUMEMNET or row["flag"] or int(row["batch"]) not in _BATCHES:
            continue
        gpu = cb.device("a100-sxm4-40gb")
        predicted = _footprint(_GPUMEMNET[row["model"]], int(row["batch"]), gpu, optimizer="momentum")
        yield {
            "source": "GPUMemNet", "model": row["model"], "batch_size": int(row["batch"]), "counted": "process",
            "measured": float(row["measured_max_gpu_mem_MiB"]), "predicted": predicted.total / _MIB,
        }  # fmt: skip


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _module(name: str, **options: int) -> torch.nn.Module:
    with torch.device("meta"):
        module: torch.nn.Module = getattr(zoo.torchvision_package().models, name)(**options)
    return module


def _weight_mib(name: str, **options: int) -> float:
    """Return the MiB of a model's parameters and buffers."""
    tensors = _module(name, **options).state_dict().values()
    return sum(each.numel() * each.element_size() for each in tensors) / _MIB


def _footprint(name: str, batch_size: int, gpu: cb.Device, *, optimizer: str, **options: int) -> cb.ModuleFootprint:
    module = _module(name, **options)
    return cb.footprint(module, IMAGE, batch_size=batch_size, mode="training", optimizer=optimizer, device=gpu)


def main(arguments: Sequence[str] | None = None) -> None:
    """Score the models and print a line for each figure; `arguments` None: those of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--data", type=Path, metavar="DIR", required=True)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    scored = []
    for row in rows(options.data):
        scored.append(row)
        print(
            f"{row['source']}, {row['model']}, batch {row['batch_size']}, {row['counted']}: measured "
            f"{row['measured']:.0f} MiB, predicted {row['predicted'] / row['measured'] - 1:+.1%}"
        )
        if options.json:
            write(options.json, {**on_cpu("published memory"), "torch": torch.__version__, "rows": scored})


if __name__ == "__main__":
    main()
