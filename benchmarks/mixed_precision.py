"""
Compare training in 16 bits with float32: `mnist-cnn`, two epochs on 10 000 images, tested on 10 000 others.

    python -m benchmarks.mixed_precision --data DIR --json benchmarks/results/<device>/mixed-precision.json

Trains on this machine's GPU in float32, float16 (with loss scaling) and, where supported, bfloat16, with float32
sums, master weights and statistics.  A CPU is rejected.  DIR holds MNIST's four files, as `cubatch train mnist-cnn
--data DIR --download` fetches them.  The exit status is 1 if an accuracy differs from that of float32 by more than 0.5
%.
"""

from __future__ import annotations

import argparse
import struct
import sys
import tempfile
from pathlib import Path

from benchmarks.provenance import provenance, write
from cubatch.engine.conditions import environment
from cubatch.engine.data import read_idx
from cubatch.engine.train import train
from cubatch.errors import InvalidData
from cubatch.hardware import arithmetic, probe
from cubatch.measure import kernel_context
from cubatch.network import models

DTYPES = ("float32", "float16", "bfloat16")
TRAINED = 10_000
GOAL = 0.005
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
OPTIONS = {"batch_size": 64, "epochs": 2, "learning_rate": 0.01, "optimizer": "momentum", "seed": 0}


def cut(source: Path, target: Path) -> None:
    """Copy MNIST with the first 10 000 of its training images."""
    for name in FILES:
        packed = source / f"{name}.gz"
        array = read_idx(packed if packed.exists() else source / name)
        array = array[:TRAINED] if name.startswith("train") else array
        header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        (target / name).write_bytes(header + array.tobytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = probe.device()
    if device.kind == "cpu":
        print("16 bits run on kernels alone, and there is no GPU here", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            cut(arguments.data, Path(folder))
        except (OSError, InvalidData) as error:
            print(f"MNIST is not in {arguments.data}: {error}", file=sys.stderr)
            return 2
        rows = []
        for dtype in arithmetic.supported_dtypes(device):
            if dtype not in DTYPES:
                continue
            network = models.build("mnist-cnn")
            context = kernel_context.usual_context(device, dtype)
            rows.append(
                train(network, data=folder, device=device, dtype=dtype, context=context, **OPTIONS).to_mapping()
            )
            epochs = rows[-1]["epochs"]
            print(dtype, " ".join(f"loss {e['loss']:.4f}, accuracy {100 * e['test_accuracy']:.2f} %" for e in epochs))
    accuracies = {row["dtype"]: row["epochs"][-1]["test_accuracy"] for row in rows}
    worst = max(abs(accuracies[dtype] - accuracies["float32"]) for dtype in accuracies)
    print(f"furthest from float32: {100 * worst:.2f} %, at most {100 * GOAL} % is the goal")
    if arguments.json:
        facts = {
            "schema": 1,
            "benchmark": "mixed_precision",
            **provenance(),
            "device": {"name": device.name, "threads": device.threads},
            "library": "cubatch",
            "environment": environment(device),
            "images": TRAINED,
            "goal": GOAL,
            "rows": rows,
        }
        write(arguments.json, facts)
    return 0 if worst <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
