"""
Tune on devices and on disks that fail, and check that no timing and no result is lost.

    python -m benchmarks.bench_faults --devices 1760 --jobs 6 --json benchmarks/results/faults.json
    python -m benchmarks.bench_faults --kinds "killed and begun again;steps that hang" --devices 20

Devices are fakes in virtual time with a real store.  Their memory runs out at random steps or is not monotone, and
errors persist in a process.  Steps hang, workers die or are suspended, the tuner is killed, and disks are full or fail.

Each run is restarted until it ends by itself, and then checked:

    lost        cached timings that are missing or changed without a warning
    twice       timings that were taken again though they were cached
    no answer   runs without a result
    wrong       results that do not follow from the rows of the store, or are below 0.7 of the best of these
    late        runs that took longer than their deadlines allow

The exit status is 1 if one of these is not zero.  Moments are drawn from the seed.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.faults import devices, judging
from benchmarks.faults.judging import Trial
from benchmarks.provenance import provenance, write

KINDS = tuple(devices.KINDS)


def try_one(seed: int, kind: tuple[str, int]) -> Trial:
    """Run the trial of a kind and number; an exception counts as no result."""
    name, number = kind
    logging.disable(logging.WARNING)  # retries, by the thousand
    try:
        return devices.try_once(name, seed * 1_000_000 + number)
    except Exception as error:  # noqa: BLE001 - the worst that may happen
        return Trial(kind=name, faults=0, sessions=0, timings=0, no_answer=True, what=repr(error))


def requests(kinds: Sequence[str], count: int) -> list[tuple[str, int]]:
    """Return the trials, whose kinds take turns."""
    wanted = [(kinds[number % len(kinds)], number // len(kinds)) for number in range(count)]
    return sorted(wanted, key=lambda kind: (KINDS.index(kind[0]), kind[1]))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--devices", type=int, default=200, help="runs in virtual time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="; ".join(KINDS), help="separated by ';'")
    parser.add_argument("--jobs", type=int, default=1, help="trials at once")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write what was found; kinds that it has of this commit and seed are not tried again",
    )
    options = parser.parse_args(arguments)
    options.kinds = [name.strip() for name in options.kinds.split(";")]
    if unknown := [name for name in options.kinds if name not in KINDS]:
        raise SystemExit(f"no kind is called {unknown[0]!r}; there are: {'; '.join(KINDS)}")
    return options


def _before(path: Path | None, seed: int) -> dict[str, Any]:
    """Return the results of an earlier call with this commit and seed; empty if `path` is None or no such file."""
    if path is not None and path.exists():
        earlier: dict[str, Any] = json.loads(path.read_text())
        if (earlier["commit"], earlier["seed"]) == (provenance()["commit"], seed):
            return earlier
    return {"summary": [], "bad": []}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; exit status 1 where something did not hold; `arguments` None: those of the process."""
    options, began = _options(arguments), time.monotonic()
    before = _before(options.json, options.seed)
    known = {row["kind"] for row in before["summary"]}
    wanted = [kind for kind in requests(options.kinds, options.devices) if kind[0] not in known]
    ask = functools.partial(try_one, options.seed)
    if options.jobs < 2:
        trials = [ask(kind) for kind in wanted]
    else:
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            trials = pool.map(ask, wanted, chunksize=1)
    rows, bad = judging.summarise(trials), [attrs.asdict(trial) for trial in trials if not trial.is_good]
    for row in rows:
        sys.stdout.write(", ".join(f"{name} {value}" for name, value in row.items()) + "\n")
    for trial in bad:
        sys.stdout.write(f"  {trial}\n")
    sys.stdout.write(
        f"{len(trials)} runs, {len(bad)} not good, seed {options.seed}; {time.monotonic() - began:.0f} s\n"
    )
    if options.json:
        content = {
            "schema": 1,
            "benchmark": "faults",
            **provenance(),
            "python": platform.python_version(),
            "seed": options.seed,
            "virtual": list(KINDS),
            "summary": sorted([*before["summary"], *rows], key=lambda row: KINDS.index(row["kind"])),
            "bad": [*before["bad"], *bad],
        }
        write(options.json, content)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
