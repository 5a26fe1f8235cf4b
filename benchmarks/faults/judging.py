"""What must hold: nothing lost, nothing twice, the answer that the rule gives, no orphan, no wait without end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Timing
from cubatch.search.posterior import Posterior
from cubatch.search.recommend import is_favored
from cubatch.tuning import store

FAR = 0.7
"""Of the best size that was read, an answer that truly does less is wrong, whatever was read."""

Key = tuple[int, int]


@attrs.frozen(kw_only=True)
class Trial:
    """
    What became of one run with all its reruns.

    Attributes:
        kind: Which faults it met.
        faults: How many it met.
        sessions: How often it was begun.
        timings: Readings that were reported to be kept.
        lost: Of those, how many the store does not have as they were, though nobody said so.
        said: Whether it was said that not all was kept: the disk did not come back.
        twice: Readings of a size and round that had one already.
        no_answer: Whether there was none: some size of each device runs.
        wrong: Whether the answer is not what the rule gives from the rows, or truly far from the best that was read.
        orphans: Processes that outlived the run.
        late: Whether it took longer than its deadlines allow.
        what: Where one of these is so, what happened.
    """

    kind: str
    faults: int
    sessions: int
    timings: int
    lost: int = 0
    said: bool = False
    twice: int = 0
    no_answer: bool = False
    wrong: bool = False
    orphans: int = 0
    late: bool = False
    what: str = ""

    @property
    def is_good(self) -> bool:
        """Whether everything held."""
        return not (self.lost or self.twice or self.no_answer or self.wrong or self.orphans or self.late)


def kept_rows(path: Path) -> dict[int, Measured]:
    """Read everything that a store holds, by the number of the run; nothing where there is no store."""
    return {run.id: store.show(path, run.id)[1] for run in store.list_runs(path)}


def lost_and_twice(told: Iterable[tuple[Key, float]], kept: Sequence[Timing]) -> tuple[int, int]:
    """Count the readings that were told and are not kept as they were, and those that were told twice."""
    rows = {(timing.batch_size, timing.round): timing.seconds for timing in kept}
    first: dict[Key, float] = {}
    twice = 0
    for key, seconds in told:
        twice += key in first
        first.setdefault(key, seconds)
    return sum(rows.get(key) != seconds for key, seconds in first.items()), twice


def answer_by_rule(measured: Measured, goal: Goal) -> int | None:
    """Return the recommendation from the rows of a store."""
    refused = {o.batch_size for o in measured.outcomes if o.status == "over_limit" and o.facts.get("limit") == "memory"}
    sizes = {timing.batch_size for timing in measured.timings} - refused
    posterior = Posterior.of({n: measured.of(n) for n in sizes}, goal)
    able = [outcome.batch_size for outcome in measured.outcomes if outcome.status == "ok"]
    able = [n for n in able if posterior.has_cost(n)]
    return posterior.recommend(able, {n for n in sizes if is_favored(Candidate(n))}).batch_size if able else None


def is_wrong(answer: int | None, measured: Measured, goal: Goal, seconds: Callable[[int], float]) -> str:
    """Say why an answer is wrong, by what is kept and by the truth; nothing if it is not."""
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
        those = [trial for trial in trials if trial.kind == kind]
        rows.append({
            "kind": kind,
            "runs": len(those),
            "sessions": sum(trial.sessions for trial in those),
            "faults": sum(trial.faults for trial in those),
            "timings": sum(trial.timings for trial in those),
            "said": sum(trial.said for trial in those),
            "lost": sum(trial.lost for trial in those),
            "twice": sum(trial.twice for trial in those),
            "no_answer": sum(trial.no_answer for trial in those),
            "wrong": sum(trial.wrong for trial in those),
            "orphans": sum(trial.orphans for trial in those),
            "late": sum(trial.late for trial in those),
        })  # fmt: skip
    return rows
