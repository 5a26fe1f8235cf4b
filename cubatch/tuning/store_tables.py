"""
The tables of the store, and their rows as records.

A run has its timings, one row per batch size and round, and its outcomes, one row per batch size.
All SQL of the store is here; when a statement runs, and what a failure means, is the store's.

Nothing that is read is believed: records check themselves, each timing has a checksum, and a run of which one field is
not what was written is damaged as a whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import attrs

from cubatch import checks
from cubatch.errors import WorkerDied
from cubatch.measure.records import Candidate, Measured, Outcome, Timing

VERSION = 6

SCHEMA = """
CREATE TABLE runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, identity_sha256 TEXT NOT NULL, identity TEXT NOT NULL,
    conditions TEXT NOT NULL, budget REAL NOT NULL, ladder TEXT, "limit" TEXT,
    seconds_spent REAL NOT NULL DEFAULT 0, state TEXT NOT NULL DEFAULT 'open', notes TEXT NOT NULL,
    created TEXT NOT NULL, updated TEXT NOT NULL, disturbed TEXT);
CREATE INDEX runs_by_identity ON runs (identity_sha256);
CREATE TABLE timings (
    run INTEGER NOT NULL REFERENCES runs (id) ON DELETE CASCADE, batch_size INTEGER NOT NULL, round INTEGER NOT NULL,
    seconds REAL NOT NULL, repeats INTEGER NOT NULL, throttled INTEGER NOT NULL, sm_clock_mhz REAL, joules REAL,
    peak_bytes INTEGER, peak_device_bytes INTEGER, checksum INTEGER, event_reasons INTEGER, temperature_celsius REAL,
    power_watts REAL, utilization_percent REAL, used_bytes INTEGER, reference_batch_size INTEGER,
    reference_before_seconds REAL, reference_after_seconds REAL,
    PRIMARY KEY (run, batch_size, round));
CREATE TABLE outcomes (
    run INTEGER NOT NULL REFERENCES runs (id) ON DELETE CASCADE, batch_size INTEGER NOT NULL,
    status TEXT NOT NULL, stop_reason TEXT NOT NULL, facts TEXT NOT NULL,
    PRIMARY KEY (run, batch_size)) WITHOUT ROWID;
"""

TABLES = (SCHEMA, VERSION)
UPGRADES = {
    2: "ALTER TABLE timings ADD COLUMN checksum INTEGER",
    3: """
        ALTER TABLE timings ADD COLUMN event_reasons INTEGER; ALTER TABLE timings ADD COLUMN temperature_celsius REAL;
        ALTER TABLE timings ADD COLUMN power_watts REAL; ALTER TABLE timings ADD COLUMN utilization_percent REAL;
        ALTER TABLE timings ADD COLUMN used_bytes INTEGER
    """,
    4: "ALTER TABLE runs ADD COLUMN disturbed TEXT",
    5: "ALTER TABLE timings ADD COLUMN reference_seconds REAL",
    6: """
        UPDATE timings SET checksum = NULL WHERE reference_seconds IS NOT NULL;
        ALTER TABLE timings ADD COLUMN reference_batch_size INTEGER;
        ALTER TABLE timings ADD COLUMN reference_before_seconds REAL;
        ALTER TABLE timings ADD COLUMN reference_after_seconds REAL
    """,  # version 5 timed a fixed operation as the reference: those timings are read as timings without one
}
"""By version, what makes it of a file of the version before; rows of before lack what was added."""

_STATES = ("open", "finished")
_COLUMNS = (
    "batch_size", "round", "seconds", "repeats", "throttled", "sm_clock_mhz", "joules", "peak_bytes",
    "peak_device_bytes",
)  # fmt: skip
_ADDED = ("event_reasons", "temperature_celsius", "power_watts", "utilization_percent", "used_bytes")
_ADDED_LATER = ("reference_batch_size", "reference_before_seconds", "reference_after_seconds")
_ALL_COLUMNS = (*_COLUMNS, *_ADDED, *_ADDED_LATER)
_REAL = (
    "seconds", "sm_clock_mhz", "joules", "temperature_celsius", "power_watts", "utilization_percent",
    "reference_before_seconds", "reference_after_seconds",
)  # fmt: skip
_MOST_SECONDS = 1e9  # of measuring: thirty years
_MOST_LETTERS = 200  # of what a damaged field may say


class DamagedRun(Exception):
    """
    What is kept of a run is not what was written.

    Args:
        run: Its number.
        reason: Which field is wrong, and what it holds.
    """

    def __init__(self, run: int, reason: str) -> None:
        super().__init__(run, reason)
        self.run, self.reason = run, reason

    def __str__(self) -> str:
        return f"run {self.run} is damaged: {self.reason}"


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
        state: "open", which a rerun continues, or "finished"; "damaged": `notes` says how, and the rest is empty.
        created, updated: UTC times.
        notes: What was said when it began.
        ladder: The candidates; None where nothing was measured yet.
        limit: Facts of the memory limit that the ladder was made under.
        num_timings, num_outcomes: How much is kept.
        disturbed: What was told of others who were busy while its timings were taken, by the latest call that was.
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
    disturbed: tuple[str, ...]


def to_json(value: object) -> str:
    """Write JSON in one canonical form, so that equal mappings give equal text, NumPy's integers too."""
    plain = checks.required_whole
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=plain)


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


