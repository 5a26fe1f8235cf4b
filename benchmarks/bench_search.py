"""
Compare batch-size finders on devices whose truth is known: ours and eight search rules of others.

    python -m benchmarks.bench_search --devices 330 --seed 0 --json benchmarks/results/search-0.json

Every finder gets every device, in a fresh session with the same noise, and time is virtual.  Per
class of device and per finder the table says

    regret      how much faster the best of all integers that fit (and are allowed) is than the answer,
                beyond the tolerance: max(0, (1 - tolerance) * best samples/s / answer's samples/s - 1),
                both by the true curve; an answer that does not fit, or none at all, counts as infinite
    size        the answer as a multiple of the smallest integer within tolerance of the best
    unusable    share of devices without an answer, or with one that does not fit
    over max    share of devices with an answer above the user's maximum
    never ran   share of devices whose answer the finder itself never ran
    trials      how often a size was prepared
    seconds     virtual seconds of the session

as median and 95th percentile (the smallest value that so large a share of the devices does not exceed).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import cubatch as cb
from benchmarks.fake_devices import KINDS, TOLERANCE, Case, make
from benchmarks.provenance import provenance
from benchmarks.rivals import RIVALS, Rival
from cubatch import choose, profiler
from cubatch.errors import NothingMeasured
from cubatch.report import grid
from cubatch.results import Goal
from tests.fakes import FakeRunner

BUDGET_SECONDS = 60.0  # autotune's own default; only our search has a budget, and keeps to it
OURS = "cubatch"
GOAL_KINDS = ("plateau", "known waves")
GOAL_REGRET = {"median": 0.0, "p95": 0.02}

Finder = Callable[[FakeRunner, Case], int | None]


@attrs.frozen(kw_only=True)
class Trial:
    """
    What one finder did on one device.

    Attributes:
        kind, device, finder: Class and number of the device, name of the finder.
        batch_size: Its answer; None where it gave none.
        best_batch_size, knee: The best over all integers, and the smallest within tolerance of it.
        regret: Regret beyond tolerance, a fraction; None where the answer cannot be used.
        over_maximum, never_ran: Defects of the answer.
        trials: How often it prepared a size.
        seconds: Virtual seconds.
    """

    kind: str
    device: int
    finder: str
    batch_size: int | None
    best_batch_size: int
    knee: int
    regret: float | None
    over_maximum: bool
    never_ran: bool
    trials: int
    seconds: float


def cubatch_search(runner: FakeRunner, case: Case) -> int | None:
    """
    Search as autotune() does: the candidates, the profiler's rounds, the choice.

    The memory plan is that of the case, and reaches the candidates as the maximum; the one of the
    engine is tested elsewhere.  The candidates are those for a library whose tiles are not known, 128 x 128.
    """
    limit = min(case.planned_limit, case.task.max_batch_size)
    ladder = cb.candidates(case.spec, device=case.gpu, max_batch_size=limit, library="im2col")
    goal = Goal(tolerance=TOLERANCE)
    measured = profiler.measure(lambda: runner, ladder, goal=goal, budget=BUDGET_SECONDS, seed=case.device.seed)
    try:
        return choose.answer(ladder, measured, goal=goal, setting={}).batch_size
    except NothingMeasured:
        return None


def as_finder(rival: Rival) -> Finder:
    """Give a rival what it would know of the device."""
    return lambda runner, case: rival(runner, case.task)


FINDERS: dict[str, Finder] = {OURS: cubatch_search} | {name: as_finder(rival) for name, rival in RIVALS.items()}


def regret_beyond_tolerance(case: Case, batch_size: int, tolerance: float = TOLERANCE) -> float:
    """Say by what fraction the best is faster than this size, less the tolerance; 0 within it."""
    return max(0.0, (1.0 - tolerance) * case.best_throughput / case.device.throughput(batch_size) - 1.0)


def try_finder(name: str, case: Case, index: int) -> Trial:
    """Let one finder search one device."""
    runner = case.device()
    batch_size = FINDERS[name](runner, case)
    usable = batch_size is not None and case.device.fits(batch_size)
    return Trial(
        kind=case.kind,
        device=index,
        finder=name,
        batch_size=batch_size,
        best_batch_size=case.best_batch_size,
        knee=case.knee,
        regret=regret_beyond_tolerance(case, batch_size) if batch_size is not None and usable else None,
        over_maximum=batch_size is not None and batch_size > case.task.max_batch_size,
        never_ran=batch_size is not None and batch_size not in runner.ran,
        trials=len(runner.prepared),
        seconds=runner.clock.now(),
    )


def summarise(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Summarise by class and finder, in the order of both."""
    rows = []
    for kind in KINDS:
        for finder in FINDERS:
            chosen = [trial for trial in trials if trial.kind == kind and trial.finder == finder]
            if chosen:
                rows.append({"kind": kind, "finder": finder, "devices": len(chosen)} | _figures(chosen))
    return rows


