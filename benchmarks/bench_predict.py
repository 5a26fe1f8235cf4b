"""
Time the prediction of resnet50 at 40 batch sizes: the time model alone, and the whole result of `cubatch.predict`.

The result also has memory plans, rooflines and intervals.  Modules and the model's arrays are loaded before, and a
first round, which is not counted, fills the caches.

    python -m benchmarks.bench_predict --json benchmarks/results/<device>/predict.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import cubatch as cb
from benchmarks.provenance import provenance, write
from cubatch.estimate.step import predict_step
from cubatch.hardware import probe
from cubatch.network import models

SIZES = (*range(1, 33), 48, 64, 96, 128, 160, 192, 224, 256)
GOAL = 0.3
_CASES = (("v100-pcie-32gb", "float32"), ("v100-sxm2-16gb", "float16"), ("titan-x-pascal", "float32"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    network = models.build("resnet50")
    cases = [
        (gpu, dtype, mode, what)
        for gpu, dtype in _CASES
        for mode in ("inference", "training")
        for what in ("steps", "answer")
    ]
    seconds: dict[tuple[str, str, str, str], list[float]] = {case: [] for case in cases}
    for number in range(arguments.rounds + 1):
        for case in cases:
            gpu, dtype, mode, what = case
            begun = time.perf_counter()
            if what == "steps":
                predict_step(network, SIZES, cb.device(gpu), mode=mode, dtype=dtype)
            else:
                cb.predict(network, device=gpu, batch_sizes=SIZES, mode=mode, dtype=dtype)
            if number:
                seconds[case].append(time.perf_counter() - begun)
    rows = [
        {
            "gpu": gpu, "dtype": dtype, "mode": mode, "what": what, "seconds": statistics.median(taken),
            "least": min(taken), "most": max(taken),
        }
        for (gpu, dtype, mode, what), taken in seconds.items()
    ]  # fmt: skip
    for row in rows:
        print(
            f"{row['gpu']:16} {row['dtype']} {row['mode']:9} {row['what']:6}  {row['seconds']:.3f} s "
            f"({row['least']:.3f} to {row['most']:.3f})"
        )
    if arguments.json:
        device = probe.device("cpu")
        facts = {
            "schema": 1, "benchmark": "predict", **provenance(), "network": "resnet50", "sizes": len(SIZES),
            "goal": GOAL,
            "device": {"name": device.name, "threads": device.threads}, "rounds": arguments.rounds, "rows": rows,
        }  # fmt: skip
        write(arguments.json, facts)


if __name__ == "__main__":
    main()
