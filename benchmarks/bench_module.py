"""
Compare `autotune_module` on real PyTorch modules with an exhaustive sweep and with the rules of other finders.

    python -m benchmarks.bench_module --top 32 --json benchmarks/results/amd-epyc-2-threads/module.json
    python -m benchmarks.bench_module --device cuda:0 --top 4096 --limit 32768 --json FILE

All finders get the same module, memory limit and maximum; cubatch also has a budget.  The sweep times powers of two,
1.5 times these and every recommended size in interleaved rounds.  Its medians name the best size.  The best of many
noisy medians is too high, so judges measure each loss again.  The recommended and the best size take turns in fresh
processes, and the loss is the median of their ratios.  If the interval of a loss of cubatch contains 3 %, more judges
run, up to MOST_JUDGES.  A size that does not run within the limit loses 100 %.  "Another sweep" is a second sweep in a
process of its own: no finder can be expected to agree better.

Each module and mode has processes of its own, with several judges, because two processes that do the same differ.  All
use raised bounds of glibc's heap.  Otherwise the speed of a size would depend on the sizes that ran before it
(benchmarks/results/amd-epyc-2-threads/README.md).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import cubatch as cb
from benchmarks.modules import zoo
from benchmarks.modules.paired_rounds import reached, samples_per_second
from benchmarks.modules.rivals import RIVALS, Unguarded, ask, task_of
from benchmarks.pages.modules import CLOSE
from benchmarks.provenance import run_on, write
from cubatch.errors import CubatchError
from cubatch.frameworks import heap, module_worker
from cubatch.frameworks.module_runner import ModuleRunner
from cubatch.frameworks.torch_module import MODES, TorchModule
from cubatch.hardware import probe
from cubatch.hardware.facts import Device
from cubatch.measure.records import Timing
from cubatch.measure.stopping import median_interval

T = TypeVar("T")

MIB = 2**20
UNBOUNDED = 2**40
OURS, SWEEP = "cubatch", "another sweep"
LONGEST_STEP = 4.0  # seconds: larger sizes are left out of the sweep
JUDGES, MOST_JUDGES = 3, 9  # processes
DUELS = 3  # turns in each
SPAN, REFERENCE_SPAN = 0.2, 0.02  # seconds of a timing, and of the reference steps before and after it


def runner_of(name: str, mode: str, limit: int, device: str) -> ModuleRunner:
    """Return a runner of a module in this process."""
    subject = TorchModule(zoo.build(name).to(module_worker.place_of(device)), zoo.example(name), mode=mode)
    return subject.ready().runner(limit, 0)


def in_rounds(runner: Unguarded, sizes: Sequence[int], rounds: int) -> dict[int, list[Timing]]:
    """Time each size that runs in shuffled rounds, once in each."""
    read: dict[int, list[Timing]] = {}
    order, left = random.Random(0), list(sizes)
    with contextlib.suppress(MemoryError):  # found again in the rounds
        runner.prepare(min(sizes))
        runner.step()
        runner.hold_reference(max(1, int(REFERENCE_SPAN / runner.clock.time(runner.step, 1).seconds)))
    for number in range(rounds):
        for size in order.sample(left, len(left)):
            try:
                runner.prepare(size)
            except MemoryError:
                runner.release()
                left.remove(size)
                continue
            step = min(runner.clock.time(runner.step, 1).seconds for _ in range(2))
            repeats = max(1, int(SPAN / step))
            timed = runner.clock.time(runner.step, repeats)
            timing = Timing(
                batch_size=size, round=number, seconds=timed.seconds, repeats=repeats,
                reference_before_seconds=timed.reference_before_seconds,
                reference_after_seconds=timed.reference_after_seconds,
            )  # fmt: skip
            read.setdefault(size, []).append(timing)
    return read


def ours(name: str, mode: str, *, device: str, top: int, limit: int, budget: float) -> dict[str, Any]:
    """Tune with `autotune_module`, in a worker, unkept."""
    began = time.monotonic()
    try:
        result = cb.autotune_module(
            f"benchmarks.modules.zoo:{name}", zoo.example(name), mode=mode, device=device, max_batch_size=top,
            memory_limit=limit, budget=budget, store=False,
        )  # fmt: skip
    except CubatchError as raised:
        error = f"{type(raised).__name__}: {raised}"
        return {"finder": OURS, "batch_size": None, "seconds": time.monotonic() - began, "failures": 0, "error": error}
    took = [m.peak_bytes for m in result.measurements if m.peak_bytes]
    failures = sum(m.status == "out_of_memory" for m in result.measurements)
    return {
        "finder": OURS, "batch_size": result.batch_size, "seconds": time.monotonic() - began, "failures": failures,
        "error": "", "decided_by": result.decided_by, "most_of_limit": max(took, default=0) / limit,
        "reasons": list(result.reasons),
    }  # fmt: skip


def compare(name: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Ask every finder about a module, and sweep it."""
    limit = options.limit * MIB
    bare = runner_of(name, mode, UNBOUNDED, options.device)
    first, second = bare.predicted(1) or 0, bare.predicted(101) or 0
    each, parameters = (second - first) / 100, sum(p.numel() for p in zoo.build(name).parameters())
    task = task_of(
        top=options.top, limit=limit, first=first, each=each, parameters=parameters, cores=os.cpu_count() or 1
    )
    rows = [
        ours(name, mode, device=options.device, top=options.top, limit=limit, budget=options.budget),
        *(ask(finder, Unguarded(bare, limit), task) for finder in options.finders if finder != SWEEP),
    ]
    truth = swept(Unguarded(bare, limit), [row["batch_size"] for row in rows if row["batch_size"]], options)
    best = max(truth, key=truth.__getitem__, default=None)
    return {"module": name, "mode": mode, "best_batch_size": best, "samples_per_second": truth, "finders": rows}


