"""
Leave out one rule of the search after the other, and print what that costs.

    python -m benchmarks.bench_ablation --jobs 2 --json FILE

Each variant searches the same fake devices (`search.fake_devices`, budgets of 60 and 10 s) and the same fake hosts
(`search.hosts`, 60 s).  The seeds are not those on which constants were chosen.  A rule is kept if leaving it out moves
a mean regret by more than 0.1 %, or if it keeps a promise.  Promises are that limits are bisected and named sizes are
measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import bench_hosts
from benchmarks.provenance import provenance, write
from benchmarks.search import fake_devices, trials
from cubatch.search import trial_rules

RULES = ("learn", "bisect", "probe_neighbors", "confirm")
BUDGETS = (60.0, 10.0)
SPREAD = 0.05


def without(rule: str | None) -> Any:
    """Return a context in which a rule names no size; None leaves all as they are."""
    return mock.patch.object(trial_rules, rule, return_value=[]) if rule else contextlib.nullcontext()


def search_device(rule: str | None, seed: int, index: int) -> dict[str, float]:
    """Return regret and seconds on one fake device, by budget, without a rule; None: with all."""
    case, figures = fake_devices.make(seed, index), {}
    with without(rule):
        for budget in BUDGETS:
            trial = trials.try_ours(case, index, budget)
            figures |= {f"regret_{budget:g}": trial.regret, f"seconds_{budget:g}": trial.seconds}
    return figures


def search_host(rule: str | None, seed: int, index: int) -> dict[str, float]:
    """Return regret and seconds on one fake host, without a rule; None: with all."""
    with without(rule):
        row = bench_hosts.search(bench_hosts.Search(seed, index, SPREAD, 0, bench_hosts.OURS, BUDGETS[0]))
    return {"regret_host": row["regret"], "seconds_host": row["seconds"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Search with all rules, then without each, and print the means; `arguments` None: those of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--devices", type=int, default=108, help="fake devices; their classes take turns")
    parser.add_argument("--hosts", type=int, default=60)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    rows = []
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for rule in (None, *RULES):
            numbers = fake_devices.numbers(options.devices)
            on_devices = pool.map(functools.partial(search_device, rule, options.seed), numbers, chunksize=1)
            on_hosts = pool.map(functools.partial(search_host, rule, options.seed), range(options.hosts), chunksize=1)
            row: dict[str, Any] = {"without": rule}
            for group in (on_devices, on_hosts):
                row |= {name: statistics.fmean(each[name] for each in group) for name in group[0]}
            rows.append(row)
            figures = ", ".join(
                f"{name.replace('_', ' ')} {value:.2%}" if name.startswith("regret") else f"{value:.1f} s"
                for name, value in row.items()
                if name != "without"
            )
            sys.stdout.write(f"without {rule or 'nothing'}: {figures}\n")
            sys.stdout.flush()
            if options.json:
                about = {"schema": 1, "benchmark": "ablation", **provenance(), "devices": options.devices}
                about |= {"hosts": options.hosts, "seed": options.seed, "spread": SPREAD}
                write(options.json, {**about, "rows": rows})


if __name__ == "__main__":
    main()
