"""
Compare predicted memory of training steps on a GPU with published memory of models of timm.

    pip install timm torchvision
    python -m benchmarks.bench_gpu_memory --data DIR --out FILE

DIR holds the memory table of GPUMemNet (itu-rad/GPUMemNet@f01eb05), of models of timm on a GPU of 40 GB.  It has the
largest memory of the process in training with float32, at batches of 8 to 128.  Two steps count for each model: the
largest batch that ran, and the smallest one that failed.  The growth between the two largest batches that ran is
continued to the failed one.  If that takes at least 95 % of the GPU, it ran out of memory.  Others failed for another
reason.

Of the models that ran out of memory, the hardest are chosen: their failed step needs the least, by that growth.  Of the
others, those with the smallest hashes of their names.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

import cubatch as cb
from benchmarks.modules import zoo
from benchmarks.provenance import provenance, write

TABLE = "memory_gpumemnet_timm_measured.csv"
GPU = "a100-sxm4-40gb"
CAPACITY = 40536  # MiB of an A100 of 40 GB by NVML; the largest published figure is 40 369
OUT_OF_MEMORY = 0.95
_MIB = 2**20


@attrs.frozen
class Published:
    """
    The published steps of a model.

    Attributes:
        model: Its name in timm.
        ran: Memory in MiB by batch size, of the steps that ran.
        failed: The smallest batch size above these that ran out of memory; None if none did.
        needed: MiB of that batch by the growth from the two largest that ran; 0 if there is none.
    """

    model: str
    ran: Mapping[int, float]
    failed: int | None
    needed: float = 0.0


def published(path: Path) -> Iterator[Published]:
    """Yield the models of a table whose steps ran at two batch sizes or more."""
    rows: dict[str, dict[int, tuple[float, str]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["measured_max_gpu_mem_MiB"]:
                known = rows.setdefault(row["model"], {})
                known[int(row["batch"])] = float(row["measured_max_gpu_mem_MiB"]), row["flag"]
    for model, known in rows.items():
        ran = {n: taken for n, (taken, flag) in sorted(known.items()) if not flag}
        later = [n for n in sorted(known) if n > max(ran, default=math.inf)]
        if len(ran) > 1:
            (small, less), (large, more) = list(ran.items())[-2:]
            needed = more + (more - less) / (large - small) * (later[0] - large) if later else 0.0
            is_out = needed >= OUT_OF_MEMORY * CAPACITY and known[later[0]][1].startswith("not larger")
            yield Published(model, ran, *((later[0], needed) if is_out else (None, 0.0)))


def build(name: str) -> torch.nn.Module:
    """Return a model of timm on the CPU whose weights take no memory until they are written."""
    zoo.torchvision_package()
    import timm

    with torch.device("meta"):
        model = timm.create_model(name)
    return model.to_empty(device="cpu")


def rows(of: Published) -> Iterator[dict[str, Any]]:
    """Yield the published and the predicted MiB of a model's largest step that ran, and of the first that failed."""
    model = build(of.model)
    shape = model.default_cfg["input_size"]
    for size in filter(None, (max(of.ran), of.failed)):
        taken = cb.footprint(model, shape, batch_size=size, mode="training", optimizer="momentum", device=GPU)
        yield {
            "model": of.model, "batch_size": size, "measured": of.ran.get(size), "predicted": round(taken.total / _MIB),
            "overhead": round(taken.overhead / _MIB), "allocator": round(taken.allocator / _MIB),
        }  # fmt: skip


def scores(of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the errors of steps that ran, and how many failed steps were predicted to fit into 95 % of the GPU."""
    errors = [row["predicted"] / row["measured"] - 1 for row in of if row["measured"]]
    failed = [row["predicted"] for row in of if not row["measured"]]
    return {
        "ran": len(errors), "mean_error": round(statistics.mean(map(abs, errors)), 4),
        "median": round(statistics.median(errors), 4), "lowest": round(min(errors), 4),
        "highest": round(max(errors), 4), "failed": len(failed),
        "predicted_to_fit": sum(predicted <= OUT_OF_MEMORY * CAPACITY for predicted in failed),
    }  # fmt: skip


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def main() -> None:
    """Trace the models and print the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the CSV file")
    parser.add_argument("--out", type=Path, help="write the rows there as JSON")
    parser.add_argument("--models", type=int, default=12, help="models that ran out of memory, and models that did not")
    arguments = parser.parse_args()
    every = sorted(published(arguments.data / TABLE), key=lambda each: (each.needed, _number(each.model)))
    steps: list[dict[str, Any]] = []
    for is_failed in (True, False):
        for each in [each for each in every if (each.failed is not None) == is_failed][: arguments.models]:
            try:
                steps += rows(each)
            except Exception as error:  # noqa: BLE001 - a name that this version of timm lacks, or an untraceable step
                print(f"{each.model}: {type(error).__name__}: {str(error)[:100]}")
            else:
                print(steps[-1], flush=True)
    print(scores(steps))
    if arguments.out:
        facts = {"schema": 1, "benchmark": "gpu_memory", **provenance(), "gpu": GPU}
        write(arguments.out, {**facts, "scores": scores(steps), "rows": steps})


if __name__ == "__main__":
    main()
