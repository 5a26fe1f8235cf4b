"""
Search measured curves of PyTorch modules in virtual time, on hosts of constant and of changing speed.

    python -m benchmarks.bench_measured_curves benchmarks/results/amd-epyc-2-threads/module.json --seeds 12

Between two measured sizes the step time is interpolated linearly. A host of changing speed has two states, 17 % apart,
of 3 to 12 s each on average, as the machine of that file has. One kind of host also slows the reference step in the
slow state. Trials may differ by a standard deviation of 2 %. Loss is against the best size, without a tolerance.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from benchmarks.search.cases import Traits
from benchmarks.search.sessions import Bimodal, Noise, Scatters
from benchmarks.search.trials import try_ours

SLOWER, STAYS_SECONDS = 0.17, (3.0, 12.0)
READINGS = Noise(0.01, outliers=0.02)
VISITS = 0.02  # from one to the next
PREPARE_SECONDS, LOAD_SECONDS = 0.1, 0.2
WITHIN = 0.03
HOSTS = {
    "constant host": {"moves": False, "tells": False},
    "changing host": {"moves": True, "tells": False},
    "changing host with a reference": {"moves": True, "tells": True},
    "changing host with a reference, trials differ": {"moves": True, "tells": True, "visits": VISITS},
    "constant host with a reference, trials differ": {"moves": False, "tells": True, "visits": VISITS},
}


@attrs.frozen
class Search:
    """A search of a curve: seconds of a step by batch size, a host of HOSTS, a seed, a budget in seconds."""

    curve: Mapping[int, float]
    host: str
    seed: str
    budget: float


class Measured(Traits):
    """A module on a host: seconds of a step by batch size, and whether the host changes and slows the reference."""

    def __init__(
        self, rng: random.Random, curve: Mapping[int, float], *, moves: bool, tells: bool, visits: float = 0.0
    ) -> None:
        super().__init__(rng)
        self.max_batch_size = self.true_limit = max(curve)
        self.curve = functools.partial(_between, sorted(curve.items()))
        self.noise_of_timings, self.is_stationary = READINGS, not moves
        self.tells_clock, self.tells_reference = False, tells
        self.prepare_seconds, self.load_seconds = PREPARE_SECONDS, LOAD_SECONDS
        if moves:
            fast, slow = (rng.uniform(*STAYS_SECONDS) for _ in range(2))
            self.behaviours.append(Bimodal(SLOWER, fast, slow, seed=rng.randrange(2**31)))
        if visits:
            self.behaviours.append(Scatters(visits, seed=rng.randrange(2**31)))


def lost(search: Search) -> tuple[float, float]:
    """Return the share of throughput that the recommendation loses, and the seconds of the search."""
    rng = random.Random(search.seed)
    case = Measured(rng, search.curve, **HOSTS[search.host]).case("measured", rng.randrange(2**31))
    trial = try_ours(case, 0, search.budget)
    return case.regret(trial.batch_size, tolerance=0.0), trial.seconds


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
    parser.add_argument("--hosts", nargs="*", choices=list(HOSTS), default=list(HOSTS))
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(arguments)
    known = curves(options.results)
    for host in options.hosts:
        searches = [
            Search(curve, host, f"{name}/{seed}", options.budget)
            for name, curve in known.items()
            for seed in range(options.seeds)
        ]
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            shares, seconds = zip(*pool.map(lost, searches, chunksize=4), strict=True)
        within = sum(share <= WITHIN for share in shares) / options.seeds
        print(
            f"{host}: {statistics.fmean(shares):.2%} lost on average, "
            f"{max(shares):.1%} at most, {within:.1f} of {len(known)} within {WITHIN:.0%}, "
            f"{statistics.fmean(seconds):.1f} s"
        )


if __name__ == "__main__":
    main()
