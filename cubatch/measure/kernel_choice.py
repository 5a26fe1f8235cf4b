"""
Which variant runs each product of a network: ranked by cost, the best few timed once, winners kept.

A cost model is right about which variants are hopeless and wrong about which of the best is best, so
the first few of the ranking are timed on the very arrays that they will work on, and then the best of them with
fewer and with more slices of gemm_k.  A winner holds for every batch size that puts as many blocks on the busiest SM,
since time follows that number.
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

import attrs

from cubatch import sqlite_file
from cubatch.engine.conditions import kernels_sha256
from cubatch.engine.native.context import Context, Prepare
from cubatch.errors import DeviceFailed, StoreError
from cubatch.hardware import arithmetic
from cubatch.hardware.facts import Device
from cubatch.hardware.waves import busiest_sm_blocks
from cubatch.kernels.cost_model import blocks
from cubatch.kernels.launch import CudaLauncher
from cubatch.kernels.problem import Problem
from cubatch.kernels.ranking import SplitKernel, other_slices, ranking
from cubatch.kernels.variant import Kernel, arch_number, kernels
from cubatch.measure.clocks import HostClock, cupy_kernel_clock
from cubatch.measure.runner import Clock

CONTENDERS = 4
"""So many of the ranking are timed, the best of Winograd's algorithm and of the direct sum among them."""

TIMED_ROUNDS = 5
SPAN_SECONDS = 2e-4
"""A reading spans this: a hundred times the resolution of CUDA events."""

FAR_BEHIND = 1.25
"""What takes so many times as long as the fastest in one round is not in the next: readings differ by far less."""

LONG_SECONDS, LONG_ROUNDS = 2e-3, 2
"""Launches from here on are as sure in two rounds, which take most of what a choice takes at large batches."""

MAX_REPEATS = 20

_TRAINING_CHOICE_SECONDS = 20.0
# The clock's two arrays lie beside the memory plan: small, yet they take several times longer to copy than to start.
_FILLER_BYTES = 1 << 25

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


