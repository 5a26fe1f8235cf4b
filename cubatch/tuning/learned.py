"""The walk of what another framework runs: its sizes are bounded by what the smaller ones took of memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from cubatch.errors import DoesNotFit, InvalidArgument, NothingMeasured
from cubatch.hardware.facts import Device
from cubatch.hardware.room import MemoryLimit
from cubatch.measure import page_faults
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate
from cubatch.search import walk
from cubatch.tuning import store as kept
from cubatch.tuning import story as stories
from cubatch.tuning import tune
from cubatch.tuning.ladder import Ladder, between, of_memory, plain
from cubatch.tuning.limits import Limits
from cubatch.tuning.results import TuningResult

_LOOK_SHARE = 0.05
"""Of the budget, that steps of small sizes may take beforehand, to learn what larger ones will."""

INPUTS = (
    "example_inputs is the shape of one sample, without the batch, or a batch of tensors, those of several arguments "
    "in a tuple or, by name, a dict."
)
LOSS = " loss is called with what the module gives, and gives a scalar."
"""Both are for whoever writes Python; the command line has words of its own in their place."""

_CLEARLY = 0.9  # of what is predicted for a smaller size: predictions are to be 10 % off at most

_FACTS = {"memory_bytes", "largest_batch_size", "first", "dtype"}
"""What a ladder that was kept must have with it."""


def tuned(
    name: str, library: str, device: Device, mode: str, optimizer: object | None, make: Callable[[int, int], Any],
    run: kept.Run, goal: Goal, limits: Limits, room: MemoryLimit, progress: Callable[[walk.Event], None] | None,
    versions: Mapping[str, Any] | None = None,
) -> TuningResult:  # fmt: skip
    """
    Walk from the ladder to the answer.

    Args:
        name: What it is called.
        library: What runs it, as a result calls it.
        device, mode, optimizer, goal, limits, room, progress: What was asked.
        make: Gives a runner for a limit of bytes and a seed; it is called when there is something to run.
        run: What is kept of it.
        versions: Of what runs it, for the result's `environment`.
    """
    made = functools.cache(functools.partial(make, room.bytes, limits.seed))
    run.notes += room.told()
    known = _kept_ladder(run, room, name, device, mode)
    try:
        if known is not None:
            ladder, facts = known
        else:
            looked = _looked(made(), limits)
            if looked.get("memory_bytes", room.bytes) < room.bytes:
                note = "a copy of the parameters that its steps change takes the rest"
                room = attrs.evolve(room, bytes=looked["memory_bytes"], note=note, is_lowered=True)
                run.notes += room.told()[:1]
            facts = {"memory_bytes": room.bytes, "note": room.note, **looked}
            if facts["why_not"]:
                run.notes.append(f"Memory was not bounded beforehand: {facts['why_not']}.")
            ladder = _ladder(facts, limits, room, made(), name, device, mode)
        facts = {**facts, "memory_bytes": ladder.memory_bytes, "largest_batch_size": ladder.largest}
        if not run.finished:
            run.save_ladder(ladder.candidates, facts)
        story = stories.of_module(name, library, facts["dtype"], mode, optimizer, device, goal, limits, room, ladder)
        environment = {**story.setting["environment"], **(versions or {})}
        story = attrs.evolve(story, setting={**story.setting, "environment": environment})

        def extended(batch_size: int) -> Candidate:
            step = between(batch_size, ladder.candidates)
            return attrs.evolve(step, predicted_peak_bytes=made().predicted(batch_size))

        measure = functools.partial(walk.measure, made, extend=None if limits.batch_sizes else extended)
        worker_pid = getattr(made(), "worker_pid", None) if made.cache_info().currsize else None  # where it has looked
        measured = tune.measured_by(measure, story, run, progress, device, worker_pid)
    finally:
        if made.cache_info().currsize:
            made().close()
    if made.cache_info().currsize:
        run.notes += made().notes
        timed = {timing.batch_size for timing in measured.timings}
        before = (run.limit or {}).get("page_faults", [])  # none where the run was begun anew
        facts = {**facts, "page_faults": page_faults.told(made().page_faults, timed) or before}
        ladder, said = _foreseen(made(), ladder, limits)
        ladder = attrs.evolve(ladder, candidates=_said(ladder.candidates, said))
        story, measured = attrs.evolve(story, ladder=ladder), attrs.evolve(measured, added=_said(measured.added, said))
        run.save_ladder([*ladder.candidates, *measured.added], {**facts, "largest_batch_size": ladder.largest})
    run.notes += [*facts.get("page_faults", []), *_falls([*ladder.candidates, *measured.added])]
    try:
        return story.answer(measured, run)
    except NothingMeasured as error:
        if facts.get("why_not") is None:
            raise
        # The walk without data failed too.
        raise NothingMeasured(error.reason, f"{error.remedy} {_wanted(mode)}") from error


def _wanted(mode: str) -> str:
    """Say what a step is made of that a user gives."""
    return INPUTS + LOSS * (mode == "training")


def _falls(steps: Sequence[Candidate]) -> list[str]:
    """
    Explain predictions that are clearly less for a larger size.

    Example:
        >>> _falls([Candidate(12, predicted_peak_bytes=120), Candidate(26, predicted_peak_bytes=110)])
        []
        >>> _falls([Candidate(26, predicted_peak_bytes=66), Candidate(12, predicted_peak_bytes=120)])
        ['Less memory is predicted for 26 than for 12: each by what was known when it was said.']
    """
    known = sorted((step.batch_size, step.predicted_peak_bytes) for step in steps if step.predicted_peak_bytes)
    for (smaller, more), (larger, less) in itertools.pairwise(known):
        if less < _CLEARLY * more:
            what = f"Less memory is predicted for {larger} than for {smaller}"
            return [f"{what}: each by what was known when it was said."]
    return []


def _foreseen(runner: Any, ladder: Ladder, limits: Limits) -> tuple[Ladder, dict[int, int]]:
    """
    Give what is known of memory at last, in the place of what was when sizes were proposed.

    What was said of a size just before it ran is what it can be held to.  A size that was proposed as the largest stays
    that where more would fit: nothing larger was to be tried.
    """
    said = {row["batch_size"]: row["said"] for row in runner.ran}
    if (known := runner.foreseen) is None:
        return ladder, said
    largest: int | None = known["largest"] or ladder.largest
    if not limits.batch_sizes:
        largest = min(size for size in (largest, ladder.largest) if size)
    return attrs.evolve(ladder, largest=largest), dict(known["bytes"]) | said


def _said(steps: Sequence[Candidate], said: Mapping[int, int]) -> tuple[Candidate, ...]:
    return tuple(
        attrs.evolve(step, predicted_peak_bytes=said.get(step.batch_size, step.predicted_peak_bytes)) for step in steps
    )


def _looked(runner: Any, limits: Limits) -> dict[str, Any]:
    """Have the runner find out what its steps take; sizes that were asked for are taken as they come."""
    top = 0 if limits.batch_sizes else limits.max_batch_size
    facts: dict[str, Any] = runner.look(seconds=_LOOK_SHARE * limits.budget, top=top)
    return facts


def _ladder(
    facts: Mapping[str, Any], limits: Limits, room: MemoryLimit, runner: Any, name: str, device: Device, mode: str
) -> Ladder:
    """Propose sizes for what is known of its memory."""
    largest: int | None = facts["largest"]
    if largest is None:
        if facts["raised"]:
            allowed = f"one whose {mode} step runs on batches of its inputs"
            told = f"On two samples it raised {facts['raised']}. {_wanted(mode)}"
            raise InvalidArgument("module", name, allowed, told)
        if limits.max_batch_size is None and limits.batch_sizes is None:
            raise InvalidArgument(
                "max_batch_size", None, "given here", f"Memory cannot be bounded: {facts['why_not']}."
            )
        return Ladder(tuple(plain(limits)), None, room.bytes)
    if not largest:
        raise DoesNotFit(name, str(device), facts["first"], room.bytes, mode)
    return of_memory(limits, room, largest, runner.predicted)


def _kept_ladder(
    run: kept.Run, room: MemoryLimit, name: str, device: Device, mode: str
) -> tuple[Ladder, Mapping[str, Any]] | None:
    """Give the ladder that an earlier call left: for the memory that is there now, unless it is measured to its end."""
    if run.ladder is None or run.limit is None or not run.limit.keys() >= _FACTS:
        return None
    ladder = Ladder(run.ladder, run.limit["largest_batch_size"], run.limit["memory_bytes"])
    if ladder.largest is None or run.finished:
        return ladder, run.limit
    fits = [step.batch_size for step in run.ladder if (step.predicted_peak_bytes or 0) <= room.bytes]
    if not fits and run.limit["first"] > room.bytes:
        raise DoesNotFit(name, str(device), run.limit["first"], room.bytes, mode)
    return ladder.within(room, max(fits, default=1)), run.limit
