"""
Compare the engine on a CPU with PyTorch eager: samples per second of several networks in training and inference.

    python -m benchmarks.bench_engine_cpu --json benchmarks/results/<device>/engine-cpu.json

Both sides run the same network in float32 on random data with the same number of threads.  Training uses SGD with
momentum at a learning rate of 0, since losses on random data would diverge.  In every round cubatch, PyTorch in NCHW
and PyTorch in channels_last run once, in random order.  The least seconds of a step are compared with the faster
layout of PyTorch.  OPENBLAS_CORETYPE is removed from the environment: it would override NumPy's choice of kernels.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks import torch_network
from benchmarks.provenance import provenance, write
from cubatch.engine.conditions import environment
from cubatch.engine.network import Model
from cubatch.hardware import probe
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layer import Layer

SPAN_SECONDS = 0.2
GOAL, WORST_GOAL = 1.0, 0.8
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "mnist-cnn": ("mnist-cnn", {}, (1, 2, 4, 16, 64, 256)),
    "resnet18 32x32": ("resnet18", {"input_shape": (32, 32, 3), "classes": 10}, (1, 2, 4, 16, 64, 256)),
    "mobilenet-v3-large 32x32": (
        "mobilenet-v3-large", {"input_shape": (32, 32, 3), "classes": 10}, (1, 2, 4, 16, 64, 256)
    ),
    "googlenet 96x96": ("googlenet", {"input_shape": (96, 96, 3), "classes": 10}, (2, 16, 64)),
    "resnet50 64x64": ("resnet50", {"input_shape": (64, 64, 3), "classes": 10}, (1, 4, 16)),
    "alexnet": ("alexnet", {}, (1, 4, 16)),
    "vgg16": ("vgg16", {}, (1, 4, 16)),
}  # fmt: skip
MODES = ("training", "inference")
NAMES = ("cubatch", "torch NCHW", "torch channels_last")


def contender(name: str, network: Network, mode: str, batch_size: int, threads: int) -> Callable[[], object]:
    """Return a step of cubatch or of PyTorch."""
    if name == "cubatch":
        device = attrs.evolve(probe.device("cpu"), threads=threads)
        model = Model(network, device=device, mode=mode, optimizer="momentum", learning_rate=0.0)
        model.prepare(batch_size)
        model.load_random()
        return model.step
    channels_last = name.endswith("channels_last")
    if mode == "inference":
        return torch_network.inference_step(network, batch_size, device="cpu", channels_last=channels_last)
    return torch_network.training_step(network, batch_size, "float32", device="cpu", channels_last=channels_last)


def time_step(step: Callable[[], object]) -> float:
    """Mean seconds of a step over a span, after a discarded one."""
    step()
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < SPAN_SECONDS:
        step()
        count += 1
    return (time.perf_counter() - begun) / count


def row(
    network: Network, mode: str, batch_size: int, *, rounds: int, threads: int, order: random.Random
) -> dict[str, Any]:
    """Measure one batch size of one network, in interleaved rounds."""
    steps = {name: contender(name, network, mode, batch_size, threads) for name in NAMES}
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        for name in order.sample(NAMES, len(NAMES)):
            seconds[name].append(time_step(steps[name]))
    rates = {name: batch_size / min(seconds[name]) for name in NAMES}
    ratio = rates["cubatch"] / max(rates["torch NCHW"], rates["torch channels_last"])
    return {"batch_size": batch_size, "samples_per_second": rates, "ratio": ratio, "seconds": seconds}


def measure(case: str, mode: str, rounds: int, threads: int) -> dict[str, Any]:
    """Measure a network in one mode at all its batch sizes."""
    model, options, batch_sizes = CASES[case]
    network = models.build(model, **options)
    if mode == "training" and any(_is_norm_of_one(node.layer) for node in network.nodes):
        batch_sizes = tuple(size for size in batch_sizes if size > 1)  # PyTorch refuses to normalise a single value
    order = random.Random(0)
    rows = [row(network, mode, size, rounds=rounds, threads=threads, order=order) for size in batch_sizes]
    mean = math.exp(sum(math.log(row["ratio"]) for row in rows) / len(rows))
    ratios = "  ".join(f"{row['batch_size']}: {row['ratio']:.2f}" for row in rows)
    print(f"{case:26} {mode:10} {mean:5.2f}   {ratios}", flush=True)
    return {"network": case, "mode": mode, "mean_ratio": mean, "rows": rows}


def _is_norm_of_one(layer: Layer) -> bool:
    return layer.has_statistics and layer.output_shape[:2] == (1, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure networks; return 0 if the goals are met. `arguments` None: those of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--networks", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if "OPENBLAS_CORETYPE" in os.environ:  # read when NumPy loads: begin again without it
        rest = {key: value for key, value in os.environ.items() if key != "OPENBLAS_CORETYPE"}
        return subprocess.call([sys.executable, "-m", "benchmarks.bench_engine_cpu", *sys.argv[1:]], env=rest)

    import torch

    torch.set_num_threads(options.threads)
    networks = [
        measure(case, mode, options.rounds, options.threads) for case in options.networks for mode in options.modes
    ]
    if options.json:
        device = probe.device("cpu")
        facts = {
            "schema": 2, "benchmark": "engine_cpu", **provenance(),
            "device": {"name": device.name, "threads": options.threads},
            "environment": environment(device) | {"torch": torch.__version__},
            "rounds": options.rounds, "goal": GOAL, "worst_goal": WORST_GOAL, "networks": networks,
        }  # fmt: skip
        write(options.json, facts)
    ratios = [row["ratio"] for case in networks for row in case["rows"]]
    return 0 if all(case["mean_ratio"] >= GOAL for case in networks) and min(ratios) >= WORST_GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
