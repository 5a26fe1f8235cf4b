"""
Search curves of PyTorch modules that were measured, on a host that stays as fast as it is and on one that moves.

    python -m benchmarks.bench_measured_curves benchmarks/results/amd-epyc-2-threads/module.json --seeds 12

The truth between two sizes that were measured lies on the line of their steps.  Time is virtual.  A host that moves has
two states, 17 % apart, of 3 to 12 s each on average, as the machine of that file has (benchmarks/README.md, PyTorch
modules).  Lost is against the best of all sizes, without a tolerance.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from benchmarks.search.cases import ORDINARY_START, TOLERANCE, Case, judged
from benchmarks.search.finders import Task
from benchmarks.search.sessions import Bimodal, LoadsCode, Noise, SearchDevice
from benchmarks.search.trials import try_ours
from cubatch.measure.goal import Goal
from cubatch.tuning.ladder import plain_candidates
from tests.fakes import Behaviour

SLOWER, STAYS_SECONDS = 0.17, (3.0, 12.0)
READINGS = Noise(0.01, outliers=0.02)
PREPARE_SECONDS, LOAD_SECONDS = 0.1, 0.2
WITHIN = 0.03


@attrs.frozen
class Search:
    """One search of one curve: seconds of a step by batch size, whether the host moves, a seed, a budget in seconds."""

    curve: dict[int, float]
    moves: bool
    seed: str
    budget: float

    def lost(self) -> tuple[float, float]:
        """Give the share that the answer lost, and the seconds that it took."""
        case = self._case()
        trial = try_ours(case, 0, self.budget)
        return case.regret(trial.batch_size, tolerance=0.0), trial.seconds

    def _case(self) -> Case:
        draw, top = random.Random(self.seed), max(self.curve)
        behaviours: list[Behaviour] = [ORDINARY_START]
        if self.moves:
            fast, slow = (draw.uniform(*STAYS_SECONDS) for _ in range(2))
            behaviours.append(Bimodal(SLOWER, fast, slow, seed=draw.randrange(2**31)))
        device = SearchDevice(
            functools.partial(_between, sorted(self.curve.items())), readings=READINGS, is_stationary=not self.moves,
            tells_clock=False, bytes_needed=lambda n: n, memory_bytes=2 * top, prepare_seconds=PREPARE_SECONDS,
            behaviours=(*behaviours, LoadsCode(LOAD_SECONDS)), seed=draw.randrange(2**31),
        )  # fmt: skip
        goal = Goal(tolerance=TOLERANCE)
        task = Task(max_batch_size=top, total_bytes=2 * top, fixed_bytes=0, bytes_per_sample=1, goal=goal)
        return judged("measured", device, goal, task, functools.partial(plain_candidates, top))


def _between(known: Sequence[tuple[int, float]], n: int) -> float:
    sizes, seconds = zip(*known, strict=True)
    return float(np.interp(n, sizes, seconds))


def curves(path: Path) -> dict[str, dict[int, float]]:
    """Read seconds of a step by batch size, of each module and mode of a result of `bench_module`."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {
        f"{row['module']} {row['mode']}": {int(n): int(n) / rate for n, rate in row["samples_per_second"].items()}
        for row in rows
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Search every curve with every seed and print what was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("results", type=Path, metavar="FILE", help="of bench_module")
    parser.add_argument("--seeds", type=int, default=12, help="searches of each curve")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(arguments)
    known = curves(options.results)
    for moves in (False, True):
        searches = [
            Search(curve, moves, f"{name}/{seed}", options.budget)
            for name, curve in known.items()
            for seed in range(options.seeds)
        ]
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            lost, seconds = zip(*pool.map(Search.lost, searches, chunksize=4), strict=True)
        within = sum(share <= WITHIN for share in lost) / options.seeds
        print(
            f"{'a host that moves' if moves else 'a host that stays'}: {statistics.fmean(lost):.2%} lost on average, "
            f"{max(lost):.1%} at most, {within:.1f} of {len(known)} within {WITHIN:.0%}, "
            f"{statistics.fmean(seconds):.1f} s"
        )


if __name__ == "__main__":
    main()
