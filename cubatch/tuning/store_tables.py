"""
The tables of the store, and their rows as records.

A run has its timings, one row per batch size and round, and its outcomes, one row per batch size.
All SQL of the store is here; when a statement runs, and what a failure means, is the store's.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import attrs

from cubatch.errors import WorkerDied
from cubatch.measure.records import Candidate, Measured, Outcome, Timing

VERSION = 1

SCHEMA = """
CREATE TABLE runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, identity_sha256 TEXT NOT NULL, identity TEXT NOT NULL,
    conditions TEXT NOT NULL, budget REAL NOT NULL, ladder TEXT, "limit" TEXT,
    seconds_spent REAL NOT NULL DEFAULT 0, state TEXT NOT NULL DEFAULT 'open', notes TEXT NOT NULL,
    created TEXT NOT NULL, updated TEXT NOT NULL);
CREATE INDEX runs_by_identity ON runs (identity_sha256);
CREATE TABLE timings (
    run INTEGER NOT NULL REFERENCES runs (id) ON DELETE CASCADE, batch_size INTEGER NOT NULL, round INTEGER NOT NULL,
    seconds REAL NOT NULL, repeats INTEGER NOT NULL, throttled INTEGER NOT NULL, sm_clock_mhz REAL, joules REAL,
    peak_bytes INTEGER, peak_device_bytes INTEGER, PRIMARY KEY (run, batch_size, round));
CREATE TABLE outcomes (
    run INTEGER NOT NULL REFERENCES runs (id) ON DELETE CASCADE, batch_size INTEGER NOT NULL,
    status TEXT NOT NULL, stop_reason TEXT NOT NULL, facts TEXT NOT NULL,
    PRIMARY KEY (run, batch_size)) WITHOUT ROWID;
"""


@attrs.frozen(kw_only=True)
class StoredRun:
    """
    One kept run, as `cubatch store list` and `show` tell it.

    Attributes:
        id: Its number in this store.
        identity: What was asked for.
        conditions: What it was measured with.
        budget: Seconds it was allowed at most, by the latest call.
        seconds_spent: Seconds of measuring so far, over all resumes.
        state: "open", which a rerun continues, or "finished".
        created, updated: UTC times.
        notes: What was said when it began.
        ladder: The candidates; None where nothing was measured yet.
        limit: Facts of the memory limit that the ladder was made under.
        num_timings, num_outcomes: How much is kept.
    """

    id: int
    identity: Mapping[str, Any]
    conditions: Mapping[str, Any]
    budget: float
    seconds_spent: float
    state: str
    created: str
    updated: str
    notes: tuple[str, ...]
    ladder: tuple[Candidate, ...] | None
    limit: Mapping[str, Any] | None
    num_timings: int
    num_outcomes: int


def to_json(value: object) -> str:
    """Write JSON in one canonical form, so that equal mappings give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def insert_run(
    database: sqlite3.Connection,
    *,
    identity_sha256: str,
    identity: str,
    conditions: str,
    budget: float,
    notes: Sequence[str],
) -> int:
    """Begin a run; its number."""
    now = _now()
    cursor = database.execute(
        "INSERT INTO runs (identity_sha256, identity, conditions, budget, notes, created, updated) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (identity_sha256, identity, conditions, budget, to_json(list(notes)), now, now),
    )
    return int(cursor.lastrowid or 0)


def reopen(database: sqlite3.Connection, run: int, budget: float) -> None:
    """
    Drop the outcomes that are not final under this budget, and open a finished run that lost some.

    Those are "interrupted", an "error" that is the death of a worker, which somebody else may have ended, and, under
    a larger budget than before, "not_run" and whatever the budget cut short, which says so in its facts.
    """
    before, state = database.execute("SELECT budget, state FROM runs WHERE id = ?", (run,)).fetchone()
    rows = database.execute("SELECT batch_size, status, facts FROM outcomes WHERE run = ?", (run,)).fetchall()

    def is_final(status: str, facts: dict[str, Any]) -> bool:
        if status == "interrupted" or (status == "error" and facts.get("type") == WorkerDied.__name__):
            return False
        return budget <= before or not (status == "not_run" or facts.get("limit") == "budget" or "cut_short" in facts)

    dropped = [(run, batch_size) for batch_size, status, facts in rows if not is_final(status, json.loads(facts))]
    database.executemany("DELETE FROM outcomes WHERE run = ? AND batch_size = ?", dropped)
    if dropped or state == "open":
        database.execute("UPDATE runs SET budget = ?, state = 'open' WHERE id = ?", (budget, run))


def update_run(database: sqlite3.Connection, run: int, column: str, value: object) -> None:
    """Set one column of a run; `column` is a literal of the caller's."""
    database.execute(f"UPDATE runs SET {column} = ?, updated = ? WHERE id = ?", (value, _now(), run))  # noqa: S608 - see above


def insert_timing(database: sqlite3.Connection, run: int, timing: Timing) -> None:
    """Add a timing; a round that is already there stays as it is."""
    database.execute(
        "INSERT INTO timings VALUES (:run, :batch_size, :round, :seconds, :repeats, :throttled, :sm_clock_mhz, "
        ":joules, :peak_bytes, :peak_device_bytes) ON CONFLICT (run, batch_size, round) DO NOTHING",
        attrs.asdict(timing) | {"run": run},
    )


def replace_outcome(database: sqlite3.Connection, run: int, outcome: Outcome) -> None:
    """Set how a candidate's measuring ended."""
    database.execute(
        "INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?, ?, ?)",
        (run, outcome.batch_size, outcome.status, outcome.stop_reason, to_json(outcome.facts)),
    )


def read_run(database: sqlite3.Connection, run: int) -> StoredRun:
    """Read what is known of a run, without its timings and outcomes."""
    row = database.execute(
        "SELECT id, identity, conditions, budget, seconds_spent, state, created, updated, notes, ladder, "
        '"limit", (SELECT count(*) FROM timings WHERE run = id) AS num_timings, '
        "(SELECT count(*) FROM outcomes WHERE run = id) AS num_outcomes FROM runs WHERE id = ?",
        (run,),
    ).fetchone()
    facts = dict(row)
    for name in ("identity", "conditions", "notes", "ladder", "limit"):
        facts[name] = None if facts[name] is None else json.loads(facts[name])
    facts["notes"] = tuple(facts["notes"])
    if facts["ladder"] is not None:
        facts["ladder"] = tuple(Candidate(**{**rung, "reasons": tuple(rung["reasons"])}) for rung in facts["ladder"])
    return StoredRun(**facts)


def read_measured(database: sqlite3.Connection, run: int) -> Measured:
    """Read everything that was measured in a run, timings in the order they were taken."""
    timings = database.execute("SELECT * FROM timings WHERE run = ? ORDER BY rowid", (run,))
    outcomes = database.execute("SELECT * FROM outcomes WHERE run = ? ORDER BY batch_size", (run,))
    return Measured(
        timings=tuple(
            Timing(**{name: row[name] for name in row.keys() if name != "run"} | {"throttled": bool(row["throttled"])})  # noqa: SIM118 - a Row iterates over values
            for row in timings
        ),
        outcomes=tuple(
            Outcome(
                batch_size=row["batch_size"],
                status=row["status"],
                stop_reason=row["stop_reason"],
                facts=json.loads(row["facts"]),
            )
            for row in outcomes
        ),
        seconds_spent=database.execute("SELECT seconds_spent FROM runs WHERE id = ?", (run,)).fetchone()[0],
    )


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