def swept(runner: Unguarded, answers: Sequence[int], options: argparse.Namespace) -> dict[int, float]:
    """Return the median samples/s of powers of two, 1.5 times these, and recommended sizes."""
    steps = [n for power in range(options.top.bit_length()) for n in (2**power, 3 * 2**power) if n <= options.top]
    seconds = {n: short for n in sorted(steps) if (short := _seconds(runner, n)) is not None}
    sizes = {n for n, taken in seconds.items() if taken <= LONGEST_STEP} | set(answers)
    return samples_per_second(in_rounds(runner, sorted(sizes), options.rounds))


def sweep_again(name: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Answer by a sweep of this process."""
    began = time.monotonic()
    runner = Unguarded(runner_of(name, mode, UNBOUNDED, options.device), options.limit * MIB)
    truth = swept(runner, [], options)
    return {
        "finder": SWEEP, "batch_size": max(truth, key=truth.__getitem__, default=None),
        "seconds": time.monotonic() - began, "failures": runner.failures, "error": "",
    }  # fmt: skip


def ratios(
    name: str, mode: str, best: int, answers: Sequence[int], options: argparse.Namespace
) -> dict[int, list[float]]:
    """Return each recommended size's share of the best size's rate, in the turns of one process."""
    runner = Unguarded(runner_of(name, mode, UNBOUNDED, options.device), options.limit * MIB)
    read = in_rounds(runner, sorted({best, *answers}), options.duels)
    return {n: reached(read, n, best) for n in answers}


def judge(case: dict[str, Any], options: argparse.Namespace) -> None:
    """
    Add to each finder its loss against the best size: the median over turns in several processes.

    Where the best size has not run in any of those, they go on; where no size ran at all there is nothing to judge.
    """
    rows, best = case["finders"], case["best_batch_size"]
    shares: dict[int, list[float]] = {row["batch_size"]: [] for row in rows if row["batch_size"]}
    asked_of = sorted(shares) if best else []
    for judged in range(1, max(options.judges, MOST_JUDGES) + 1):
        if not asked_of:
            break
        for size, reached_of_best in alone(ratios, case["module"], case["mode"], best, asked_of, options).items():
            shares[size] += reached_of_best
        if judged >= options.judges and any(shares.values()):
            own = {row["batch_size"] for row in rows if row["finder"] == OURS}
            asked_of = [size for size in asked_of if size in own and _holds(_interval(shares[size]), 1 - CLOSE)]
    for row in rows:
        of = shares.get(row["batch_size"], [])
        low, high = _interval(of)
        row.update(lost=1 - statistics.median(of or [0.0]), lost_interval=[1 - high, 1 - low], turns=len(of))


def _interval(shares: Sequence[float]) -> tuple[float, float]:
    return median_interval(shares) or (min(shares, default=0.0), max(shares, default=0.0))


def _holds(interval: tuple[float, float], share: float) -> bool:
    return interval[0] <= share <= interval[1]


def alone(function: Callable[..., T], *given: object) -> T:
    """Call a function in a process started for it, which keeps freed memory as a worker of cubatch does."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=heap.own_process) as fresh:
        return fresh.submit(function, *given).result()


def _seconds(runner: Unguarded, size: int) -> float | None:
    """Time one step; None where it does not fit, or would take far too long by what half of it took."""
    if runner.gave_up:
        return None
    try:
        runner.prepare(size)
    except MemoryError:
        runner.release()
        return None
    taken = runner.clock.time(runner.step, 1).seconds
    runner.gave_up = taken > LONGEST_STEP
    return taken


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare on each module and print a line for each answer; `arguments` None: those of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--modules", nargs="*", choices=zoo.NAMES, default=list(zoo.NAMES))
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--finders", nargs="*", choices=[*RIVALS, SWEEP], default=[*RIVALS, SWEEP])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float, default=60.0, help="budget of cubatch in seconds")
    parser.add_argument("--top", type=int, default=256, help="largest size that any may try")
    parser.add_argument("--limit", type=int, default=3072, help="MiB that a step may take")
    parser.add_argument("--rounds", type=int, default=2, help="of the sweep")
    parser.add_argument("--judges", type=int, default=JUDGES, help="processes that judge the answers")
    parser.add_argument("--duels", type=int, default=DUELS, help="turns of the answers and the best in each")
    options = parser.parse_args(arguments)
    device = probe.resolve(options.device)
    options.device = device.address
    rows = []
    for name in options.modules:
        for mode in options.modes:
            rows.append(alone(compare, name, mode, options))
            if SWEEP in options.finders:
                rows[-1]["finders"].append(alone(sweep_again, name, mode, options))
            judge(rows[-1], options)
            print(f"{name} {mode}: best {rows[-1]['best_batch_size']}")
            for row in rows[-1]["finders"]:
                print(
                    f"    {row['finder']}: {row['batch_size']} in {row['seconds']:.1f} s, {row['lost']:.1%} lost "
                    f"({row['lost_interval'][0]:.1%} to {row['lost_interval'][1]:.1%} by {row['turns']} turns), "
                    f"{row['failures']} out of memory{'; ' + row['error'] if row['error'] else ''}"
                )
            sys.stdout.flush()
            if options.json:  # as far as it is: all modules take hours
                _write(options, device, rows)
    _summary(rows, options.finders)


def _write(options: argparse.Namespace, device: Device, rows: Sequence[dict[str, Any]]) -> None:
    about = run_on(device, "module")
    content = {
        **about, "environment": {**about["environment"], "torch": importlib.metadata.version("torch")},
        "budget_seconds": options.budget, "max_batch_size": options.top,
        "memory_limit": options.limit * MIB, "rows": rows,
    }  # fmt: skip
    write(options.json, content)


def _summary(rows: Sequence[dict[str, Any]], finders: Sequence[str]) -> None:
    for finder in (OURS, *finders):
        of = [row for case in rows for row in case["finders"] if row["finder"] == finder]
        lost = [row["lost"] for row in of]
        print(
            f"{finder}: mean {statistics.fmean(lost):.1%} lost, worst {max(lost):.1%}, "
            f"{sum(share <= 0.03 for share in lost)} of {len(lost)} within 3 %, "
            f"{statistics.fmean(row['seconds'] for row in of):.1f} s, "
            f"{sum(row['failures'] for row in of)} out of memory"
        )


if __name__ == "__main__":
    main()
