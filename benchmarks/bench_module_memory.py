"""
Compare the memory that `autotune_module` predicts with the memory that steps use.

    python -m benchmarks.bench_module_memory --json benchmarks/results/amd-epyc-2-threads/module-memory.json
    python -m benchmarks.bench_module_memory --device cuda:0 --spare-mib 2048 --json FILE

Each module runs in a process of its own, with a limit of its use at one sample plus `--spare-mib`.  A few small sizes
run first, as in tuning.  Then the largest size that is predicted to fit runs STEPS steps, and again a larger one
while the used memory allows a tenth more.  The prediction just before a size ran is compared with the growth of the
resident set or, on a GPU, with PyTorch's allocator.  A fake-tensor trace alone is scored as well.  A busy machine
does not disturb this benchmark.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.modules import zoo
from benchmarks.provenance import run_on, write
from cubatch.errors import OverLimit
from cubatch.frameworks import module_worker
from cubatch.frameworks.torch_module import MODES
from cubatch.hardware import probe
from cubatch.measure.remote import RemoteRunner
from cubatch.measure.runner import FactoryRef

MIB = 2**20
STEPS = 4
GREW, LESS = 1.1, 0.97
LARGE = 2**34  # bytes: with a limit of a terabyte `encoder` had no prediction on an H200
LOOK_SECONDS = 3.0  # as of a budget of 60 s
_KIND = {"loss": None, "optimizer": "sgd", "autocast": None, "channels_last": False, "compiled": False}


def opened(name: str, mode: str, device: str, limit: int) -> RemoteRunner:
    """Start a worker with a module's runner."""
    arguments = {
        "build": f"benchmarks.modules.zoo:{name}", "inputs": module_worker.pack(zoo.example(name)), "device": device,
        "mode": mode, "memory_limit": limit, "seed": 0, **_KIND,
    }  # fmt: skip
    return RemoteRunner(FactoryRef("cubatch.frameworks.module_worker:runner", arguments))


def score(name: str, mode: str, device: str, spare: int) -> dict[str, Any]:
    """Run up to the largest size that fits; return predicted and used bytes."""
    first = opened(name, mode, device, LARGE)
    trace = first.call("look", seconds=0.0, top=0)
    first.close()
    if trace["first"] is None:
        return {"module": name, "mode": mode, "why_not": trace["why_not"]}
    limit = trace["first"] + spare
    runner = opened(name, mode, device, limit)
    size = runner.call("look", seconds=LOOK_SECONDS, top=None)["largest"]
    ran = 0
    while size > GREW * ran:
        try:
            runner.prepare(size)
        except OverLimit:
            size = int(LESS * size)
            continue
        runner.time(STEPS)
        runner.release()
        ran, size = size, runner.call("look", seconds=0.0, top=0)["largest"]
    rows = runner.call("history")
    runner.close()
    if not rows:
        return {"module": name, "mode": mode, "why_not": "what its steps take cannot be read on this machine"}
    largest = rows[-1]
    return {
        "module": name, "mode": mode, "limit": limit, "sizes": rows,
        "batch_size": largest["batch_size"], "error": largest["said"] / largest["took"] - 1,
        "walked_error": largest["walked"] / largest["took"] - 1,
        "most": max(row["took"] for row in rows) / limit,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Score the modules and print a line for each; `arguments` None: those of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--modules", nargs="*", choices=zoo.NAMES, default=list(zoo.NAMES))
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--spare-mib", type=int, default=256, help="MiB above the memory of one sample")
    options = parser.parse_args(arguments)
    device = probe.resolve(options.device)
    rows = []
    for name in options.modules:
        for mode in options.modes:
            row = score(name, mode, device.address, options.spare_mib * MIB)
            if "why_not" in row:
                print(f"{name} {mode}: its memory cannot be predicted: {row['why_not']}")
                continue
            rows.append(row)
            last = row["sizes"][-1]
            print(
                f"{name} {mode}: batch size {row['batch_size']}, predicted {last['said'] // MIB} MiB, used "
                f"{last['took'] // MIB} ({row['error']:+.1%}); trace alone {row['walked_error']:+.1%}; the most "
                f"{row['most']:.1%} of the limit"
            )
            sys.stdout.flush()
            if options.json:
                content = {**run_on(device, "module_memory"), "image": zoo.IMAGE, "rows": rows}
                write(options.json, content)
    if not rows:
        return
    errors = sorted(abs(row["error"]) for row in rows)
    above = sum(row["most"] > 1 for row in rows)
    within = sum(error <= 0.1 for error in errors)
    print(
        f"largest sizes: {within} of {len(rows)} within 10 %, median {statistics.median(errors):.1%}, worst "
        f"{errors[-1]:.1%}; {above} took more than the limit"
    )


if __name__ == "__main__":
    main()