def reopen(
    database: sqlite3.Connection, run: StoredRun, kept: Measured, budget: float, memory_bytes: int | None
) -> None:
    """
    Drop the outcomes that are not final under this budget and this memory, and open a finished run that lacks some.

    Those are "interrupted", an "error" that is the death of a worker, which somebody else may have ended, an "ok"
    whose timings are gone, and what was refused for memory that there is now.  Under a larger budget than before there
    are "not_run", too, and whatever the budget cut short, which says so in its facts.
    """
    measured = {timing.batch_size for timing in kept.timings}
    planned = {step.batch_size: step.predicted_peak_bytes for step in run.ladder or ()}

    def is_final(outcome: Outcome) -> bool:
        facts = outcome.facts
        if outcome.status == "interrupted" or (outcome.status == "error" and facts.get("type") == WorkerDied.__name__):
            return False
        if outcome.status == "ok" and outcome.batch_size not in measured:
            return False
        if memory_bytes is not None and _is_roomier(outcome, planned.get(outcome.batch_size), memory_bytes):
            return False
        is_cut = outcome.status == "not_run" or facts.get("limit") == "budget" or "cut_short" in facts
        return budget <= run.budget or not is_cut

    dropped = [(run.id, outcome.batch_size) for outcome in kept.outcomes if not is_final(outcome)]
    database.executemany("DELETE FROM outcomes WHERE run = ? AND batch_size = ?", dropped)
    is_whole = planned.keys() <= {outcome.batch_size for outcome in kept.outcomes}
    if dropped or run.state == "open" or not is_whole:
        database.execute("UPDATE runs SET budget = ?, state = 'open' WHERE id = ?", (budget, run.id))


_ROOMIER = 1.1
"""Times the memory of before, that a size which ran out of it is tried again with: what is free always differs."""


def _is_roomier(outcome: Outcome, planned_bytes: int | None, memory_bytes: int) -> bool:
    """Say whether a size that was refused for memory, or ran out of it, is worth another try with this much."""
    facts = outcome.facts
    if outcome.status == "over_limit" and facts.get("limit") == "memory":
        needed = facts.get("needed_bytes") or planned_bytes
        return needed is not None and needed <= memory_bytes
    if outcome.status == "out_of_memory":
        before = facts.get("memory_bytes")
        return before is not None and memory_bytes >= _ROOMIER * before
    return False


def update_run(database: sqlite3.Connection, run: int, column: str, value: object) -> None:
    """Set one column of a run; `column` is a literal of the caller's."""
    database.execute(f"UPDATE runs SET {column} = ?, updated = ? WHERE id = ?", (value, _now(), run))  # noqa: S608 - see above


def delete_run(database: sqlite3.Connection, run: int) -> None:
    """Forget a run, with all that is kept of it."""
    database.execute("DELETE FROM runs WHERE id = ?", (run,))


def insert_timing(database: sqlite3.Connection, run: int, timing: Timing) -> None:
    """Add a timing; a round that is already there stays as it is."""
    values = {name: getattr(timing, name) for name in _ALL_COLUMNS}
    names = ("run", *values, "checksum")
    database.execute(
        f"INSERT INTO timings ({', '.join(names)}) VALUES ({', '.join(':' + name for name in names)}) "  # noqa: S608 - literals
        "ON CONFLICT (run, batch_size, round) DO NOTHING",
        values | {"run": run, "checksum": checksum(run, values)},
    )


def checksum(run: int, values: Mapping[str, Any]) -> int:
    """
    Sum up a timing's columns, so that one that changes by itself is noticed: CRC-32 of their shortest text.

    Those that were added together count where one of them is known, so that the sums of older rows hold.
    """
    added = [names for names in (_ADDED, _ADDED_LATER) if any(values[name] is not None for name in names)]
    names = [*_COLUMNS, *itertools.chain.from_iterable(added)]
    plain = [float(values[name]) if name in _REAL and values[name] is not None else values[name] for name in names]
    return zlib.crc32(to_json([run, *(int(value) if isinstance(value, bool) else value for value in plain)]).encode())


def replace_outcome(database: sqlite3.Connection, run: int, outcome: Outcome) -> None:
    """Set how a candidate's measuring ended."""
    database.execute(
        "INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?, ?, ?)",
        (run, outcome.batch_size, outcome.status, outcome.stop_reason, to_json(outcome.facts)),
    )


