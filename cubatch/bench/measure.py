"""Planning a case, which needs no GPU, and measuring it: check every variant, then time those that are right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence

import attrs
import numpy as np

from cubatch.bench import bench_results
from cubatch.bench.bench_results import NOT_ASKED, Entry, Result
from cubatch.bench.calls import Case
from cubatch.bench.check import WINOGRAD, Check, Expected, poison
from cubatch.bench.contest import OURS, Contest, Entrant
from cubatch.bench.implementations import Tracer, Way, Which, ways
from cubatch.bench.rivals import VENDOR, Rival, Ways, rivals
from cubatch.bench.target import COLD, Arrays, Target, count_sets, filled
from cubatch.engine import backend
from cubatch.engine.native.arrays import sharing_workspace
from cubatch.errors import CompileError, DeviceFailed, InvalidArgument, OutOfMemory
from cubatch.hardware.facts import Device

_COPY_BYTES = 1 << 30
_COPY_SHARE = 8
Step = Callable[[], object]


def plan(
    case: Case, device: Device, *, variants: Which = "chosen", without: Collection[str] = (), compiled: bool = True
) -> Result:
    """
    Return how a case would run on a device, which need not be in this machine; nothing is timed.

    Entries are "planned", or "error" for a kernel that does not compile. OutOfMemory is raised if the device has too
    few bytes. `compiled` kernels have registers and occupancy; for variants see `ways`.
    """
    if device.memory_bytes is not None and case.num_bytes > device.memory_bytes:
        raise OutOfMemory(f"{case.name} on {device}", case.num_bytes, device.memory_bytes)
    return _planned(case, device, ways(case, device, variants, without), compiled=compiled)


def _planned(case: Case, device: Device, listed: Sequence[Way], *, compiled: bool = True) -> Result:
    entries = []
    for way in listed:
        entry = Entry(name=way.main.name, label=way.label)
        try:
            facts = tuple(
                bench_results.launch_facts(launch, device, compiled=compiled, tiles=way.shared_tiles(launch))
                for launch in way.launches
            )
            entries.append(attrs.evolve(entry, launches=facts))
        except CompileError as error:
            entries.append(attrs.evolve(entry, status="error", reason=str(error)))
    return Result(
        case=case,
        entries=tuple(entries),
        roofline_seconds=case.roofline_seconds(device),
        bound=case.bound(device),
    )


@attrs.frozen
class _Checked:
    """Sets of arrays of a case on a target, with the right results of the first set."""

    case: Case
    target: Target
    sets: Sequence[Arrays]
    expected: Expected
    initial: Arrays  # results that are read, as they are before a run

    @classmethod
    def of(cls, case: Case, target: Target, seed: int, count: int, **sample: int | None) -> _Checked:
        sets = list(itertools.islice(filled(target.module, case, seed), count))
        expected = Expected(case, sets[0], np.random.default_rng(seed), **sample)
        read = [name for name in case.results if case.reads(name)]
        return cls(case, target, sets, expected, {name: sets[0][name].copy() for name in read})

    def restore(self) -> None:
        """Restore results that a run also reads, and fill the other results with NaN or the largest integer."""
        for name, array in self.initial.items():
            self.target.module.copyto(self.sets[0][name], array)
        poison(self.case, self.sets[0])

    def variant(self, way: Way, entry: Entry) -> tuple[Entry, Step | None]:
        """Run a variant once and check it; return its entry and a step to time, None if it failed or is wrong."""
        operations, target = way.operations(Tracer(self.target.launcher)), self.target
        self.restore()
        try:
            with target.trying(way.main):
                with sharing_workspace():
                    steps = [backend.prepare(self.case.call, operations, arrays) for arrays in self.sets]
                steps[0]()
                target.synchronize()  # a launch reports its error late, and another kernel would be named
        except (CompileError, InvalidArgument, DeviceFailed) as error:
            if isinstance(error, DeviceFailed) and error.is_fatal:
                raise DeviceFailed(f"the first run of {way.main.name}", error.status, "", error.cuda_status) from error
            return attrs.evolve(entry, status="error", reason=str(error)), None
        check = self.expected.check(self.sets[0], factor=WINOGRAD if way.main.winograd else 1.0)
        entry = attrs.evolve(entry, worst_error=check.worst)
        if not check.passed:
            reason = f"{check.worst:.3g}x the rounding bound at {check.where}"
            return attrs.evolve(entry, status="wrong", reason=reason), None
        return entry, rotating(steps)

    def rival(self, rival: Rival) -> tuple[Entry, Step] | str:
        """Run a rival once and check it; return its entry and a step to time, or the reason if it fails or is wrong."""
        self.restore()

        def bind() -> tuple[Sequence[Step], Check]:
            steps = [rival.bind(arrays) for arrays in self.sets]
            returned = [step() for step in steps]  # takes the memory of every set's results
            self.target.synchronize()
            results = rival.results(returned[0]) if rival.results else None
            return steps, self.expected.check(
                {**self.sets[0], **(results or {})}, names=results, stored_between=rival.stored_between,
                factor=rival.slack,
            )  # fmt: skip

        bound = self.target.attempt(bind)
        if isinstance(bound, str):
            return f"{rival.library} failed with {bound}"
        steps, check = bound
        if not check.passed:
            return f"{rival.library} is wrong, {check.worst:.3g}x the rounding bound at {check.where}"
        return Entry(name=rival.library, side=VENDOR, worst_error=check.worst), rotating(steps)


def time_case(
    case: Case,
    target: Target,
    contest: Contest,  # times the entrants; one for all cases of a process, since it knows whether the clocks are warm
    *,
    variants: Which = "chosen",  # variants, without: variants of cubatch: see `ways`
    without: Collection[str] = (),
    with_rivals: bool = True,  # whether the vendor's libraries take part
    others: Ways | None = None,  # as for `rivals`, None included
    seconds: float = 1.0,  # time limit, checks and preparation not counted
    seed: int = 0,  # seed of data, sample and order
    copy_bytes_per_second: float | None = None,  # measured bandwidth of a copy; None if unknown
) -> Result:
    """
    Check and time a case.

    Returns:
        Result: An entry with wrong results is "wrong" and not timed; a rival with wrong results is missing.
    """
    listed = ways(case, target.device, variants, without)
    planned = _planned(case, target.device, listed)
    target.free_pools()  # of the case before
    entries, entrants, missing = list(planned.entries), dict[int, Entrant](), list[str]()
    try:
        checked = _Checked.of(case, target, seed, count_sets(case, target.device.l2_bytes))
        for index, way in enumerate(listed):
            if entries[index].status != "error":
                entries[index], step = checked.variant(way, entries[index])
                if step is not None:
                    entrants[index] = Entrant(entries[index].name, OURS, step)
        foreign = rivals(case, target.module, others=others) if with_rivals else NOT_ASKED
        for rival in [foreign] if isinstance(foreign, str) else foreign:
            bound = rival if isinstance(rival, str) else checked.rival(rival)
            if isinstance(bound, str):
                missing.append(bound)
                continue
            entrants[len(entries)] = Entrant(bound[0].name, bound[0].side, bound[1])
            entries.append(bound[0])
        contest.run([*entrants.values()], seconds)
    except MemoryError:
        return attrs.evolve(planned, status="out_of_memory")
    timed = [entrant for entrant in entrants.values() if entrant.side == VENDOR and entrant.status != "error"]
    fastest = min(timed, key=lambda entrant: entrant.seconds or math.inf, default=None)
    for index, entrant in entrants.items():
        entries[index] = bench_results.entered(
            entries[index], entrant, case, roofline_seconds=planned.roofline_seconds,
            copy_bytes_per_second=copy_bytes_per_second, rival=fastest,
        )  # fmt: skip
    is_cold = len(checked.sets) * case.num_bytes >= COLD * (target.device.l2_bytes or 0)
    return attrs.evolve(
        planned, entries=tuple(entries), sets=len(checked.sets), l2="cold" if is_cold else "warm",
        no_rival="" if any(entry.side == VENDOR for entry in entries) else "; ".join(missing),
    )  # fmt: skip


def verify(case: Case, target: Target, *, seed: int = 0, without: Collection[str] = ()) -> Result:
    """
    Check every variant of a small case without timing it, without the families `without`.

    Returns:
        Result: Entries are "ok", "wrong" or "error", each with its worst error.
    """
    listed = ways(case, target.device, "all", without)
    planned = _planned(case, target.device, listed)
    checked = _Checked.of(case, target, seed, 1, images=None, channels=None)
    entries = []
    for entry, way in zip(planned.entries, listed, strict=True):
        done, step = (entry, None) if entry.status == "error" else checked.variant(way, entry)
        entries.append(done if step is None else attrs.evolve(done, status="ok"))
    return attrs.evolve(planned, entries=tuple(entries), sets=1)


def copy_bandwidth(target: Target, contest: Contest, seconds: float = 0.3) -> float:
    """
    Return the bytes per second, reads plus writes, of a plain copy within the memory of the device; NaN if it failed.

    `contest` takes the timings, for at most `seconds`.
    """
    size = min(_COPY_BYTES, (target.device.memory_bytes or _COPY_SHARE * _COPY_BYTES) // _COPY_SHARE)
    source = backend.random_generator(target.module.empty(0), 0).random(size=size // 4, dtype=np.float32)
    copied = target.module.empty_like(source)
    entrant = Entrant("copy", OURS, lambda: target.module.copyto(copied, source))
    contest.run([entrant], seconds)
    return 2 * float(source.nbytes) / (entrant.seconds or math.nan)


def rotating(steps: Sequence[Step]) -> Step:
    """Return a function that calls the next of `steps` at each call, in a cycle."""
    cycle = itertools.cycle(steps)

    def step() -> None:
        next(cycle)()

    return step
