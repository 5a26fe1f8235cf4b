"""
The tables of the store, and their rows as records.

A run has its timings, one row per batch size and round, and its outcomes, one row per batch size.  Everything that no
statement searches for is JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import attrs
from attrs import field

from cubatch import checks
from cubatch.errors import WorkerDied
from cubatch.measure.records import Candidate, Measured, Outcome, Timing

VERSION = 7
_INTERFERENCE = "disturbed"
SCHEMA = f"""
CREATE TABLE runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, identity TEXT NOT NULL, conditions TEXT NOT NULL, budget REAL NOT NULL,
    ladder TEXT, "limit" TEXT, seconds_spent REAL NOT NULL DEFAULT 0, state TEXT NOT NULL DEFAULT 'open',
    notes TEXT NOT NULL, created TEXT NOT NULL, updated TEXT NOT NULL, {_INTERFERENCE} TEXT NOT NULL DEFAULT '[]');
CREATE INDEX runs_by_identity ON runs (identity);
CREATE TABLE timings (
    run INTEGER NOT NULL REFERENCES runs (id) ON DELETE CASCADE, batch_size INTEGER NOT NULL, round INTEGER NOT NULL,
    seconds REAL NOT NULL, facts TEXT NOT NULL, PRIMARY KEY (run, batch_size, round));
CREATE TABLE outcomes (
    run INTEGER NOT NULL REFERENCES runs (id) ON DELETE CASCADE, batch_size INTEGER NOT NULL,
    status TEXT NOT NULL, stop_reason TEXT NOT NULL, facts TEXT NOT NULL,
    PRIMARY KEY (run, batch_size)) WITHOUT ROWID;
"""
TABLES = (SCHEMA, VERSION)
_TIMING_COLUMNS = ("batch_size", "round", "seconds")
_JSON_COLUMNS = ("identity", "conditions", "ladder", "limit", "notes", _INTERFERENCE)


class DamagedRun(Exception):
    """A run whose rows cannot be read as records; `run` is its number."""

    def __init__(self, run: int, reason: str) -> None:
        super().__init__(f"run {run} is damaged: {reason}")
        self.run = run


def _candidates(rungs: Sequence[Mapping[str, Any]]) -> tuple[Candidate, ...]:
    return tuple(Candidate(**{**rung, "reasons": checks.texts(rung["reasons"])}) for rung in checks.mappings(rungs))


@attrs.frozen(kw_only=True)
class StoredRun:
    """
    A run of the store, without its timings and outcomes.

    Attributes:
        id: Its number in this store.
        identity: The request.
        conditions: What it was measured with.
        budget: The largest measuring time in seconds, of the latest call.
        seconds_spent: Seconds of measuring so far, over all resumes.
        state: "open", which a rerun continues, or "finished".
        created, updated: UTC times.
        notes: The notes of its first call.
        ladder: The candidates; None if nothing was measured yet.
        limit: Facts of the memory limit that the ladder was made under.
        num_timings, num_outcomes: Number of rows.
        `disturbed`: Sentences about interference of other processes while its timings were taken.
    """

    id: int
    identity: Mapping[str, Any] = field(converter=checks.mapping)
    conditions: Mapping[str, Any] = field(converter=checks.mapping)
    budget: float
    seconds_spent: float
    state: str
    created: str
    updated: str
    notes: tuple[str, ...] = field(converter=checks.texts)
    ladder: tuple[Candidate, ...] | None = field(converter=attrs.converters.optional(_candidates))
    limit: Mapping[str, Any] | None = field(converter=attrs.converters.optional(checks.mapping))
    num_timings: int
    num_outcomes: int
    disturbed: tuple[str, ...] = field(converter=checks.texts)


def to_json(value: object) -> str:
    """Return JSON in one canonical form, so that equal mappings give equal text; NumPy's integers are allowed."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=checks.required_whole
    )  # fmt: skip


def lock_name(identity: str) -> str:
    """Return the name of the lock of an identity."""
    return hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()


def insert_run(
    database: sqlite3.Connection, *, identity: str, conditions: str, budget: float, notes: Sequence[str]
) -> int:
    """Insert a run and return its number."""
    now = _now()
    cursor = database.execute(
        "INSERT INTO runs (identity, conditions, budget, notes, created, updated) VALUES (?, ?, ?, ?, ?, ?)",
        (identity, conditions, budget, to_json(list(notes)), now, now),
    )
    return int(cursor.lastrowid or 0)


def final_outcomes(
    run: StoredRun, earlier: Measured, budget: float, memory_bytes: int | None
) -> tuple[Outcome, ...]:  # fmt: skip
    """
    Return the outcomes that a call with this budget and memory need not measure again.

    Not final are "interrupted", an "error" by the death of a worker, an "ok" without timings, and refusals for memory
    that is available now. Under a larger budget than before, "not_run" and all that the budget cut short are not
    final either.
    """
    timed = {timing.batch_size for timing in earlier.timings}
    planned = {step.batch_size: step.predicted_peak_bytes for step in run.ladder or ()}

    def is_final(outcome: Outcome) -> bool:
        facts = outcome.facts
        if outcome.status == "interrupted" or (outcome.status == "error" and facts.get("type") == WorkerDied.__name__):
            return False
        if outcome.status == "ok" and outcome.batch_size not in timed:
            return False
        if memory_bytes is not None and _is_roomier(outcome, planned.get(outcome.batch_size), memory_bytes):
            return False
        is_cut = outcome.status == "not_run" or facts.get("limit") == "budget" or "cut_short" in facts
        return budget <= run.budget or not is_cut

    return tuple(outcome for outcome in earlier.outcomes if is_final(outcome))


