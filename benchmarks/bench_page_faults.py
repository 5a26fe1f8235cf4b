"""
What it costs PyTorch modules on a CPU that glibc gives freed memory back, and what it takes to have it kept.

    python -m benchmarks.bench_page_faults --json benchmarks/results/amd-epyc-2-threads/page-faults.json

Each reading is of a process of its own that knows one batch size only, as a user's does: its steps for SECONDS after
WARM_UP of them, their page faults, the share of the CPU time that the system took, and the process's largest resident
set.  Processes with `heap.KEPT` in their environment take turns with processes that have nothing like it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench_module import UNBOUNDED, runner_of
from benchmarks.modules import zoo
from benchmarks.pages.modules import medians
from benchmarks.provenance import on_cpu
from cubatch.frameworks.torch_module import MODES
from cubatch.measure import heap

MODULES = ("resnet18", "resnet50", "mobilenet_v3_large", "convnext_tiny", "vit", "encoder")
SIZES = {"inference": (16, 128), "training": (32,)}
WARM_UP = 3
SECONDS = 2.0
_OTHERS = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def read(name: str, mode: str, batch_size: int) -> dict[str, float]:
    """Step a module in this process."""
    runner = runner_of(name, mode, UNBOUNDED)
    runner.draw(batch_size)
    for _ in range(WARM_UP):
        runner.step()
    before, begun, seconds = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter(), []
    while time.perf_counter() - begun < SECONDS or len(seconds) < WARM_UP:
        seconds.append(runner.clock.time(runner.step, 1).seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    system, user = after.ru_stime - before.ru_stime, after.ru_utime - before.ru_utime
    return {
        "samples_per_second": batch_size / statistics.median(seconds),
        "page_faults": (after.ru_minflt - before.ru_minflt) / len(seconds),
        "system_share": system / (system + user),
        "peak_bytes": after.ru_maxrss * 1024,
    }


def in_turns(name: str, mode: str, batch_size: int, rounds: int) -> dict[str, Any]:
    """Read it in processes that keep freed memory, and in such that do not."""
    bare = {key: value for key, value in os.environ.items() if key not in {*heap.KEPT, *_OTHERS}}
    environments = {"given_back": bare, "kept": {**bare, **heap.KEPT}}
    command = [sys.executable, "-m", "benchmarks.bench_page_faults", "--one", name, mode, str(batch_size)]
    readings: dict[str, list[dict[str, float]]] = {how: [] for how in environments}
    for turn in range(rounds):
        for how in sorted(environments, reverse=bool(turn % 2)):
            done = subprocess.run(command, env=environments[how], capture_output=True, text=True, check=True)
            readings[how].append(json.loads(done.stdout))
    return {"module": name, "mode": mode, "batch_size": batch_size, **readings}


def _told(row: dict[str, Any]) -> str:
    before, kept = medians(row["given_back"]), medians(row["kept"])
    gain, more = (kept[figure] / before[figure] - 1 for figure in ("samples_per_second", "peak_bytes"))
    return (
        f"{before['samples_per_second']:.0f} samples/s, kept {kept['samples_per_second']:.0f} ({gain:+.1%}); "
        f"{before['page_faults']:.0f} page faults a step, {before['system_share']:.1%} of the CPU time; "
        f"peak {more:+.1%}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read each module and print a line for it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--modules", nargs="*", choices=zoo.NAMES, default=list(MODULES))
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--one", nargs=3, metavar=("MODULE", "MODE", "N"), help="read once, in this process")
    options = parser.parse_args(arguments)
    if options.one:
        name, mode, batch_size = options.one
        print(json.dumps(read(name, mode, int(batch_size))))
        return
    rows = []
    for name in options.modules:
        for mode in MODES:
            for batch_size in SIZES[mode]:
                rows.append(row := in_turns(name, mode, batch_size, options.rounds))
                print(f"{name} {mode} {batch_size}: {_told(row)}", flush=True)
    if options.json:
        content = {**on_cpu("page_faults"), "kept": heap.spelt(heap.KEPT), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
