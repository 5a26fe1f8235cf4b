"""
Steps as CUDA graphs beside the same kernels launched one by one, at small batches.

    python -m benchmarks.bench_step_graphs --mode training --dtype float16 --json FILE

Both ways take turns at each batch size, on models of their own, timed by CUDA events.  The times of launches one by one
are the host's wherever it is slower than the GPU; those of graphs are the GPU's.  It needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from pathlib import Path

from benchmarks.provenance import provenance
from cubatch.engine.conditions import environment
from cubatch.engine.network import Model
from cubatch.hardware import probe
from cubatch.measure import clocks, kernel_choice
from cubatch.network import models

ROUNDS, SPAN_SECONDS, MOST_REPEATS = 9, 0.05, 100


def compared(network, batch_size, *, device, clock, **options):
    """Seconds of a step with and without graphs at one batch size, in rounds that take turns."""
    with contextlib.ExitStack() as opened:
        both = {
            graphs: opened.enter_context(Model(network, device=device, learning_rate=0.0, graphs=graphs, **options))
            for graphs in (False, True)
        }
        seconds = {graphs: [] for graphs in both}
        for model in both.values():
            model.prepare(batch_size)
            model.load_random()
            clock.time(model.step, 3)
        for _ in range(ROUNDS):
            for graphs, model in both.items():
                one = clock.time(model.step, 1).seconds
                repeats = max(1, min(MOST_REPEATS, round(SPAN_SECONDS / one)))
                seconds[graphs].append(clock.time(model.step, repeats).seconds)
        launch = both[True].launch
    launches, graph = (statistics.median(seconds[graphs]) for graphs in (False, True))
    return {
        "batch_size": batch_size, "launch": launch, "launches_seconds": launches, "graph_seconds": graph,
        "gain": launches / graph, "timings_seconds": {"launches": seconds[False], "graph": seconds[True]},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--mode", choices=("inference", "training"), default="training")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--batch-sizes", default="1,2,4,8,12,16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = probe.device()
    if device.kind == "cpu":
        print("graphs are a GPU's, and there is none here", file=sys.stderr)
        return 2
    network, clock = models.build(arguments.model), clocks.cupy_clock(device.uuid)
    options = {
        "mode": arguments.mode, "dtype": arguments.dtype, "device": device, "clock": clock,
        "context": kernel_choice.usual_context(device, arguments.dtype),
    }  # fmt: skip
    rows = []
    for batch_size in map(int, arguments.batch_sizes.split(",")):
        rows.append(compared(network, batch_size, **options))
        row = rows[-1]
        if not row["launch"]["graph"]:
            print(f"no graph: {row['launch']['refusal']}", file=sys.stderr)
            return 1
        print(
            f"batch {batch_size}: {1e3 * row['launches_seconds']:.3f} ms by {row['launch']['launches']} launches, "
            f"{1e3 * row['graph_seconds']:.3f} ms by a graph, {row['gain']:.2f} times as fast"
        )
    if arguments.json:
        facts = {
            "schema": 1, "benchmark": "step_graphs", **provenance(), "device": {"name": device.name},
            "environment": environment(device), "model": arguments.model, "mode": arguments.mode,
            "dtype": arguments.dtype, "rounds": ROUNDS, "rows": rows,
        }  # fmt: skip
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
