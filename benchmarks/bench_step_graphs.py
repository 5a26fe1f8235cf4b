"""
Compare steps as CUDA graphs with single launches, with overlapping launches and without.

    python -m benchmarks.bench_step_graphs --mode training --dtype float16 --json FILE

With --experimental NAMES two graphs are compared instead: without and with these `experimental` names of `Model`, which
docs/method/kernels.md describes.  A name without effect on the model or GPU is ignored: both graphs are then equal.

The ways take turns at each batch size, each on a model of its own, timed by CUDA events.  Single launches are paced by
the host wherever it is slower than the GPU; graphs are paced by the GPU.  Needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
from pathlib import Path

import attrs

from benchmarks.provenance import provenance, write
from cubatch.checks import EXPERIMENTAL
from cubatch.engine.conditions import environment
from cubatch.engine.network import Model
from cubatch.hardware import probe
from cubatch.kernels.launch import CudaLauncher
from cubatch.measure import clocks, kernel_context
from cubatch.network import models

ROUNDS, SPAN_SECONDS, MOST_REPEATS = 9, 0.05, 100
GRAPHS = {"launches": False, "graph": True}
OVERLAPS = {"": False, ", overlapping": True}


def compared(network, batch_size, *, device, clock, context, experimental, **options):
    """Seconds of a step of each way at one batch size, in rounds that take turns."""
    contexts = {
        word: attrs.evolve(context, launcher=CudaLauncher(device, overlaps=overlaps))
        for word, overlaps in OVERLAPS.items()
    }
    kinds = {
        f"{graphs}{overlaps}": {"graphs": GRAPHS[graphs], "context": contexts[overlaps]}
        for graphs, overlaps in itertools.product(GRAPHS, OVERLAPS)
    }
    if experimental:
        name = f"graph, {' and '.join(experimental)}"
        kinds = {"graph": kinds["graph"], name: kinds["graph"] | {"experimental": experimental}}
    with contextlib.ExitStack() as opened:
        ways = {
            way: opened.enter_context(Model(network, device=device, learning_rate=0.0, **kind, **options))
            for way, kind in kinds.items()
        }
        seconds = {way: [] for way in ways}
        for model in ways.values():
            model.prepare(batch_size)
            model.load_random()
            clock.time(model.step, 3)
        for _ in range(ROUNDS):
            for way, model in ways.items():
                seconds_once = clock.time(model.step, 1).seconds
                repeats = max(1, min(MOST_REPEATS, round(SPAN_SECONDS / seconds_once)))
                seconds[way].append(clock.time(model.step, repeats).seconds)
        launches = {way: model.launch["launches"] for way, model in ways.items()}
        about = {"batch_size": batch_size, "launch": ways["graph"].launch, "launches": launches}
        return about | {"timings_seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="of `cubatch models`; %(default)s")
    parser.add_argument("--mode", choices=("inference", "training"), default="training", help="%(default)s")
    parser.add_argument("--dtype", default="float16", help="%(default)s")
    parser.add_argument("--batch-sizes", default="1,2,4,8,12,16", help="%(default)s")
    parser.add_argument(
        "--experimental", nargs="+", default=[], choices=EXPERIMENTAL, metavar="NAME", help=", ".join(EXPERIMENTAL)
    )
    parser.add_argument("--json", type=Path, help="write all timings into this file")
    arguments = parser.parse_args()
    device = probe.device()
    if device.kind == "cpu":
        parser.error(
            "there is no GPU in this machine, and only a GPU's steps are graphs; `cubatch predict MODEL --library "
            "cubatch --device h200-sxm` predicts a step without one"
        )
    network, clock = models.build(arguments.model), clocks.cupy_clock(device.uuid)
    options = {
        "mode": arguments.mode, "dtype": arguments.dtype, "device": device, "clock": clock,
        "experimental": arguments.experimental,
        "context": kernel_context.usual_context(device, arguments.dtype),
    }  # fmt: skip
    rows = []
    for batch_size in map(int, arguments.batch_sizes.split(",")):
        rows.append(compared(network, batch_size, **options))
        row = rows[-1]
        if not row["launch"]["graph"]:
            print(f"no graph: {row['launch']['refusal']}", file=sys.stderr)
            return 1
        taken = "; ".join(
            f"{1e3 * statistics.median(seconds):.3f} ms by {way}" for way, seconds in row["timings_seconds"].items()
        )
        print(f"batch {batch_size}, {row['launch']['launches']} launches: {taken}")
    if arguments.json:
        facts = {
            "schema": 1, "benchmark": "step_graphs", **provenance(), "device": {"name": device.name},
            "environment": environment(device), "model": arguments.model, "mode": arguments.mode,
            "dtype": arguments.dtype, "rounds": ROUNDS, "rows": rows,
        }  # fmt: skip
        write(arguments.json, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
