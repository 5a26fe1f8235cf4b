"""Planning a case, which needs no GPU, and measuring it: check every variant, then time those that are right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence

import attrs
import numpy as np

from cubatch.bench import records
from cubatch.bench.cases import Case
from cubatch.bench.check import Expected, poison
from cubatch.bench.contest import Contest, Entrant
from cubatch.bench.guard import Guarded, twice
from cubatch.bench.implementations import Tracer, Way, Which, ways
from cubatch.bench.records import OURS, Entry, Result
from cubatch.bench.rivals import RIVALS, Missing, Rival, failure, rivals
from cubatch.bench.target import COLD, Arrays, Target, count_sets, fill, filled
from cubatch.engine import backend
from cubatch.engine.native.arrays import sharing_workspace
from cubatch.errors import CompileError, DeviceFailed, InvalidArgument, OutOfMemory
from cubatch.hardware.facts import Device

_COPY_BYTES = 1 << 30
_COPY_SHARE = 8
Step = Callable[[], object]


def plan(case: Case, device: Device, *, variants: Which = "chosen", compiled: bool = True) -> Result:
    """
    Say how a case would run on a device, which need not be here.

    Args:
        case: The call.
        device: What it would run on.
        variants: Which of them: see `ways`.
        compiled: Whether to compile the kernels, which gives registers and occupancy.

    Returns:
        Result: Its entries are "planned", or "error" for what does not compile.

    Raises:
        UnsupportedLayer: If no kernel computes it.
        CubatchError: What else the operation says of it.
    """
    _check_fits(case, device)
    return _planned(case, device, ways(case, device, variants), compiled=compiled)


def _check_fits(case: Case, device: Device) -> None:
    if device.memory_bytes is not None and case.num_bytes > device.memory_bytes:
        raise OutOfMemory(f"{case.name} on {device}", case.num_bytes, device.memory_bytes)


def _planned(case: Case, device: Device, found: Sequence[Way], *, compiled: bool = True) -> Result:
    entries = []
    for way in found:
        entry = Entry(name=way.main.name, label=way.label)
        try:
            facts = tuple(
                records.launch_facts(launch, device, compiled=compiled, tiles=way.shared_tiles(launch))
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


def time_case(
    case: Case,
    target: Target,
    contest: Contest,
    *,
    variants: Which = "chosen",
    without: Collection[str] = (),
    with_rivals: bool = True,
    seconds: float = 1.0,
    seed: int = 0,
    copy_bytes_per_second: float | None = None,
) -> Result:
    """
    Check and time a case.

    Args:
        case: The call.
        target: Where it runs.
        contest: Times the entrants; one for all cases of a process, since it knows that the clocks are warm.
        variants, without: Which of ours: see `ways`.
        with_rivals: Whether anybody but us takes part.
        seconds: How long to time, checks and preparation not counted.
        seed: Of data, sample and order.
        copy_bytes_per_second: What a copy reaches; None where that was not measured.

    Returns:
        Result: An entry whose results are not right is "wrong" and was not timed; a rival whose are not is missing.

    Raises:
        UnsupportedLayer: If no kernel computes it.
        DeviceFailed: If the GPU reported an error after which nothing more runs in this process.
    """
    found = ways(case, target.device, variants, without)
    planned = _planned(case, target.device, found)
    missing = {} if with_rivals else dict.fromkeys(RIVALS, records.NOT_ASKED)
    target.free_pools()  # of the case before
    try:
        sets = list(itertools.islice(filled(target.module, case, seed), count_sets(case, target.device.l2_bytes)))
        expected = Expected(case, sets[0], np.random.default_rng(seed))
        kept = {name: sets[0][name].copy() for name in _given_results(case)}
        entries, entrants, failed = list(planned.entries), [], list[Missing]()
        for index, way in enumerate(found):
            entry = entries[index]
            if entry.status == "error":
                continue
            entries[index], step = _ready(way, target, entry, sets, expected, kept)
            if step is not None:
                entrants.append((index, Entrant(entry.name, OURS, step)))
        for other in rivals(case, target.module) if with_rivals else ():
            bound = other if isinstance(other, Missing) else _bound(other, case, target, sets, expected, kept)
            if isinstance(bound, Missing):
                failed.append(bound)
                continue
            entry, guard = bound
            entries.append(entry)
            entrants.append((len(entries) - 1, Entrant(entry.name, entry.side, guard)))
        contest.run([entrant for _, entrant in entrants], seconds)
    except MemoryError:
        return attrs.evolve(planned, status="out_of_memory")
    for index, entrant in entrants:
        if entrant.status == "error":
            entries[index] = attrs.evolve(entries[index], status="error", reason=entrant.reason)
            continue
        entries[index] = records.entered(entries[index], entrant, case, planned.roofline_seconds, copy_bytes_per_second)
    ran = {entry.side for entry in entries}
    missing |= {one.name: one.reason for one in failed if one.name not in ran}
    is_cold = len(sets) * case.num_bytes >= COLD * (target.device.l2_bytes or 0)
    return attrs.evolve(
        planned,
        entries=records.compared(entries),
        sets=len(sets),
        l2="cold" if is_cold else "warm",
        missing=missing,
    )


def verify(case: Case, target: Target, *, seed: int = 0, without: Collection[str] = ()) -> Result:
    """
    Check all results of every variant of a case, and time none.

    Args:
        case: The call, small.
        target: Where it runs.
        seed: Of the data.
        without: Families that take no part.

    Returns:
        Result: Entries are "ok", "wrong" or "error", with the worst error of each.
    """
    found = ways(case, target.device, "all", without)
    planned = _planned(case, target.device, found)
    arrays = fill(target.module, case, seed)
    expected = Expected(case, arrays, np.random.default_rng(seed), images=None, channels=None)
    kept = {name: arrays[name].copy() for name in _given_results(case)}
    entries = []
    for entry, way in zip(planned.entries, found, strict=True):
        if entry.status == "error":
            entries.append(entry)
            continue
        checked, step = _ready(way, target, entry, [arrays], expected, kept)
        entries.append(checked if step is None else attrs.evolve(checked, status="ok"))
    return attrs.evolve(planned, entries=tuple(entries), sets=1)


def copy_bandwidth(target: Target, contest: Contest, seconds: float = 0.3) -> float:
    """
    Measure what a plain copy within the device's memory reaches, reads and writes counted: bytes per second.

    Args:
        target: Where.
        contest: What times it.
        seconds: How long.
    """
    size = min(_COPY_BYTES, (target.device.memory_bytes or _COPY_SHARE * _COPY_BYTES) // _COPY_SHARE)
    source = backend.random_generator(target.module.empty(0), 0).random(size=size // 4, dtype=np.float32)
    copied = target.module.empty_like(source)
    entrant = Entrant("copy", OURS, lambda: target.module.copyto(copied, source))
    contest.run([entrant], seconds)
    return 2 * float(source.nbytes) / (entrant.seconds or math.nan)


def _ready(
    way: Way,
    target: Target,
    entry: Entry,
    sets: Sequence[Arrays],
    expected: Expected,
    kept: Arrays,
) -> tuple[Entry, Callable[[], None] | None]:
    """Bind a variant to its buffers and check it on the first set; the step is None where it must not be timed."""
    case, found = way.case, way.operations(Tracer(target.launcher))
    _reset(case, target, sets[0], kept)
    try:
        with target.trying(way.main):
            with sharing_workspace():
                steps = [backend.prepare(case.call, found, arrays) for arrays in sets]
            steps[0]()
            target.synchronize()  # what it does to the GPU is told late, and would be said of another
    except (CompileError, InvalidArgument, DeviceFailed) as error:
        if isinstance(error, DeviceFailed) and error.is_fatal:
            raise DeviceFailed(f"the first run of {way.main.name}", error.status, "", error.cuda_status) from error
        return attrs.evolve(entry, status="error", reason=str(error)), None
    check = expected.check(sets[0], outputs=way.main.winograd)
    entry = attrs.evolve(entry, worst_error=check.worst)
    if not check.passed:
        return attrs.evolve(
            entry, status="wrong", reason=f"{check.worst:.3g}x the rounding bound at {check.where}"
        ), None
    return entry, _rotating(steps)


def _bound(
    rival: Rival, case: Case, target: Target, sets: Sequence[Arrays], expected: Expected, kept: Arrays
) -> tuple[Entry, Guarded] | Missing:
    """Bind a rival's library and check it as ours are; what it refuses or gets wrong does not end the others'."""
    _reset(case, target, sets[0], kept)

    def bind() -> tuple[Sequence[Step], object]:
        steps = [rival.bind(arrays) for arrays in sets]
        returned = [step() for step in steps]  # takes the memory of every set's results
        target.synchronize()
        return steps, returned[0]

    target.synchronize()  # an error of our kernels is none of theirs
    try:
        steps, returned = twice(bind, target)
        found = rival.results(returned) if rival.results else None
        check = expected.check({**sets[0], **(found or {})}, names=found, stored_between=rival.stored_between)
    except Exception as error:  # noqa: BLE001 - whatever a library raises
        reason = failure(error)
        target.synchronize()  # raises where the context is broken: nothing of ours would run either
        return Missing(f"{rival.library} failed with {reason}", name=rival.name)
    if check.worst > rival.slack:
        times = f"{check.worst / rival.slack:.3g}x the rounding bound"
        return Missing(f"{rival.library} is wrong, {times} at {check.where}", name=rival.name)
    return Entry(name=rival.library, side=rival.name, worst_error=check.worst), Guarded(_rotating(steps), target)


def _reset(case: Case, target: Target, arrays: Arrays, kept: Arrays) -> None:
    """Put back what is written over, and forget every result."""
    for name, array in kept.items():
        target.module.copyto(arrays[name], array)
    poison(case, arrays)


def _rotating(steps: Sequence[Step]) -> Callable[[], None]:
    cycle = itertools.cycle(steps)

    def step() -> None:
        next(cycle)()

    return step


def _given_results(case: Case) -> list[str]:
    """Name what is read and written over, so that it must be put back before the next variant is checked."""
    return [name for name in case.results if case.reads(name)]
