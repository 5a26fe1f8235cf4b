"""
Choose the variant that runs each product of a network: ranked by cost, the first few timed, winners kept in a file.

The cost model finds variants that are far too slow, but not the fastest of the others.  So the first few of the ranking
are timed on the arrays of the problem.  The fastest is also timed with fewer and with more slices of gemm_k.  It is
compared with its variant that stores phases of a strided gradient, and with one whose operands are transposed first.
Time depends on the number of blocks on the busiest SM, so a winner is used for every batch size with the same number.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import sqlite3
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import attrs

from cubatch import sqlite_file
from cubatch.errors import DeviceFailed, StoreError
from cubatch.hardware.facts import Device
from cubatch.hardware.waves import busiest_sm_blocks
from cubatch.kernels.cost_model import blocks
from cubatch.kernels.problem import Problem
from cubatch.kernels.ranking import Prepare, SplitKernel, of_phases, other_slices, ranking
from cubatch.kernels.transposing import ranking_transposed
from cubatch.kernels.variant import Kernel

CONTENDERS = 4
"""Variants of the ranking that are timed, including the best of Winograd's algorithm and of the direct sum."""

TIMED_ROUNDS = 5
SPAN_SECONDS = 2e-4  # of a timing: a hundred times the resolution of CUDA events

FAR_BEHIND = 1.25
"""A variant this many times slower than the fastest of a round is not timed again; timings differ by far less."""

LONG_SECONDS, LONG_ROUNDS = 2e-3, 2
"""Longer launches need fewer rounds, which take most of the time of a choice at large batches."""

MAX_REPEATS = 20

_SUMS_OVER_THE_BATCH = frozenset({"conv2d_wgrad", "gemm_tn"})

_SCHEMA = """
CREATE TABLE winners (
    gpu TEXT NOT NULL, kernels TEXT NOT NULL, overlaps INTEGER NOT NULL, problem TEXT NOT NULL, winner TEXT NOT NULL,
    seconds TEXT NOT NULL, created TEXT NOT NULL, PRIMARY KEY (gpu, kernels, overlaps, problem)) WITHOUT ROWID;
"""
_VERSION = 2
_log = logging.getLogger(__name__)

Ranked = tuple[float, int, Kernel]
"""Clocks, slices and variant: an entry of `ranking.ranking`."""


class LaunchClock(Protocol):
    """A clock for kernel launches: `measure.runner.Clock` without `sleep`."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""

    def time(self, step: Callable[[], object], repeats: int) -> Any:
        """Run a step `repeats` times; return a record whose `seconds` are the mean time of a run."""


class Winners:
    """
    The fastest variant of each problem ("winner") from earlier timings, in a file that several processes share.

    If the file cannot be used, a warning is logged and winners are kept in memory.

    Args:
        path: The SQLite file; None: winners are kept in memory.
        gpu: Name of the GPU, or of its slice.
        sources: Hash of the sources of the kernels.
        overlaps: Whether launches overlap: a launch begins while the one before it ends.  Overlap hides some of a
            variant's start, so another variant may win.
    """

    def __init__(self, path: Path | None, *, gpu: str, sources: str, overlaps: bool = False) -> None:
        self._path, self._key = path, (gpu, sources, overlaps)
        self._known: dict[str, str] = {}
        rows = self._execute(
            "SELECT problem, winner FROM winners WHERE gpu = ? AND kernels = ? AND overlaps = ?", self._key
        )
        self._known = {row["problem"]: row["winner"] for row in rows}

    def get(self, problem: str) -> str | None:
        """Return the name of the fastest variant of the problem with this key; None if it was not timed."""
        return self._known.get(problem)

    def put(self, problem: str, winner: str, seconds: Mapping[str, float]) -> None:
        """Store the name of the fastest variant of the problem with this key, and the seconds of each timed variant."""
        self._known[problem] = winner
        row = (*self._key, problem, winner, json.dumps(seconds), datetime.now(UTC).isoformat())
        self._execute("INSERT OR REPLACE INTO winners VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def add_missing(self, other: Winners) -> None:
        """Add another object's winners for problems that have none here; do not write them to the file."""
        self._known = other._known | self._known

    def _execute(self, statement: str, values: Sequence[str | bool]) -> list[sqlite3.Row]:
        """
        Execute a statement on the file and return the rows; empty without a file.

        After an error the result is empty too, and the file is not used any more.
        """
        if self._path is None:
            return []
        try:
            path = sqlite_file.place(self._path)
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite_file.connect(path, _SCHEMA, _VERSION)) as database:
                return database.execute(statement, values).fetchall()
        except (*sqlite_file.ERRORS, StoreError) as error:
            why = error if isinstance(error, StoreError) else sqlite_file.reason(error)
            _log.warning("kernel choices are not kept: %s: %s", self._path, why)
            self._path = None
            return []


