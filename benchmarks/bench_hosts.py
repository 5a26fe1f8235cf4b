"""
Compare batch-size finders on fake CPU hosts that switch between a fast and a slow state.

    python -m benchmarks.bench_hosts --hosts 100 --seeds 10 --jobs 2 --json benchmarks/results/hosts.json
    python -m benchmarks.bench_hosts --hosts 20 --seeds 4 --spreads 0.05 --finders cubatch
    python -m benchmarks.bench_hosts --hosts 20 --seeds 3 --spreads 0.05 --finders cubatch --family 41 --jumps

Each host is searched several times, with other noise and other times of its states.  Per finder the table shows

    regret      share of the best rate lost beyond the tolerance, by the truth of `search.hosts.Ratios`
    spread      largest over smallest answer for the same host: median and 90th percentile over hosts
    seconds     virtual seconds of a search: mean and 90th percentile
    rate error  by how much the reported rate of the answer is off, median (cubatch alone)
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import attrs
import numpy as np

from benchmarks.provenance import provenance, write
from benchmarks.search.finders import Task
from benchmarks.search.hosts import TOLERANCE, Host, Ratios, Session
from benchmarks.search.timed_rivals import powers_of_two
from cubatch.search import loop
from cubatch.tuning import answer, ladder

GOALS: Mapping[float, Mapping[str, float]] = {
    0.05: {"regret": 0.010, "spread_median": 2.0, "spread_90": 4.0, "seconds": 15.0},
    0.15: {"regret": 0.015, "spread_median": 3.0, "spread_90": 8.0, "seconds": 15.0},
}
"""By how much the slow/fast ratio varies between sizes: what a search is to reach."""


@attrs.frozen
class Search:
    """A search: its host, ratios and noise."""

    family: int
    host: int
    spread: float
    seed: int
    finder: str
    budget: float
    ratios: Ratios = Ratios.PER_SIZE
    jumps: bool = False


def run_cubatch(host: Host, session: Session, seed: int, budget: float) -> tuple[int | None, float | None]:
    """Return the answer of our search and the rate that it reports."""
    steps = host.candidates()
    measured = loop.Search(
        factory=lambda: session, ladder=steps, goal=host.goal, budget=budget, seed=seed,
        extend=functools.partial(ladder.between, steps=steps),
    ).run()  # fmt: skip
    setting = {"limits": {"max_batch_size": host.max_batch_size}, "device": {"kind": "cpu"}}
    result = answer.answer([*steps, *measured.added], measured, goal=host.goal, setting=setting)
    rates = {m.batch_size: m.samples_per_second for m in result.measurements}
    return result.batch_size, rates.get(result.batch_size or 0)


def time_powers(host: Host, session: Session, seed: int, budget: float) -> tuple[int | None, None]:  # noqa: ARG001
    """Return the answer of `powers_of_two`, which needs no memory facts."""
    task = Task(
        max_batch_size=host.max_batch_size, total_bytes=0, fixed_bytes=0, bytes_per_sample=0.0, goal=host.goal
    )  # fmt: skip
    return powers_of_two(session, task), None


def pair_rounds(host: Host, session: Session, seed: int, budget: float) -> tuple[int | None, None]:  # noqa: ARG001
    """Return the smallest size within 1 % of the best median ratio to a reference, of five shuffled rounds."""
    sizes = [c.batch_size for c in host.candidates()]
    session.prepare(8)
    session.hold_reference(max(1, int(0.01 / session.time(session.step, 1).seconds)))
    ratios: dict[int, list[float]] = {n: [] for n in sizes}
    for turn in range(5):
        for n in Random(f"{seed}/{turn}").sample(sizes, len(sizes)):
            session.prepare(n)
            first = session.time(session.step, 1).seconds
            timing = session.time(session.step, max(1, int(0.01 / first)))
            around = (timing.reference_before_seconds or 1.0) + (timing.reference_after_seconds or 1.0)
            ratios[n].append(timing.seconds / around)
    rates = {n: n / statistics.median(taken) for n, taken in ratios.items()}
    return min(n for n, rate in rates.items() if rate >= (1 - TOLERANCE) * max(rates.values())), None


OURS = "cubatch"
FINDERS = {OURS: run_cubatch, "powers of two x 5": time_powers, "paired rounds": pair_rounds}


def search(request: Search) -> dict[str, Any]:
    """Run one search and judge its answer by the truth."""
    host = Host.draw(request.family, request.host, request.spread, request.ratios, jumps=request.jumps)
    session = Session(host, request.seed + 1000 * request.host)
    size, rate = FINDERS[request.finder](host, session, request.seed, request.budget)
    loss = host.loss(size)
    return attrs.asdict(request) | {
        "batch_size": size,
        "loss": loss,
        "regret": max(0.0, 1.0 - (1.0 - loss) / (1.0 - TOLERANCE)),
        "seconds": session.now(),
        "trials": len(session.prepared),
        "rate_error": None if rate is None or size is None else rate / host.rate(size) - 1.0,
    }


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row of figures for each spread of ratios and finder."""
    summary = []
    for spread, finder in dict.fromkeys((row["spread"], row["finder"]) for row in rows):
        own = [row for row in rows if (row["spread"], row["finder"]) == (spread, finder)]
        sizes: dict[int, list[int]] = {}
        for row in own:
            sizes.setdefault(row["host"], []).append(row["batch_size"] or 1)
        spreads, seconds = [max(of) / min(of) for of in sizes.values()], [row["seconds"] for row in own]
        errors = [abs(row["rate_error"]) for row in own if row["rate_error"] is not None]
        summary.append({
            "spread": spread,
            "finder": finder,
            "regret": statistics.fmean(row["regret"] for row in own),
            "loss": statistics.fmean(row["loss"] for row in own),
            "spread_median": statistics.median(spreads),
            "spread_90": float(np.quantile(spreads, 0.9)),
            "seconds": statistics.fmean(seconds),
            "seconds_90": float(np.quantile(seconds, 0.9)),
            "rate_error": statistics.median(errors) if errors else None,
        })  # fmt: skip
    return summary


