"""
How good an answer is after 30 s, on the CPU at hand: `cubatch tune` beside an exhaustive run.

    python -m benchmarks.bench_tune_cpu --json benchmarks/results/amd-epyc-2-threads/tune.json

Each case is tuned several times, unkept.  Right after each answer every size of the ladder whose step
takes no longer than LONGEST_STEP, and the answer, are measured in interleaved rounds, whose medians name
the best size.  Of many noisy medians the largest is too large, so what the answer lost is judged anew: the
answer and that best size take turns, and the median of their ratios is given.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cubatch as cb
from benchmarks.provenance import on_cpu
from cubatch.measure.network_runner import network_runner

LONGEST_STEP = 2.5
DUELS = 9
CASES: dict[str, dict[str, Any]] = {
    "resnet18 inference": {"model": "resnet18", "mode": "inference"},
    "resnet18 training 32x32": {
        "model": "resnet18", "mode": "training", "options": {"input_shape": (32, 32, 3), "classes": 10}
    },
    "vgg16 inference": {"model": "vgg16", "mode": "inference"},
    "mnist-cnn training": {"model": "mnist-cnn", "mode": "training"},
}  # fmt: skip


def in_rounds(case: Mapping[str, Any], sizes: Sequence[int], rounds: int) -> dict[int, list[float]]:
    """Give the samples per second of each size in rounds in which each is measured once, in an order drawn anew."""
    spec = cb.models.build(case["model"], **case.get("options", {}))
    runner = network_runner(
        spec=spec.to_mapping(), device="cpu", mode=case["mode"], dtype="float32", optimizer="sgd", library="im2col",
        recompute=False, seed=0,
    )  # fmt: skip
    read: dict[int, list[float]] = {}
    order = random.Random(0)
    for _ in range(rounds):
        for size in order.sample(sizes, len(sizes)):
            runner.prepare(size)
            step = min(runner.clock.time(runner.step, 1).seconds for _ in range(2))
            repeats = max(1, int(0.2 / step))
            read.setdefault(size, []).append(size / runner.clock.time(runner.step, repeats).seconds)
    runner.close()
    return read


def compare(name: str, *, budget: float, repeats: int, rounds: int) -> dict[str, Any]:
    """Tune a case several times, and hold each answer against an exhaustive run right after it."""
    case = CASES[name]
    spec = cb.models.build(case["model"], **case.get("options", {}))
    tuned = []
    for seed in range(repeats):
        began = time.monotonic()
        result = cb.autotune(spec, device="cpu", mode=case["mode"], budget=budget, store=False, seed=seed)
        seconds = time.monotonic() - began
        answer = result.batch_size
        if answer is None:
            sys.exit(f"{name}: no answer in {budget} s")
        fastest = max(m.samples_per_second for m in result.measurements if m.samples_per_second)
        ladder = [m.batch_size for m in result.measurements if "between" not in " ".join(m.reasons)]
        kept = [n for n in ladder if n / fastest <= LONGEST_STEP]
        read = in_rounds(case, sorted({*kept, answer}), rounds)
        truth = {size: statistics.median(rates) for size, rates in read.items()}
        best = max(truth, key=truth.__getitem__)
        duel = in_rounds(case, sorted({best, answer}), DUELS)
        ratios = [a / b for a, b in zip(duel[answer], duel[best], strict=True)]
        tuned.append({
            "batch_size": answer, "decided_by": result.decided_by, "seconds": seconds, "best_batch_size": best,
            "lost": 1 - statistics.median(ratios), "ratios": ratios, "samples_per_second": truth,
        })  # fmt: skip
    return {"case": name, "tuned": tuned}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases and print a line for each answer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--budget", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=2, help="how often each case is tuned")
    parser.add_argument("--rounds", type=int, default=2, help="of the exhaustive run")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    options = parser.parse_args(arguments)
    rows = []
    for name in options.cases:
        rows.append(compare(name, budget=options.budget, repeats=options.repeats, rounds=options.rounds))
        for tuned in rows[-1]["tuned"]:
            print(
                f"{name}: {tuned['batch_size']} in {tuned['seconds']:.1f} s ({tuned['decided_by']}), best "
                f"{tuned['best_batch_size']}, {100 * tuned['lost']:.1f} % lost"
            )
            sys.stdout.flush()
    if options.json:
        content = {**on_cpu("tune_cpu"), "budget_seconds": options.budget, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