@attrs.define(eq=False)
class TimedChoice:
    """Chooses the variant of a problem by timing those of least predicted cost; usable as `Context.chooser`."""

    make_clock: Callable[[], LaunchClock]  # returns a clock that times launches
    winners: Winners  # fastest variants of earlier timings
    # seconds left for timing. Afterwards the fastest variant of the nearest batch is used, or without one the first of
    # the ranking by predicted cost
    seconds: float
    _near: dict[str, dict[int, str]] = attrs.field(factory=dict, init=False)

    @functools.cached_property
    def clock(self) -> LaunchClock:
        """The clock for launches. It allocates memory of the current device, so it is created for the first timing."""
        return self.make_clock()

    def __call__(self, problem: Problem, device: Device, prepare: Prepare | None = None) -> SplitKernel:
        """
        Return the variant that ran a problem fastest, and the number of slices that it splits gemm_k into.

        Without a timing it is that of the nearest batch size, else the first of the ranking by predicted cost.

        Args:
            prepare: Binds a variant to the arrays and returns its launch; None: choose without timing.
        """
        contenders = _contenders(ranking(problem, device))
        splits = {kernel.name: SplitKernel(kernel, slices) for _, slices, kernel in contenders}

        def others(name: str) -> dict[str, SplitKernel]:
            return _others(problem, splits[name].kernel, device)

        def named(winner: str) -> SplitKernel | None:
            name = winner.split(maxsplit=1)[0]
            return splits.get(winner) or (others(name).get(winner) if name in splits else None)

        first = next(iter(splits))
        if len(splits) == 1 and not others(first):
            return splits[first]
        layer = _layer(problem)
        key, near = _key(layer, problem, device, contenders), self._near.setdefault(layer, {})
        winner = self.winners.get(key)
        split = None if winner is None else named(winner)
        if split is None and prepare is not None and self.seconds > 0:
            winner = self._fastest(key, splits, others, prepare)
            split = None if winner is None else named(winner)
        if winner is not None and split is not None:
            near[_grown(problem)] = winner
            return split
        nearest = min(near, key=lambda size: abs(size - _grown(problem)), default=None)
        name = first if nearest is None else near[nearest]
        return named(name) or splits.get(name.split()[0], splits[first])  # there may be no other slices here

    def _fastest(
        self, key: str, splits: Mapping[str, SplitKernel], others: Callable[[str], Mapping[str, SplitKernel]],
        prepare: Prepare,
    ) -> str | None:  # fmt: skip
        """
        Time variants, then the other ways to run the fastest one; store and return the name of the fastest way.

        Returns None if timing would take longer than the seconds left, or if no variant runs. `splits` has the variants
        by name, `others` returns further ways, and `prepare` binds one to the arrays.
        """
        medians = self._medians(splits, prepare)
        if not medians:
            return None
        winner = min(medians, key=medians.__getitem__)
        more = others(winner)
        if more and self.seconds > 0:
            medians |= self._medians({winner: splits[winner], **more}, prepare)
            winner = min((winner, *more), key=lambda name: medians.get(name, math.inf))
        self.winners.put(key, winner, medians)
        return winner

    def _medians(self, splits: Mapping[str, SplitKernel], prepare: Prepare) -> dict[str, float]:
        """
        Time variants in turns and return the median seconds of each by name, without variants that fail.

        The result is empty if timing would take longer than the seconds left.
        """
        began = self.clock.now()
        works: dict[str, Callable[[], object]] = {}
        repeats: dict[str, int] = {}
        timings: dict[str, list[float]] = {name: [] for name in splits}
        for name, split in splits.items():
            try:
                work = prepare(split)
                self._read(work, 1)  # cold caches and clocks
            except DeviceFailed as error:  # another variant may run
                if error.is_fatal:
                    raise
                _log.warning("%s is left out: %s", name, error)
                continue
            works[name], seconds = work, self._read(work, 1)
            if not repeats and seconds * len(splits) * (2 + _rounds(seconds)) > self.seconds:
                self.seconds -= self.clock.now() - began
                return {}
            repeats[name] = max(1, min(MAX_REPEATS, round(SPAN_SECONDS / seconds)))
        left = works
        for number in range(TIMED_ROUNDS):
            for name, work in left.items():
                timings[name].append(self._read(work, repeats[name]))
            least = min((timings[name][-1] for name in left), default=0.0)
            left = {name: work for name, work in left.items() if timings[name][-1] < FAR_BEHIND * least}
            if len(left) <= 1 or number + 1 == _rounds(least):
                break
        self.seconds -= self.clock.now() - began
        return {name: statistics.median(timings[name]) for name in works}

    def _read(self, work: Callable[[], object], repeats: int) -> float:
        def step() -> None:
            work()

        return float(self.clock.time(step, repeats).seconds)


