"""Promises of a run: no timing lost or taken twice, the result of the rule, no endless wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Timing
from cubatch.search.posterior import Posterior, is_favored
from cubatch.tuning import store

FAR = 0.7
"""A result with less than this share of the throughput of the best timed size is wrong."""

Key = tuple[int, int]


@attrs.frozen(kw_only=True)
class Trial:
    """
    The outcome of a run with all its reruns.

    Attributes:
        kind: Kind of its faults.
        faults: Number of faults.
        sessions: Number of starts.
        timings: Timings that were reported as stored.
        lost: Number of these that the store does not have, without a warning.
        warned: Whether it warned that timings were not stored, because the disk stayed full.
        twice: Timings of a size and round that had one already.
        no_answer: Whether there was no result, although some size of each device runs.
        wrong: Whether the result is not that of the rule for the rows, or far from the best timed size.
        late: Whether it took longer than its deadlines allow.
        what: Description of a broken promise.
    """

    kind: str
    faults: int
    sessions: int
    timings: int
    lost: int = 0
    warned: bool = False
    twice: int = 0
    no_answer: bool = False
    wrong: bool = False
    late: bool = False
    what: str = ""

    @property
    def is_good(self) -> bool:
        """Whether everything held."""
        return not (self.lost or self.twice or self.no_answer or self.wrong or self.late)


def kept_rows(path: Path) -> dict[int, Measured]:
    """Return the content of a store by the number of the run; empty if there is no store."""
    return {run.id: store.show(path, run.id)[1] for run in store.list_runs(path)}


def lost_and_twice(reported: Iterable[tuple[Key, float]], stored: Sequence[Timing]) -> tuple[int, int]:
    """Count reported timings that are not stored as they were, and those that were reported twice."""
    rows = {(timing.batch_size, timing.round): timing.seconds for timing in stored}
    first: dict[Key, float] = {}
    twice = 0
    for key, seconds in reported:
        twice += key in first
        first.setdefault(key, seconds)
    return sum(rows.get(key) != seconds for key, seconds in first.items()), twice


def answer_by_rule(measured: Measured, goal: Goal) -> int | None:
    """Return the recommendation from the rows of a store; None if none of its sizes ran."""
    refused = {o.batch_size for o in measured.outcomes if o.status == "over_limit" and o.facts.get("limit") == "memory"}
    sizes = {timing.batch_size for timing in measured.timings} - refused
    posterior = Posterior.of({n: measured.of(n) for n in sizes}, goal)
    able = [outcome.batch_size for outcome in measured.outcomes if outcome.status == "ok"]
    able = [n for n in able if posterior.cost_interval(n)]
    return posterior.recommend(able, {n for n in sizes if is_favored(Candidate(n))}).batch_size if able else None


def is_wrong(answer: int | None, measured: Measured, goal: Goal, seconds: Callable[[int], float]) -> str:
    """Return why an answer (None: no size) is wrong by the stored rows or by the true curve; empty if it is right."""
    by_rule = answer_by_rule(measured, goal)
    if answer != by_rule:
        return f"the answer is {answer}, the rule gives {by_rule}"
    if answer is None:
        return ""
    read = {timing.batch_size for timing in measured.timings}
    best = max(n / seconds(n) for n in read)
    if answer / seconds(answer) < FAR * best:
        return f"the answer {answer} does {answer / seconds(answer) / best:.2f} of the best that was read"
    return ""


def summarise(trials: Sequence[Trial]) -> list[Mapping[str, object]]:
    """Sum up by kind, in the order of the trials."""
    rows = []
    for kind in dict.fromkeys(trial.kind for trial in trials):
        same_kind = [trial for trial in trials if trial.kind == kind]
        rows.append({
            "kind": kind,
            "runs": len(same_kind),
            "sessions": sum(trial.sessions for trial in same_kind),
            "faults": sum(trial.faults for trial in same_kind),
            "timings": sum(trial.timings for trial in same_kind),
            "said": sum(trial.warned for trial in same_kind),
            "lost": sum(trial.lost for trial in same_kind),
            "twice": sum(trial.twice for trial in same_kind),
            "no_answer": sum(trial.no_answer for trial in same_kind),
            "wrong": sum(trial.wrong for trial in same_kind),
            "late": sum(trial.late for trial in same_kind),
        })  # fmt: skip
    return rows
