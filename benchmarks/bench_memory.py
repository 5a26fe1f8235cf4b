"""
Compare the predicted memory of cubatch's engine with the memory that a process uses.

    python -m benchmarks.bench_memory --json benchmarks/results/amd-epyc-2-threads/memory.json
    python -m benchmarks.bench_memory --device cuda --library cubatch --json memory.json

Each case runs STEPS steps in a worker of its own, as in tuning.  "Used" is what NVML reports on a GPU, context
included, or the growth of the resident set on a CPU.  Sizes fill --shares of the available memory (on a CPU: `--room`);
the last one is the largest that is predicted to fit.  On a GPU a first run of `mlp` learns the process overhead.  A
busy machine does not disturb this benchmark.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance, write
from cubatch.engine.conditions import environment
from cubatch.errors import CubatchError, DoesNotFit
from cubatch.hardware import memory_limit as hardware_memory, probe
from cubatch.measure.remote import RemoteRunner
from cubatch.measure.runner import FactoryRef
from cubatch.memory import fit
from cubatch.memory.plan import plan
from cubatch.memory.process_overhead import device_bytes
from cubatch.network import models
from cubatch.workload import Workload

MIB = 2**20
STEPS = 3
SHARES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
MODELS = (
    "lenet5", "mnist-cnn", "alexnet", "vgg16", "googlenet", "resnet18", "resnet50", "mobilenet-v3-large", "go-net",
    "deit-tiny",
)  # fmt: skip
MODES = ("inference", "training")


def workload(model: str, mode: str, device: str, library: str, optimizer: str) -> Workload:
    """Return the description of the case that runs."""
    return Workload.of(
        models.build(model), device, mode=mode, dtype="float32", optimizer=optimizer, library=library, present=True
    )


def sizes(work: Workload, limit: int, least: int, shares: Sequence[float]) -> list[int]:
    """Return the sizes that fill shares of the memory left by one sample; none if that does not fit."""
    try:
        return sorted({fit.largest(work, least + int(share * (limit - least))) for share in shares})
    except DoesNotFit:
        return []


def taken(work: Workload, batch_size: int) -> dict[str, Any]:
    """Run a size in a worker; return predicted and used bytes."""
    kept_back = hardware_memory.memory_limit(work.device).overhead_bytes
    predicted = device_bytes(work, batch_size, kept_back)
    device = "cpu" if work.device.kind == "cpu" else f"cuda:{work.device.index}"
    arguments = {"spec": work.spec.to_mapping(), "device": device, **work.settings, "seed": 0}
    row = {"batch_size": batch_size, "planned": plan(work, batch_size).total, "said": predicted}
    runner = RemoteRunner(FactoryRef("cubatch.measure.network_runner:network_runner", arguments))
    try:
        runner.prepare(batch_size)
        runner.time(STEPS)
        took = runner.peak_device_bytes
        untold = {"failed": "what the process takes cannot be read on this machine"}
        row |= untold if took is None else {"held": runner.peak_bytes, "took": took}
        runner.release()
    except CubatchError as error:
        row |= {"failed": str(error)}
    finally:
        runner.close()
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases and print a line for each; `arguments` None: those of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--library", default="auto")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES), help="of the memory that may be taken")
    parser.add_argument("--room", type=int, default=512, help="MiB above the memory of one sample, on a CPU")
    options = parser.parse_args(arguments)
    device = probe.resolve(options.device)
    if device.kind == "cuda":
        taken(workload("mlp", "training", options.device, options.library, options.optimizer), 1)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        for mode in options.modes:
            work = workload(model, mode, options.device, options.library, options.optimizer)
            least = plan(work, 1).total
            limit = hardware_memory.memory_limit(device).bytes if device.kind == "cuda" else least + options.room * MIB
            for size in sizes(work, limit, least, options.shares):
                row = {"model": model, "mode": mode, **taken(work, size)}
                rows.append(row)
                print(_line(row))
                sys.stdout.flush()
                if options.json:
                    content = {
                        "schema": 1, "benchmark": "memory", **provenance(), "device": device.name,
                        "threads": device.threads, "environment": environment(device), "steps": STEPS,
                        "optimizer": options.optimizer, "rows": rows,
                    }  # fmt: skip
                    write(options.json, content)


def _line(row: dict[str, Any]) -> str:
    case = f"{row['model']} {row['mode']} {row['batch_size']}: planned {row['planned'] / MIB:.1f} MiB"
    if "failed" in row:
        return f"{case}, FAILED: {row['failed']}"
    away = row["said"] - row["took"]
    return (
        f"{case}, held {row['held'] / MIB:.1f}, predicted {row['said'] / MIB:.1f}, used {row['took'] / MIB:.1f} "
        f"({away / MIB:+.1f} MiB, {away / row['took']:+.1%}; the plan alone {row['planned'] / row['took'] - 1:+.1%})"
    )


if __name__ == "__main__":
    main()