class Winners:
    """
    The winners that were timed before, in a file that many processes share.

    A file that cannot be used costs the timings, not the run: a warning is logged and they are kept in memory.

    Args:
        path: The SQLite file; None keeps them in memory.
        gpu: Which GPU they hold for: its name, or a slice of it.
        sources: Hash of the kernels' sources that they hold for.
        overlaps: Whether launches overlap: a launch begins while the launch before ends.  Overlap hides some of a
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
        """Return the name of a problem's winner, or None."""
        return self._known.get(problem)

    def put(self, problem: str, winner: str, seconds: Mapping[str, float]) -> None:
        """Keep a winner, and what each contender took."""
        self._known[problem] = winner
        row = (*self._key, problem, winner, json.dumps(seconds), datetime.now(UTC).isoformat())
        self._execute("INSERT OR REPLACE INTO winners VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def add_missing(self, other: Winners) -> None:
        """Add the winners of another object for problems without a winner here; the file stays as it is."""
        self._known = other._known | self._known

    def _execute(self, statement: str, values: Sequence[str | bool]) -> list[sqlite3.Row]:
        """Open the file for one statement; a file that fails is not tried again."""
        if self._path is None:
            return []
        try:
            path = sqlite_file.place(self._path)
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(_connect(path)) as database:
                return database.execute(statement, values).fetchall()
        except (*sqlite_file.ERRORS, StoreError) as error:
            _log.warning("kernel choices are not kept: %s: %s", self._path, error)
            self._path = None
            return []


@attrs.define(eq=False)
class TimedChoice:
    """
    Chooses the variant of a problem by timing the contenders; a chooser for the engine's Context.

    Attributes:
        make_clock: Makes what tells the time of a launch.
        winners: Those of earlier runs.
        seconds: What may still be spent on timing; afterwards the nearest winner, else the ranking, decides.
    """

    make_clock: Callable[[], Clock]
    winners: Winners
    seconds: float
    _near: dict[str, dict[int, str]] = attrs.field(factory=dict, init=False)

    @functools.cached_property
    def clock(self) -> Clock:
        """Made with the first timing: only then is the GPU sure to be the current device, whose memory it takes."""
        return self.make_clock()

    def __call__(self, problem: Problem, device: Device, prepare: Prepare | None = None) -> SplitKernel:
        """
        Return the variant that runs a problem, and its slices.

        Args:
            problem: What is computed.
            device: The GPU.
            prepare: Binds a variant to the arrays; what it gives launches it. None: choose without timing.
        """
        contenders = _contenders(ranking(problem, device))
        found = {kernel.name: SplitKernel(kernel, slices) for _, slices, kernel in contenders}

        def others(name: str) -> dict[str, SplitKernel]:
            return _others(problem, found[name], device)

        def named(winner: str) -> SplitKernel | None:
            name = winner.split(maxsplit=1)[0]
            return found.get(winner) or (others(name).get(winner) if name in found else None)

        first = next(iter(found))
        if len(found) == 1 and not others(first):
            return found[first]
        layer = _layer(problem)
        key, near = _key(layer, problem, device, contenders), self._near.setdefault(layer, {})
        winner = self.winners.get(key)
        split = None if winner is None else named(winner)
        if split is None and prepare is not None and self.seconds > 0:
            winner = self._fastest(key, found, others, prepare)
            split = None if winner is None else named(winner)
        if winner is not None and split is not None:
            near[_grown(problem)] = winner
            return split
        nearest = min(near, key=lambda size: abs(size - _grown(problem)), default=None)
        name = first if nearest is None else near[nearest]
        return named(name) or found.get(name.split()[0], found[first])  # which may have no other slices here

    def _fastest(
        self, key: str, found: Mapping[str, SplitKernel], others: Callable[[str], Mapping[str, SplitKernel]],
        prepare: Prepare,
    ) -> str | None:  # fmt: skip
        """Time the contenders, then the fastest with other slices, and keep the winner; None where that is too long."""
        medians = self._medians(found, prepare)
        if not medians:
            return None
        winner = min(medians, key=medians.__getitem__)
        more = others(winner)
        if more and self.seconds > 0:
            medians |= self._medians({winner: found[winner], **more}, prepare)
            winner = min((winner, *more), key=lambda name: medians.get(name, math.inf))
        self.winners.put(key, winner, medians)
        return winner

    def _medians(self, found: Mapping[str, SplitKernel], prepare: Prepare) -> dict[str, float]:
        """Time some in turns and give the median seconds of those that run; none where timing would take too long."""
        began = self.clock.now()
        works: dict[str, Callable[[], object]] = {}
        repeats: dict[str, int] = {}
        readings: dict[str, list[float]] = {name: [] for name in found}
        for name, split in found.items():
            try:
                work = prepare(split)
                self._read(work, 1)  # cold caches and clocks
            except DeviceFailed as error:  # another may be taken
                if error.is_fatal:
                    raise
                _log.warning("%s is left out: %s", name, error)
                continue
            works[name], one = work, self._read(work, 1)
            if not repeats and one * len(found) * (2 + _rounds(one)) > self.seconds:
                self.seconds -= self.clock.now() - began
                return {}
            repeats[name] = max(1, min(MAX_REPEATS, round(SPAN_SECONDS / one)))
        left = works
        for number in range(TIMED_ROUNDS):
            for name, work in left.items():
                readings[name].append(self._read(work, repeats[name]))
            least = min((readings[name][-1] for name in left), default=0.0)
            left = {name: work for name, work in left.items() if readings[name][-1] < FAR_BEHIND * least}
            if len(left) <= 1 or number + 1 == _rounds(least):
                break
        self.seconds -= self.clock.now() - began
        return {name: statistics.median(readings[name]) for name in works}

    def _read(self, work: Callable[[], object], repeats: int) -> float:
        def step() -> None:
            work()

        return self.clock.time(step, repeats).seconds


def _rounds(seconds: float) -> int:
    """Return how often a launch that takes so long is read."""
    return LONG_ROUNDS if seconds >= LONG_SECONDS else TIMED_ROUNDS


def kernel_context(device: Device, dtype: str, *, overlaps: bool, seconds: float, path: Path | None) -> Context:
    """
    Return the context that runs the engine on cubatch kernels, all compiled, with the choice of variants timed.

    Nothing is taken of the GPU yet, nor of the one that is current meanwhile.

    Args:
        device: A GPU of this machine.
        dtype: "float32", "tf32", "float16" or "bfloat16".
        overlaps: Whether a launch may begin while the one before ends. Launched one by one small steps take less time
            like that, and graphs of inference too; graphs of training steps of ResNet-50 took 3 to 4 % longer from
            batch 8 on, on an H100 (benchmarks/results/h100-sxm).
        seconds: How long the choice may take in all.
        path: Where winners are kept; None keeps them for this process.

    Raises:
        MissingDependency: If CuPy or NVRTC is missing.
        CompileError: If a kernel does not compile.
    """
    launcher = CudaLauncher(device, overlaps=overlaps)
    arch = arch_number(device.arch or "")
    needed = {dtype, "float32"} if dtype == "tf32" else {dtype}  # which only rounds what it multiplies
    launcher.compile(kernel for kernel in kernels() if kernel.dtype in needed and kernel.runs_on(arch))
    winners = Winners(path, gpu=_gpu(device), sources=kernels_sha256(), overlaps=launcher.overlaps)
    chooser = TimedChoice(functools.partial(cupy_kernel_clock, None, _FILLER_BYTES), winners, seconds)
    return Context(device, launcher, chooser, tf32=dtype == "tf32")


def kept_choice(device: Device, path: Path | None, *, overlaps: bool = False) -> TimedChoice:
    """
    Return the choice as earlier runs left it: winners where there are any, else the nearest or the ranking's.

    It times nothing, so no GPU need be here.

    Args:
        device: The GPU that they hold for.
        path: Where they are kept; None is none.
        overlaps: As for `kernel_context`.  Only the driver knows whether launches did overlap, so a problem without
            a winner of this kind takes the winner of the other kind.
    """
    winners, others = (
        Winners(path, gpu=_gpu(device), sources=kernels_sha256(), overlaps=kind) for kind in (overlaps, not overlaps)
    )
    winners.add_missing(others)
    return TimedChoice(HostClock, winners, seconds=0.0)


def usual_context(device: Device, dtype: str = "float32", *, overlaps: bool = False) -> Context | None:
    """
    Return what a model runs on: our kernels on a GPU, winners of earlier runs where there are any; None on a CPU.

    Args:
        device: A device of this machine.
        dtype: One that it takes.
        overlaps: As for `kernel_context`: not where its steps are graphs of training.

    Raises:
        UnsupportedDtype: If it does not take it.
        MissingDependency, CompileError: As `kernel_context`.
    """
    arithmetic.check_dtype(device, dtype)
    if device.kind == "cpu":
        return None
    path = path_beside(sqlite_file.default_path())
    return kernel_context(device, dtype, overlaps=overlaps, seconds=_TRAINING_CHOICE_SECONDS, path=path)


def path_beside(store_path: Path) -> Path:
    """
    Say where winners are kept: in a file beside the store, where links to it lead.

    Example:
        >>> path_beside(Path("cache/store.sqlite3")).name
        'store-kernels.sqlite3'
    """
    with contextlib.suppress(OSError, StoreError):  # whoever opens it says what is wrong there
        store_path = sqlite_file.place(store_path)
    return store_path.with_name(f"{store_path.stem}-kernels.sqlite3")


def forget(path: Path, device: Device | None = None) -> int:
    """
    Forget the winners of one GPU, or of all GPUs.

    Args:
        path: Their file, see `path_beside`; none is no winners.
        device: The GPU; None is all.

    Returns:
        How many were forgotten.

    Raises:
        StoreError: If the file cannot be used.

    Example:
        >>> forget(Path("no-such-file.sqlite3"))
        0
    """
    try:
        path = sqlite_file.place(path)
        if not path.exists():
            return 0
        with closing(_connect(path)) as database:
            if device is None:
                return database.execute("DELETE FROM winners").rowcount
            return database.execute("DELETE FROM winners WHERE gpu = ?", (_gpu(device),)).rowcount
    except sqlite_file.ERRORS as error:
        raise StoreError(str(path), sqlite_file.reason(error), "Remove the file.") from error


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite_file.connect(path, _SCHEMA, _VERSION, on_replaced=lambda _old, _reason: None)


def _gpu(device: Device) -> str:
    """Return what winners hold for: all GPUs of a name, or MIG slices of such a GPU."""
    return f"{device.name} {device.mig or ''}".strip()


def _contenders(ranked: Sequence[Ranked]) -> list[Ranked]:
    """Return those that are timed, in their order: no model is trusted to compare two algorithms."""
    found = list(ranked[:CONTENDERS])
    for is_winograd in (False, True):
        best = next((one for one in ranked if (one[2].winograd is not None) is is_winograd), None)
        if best is not None and best not in found:
            found[-1] = best
    return found


def _others(problem: Problem, found: SplitKernel, device: Device) -> dict[str, SplitKernel]:
    """Return a variant with fewer and with more slices, by its name and how many to what the model says."""
    counts = other_slices(problem, found.kernel, device)
    return {f"{found.kernel.name} {side}": SplitKernel(found.kernel, count) for side, count in counts.items()}


def _grown(problem: Problem) -> int:
    """Return the extent that grows with the batch."""
    return problem.k if problem.operation in _SUMS_OVER_THE_BATCH else problem.m


def _layer(problem: Problem) -> str:
    """Return a problem but for its batch."""
    grown = "k" if problem.operation in _SUMS_OVER_THE_BATCH else "m"
    return json.dumps(attrs.asdict(problem, filter=lambda field, _: field.name != grown), sort_keys=True)


def _key(layer: str, problem: Problem, device: Device, contenders: Sequence[Ranked]) -> str:
    """Return what a winner holds for: the shape but for the batch, and what each contender puts on the busiest SM."""
    num_sms = device.num_sms or 1
    busiest = {
        kernel.name: busiest_sm_blocks(blocks(problem, kernel) * slices, num_sms) for _, slices, kernel in contenders
    }
    return json.dumps([layer, busiest], sort_keys=True)
