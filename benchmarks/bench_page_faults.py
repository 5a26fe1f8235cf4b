"""
Measure what page faults cost PyTorch modules on a CPU, under three settings of glibc's heap.

    python -m benchmarks.bench_page_faults --json benchmarks/results/amd-epyc-2-threads/page-faults.json

A trial runs a batch size for SECONDS after WARM_UP, with page faults and the system's share of the CPU time.
Processes that run one batch size only take turns: with glibc's defaults, with `heap.RAISED` as in the worker of a
named module, and with `heap.KEPT`.  Other processes run all sizes in a random order, as a search does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench_module import UNBOUNDED, runner_of
from benchmarks.modules import zoo
from benchmarks.provenance import on_cpu
from cubatch.frameworks import heap
from cubatch.frameworks.module_runner import ModuleRunner
from cubatch.frameworks.torch_module import MODES

MODULES = ("resnet50", "mobilenet_v3_large", "convnext_tiny")
SIZES = {"inference": (16, 128), "training": (8, 32)}
ALONE: Mapping[str, Mapping[str, str]] = {"given_back": {}, "raised": heap.RAISED, "kept": heap.KEPT}
IN_TURNS = ("given_back", "raised")
VISITS = 2  # trials of each size in turns
WARM_UP = 3
SECONDS = 2.0


def visit(runner: ModuleRunner, batch_size: int) -> dict[str, float]:
    """Step a size in this process, whose heap is as the environment has it."""
    runner.draw(batch_size)
    for _ in range(WARM_UP):
        runner.step()
    before, begun, read = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter(), []
    while time.perf_counter() - begun < SECONDS or len(read) < WARM_UP:
        read.append(runner.clock.time(runner.step, 1))
    after = resource.getrusage(resource.RUSAGE_SELF)
    system, user = after.ru_stime - before.ru_stime, after.ru_utime - before.ru_utime
    return {
        "batch_size": batch_size,
        "seconds": statistics.median(reading.seconds for reading in read),
        "page_faults": (after.ru_minflt - before.ru_minflt) / len(read),
        "system_share": system / (system + user),
    }


def read_all(name: str, mode: str, order: Sequence[int]) -> dict[str, Any]:
    """Time sizes in this process; return them and its largest resident set since the last batch was drawn."""
    runner = runner_of(name, mode, UNBOUNDED, "cpu")
    visits = [visit(runner, batch_size) for batch_size in order]
    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "visits": visits}


def started(name: str, mode: str, order: Sequence[int], variables: Mapping[str, str]) -> dict[str, Any]:
    """Time sizes in a new process, with the given variables of glibc's heap and no others."""
    others = {*heap.KEPT, *heap.RAISED, "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD"}
    bare = {key: value for key, value in os.environ.items() if key not in others}
    command = [sys.executable, "-m", "benchmarks.bench_page_faults", "--one", name, mode, *map(str, order)]
    done = subprocess.run(command, env={**bare, **variables}, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def compared(name: str, mode: str, rounds: int) -> dict[str, Any]:
    """Read each size alone and all in turns, in processes that keep more freed memory or less."""
    draw = random.Random(f"{name} {mode}")
    alone: dict[str, list[Any]] = {how: [] for how in ALONE}
    in_turns: dict[str, list[Any]] = {how: [] for how in IN_TURNS}
    for turn in range(rounds):
        for how in [*ALONE][:: -1 if turn % 2 else 1]:
            alone[how] += [started(name, mode, [size], ALONE[how]) for size in SIZES[mode]]
        order = [size for _ in range(VISITS) for size in draw.sample(SIZES[mode], len(SIZES[mode]))]
        for how in IN_TURNS[:: -1 if turn % 2 else 1]:
            in_turns[how].append(started(name, mode, order, ALONE[how]))
    return {"module": name, "mode": mode, "alone": alone, "in_turns": in_turns}


def main(arguments: Sequence[str] | None = None) -> None:
    """Read each module; the page has the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--modules", nargs="*", choices=zoo.NAMES, default=list(MODULES))
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--one", nargs="+", metavar=("MODULE MODE", "N"), help="read once, in this process")
    options = parser.parse_args(arguments)
    if options.one:
        name, mode, *order = options.one
        print(json.dumps(read_all(name, mode, [int(size) for size in order])))
        return
    rows = []
    for name in options.modules:
        for mode in MODES:
            rows.append(compared(name, mode, options.rounds))
            print(f"{name} {mode} is done", flush=True)
            if options.json:  # as far as it is
                raised, retained = heap.format_variables(heap.RAISED), heap.format_variables(heap.KEPT)
                about = {**on_cpu("page_faults"), "raised": raised, "kept": retained}
                text = json.dumps({**about, "rows": rows}, indent=1, allow_nan=False)
                options.json.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
