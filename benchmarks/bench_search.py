"""
Compare batch-size finders on devices whose true curve is known: cubatch at several budgets and other rules.

    python -m benchmarks.bench_search --devices 360 --seed 0 --jobs 2 --json benchmarks/results/search-0.json
    python -m benchmarks.bench_search --devices 40 --kinds "plateau;sawtooth" --budgets 10 --rivals none --worst 9

Every finder gets every device in a fresh session with the same noise, in virtual time.  For each class of device and
each finder the tables show

    regret      share of the throughput lost beyond the tolerance, against the best size that fits and keeps the latency
                limit, by the true curve; by latency the additional time; at most 1, also without a usable result
    seconds     virtual seconds of the session
    no answer   devices without a result; unusable: without one that fits and keeps the latency limit
    over max    devices with a result above the user's maximum
    never ran   devices whose result the finder never ran
    size        result over ideal size, median
    trials      how often a size was prepared
    gap         where memory or latency limits a rising throughput: how far the result is below the largest allowed
                size; beyond: below the ideal size, which is up to 5 % smaller because of the tolerance

Rivals that know only throughput skip devices where latency counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import cubatch as cb
from benchmarks.provenance import provenance
from benchmarks.search import summary, tables
from benchmarks.search.cases import TOLERANCE
from benchmarks.search.fake_devices import KINDS, numbers
from benchmarks.search.trials import FINDERS, Request, Trial, search_device

BUDGETS = (2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


def requests(options: argparse.Namespace) -> list[Request]:
    """List what is to be tried."""
    return [
        Request(seed=options.seed, index=index, budgets=options.budgets, rivals=options.rivals)
        for index in numbers(options.devices, options.kinds)
    ]


def search_all(wanted: Sequence[Request], jobs: int) -> Iterator[list[Trial]]:
    """Try everything, in `jobs` processes; the order is that of the requests."""
    if jobs < 2:
        yield from map(search_device, wanted)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(search_device, wanted, chunksize=1)


def _json(content: Mapping[str, Any], trials: Sequence[Trial]) -> str:
    """Write the run for people and programs: what there is few of indented, a trial per line."""
    rows = ",\n".join(
        json.dumps([_short(v) for v in attrs.astuple(trial)], allow_nan=False, separators=(",", ":"))
        for trial in trials
    )
    return json.dumps(content, indent=1, allow_nan=False)[:-2] + f',\n "trials": [\n{rows}\n]}}\n'


def _short(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return round(value, 5) if isinstance(value, float) else value


def _names(text: str, known: Sequence[str], what: str) -> list[str]:
    """Read a list of names; "all" and "none" are lists, too."""
    if text in ("all", "none"):
        return list(known) if text == "all" else []
    names = [name.strip() for name in text.split(";")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no {what} is called {unknown[0]!r}; there are: {'; '.join(known)}")
    return names


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--devices", type=int, default=360, help="how many devices; the classes take turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--budgets", default=",".join(f"{budget:g}" for budget in BUDGETS), help="of cubatch, in seconds"
    )
    parser.add_argument(
        "--kinds", default="all", help=f"classes, separated by ';': {'; '.join(list(KINDS))}".replace("%", "%%")
    )
    parser.add_argument("--rivals", default="all", help="names separated by ';', or none")
    parser.add_argument(
        "--worst",
        type=int,
        default=0,
        metavar="N",
        help="list the N devices with the highest regret of cubatch, by budget",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every trial and the summary")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw regret against seconds")
    options = parser.parse_args(arguments)
    options.budgets = [float(budget) for budget in options.budgets.split(",")]
    options.kinds = _names(options.kinds, list(KINDS), "class")
    options.rivals = _names(options.rivals, list(FINDERS), "rival")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; exit status 1 where our search misses a goal; `arguments` None: those of the process."""
    options = _options(arguments)
    began = time.monotonic()
    trials = [trial for device_trials in search_all(requests(options), options.jobs) for trial in device_trials]
    rows = summary.summarise(trials, KINDS)
    judged = summary.judge(rows)
    if options.json:
        content = {
            "schema": 2,
            "benchmark": "search",
            **provenance(),
            "cubatch": cb.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "seed": options.seed,
            "devices": options.devices,
            "kinds": options.kinds,
            "budgets": options.budgets,
            "tolerance": TOLERANCE,
            "goals": judged,
            "summary": rows,
            "columns": [field.name for field in attrs.fields(Trial)],
        }
        options.json.write_text(_json(content, trials))
    if options.figure:
        from benchmarks.search.figure import draw

        draw(rows, options.figure)
    parts = [
        tables.by_class(rows),
        tables.coverage(rows) if any(row["kind"] == summary.ALL for row in rows) else "",
        tables.worst(trials, options.worst) if options.worst else "",
        tables.goals(judged),
    ]
    sys.stdout.write(
        "\n\n".join(part for part in parts if part)
        + f"\n\n{options.devices} devices, seed {options.seed}, tolerance {TOLERANCE}; "
        + f"{time.monotonic() - began:.0f} s\n"
    )
    return 0 if all(row["met"] for row in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
