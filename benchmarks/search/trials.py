"""One finder on one device: cubatch with a budget, rivals to their end."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from benchmarks.search import fake_devices
from benchmarks.search.cases import Case
from benchmarks.search.finders import RIVALS, Rival
from benchmarks.search.sessions import Session
from benchmarks.search.timed_rivals import KNOW_LATENCY, TIMED
from cubatch.errors import NothingMeasured
from cubatch.measure.records import Candidate
from cubatch.search import loop
from cubatch.tuning import answer
from cubatch.tuning.results import TuningResult

OURS = "cubatch"
FINDERS: dict[str, Rival] = RIVALS | TIMED


@attrs.frozen(kw_only=True)
class Trial:
    """
    Result of a finder on a device.

    Attributes:
        kind, device, finder: Class and number of the device, name of the finder.
        budget: Budget of cubatch in seconds; None for a rival, which has none.
        batch_size: The result, or None.
        best_batch_size, knee, largest: The best, the ideal answer, the largest allowed; all by the truth.
        regret: Beyond the tolerance; 1 if the result cannot be used.
        usable: There is an answer, it fits, and it keeps the latency limit but for the tolerance.
        over_maximum, never_ran: Defects of the answer.
        gap: Where the ideal answer lies at a limit: the share of the largest allowed that the answer falls short. None
            elsewhere, and if the answer is not usable.
        beyond: The same of the ideal answer: what the tolerance gives away is no gap. None in the same cases.
        trials: How often a size was prepared.
        seconds: Virtual seconds.
        stationary: Whether the device is.
        intervals, held: Stated intervals of sizes with the status "ok", and how many of them hold the true median.
        answer_held, fastest_held: Whether that of the answer, and of the fastest size, does; None where none is stated.
    """

    kind: str
    device: int
    finder: str
    budget: float | None
    batch_size: int | None
    best_batch_size: int
    knee: int
    largest: int
    regret: float
    usable: bool
    over_maximum: bool
    never_ran: bool
    gap: float | None
    beyond: float | None
    trials: int
    seconds: float
    stationary: bool
    intervals: int = 0
    held: int = 0
    answer_held: bool | None = None
    fastest_held: bool | None = None


def cubatch_search(runner: Session, case: Case, budget: float) -> TuningResult | None:
    """Search as autotune() does: the candidates, the profiler, the choice; None where nothing could be measured."""
    ladder = case.candidates()
    try:
        measured = loop.Search(
            factory=lambda: runner, ladder=ladder, goal=case.goal, budget=budget, seed=case.device.seed,
            extend=Candidate, on_host=False,
        ).run()  # fmt: skip
    except Exception as error:
        error.add_note(f"on a device of the class {case.kind}, with a budget of {budget:g} s")
        raise
    try:
        return answer.answer([*ladder, *measured.added], measured, goal=case.goal, setting={})
    except NothingMeasured:
        return None


def try_ours(case: Case, index: int, budget: float) -> Trial:
    """Run cubatch's search on a device with a budget in seconds."""
    runner = case.device()
    result = cubatch_search(runner, case, budget)
    trial = _trial(case, index, OURS, runner, result.batch_size if result else None)
    trial = attrs.evolve(trial, budget=budget)
    if result is None:
        return trial
    holds = {
        m.batch_size: m.latency_interval[0] <= runner.true_median(m.batch_size) <= m.latency_interval[1]
        for m in result.measurements
        if m.status == "ok" and m.latency_interval is not None
    }
    return attrs.evolve(
        trial,
        intervals=len(holds),
        held=sum(holds.values()),
        answer_held=holds.get(result.batch_size or 0),
        fastest_held=holds.get(result.fastest_batch_size or 0),
    )


def try_rival(name: str, case: Case, index: int) -> Trial:
    """Run a rival on a device to its end."""
    runner = case.device()
    return _trial(case, index, name, runner, FINDERS[name](runner, case.task))


def _trial(case: Case, index: int, finder: str, runner: Session, batch_size: int | None) -> Trial:
    usable = case.is_usable(batch_size)
    return Trial(
        kind=case.kind,
        device=index,
        finder=finder,
        budget=None,
        batch_size=batch_size,
        best_batch_size=case.best_batch_size,
        knee=case.knee,
        largest=case.largest,
        regret=case.regret(batch_size),
        usable=usable,
        over_maximum=batch_size is not None and batch_size > case.task.max_batch_size,
        never_ran=batch_size is not None and batch_size not in runner.ran,
        gap=_short(batch_size, case.largest) if usable and case.is_limited else None,
        beyond=_short(batch_size, case.knee) if usable and case.is_limited else None,
        trials=len(runner.prepared),
        seconds=runner.clock.now(),
        stationary=case.device.is_stationary,
    )


def _short(batch_size: int | None, goal: int) -> float:
    return max(0.0, 1.0 - (batch_size or 0) / goal)


def understands(name: str, case: Case) -> bool:
    """Return whether a rival knows the objective of this device."""
    return name in KNOW_LATENCY or (case.goal.objective == "throughput" and case.goal.latency_limit is None)


@attrs.frozen(kw_only=True)
class Request:
    """The searches of one device: cubatch with budgets in seconds, and rivals by their names."""

    seed: int
    index: int
    budgets: Sequence[float] = ()
    rivals: Sequence[str] = ()


def search_device(request: Request) -> list[Trial]:
    """Run all searches of one device; an error names the device."""
    try:
        return _search_device(request)
    except Exception as error:
        error.add_note(f"device {request.index} of seed {request.seed}")
        raise


def _search_device(request: Request) -> list[Trial]:
    case = fake_devices.make(request.seed, request.index)
    trials = [try_ours(case, request.index, budget) for budget in request.budgets]
    return trials + [try_rival(name, case, request.index) for name in request.rivals if understands(name, case)]
