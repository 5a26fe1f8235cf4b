"""
Training `mnist-cnn` on the CPU: our engine beside PyTorch eager, samples per second.

    python -m benchmarks.bench_engine_cpu --json benchmarks/results/<device>/engine-cpu.json

Both train the same network in float32 with SGD on random data, with the same number of threads.  In
every round each of ours, PyTorch NCHW and PyTorch channels_last runs once at each batch size, in an
order drawn anew; the medians over the rounds are compared with the faster of PyTorch's two layouts.
The environment variable OPENBLAS_CORETYPE, which would give NumPy other kernels than its own choice,
is taken away from this process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.provenance import provenance

BATCH_SIZES = (4, 8, 16, 32, 64, 128, 256)
SPAN_SECONDS = 0.25
GOAL = 0.8


def ours(batch_size: int, threads: int) -> Callable[[], object]:
    import attrs

    from cubatch.engine.network import Model
    from cubatch.hardware import probe
    from cubatch.network import models

    device = attrs.evolve(probe.device("cpu"), threads=threads)
    model = Model(models.build("mnist-cnn"), device=device, mode="training", optimizer="sgd")
    model.prepare(batch_size)
    model.load_random()
    return model.step


def torch_step(batch_size: int, *, channels_last: bool) -> Callable[[], object]:
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    x = torch.randn(batch_size, 1, 28, 28)
    labels = torch.randint(0, 10, (batch_size,))
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def time_step(step: Callable[[], object]) -> float:
    """Mean seconds of a step over a span, after two discarded ones."""
    step()
    step()
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < SPAN_SECONDS:
        step()
        count += 1
    return (time.perf_counter() - begun) / count


def measure(rounds: int, threads: int) -> list[dict[str, object]]:
    import torch

    torch.set_num_threads(threads)
    order = random.Random(0)
    steps: dict[tuple[int, str], Callable[[], object]] = {}
    for batch_size in BATCH_SIZES:
        steps[batch_size, "cubatch"] = ours(batch_size, threads)
        steps[batch_size, "torch NCHW"] = torch_step(batch_size, channels_last=False)
        steps[batch_size, "torch channels_last"] = torch_step(batch_size, channels_last=True)
    seconds: dict[tuple[int, str], list[float]] = {key: [] for key in steps}
    for done in range(rounds):
        for batch_size in BATCH_SIZES:
            contenders = [key for key in steps if key[0] == batch_size]
            order.shuffle(contenders)
            for key in contenders:
                seconds[key].append(time_step(steps[key]))
        print(f"round {done + 1} of {rounds}", file=sys.stderr)
    rows = []
    for batch_size in BATCH_SIZES:
        rates = {
            name: batch_size / statistics.median(seconds[batch_size, name])
            for name in ("cubatch", "torch NCHW", "torch channels_last")
        }
        rival = max(rates["torch NCHW"], rates["torch channels_last"])
        rows.append(
            {
                "batch_size": batch_size,
                "samples_per_second": rates,
                "ratio": rates["cubatch"] / rival,
                "seconds": {name: seconds[batch_size, name] for name in rates},
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if "OPENBLAS_CORETYPE" in os.environ:  # read when NumPy loads: begin again without it
        rest = {key: value for key, value in os.environ.items() if key != "OPENBLAS_CORETYPE"}
        return subprocess.call([sys.executable, "-m", "benchmarks.bench_engine_cpu", *sys.argv[1:]], env=rest)
    rows = measure(arguments.rounds, arguments.threads)

    import torch

    from cubatch.hardware import probe
    from cubatch.measure.conditions import environment

    device = probe.device("cpu")
    print("batch  cubatch/s  torch NCHW/s  torch channels_last/s  ratio")
    for row in rows:
        rates = row["samples_per_second"]
        print(
            f"{row['batch_size']:5}  {rates['cubatch']:9.0f}  {rates['torch NCHW']:12.0f}  "
            f"{rates['torch channels_last']:21.0f}  {row['ratio']:5.2f}"
        )
    if arguments.json:
        facts = {
            "schema": 1,
            "benchmark": "engine_cpu",
            **provenance(),
            "device": {"name": device.name, "threads": arguments.threads},
            "environment": environment(device) | {"torch": torch.__version__},
            "rounds": arguments.rounds,
            "goal": GOAL,
            "rows": rows,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["ratio"] >= GOAL for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
