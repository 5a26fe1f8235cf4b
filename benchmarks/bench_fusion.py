"""
What a step of resnet50 moves and launches, counted from the schedule: now, and before neighbours did as much.

Nothing is timed: operations and bytes are counted, and beside them stands the prediction of our kernels' time.
`--before` names a commit whose `cubatch` is counted by the same rules, in a copy of its sources.

    python -m benchmarks.bench_fusion --before fee1b3a --json benchmarks/results/fusion.json
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

NETWORK, BATCH, DTYPE, GPU = "resnet50", 256, "float16", "h100-sxm"
ITEM_BYTES = 2
_NORMS_OF_A_FOLD = 32


def moved_elements(op, buffers, n):
    """
    Count what an operation's kernels read and write of the batch, each array as often as it is gone through.

    A batch norm goes through its input twice to train, and twice back; a product's gradients are two products.
    """
    size = {number: buffers[number].elements * n for number in {*op.reads.values(), *op.writes.values()}
            if buffers[number].batched}  # fmt: skip
    read = {role: size.get(number, 0) for role, number in op.reads.items()}
    written = {role: size.get(number, 0) for role, number in op.writes.items()}
    total, kind = sum(read.values()) + sum(written.values()), op.node.layer.type if op.node else ""
    if kind == "batch_norm2d":
        again = read.get("x0", 0) if "statistics" in {**op.reads, **op.writes} else 0
        total += again + read.get("dy", 0)
    elif op.kind == "backward" and kind in {"conv2d", "linear"} and "dx0" in written:
        total += read["dy"]
    weights = 0 if op.node is None else sum(map(math.prod, op.node.layer.parameter_shapes.values()))
    return total + weights * (2 if op.kind == "backward" and "dx0" in written else 1)


def launches(op, buffers):
    """
    Count an operation's kernels: phases of a stride and sums of split products, which depend on the GPU, as one.

    A convolution over a batch that is stored with more channels than it has copies its filter, or that's gradient.
    """
    return _products(op) + _is_padded(op, buffers)


def _is_padded(op, buffers):
    shape = op.node.layer.convolution if op.node else None
    return shape is not None and buffers[op.reads["x0"]].shape[2:] not in {(), (shape.c,)}


def _products(op):
    kind = op.node.layer.type if op.node else ""
    if op.kind == "fold":
        return -(-len(op.norms) // _NORMS_OF_A_FOLD)
    if kind == "batch_norm2d":
        return 3 if "statistics" in {**op.reads, **op.writes} else 1
    if op.kind == "backward" and kind in {"conv2d", "linear"}:
        return 1 + ("dx0" in op.writes) + ("b" in op.node.layer.parameter_shapes)
    return 1


def count():
    """Count both modes with the `cubatch` that can be imported."""
    import cubatch as cb
    from cubatch.estimate.step import predict_step
    from cubatch.memory.parts import footprint
    from cubatch.memory.schedule import schedule
    from cubatch.network import models

    network, device, found = models.build(NETWORK), cb.device(GPU), {}
    for mode in ("inference", "training"):
        takes_library = "library" in inspect.signature(schedule).parameters
        program = schedule(network, mode, **({"library": "cubatch"} if takes_library else {}))
        ops = [op for op in program.ops if op.kind not in {"loss", "update"}]
        step = predict_step(network, [BATCH], device, mode=mode, dtype=DTYPE, library="cubatch")
        memory = footprint(network, batch_size=BATCH, mode=mode, dtype=DTYPE, device=GPU, library="cubatch")
        found[mode] = {
            "operations": len(ops),
            "launches": sum(launches(op, program.buffers) for op in ops),
            "bytes": ITEM_BYTES * sum(moved_elements(op, program.buffers, BATCH) for op in ops),
            "planned_bytes": memory.total,
            "predicted_seconds": float(step.seconds[0]),
        }
    return found


def of_commit(commit):
    """Count with the sources of a commit."""
    archive = subprocess.run(["git", "archive", commit, "cubatch", "kernels"], capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extraction_filter = getattr(tarfile, "data_filter", None)  # not in Python 3.11.3 and older
            files.extractall(folder)  # noqa: S202 - git's own archive
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--count"]
        done = subprocess.run(command, capture_output=True, check=True, text=True, env=environment, cwd=folder)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="fee1b3a", metavar="COMMIT")
    parser.add_argument("--count", action="store_true", help="print the counts of the cubatch that is imported")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.count:
        print(json.dumps(count()))
        return
    from benchmarks.provenance import provenance

    facts = {
        "schema": 1, "benchmark": "fusion", **provenance(), "network": NETWORK, "batch_size": BATCH, "dtype": DTYPE,
        "gpu": GPU, "before": {"commit": arguments.before, **of_commit(arguments.before)}, "now": count(),
    }  # fmt: skip
    print(json.dumps(facts, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
