"""What a worker has kept of a run, as messages that bring another store to the same state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from cubatch.errors import StoreError
from cubatch.measure.records import Candidate, Outcome, Timing
from cubatch.tuning import store
from cubatch.tuning.store_tables import StoredRun, to_json


def of_run(path: Path | str, run: StoredRun, *, past: int = 0, anew: bool = False) -> dict[str, Any]:
    """
    Give a run as a message that JSON can hold.

    Args:
        path: The store's file.
        run: One of its runs.
        past: So many timings, the first, are left out.
        anew: Whether it was begun in place of another of the same question, whose timings do not count.
    """
    _, measured = store.show(path, run.id)
    return {
        "identity": dict(run.identity),
        "conditions": dict(run.conditions),
        "budget": run.budget,
        "ladder": None if run.ladder is None else [attrs.asdict(candidate) for candidate in run.ladder],
        "limit": run.limit,
        "timings": [attrs.asdict(timing) for timing in measured.timings[past:]],
        "outcomes": [attrs.asdict(outcome) for outcome in measured.outcomes],
        "seconds_spent": measured.seconds_spent,
        "finished": run.state == "finished",
        "disturbed": list(run.disturbed),
        "anew": anew,
    }


def about(path: Path | str, identity: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """
    Give the runs of a store whose identities have these entries, of one question under the same conditions the latest.

    Of one that is damaged tells whoever opens it.
    """
    latest = {question(run.identity, run.conditions): run for run in store.list_runs(path)}
    for run in latest.values():
        if all(run.identity.get(name) == value for name, value in identity.items()):
            with contextlib.suppress(StoreError):
                yield of_run(path, run)


def question(identity: Mapping[str, Any], conditions: Mapping[str, Any]) -> str:
    """Give what runs have in common whose timings could be one run's."""
    return to_json([identity, conditions])


def replay(run: store.Run, message: Mapping[str, Any]) -> None:
    """Keep what a message says in an open run; what is there already stays as it is."""
    if message["anew"]:
        run.begin_anew()
    if message["ladder"] is not None:
        ladder = [Candidate(**{**rung, "reasons": tuple(rung["reasons"])}) for rung in message["ladder"]]
        run.save_ladder(ladder, message["limit"])
    for timing in message["timings"]:
        run.timing(Timing(**timing))
    for outcome in message["outcomes"]:
        run.outcome(Outcome(**outcome))
    run.spent(message["seconds_spent"])
    run.save_disturbed(message["disturbed"])
    if message["finished"]:
        run.finish()


def opened(path: Path | str | None, message: Mapping[str, Any], *, refresh: bool = False) -> store.Run:
    """Open the run that a message is about, or begin it; `refresh` forgets what was kept of it."""
    return store.open_run(
        path, identity=message["identity"], conditions=message["conditions"], budget=message["budget"],
        refresh=refresh,
    )  # fmt: skip