def read_run(database: sqlite3.Connection, run: int) -> StoredRun:
    """
    Read what is known of a run, without its timings and outcomes.

    Raises:
        DamagedRun: If a field is not what it should be.
    """
    row = database.execute(
        "SELECT identity_sha256, identity, conditions, budget, seconds_spent, state, created, updated, notes, ladder, "
        '"limit", disturbed, (SELECT count(*) FROM timings WHERE run = id) AS num_timings, '
        "(SELECT count(*) FROM outcomes WHERE run = id) AS num_outcomes FROM runs WHERE id = ?",
        (run,),
    ).fetchone()
    facts = dict(row)
    with _naming(run, "identity"):
        if hashlib.sha256(facts["identity"].encode()).hexdigest() != facts.pop("identity_sha256"):
            raise ValueError("is not what its checksum says")
    for name, read in _READ.items():
        with _naming(run, name):
            facts[name] = read(facts[name])
    return StoredRun(id=run, **facts)


def damaged(database: sqlite3.Connection, damage: DamagedRun) -> StoredRun:
    """List a run of which not all can be read."""
    counts = [
        database.execute(f"SELECT count(*) FROM {table} WHERE run = ?", (damage.run,)).fetchone()[0]  # noqa: S608 - literals
        for table in ("timings", "outcomes")
    ]
    return StoredRun(
        id=damage.run, identity={}, conditions={}, budget=0.0, seconds_spent=0.0, state="damaged", created="",
        updated="", notes=(f"{damage}.",), ladder=None, limit=None, num_timings=counts[0], num_outcomes=counts[1],
        disturbed=(),
    )  # fmt: skip


def read_measured(database: sqlite3.Connection, run: int) -> Measured:
    """
    Read everything that was measured in a run, timings in the order they were taken.

    Raises:
        DamagedRun: If a timing or an outcome is not what it should be.
    """
    timings = []
    for row in database.execute("SELECT * FROM timings WHERE run = ? ORDER BY rowid", (run,)):
        found = dict(row)
        with _naming(run, f"the timing of batch size {found.get('batch_size')!r} in round {found.get('round')!r}:"):
            values = {name: row[name] for name in _ALL_COLUMNS}
            if row["throttled"] in (0, 1):
                values["throttled"] = bool(row["throttled"])
            timings.append(Timing(**values))
            if row["checksum"] is not None and row["checksum"] != checksum(run, values):
                raise ValueError("is not what its checksum says")
    outcomes = []
    for row in database.execute("SELECT * FROM outcomes WHERE run = ? ORDER BY batch_size", (run,)):
        with _naming(run, f"the outcome of batch size {dict(row).get('batch_size')!r}:"):
            facts = checks.mapping(json.loads(row["facts"]))
            outcomes.append(Outcome(row["batch_size"], row["status"], _text(row["stop_reason"]), facts))
    spent = database.execute("SELECT seconds_spent FROM runs WHERE id = ?", (run,)).fetchone()[0]
    with _naming(run, "seconds_spent"):
        return Measured(timings=tuple(timings), outcomes=tuple(outcomes), seconds_spent=_seconds(spent))


@contextlib.contextmanager
def _naming(run: int, what: str) -> Iterator[None]:
    """Say which run and what of it is damaged, where reading it raises anything."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        text = "".join(letter if letter.isprintable() else "?" for letter in str(error)[:_MOST_LETTERS])
        raise DamagedRun(run, f"{what} {text}") from error


def _text(value: object) -> str:
    """Take text that was UTF-8 in the file: what was not came with surrogates in it."""
    if not isinstance(value, str):
        raise TypeError(f"must be text, got {value!r}")
    value.encode()
    return value


def _seconds(value: Any) -> float:
    if checks.check_number("it", value) > _MOST_SECONDS:
        raise ValueError(f"must be at most {_MOST_SECONDS:g}, got {value!r}")
    return float(value)


def _positive(value: Any) -> float:
    return float(checks.check_number("it", value, above=0.0))


def _state(value: Any) -> str:
    if value not in _STATES:
        raise ValueError(f"must be one of {', '.join(_STATES)}, got {value!r}")
    return str(value)


def _mapping(value: Any) -> dict[str, Any]:
    return checks.mapping(json.loads(_text(value)))


def _texts(value: Any) -> tuple[str, ...]:
    return checks.texts(json.loads(_text(value)))


def _ladder(value: Any) -> tuple[Candidate, ...] | None:
    if value is None:
        return None
    rungs = checks.mappings(json.loads(_text(value)))
    found = tuple(Candidate(**{**rung, "reasons": checks.texts(rung["reasons"])}) for rung in rungs)
    if len({step.batch_size for step in found}) < len(found):
        raise ValueError("holds a batch size twice")
    return found


def _limit(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    facts = _mapping(value)
    for name in ("memory_bytes", "largest_batch_size", "first"):
        if facts.get(name) is not None:
            checks.check_whole(name, facts[name], least=0)
    checks.texts(facts.get("page_faults", []))
    return facts


_READ: Mapping[str, Callable[[Any], Any]] = {
    "identity": _mapping, "conditions": _mapping, "budget": _positive, "seconds_spent": _seconds, "state": _state,
    "created": _text, "updated": _text, "notes": _texts,
    "ladder": _ladder, "limit": _limit, "disturbed": lambda value: () if value is None else _texts(value),
}  # fmt: skip


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
