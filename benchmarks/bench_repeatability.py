"""
Repeatability: whether one command recommends the same, fast batch size each time and reports a true rate.

    python -m benchmarks.bench_repeatability --json FILE
    python -m benchmarks.bench_repeatability --busy 1 --json FILE --workloads mnist-cnn resnet18-32

The tuner runs several times per workload, each time in a fresh process, without a store, interleaved with its rivals.
The JSON is written after every run.  The same command continues an interrupted benchmark: same file, same source.
Then a judge measures the recommended sizes, powers of two and 1.5 times these, in shuffled rounds.  Within a round all
sizes are compared with each other, so that a slow minute of the host cancels.  It runs in several processes.
In some the heap returns freed memory to the system at each step, which then takes up to 1.7 times as long.

    rate(n) = n / median over rounds of the seconds of a step, less what its round was slower
    loss(n) = 1 - rate(n) / best rate

The best of many noisy medians is too large, so a loss is overestimated by about the noise of one median.  The interval
resamples rounds.  The rate error compares the reported with the judged rate.  Its normalized form needs a result that
contains its own reference.  The judge measures that size too, and the ratio of both speeds scales the judged rate.

Rivals stop at the maximum of the tuner (else 4096) or where the next size would exceed the budget of the tuner.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages.repeatability import lines
from benchmarks.provenance import ROOT, begun, write
from benchmarks.repeatability.finder_runs import FINDERS, LIGHTNING, OURS, POWERS
from benchmarks.repeatability.paired_judge import JUDGES, joined, judge, judged_sizes, sizes_to_judge
from benchmarks.repeatability.repeat_summary import BUSY_GOALS, QUIET_GOALS, summarize
from benchmarks.repeatability.workloads import WORKLOADS

BUSY_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**6): pass"


def in_fresh_process(task: str, name: str, *arguments: Any) -> Any:
    """Run a finder or the judge of a workload in a fresh process and return its JSON."""
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_repeatability", "--task", json.dumps([task, name, *arguments])],
        stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    if process.returncode:
        sys.exit(
            f"{task} on {name} failed with exit status {process.returncode}. The same command continues from here."
        )
    return json.loads(process.stdout.splitlines()[-1])


def _do(task: str, name: str, *arguments: Any) -> Any:
    return (FINDERS | {"judge": judge})[task](WORKLOADS[name], *arguments)


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Start processes that use a CPU each, and end them."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def schedule(count: int, rivals: Sequence[str]) -> list[tuple[str, int]]:
    """
    Return the finder and the number of each run, in order.

    Example:
        >>> schedule(2, [POWERS])
        [('cubatch', 0), ('powers of two x 5', 0), ('powers of two x 5', 1), ('cubatch', 1)]
    """
    order = []
    for number in range(count):
        pair = [finder for finder in (OURS, POWERS) if finder == OURS or finder in rivals]
        order += [(finder, number) for finder in (pair if number % 2 == 0 else pair[::-1])]
        if number == 0 and LIGHTNING in rivals:  # its answer hardly differs between runs
            order.append((LIGHTNING, 0))
    return order


def measure(case: dict[str, Any], options: argparse.Namespace, save: Callable[[], None]) -> None:
    """Complete the runs, the judge and the summary of a workload."""
    name, runs = case["workload"], case["runs"]
    done = {(run["finder"], run["run"]) for run in runs}
    missing = [each for each in schedule(options.runs, options.rivals) if each not in done]
    if missing:
        case.update(judge=None, sizes=[], summary=[])

    def ask_judge() -> None:
        if case["judge"] is None:
            sizes, slow = sizes_to_judge(runs)
            each = options.judge_seconds / JUDGES
            case["judge"] = joined(
                [in_fresh_process("judge", name, sizes, [] if i else slow, each) for i in range(JUDGES)]
            )

    with busy_processes(options.busy if missing or not (case["judge"] or options.judge_quiet) else 0):
        for finder, number in missing:
            began = time.monotonic()
            run = in_fresh_process(finder, name, options.budget)
            runs.append({"finder": finder, "run": number, **run, "process_seconds": time.monotonic() - began})
            save()
            print(f"{name}, {finder}, run {number}: {run['batch_size']} in {run['seconds_spent']:.1f} s {run['error']}")
            sys.stdout.flush()
        if not options.judge_quiet:
            ask_judge()
    ask_judge()
    case["sizes"] = judged_sizes(case["judge"])
    goals = BUSY_GOALS if options.busy else QUIET_GOALS
    case["summary"] = [summarize(case, finder, goals) for finder in dict.fromkeys(run["finder"] for run in runs)]
    save()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print a line for each run and a table; `arguments` None: those of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rivals", nargs="*", choices=[POWERS, LIGHTNING], default=[POWERS, LIGHTNING])
    parser.add_argument("--runs", type=int, default=10, help="runs of the tuner for each workload")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds that a run may take")
    parser.add_argument("--busy", type=int, default=0, metavar="K", help="busy processes during the benchmark")
    parser.add_argument("--judge-seconds", type=float, default=60.0, help="for each workload")
    parser.add_argument("--judge-quiet", action="store_true", help="end the busy processes before the judge")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.task:
        print("\n" + json.dumps(_do(*json.loads(options.task)), allow_nan=False))
        return
    content = begun(
        options.json, "repeatability", "workloads", packages=["torch"], budget_seconds=options.budget,
        busy=options.busy, judge_seconds=options.judge_seconds,
        judge_is_quiet=options.judge_quiet or not options.busy, goals=BUSY_GOALS if options.busy else QUIET_GOALS,
    )  # fmt: skip

    def save() -> None:
        if options.json:
            write(options.json, content)

    for name in options.workloads:
        case = next((case for case in content["workloads"] if case["workload"] == name), None)
        if case is None:
            case = {
                "workload": name,
                "mode": WORKLOADS[name].mode,
                "runs": [],
                "judge": None,
                "sizes": [],
                "summary": [],
            }
            content["workloads"].append(case)
        measure(case, options, save)
        for line in lines([content], only=name):
            print(" | ".join(line))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