def judge(summary: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each goal of our search with its figure and whether it is met."""
    return [
        {"spread": row["spread"], "what": what, "value": row[what], "most": most, "met": row[what] <= most}
        for row in summary
        if row["finder"] == OURS
        for what, most in GOALS.get(row["spread"], {}).items()
    ]


def run_all(searches: Sequence[Search], jobs: int) -> Iterator[dict[str, Any]]:
    """Run searches in `jobs` processes, in order."""
    if jobs < 2:
        yield from map(search, searches)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(search, searches, chunksize=4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; exit status 1 where our search misses a goal; `arguments` None: those of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=10, help="searches of each host")
    parser.add_argument("--family", type=int, default=0, help="seed of the hosts")
    parser.add_argument("--spreads", default="0.05,0.15", help="by how much the slow/fast ratio varies between sizes")
    parser.add_argument("--ratios", type=Ratios, choices=list(Ratios), default=Ratios.PER_SIZE)
    parser.add_argument("--jumps", action="store_true", help="steps take far longer from a small size on, or below it")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--finders", default=";".join(FINDERS), help="names separated by ';'")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    searches = [
        Search(options.family, host, float(spread), seed, finder, options.budget, options.ratios, options.jumps)
        for spread in options.spreads.split(",")
        for finder in options.finders.split(";")
        for host in range(options.hosts)
        for seed in range(options.seeds)
    ]
    rows = list(run_all(searches, options.jobs))
    summary = summarize(rows)
    judged = judge(summary) if options.ratios is Ratios.PER_SIZE and not options.jumps else []
    for row in summary:
        error = "" if row["rate_error"] is None else f", rate error {row['rate_error']:.1%}"
        sys.stdout.write(
            f"{row['spread']:.0%} {row['finder']:18} regret {row['regret']:.2%}, loss {row['loss']:.2%}, spread "
            f"{row['spread_median']:.2f} / {row['spread_90']:.2f}, {row['seconds']:.1f} / {row['seconds_90']:.1f} s"
            f"{error}\n"
        )
    for row in judged:
        word = "met   " if row["met"] else "MISSED"
        sys.stdout.write(f"{word} {row['spread']:.0%} {row['what']}: {row['value']:.4g}, goal <= {row['most']:g}\n")
    if options.json:
        about = {
            "schema": 1,
            "benchmark": "hosts",
            **provenance(),
            "hosts": options.hosts,
            "seeds": options.seeds,
            "ratios": options.ratios,
            "jumps": options.jumps,
        }
        about |= {"family": options.family, "budget": options.budget, "tolerance": TOLERANCE}
        write(options.json, {**about, "summary": summary, "goals": judged})
    return 0 if all(row["met"] for row in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