def _figures(trials: Sequence[Trial]) -> dict[str, Any]:
    def spread(values: list[float]) -> dict[str, float | None]:
        quantiles = np.quantile(values, (0.5, 0.95), method="inverted_cdf")
        return dict(zip(("median", "p95"), (float(q) if math.isfinite(q) else None for q in quantiles), strict=True))

    count = len(trials)
    return {
        "regret": spread([math.inf if trial.regret is None else trial.regret for trial in trials]),
        "size": spread([math.inf if trial.batch_size is None else trial.batch_size / trial.knee for trial in trials]),
        "unusable": sum(trial.regret is None for trial in trials) / count,
        "over_maximum": sum(trial.over_maximum for trial in trials) / count,
        "never_ran": sum(trial.never_ran for trial in trials) / count,
        "trials": spread([trial.trials for trial in trials]),
        "seconds": spread([trial.seconds for trial in trials]),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the summary as text, a table per class."""

    def percent(share: float | None) -> str:
        return "fails" if share is None else f"{100 * share:.1f} %"

    def multiple(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}x"

    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.2g}"

    parts = []
    for kind in KINDS:
        chosen = [row for row in rows if row["kind"] == kind]
        if not chosen:
            continue
        cells = [
            [
                row["finder"], percent(row["regret"]["median"]), percent(row["regret"]["p95"]),
                multiple(row["size"]["median"]),
                *(percent(row[key]) for key in ("unusable", "over_maximum", "never_ran")),
                *(figure(row[key][share]) for key in ("trials", "seconds") for share in ("median", "p95")),
            ]
            for row in chosen
        ]  # fmt: skip
        columns = [
            "finder", "regret", "95th", "size", "unusable", "over max", "never ran", "trials", "95th", "seconds", "95th"
        ]  # fmt: skip
        title = f"{kind} ({chosen[0]['devices']} devices)"
        parts.append(grid({"title": title, "columns": columns, "rows": cells}))
    return "\n\n".join(parts)


def missed_goals(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """List where our search misses its goal, in words; nothing where it meets it."""
    return [
        f"{row['kind']}: {share} regret beyond tolerance is {row['regret'][share]}, the goal is {most}"
        for row in rows
        if row["finder"] == OURS and row["kind"] in GOAL_KINDS
        for share, most in GOAL_REGRET.items()
        if row["regret"][share] is None or row["regret"][share] > most
    ]


def _json(content: Mapping[str, Any], trials: Sequence[Trial]) -> str:
    """Write the run for people and programs: what there is few of indented, a trial per line."""
    rows = ",\n".join(json.dumps(attrs.astuple(trial), allow_nan=False) for trial in trials)
    return json.dumps(content, indent=1, allow_nan=False)[:-2] + f',\n "trials": [\n{rows}\n]}}\n'


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; exit status 1 where our search misses its goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--devices", type=int, default=330, help="how many devices; the classes take turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every trial and the summary")
    options = parser.parse_args(arguments)

    began = time.monotonic()
    cases = [make(options.seed, index) for index in range(options.devices)]
    trials = [try_finder(name, case, index) for index, case in enumerate(cases) for name in FINDERS]
    rows = summarise(trials)
    missed = missed_goals(rows)
    if options.json:
        content = {
            "schema": 1,
            "benchmark": "search",
            **provenance(),
            "cubatch": cb.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "seed": options.seed,
            "devices": options.devices,
            "tolerance": TOLERANCE,
            "budget_seconds": BUDGET_SECONDS,
            "goal": {"kinds": GOAL_KINDS, "regret": GOAL_REGRET, "missed": missed},
            "summary": rows,
            "columns": [field.name for field in attrs.fields(Trial)],
        }
        options.json.write_text(_json(content, trials))
    verdict = "goal met: " + ", ".join(GOAL_KINDS) if not missed else "goal missed: " + "; ".join(missed)
    sys.stdout.write(
        f"{table(rows)}\n\n{options.devices} devices, seed {options.seed}, tolerance {TOLERANCE}; {verdict}; "
        f"{time.monotonic() - began:.0f} s\n"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
