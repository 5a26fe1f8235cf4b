"""
Training loops with a data loader: what cubatch recommends and reports, and what the plain loop then reaches.

    python -m benchmarks.bench_loops --out FILE
    python -m benchmarks.bench_loops --loop mlp text --seconds 3 --out FILE

For each loop, two steps in fresh processes:

1. cubatch is called as a user of the loop would, with a small budget.  The plain loop follows in the same process, at
   the recommended size: a host that changes its speed within minutes matters less there.
2. The loop runs without cubatch, in PyTorch, Lightning or Transformers alone.  First two other rules run one batch
   after a warm-up at 2, 4, 8 and so on, until the data set or the budget ends.  Lightning's takes the largest of them,
   "timed once" the fastest.  Then the recommended size, both answers and the powers of two that cubatch tried take
   turns in shuffled rounds.  The recommended size runs three times as long as the others.  After the first round only
   those sizes remain that were at most a fifth slower than the fastest.

The processes have the thresholds of glibc that docs/how-to/pytorch.md sets.  By default, the largest batch that a
process ever ran decides how fast the others are, for `lstm` by a third.

The file holds the samples and the seconds of each turn.  The same command continues an interrupted benchmark, and
repeats loops that failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.pages.training_loops import lines
from benchmarks.provenance import ROOT, begun, write
from cubatch.errors import CubatchError
from cubatch.frameworks import heap

if TYPE_CHECKING:
    from benchmarks.loops.plain_loop import Block, Loop

LOOPS = {
    "vision": "image_loops", "mobile": "image_loops", "mlp": "tabular_loops", "text": "text_loops",
    "encoder": "text_loops", "causal_lm": "text_loops", "lstm": "text_loops", "siamese": "image_loops",
    "detection": "image_loops", "graphs": "tabular_loops", "embedding_bag": "text_loops", "gan": "image_loops",
    "contrastive": "image_loops", "slow_loader": "image_loops", "vae": "image_loops",
    "accumulation": "tabular_loops", "lightning": "trainer_loops", "hugging_face": "trainer_loops",
    "compiled": "tabular_loops", "loss_dict": "tabular_loops",
}  # fmt: skip
"""The module in `benchmarks.loops` of each loop."""
LONGER = 3  # times the seconds of the others runs the recommended size
CONTENDERS = 0.8  # of the best rate of the first round; slower sizes are left out of the next
MOST_SECONDS = 400.0  # a process that takes longer has failed


def in_fresh_process(task: str, name: str, **arguments: Any) -> dict[str, Any]:
    """Run a task on a loop in a fresh process and return its JSON; {"error": ...} if it failed."""
    command = [sys.executable, "-m", "benchmarks.bench_loops", "--task", json.dumps([task, name, arguments])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=MOST_SECONDS,
            env={**os.environ, **heap.RAISED},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"{task}: more than {MOST_SECONDS:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"error": f"{task}: exit status {done.returncode}: {last}"}
    return json.loads(done.stdout.splitlines()[-1])


def _loop(name: str) -> Loop:
    import torch

    torch.manual_seed(0)
    return getattr(importlib.import_module(f"benchmarks.loops.{LOOPS[name]}"), name)()


def tune(name: str, *, budget: float, seconds: float, rounds: int) -> dict[str, Any]:
    """Call cubatch on a loop and return its recommendation, the wall time of the call, and turns of the plain loop."""
    loop, began = _loop(name), time.perf_counter()
    try:
        result = loop.tune(budget)
    except Exception as error:  # noqa: BLE001 - an exception of cubatch that is not its own is what we look for
        if not isinstance(error, CubatchError):
            traceback.print_exc()
        return {"error": f"tune: {type(error).__name__}: {error}", "wall_seconds": time.perf_counter() - began}
    wall, n = time.perf_counter() - began, result.batch_size
    block = loop.open()
    return {
        "wall_seconds": wall,
        "seconds_spent": result.seconds_spent,
        "recommended": n,
        "reported": result.samples_per_second,
        "step_rate": result.step_samples_per_second,
        "loader_rate": result.loader_samples_per_second,
        "decided_by": result.decided_by,
        "reasons": list(result.reasons),
        "measured": {str(n): rate for n, rate in result.loop_rates.items()},
        "largest_measured": result.largest_measured,
        "turns_after": [block(n, seconds) for _ in range(rounds)] if n else [],
        "error": "" if n else f"tune: no recommendation: {result.reasons[0]}",
    }


def run_plain(
    name: str, *, recommended: int, largest: int, budget: float, seconds: float, rounds: int
) -> dict[str, Any]:
    """Run a loop without cubatch and return the answers of two rules, and the turns of each batch size."""
    loop = _loop(name)
    block = loop.open()
    timed = _double(block, loop.num_samples, budget)
    answers = {"lightning": max(n for n in timed), "timed_once": max(timed, key=lambda n: timed[n])}
    powers = [2**place for place in range(largest.bit_length()) if 2**place <= loop.num_samples]
    sizes = sorted({recommended, *answers.values(), *powers})
    turns: dict[int, list[tuple[int, float]]] = {n: [] for n in sizes}
    for turn in range(rounds):
        for n in random.Random(turn).sample(sizes, len(sizes)):
            turns[n].append(block(n, seconds * (LONGER if n == recommended else 1)))
        rates = {n: turns[n][0][0] / turns[n][0][1] for n in sizes}
        sizes = [n for n in sizes if n == recommended or rates[n] >= CONTENDERS * max(rates.values())]
    return {**answers, "turns": {str(n): each for n, each in turns.items()}}


def _double(block: Block, num_samples: int, budget: float) -> dict[int, float]:
    """Return samples per second of one batch at 2, 4, 8 and so on, up to the data set or the budget."""
    rates, size, last, began = dict[int, float](), 2, 0.0, time.perf_counter()
    while size <= num_samples and time.perf_counter() - began + 2 * last <= budget:
        start = time.perf_counter()
        samples, spent = block(size, 0.0)
        rates[size] = samples / spent
        size, last = 2 * size, time.perf_counter() - start
    return rates


TASKS = {"tune": tune, "plain": run_plain}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the results of a loop; the key "error" is empty unless something failed."""
    times = {"budget": options.budget, "seconds": options.seconds, "rounds": options.rounds}
    row = {"loop": name, **in_fresh_process("tune", name, **times)}
    if row["error"]:
        return row
    plain = in_fresh_process("plain", name, recommended=row["recommended"], largest=row["largest_measured"], **times)
    return {**row, **plain}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print a line for each loop; `arguments` None: those of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON to write after each loop")
    parser.add_argument("--loop", nargs="*", choices=list(LOOPS), default=list(LOOPS), metavar="NAME")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds that cubatch may measure")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn of a batch size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.task:
        task, name, rest = json.loads(options.task)
        print("\n" + json.dumps(TASKS[task](name, **rest), allow_nan=False))
        return
    content = begun(
        options.out, "loops", "loops", sources=ROOT.joinpath("benchmarks", "loops").glob("*.py"),
        packages=["torch", "lightning", "transformers"], budget_seconds=options.budget, turn_seconds=options.seconds,
        rounds=options.rounds,
    )  # fmt: skip
    for name in options.loop:
        if any(row["loop"] == name and not row["error"] for row in content["loops"]):
            continue
        row = measure(name, options)
        content["loops"] = [*(each for each in content["loops"] if each["loop"] != name), row]
        content["loops"].sort(key=lambda each: list(LOOPS).index(each["loop"]))
        if options.out:
            write(options.out, content)
        print(" | ".join(lines(row)), flush=True)


if __name__ == "__main__":
    main()