def _rounds(seconds: float) -> int:
    return LONG_ROUNDS if seconds >= LONG_SECONDS else TIMED_ROUNDS


def winners_path(store_path: Path) -> Path:
    """Return the path of the file with the fastest variants: next to the SQLite file of cached timings."""
    with contextlib.suppress(OSError, StoreError):  # opening the store reports the error
        store_path = sqlite_file.place(store_path)
    return store_path.with_name(f"{store_path.stem}-kernels.sqlite3")


def delete_winners(path: Path, device: Device | None = None) -> int:
    """Delete the stored fastest variants of one GPU (None: all), and return their number. The file may be missing."""
    try:
        path = sqlite_file.place(path)
        if not path.exists():
            return 0
        with closing(sqlite_file.connect(path, _SCHEMA, _VERSION)) as database:
            if device is None:
                return database.execute("DELETE FROM winners").rowcount
            return database.execute("DELETE FROM winners WHERE gpu = ?", (gpu_name(device),)).rowcount
    except sqlite_file.ERRORS as error:
        raise StoreError(str(path), sqlite_file.reason(error), sqlite_file.remedy(error)) from error


def gpu_name(device: Device) -> str:
    """Return the name under which the fastest kernel variants are stored: that of a GPU or of its MIG slice."""
    return f"{device.name} {device.mig or ''}".strip()


def _contenders(ranked: Sequence[Ranked]) -> list[Ranked]:
    """
    Return the variants to time, best first.

    They include variants with and without Winograd's algorithm, which the cost model cannot compare.
    """
    contenders = list(ranked[:CONTENDERS])
    for is_winograd in (False, True):
        best = next((entry for entry in ranked if (entry[2].winograd is not None) is is_winograd), None)
        if best is not None and best not in contenders:
            contenders[-1] = best
    return contenders


def _others(problem: Problem, kernel: Kernel, device: Device) -> dict[str, SplitKernel]:
    """
    Return other ways to run a problem than by a variant, by name; those that do not exist are left out.

    The variant's name with "/2" or "*2" has about half or twice the slices of gemm_k. With "phases" it is
    `of_phases`, with "transposed" the first of `ranking_transposed`.
    """
    counts, phased = other_slices(problem, kernel, device), of_phases(problem, kernel)
    others = {f"{kernel.name} {side}": SplitKernel(kernel, count) for side, count in counts.items()}
    if phased is not None:
        others[f"{kernel.name} phases"] = SplitKernel(phased)
    for _, count, first in ranking_transposed(problem, device)[:1]:
        others[f"{kernel.name} transposed"] = SplitKernel(first, count)
    return others


def _grown(problem: Problem) -> int:
    return problem.k if problem.operation in _SUMS_OVER_THE_BATCH else problem.m


def _layer(problem: Problem) -> str:
    grown = "k" if problem.operation in _SUMS_OVER_THE_BATCH else "m"
    return json.dumps(attrs.asdict(problem, filter=lambda field, _: field.name != grown), sort_keys=True)


def _key(layer: str, problem: Problem, device: Device, contenders: Sequence[Ranked]) -> str:
    """Return the key of a stored choice: the shape without the batch, and each variant's blocks on the busiest SM."""
    num_sms = device.num_sms or 1
    busiest = {
        kernel.name: busiest_sm_blocks(blocks(problem, kernel) * slices, num_sms) for _, slices, kernel in contenders
    }
    return json.dumps([layer, busiest], sort_keys=True)