_ROOMIER = 1.1
"""A size that ran out of memory is tried again with this many times the memory: free memory always varies."""


def _is_roomier(outcome: Outcome, planned_bytes: int | None, memory_bytes: int) -> bool:
    """Return whether a size that was refused for memory, or ran out of it, is tried again with this much memory."""
    facts = outcome.facts
    if outcome.status == "over_limit" and facts.get("limit") == "memory":
        needed = facts.get("needed_bytes") or planned_bytes
        return needed is not None and needed <= memory_bytes
    if outcome.status == "out_of_memory":
        before = facts.get("memory_bytes")
        return before is not None and memory_bytes >= _ROOMIER * before
    return False


def reopen(database: sqlite3.Connection, run: int, budget: float, dropped: Sequence[int]) -> None:
    """Open a run again, without the outcomes of some sizes."""
    update_run(database, run, {"budget": budget, "state": "open"})
    database.executemany(
        "DELETE FROM outcomes WHERE run = ? AND batch_size = ?", [(run, batch_size) for batch_size in dropped]
    )


def update_run(database: sqlite3.Connection, run: int, columns: Mapping[str, str | float]) -> None:
    """Set columns of a run; their names must be literals."""
    names = ", ".join(f'"{name}" = ?' for name in columns)
    values = (*columns.values(), _now(), run)
    database.execute(f"UPDATE runs SET {names}, updated = ? WHERE id = ?", values)  # noqa: S608 - literals


def delete_run(database: sqlite3.Connection, run: int) -> None:
    """Delete a run with its timings and outcomes."""
    database.execute("DELETE FROM runs WHERE id = ?", (run,))


def insert_timing(database: sqlite3.Connection, run: int, timing: Timing) -> None:
    """Insert a timing; a round that is already there stays as it is."""
    values = attrs.asdict(timing, filter=lambda field, value: field.name not in _TIMING_COLUMNS and value is not None)
    database.execute(
        "INSERT INTO timings VALUES (?, ?, ?, ?, ?) ON CONFLICT (run, batch_size, round) DO NOTHING",
        (run, timing.batch_size, timing.round, timing.seconds, to_json(values)),
    )


def replace_outcome(database: sqlite3.Connection, run: int, outcome: Outcome) -> None:
    """Insert the outcome of a candidate, or replace it."""
    database.execute(
        "INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?, ?, ?)",
        (run, outcome.batch_size, outcome.status, outcome.stop_reason, to_json(outcome.facts)),
    )


def read_run(database: sqlite3.Connection, run: int) -> StoredRun:
    """
    Read a run without its timings and outcomes.

    Raises:
        DamagedRun: If a field cannot be read.
    """
    row = database.execute(
        "SELECT *, (SELECT count(*) FROM timings WHERE run = id) AS num_timings, "
        "(SELECT count(*) FROM outcomes WHERE run = id) AS num_outcomes FROM runs WHERE id = ?",
        (run,),
    ).fetchone()
    with _reading(run):
        return StoredRun(**{
            name: json.loads(value) if name in _JSON_COLUMNS and value is not None else value
            for name, value in dict(row).items()
        })  # fmt: skip


def read_measured(database: sqlite3.Connection, run: int) -> Measured:
    """
    Read the timings of a run in the order they were taken, its outcomes, and its measuring time.

    Raises:
        DamagedRun: If a row cannot be read.
    """
    names = ", ".join(_TIMING_COLUMNS)
    timings = database.execute(f"SELECT {names}, facts FROM timings WHERE run = ? ORDER BY rowid", (run,))  # noqa: S608 - literals
    outcomes = database.execute(
        "SELECT batch_size, status, stop_reason, facts FROM outcomes WHERE run = ? ORDER BY batch_size", (run,)
    )
    spent = database.execute("SELECT seconds_spent FROM runs WHERE id = ?", (run,)).fetchone()[0]
    with _reading(run):
        return Measured(
            timings=tuple(
                Timing(**dict(zip(_TIMING_COLUMNS, row, strict=False)), **json.loads(row["facts"])) for row in timings
            ),
            outcomes=tuple(
                Outcome(row["batch_size"], row["status"], row["stop_reason"], checks.mapping(json.loads(row["facts"])))
                for row in outcomes
            ),
            seconds_spent=checks.check_number("seconds_spent", spent),
        )


@contextlib.contextmanager
def _reading(run: int) -> Iterator[None]:
    """Turn an error of reading a row into DamagedRun."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DamagedRun(run, str(error)) from error


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
