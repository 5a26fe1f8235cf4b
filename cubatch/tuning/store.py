"""
The store: every timing of every run, in one SQLite file, written as it is taken.

A run is one *identity* (the request) measured under one set of *conditions* (drivers, libraries, sources). A second
call with equal identity and conditions continues the run. Other conditions begin a new run, and a note names the
fields that differ. A run has its timings, one row per batch size and round, and its outcomes, one row per batch size.
Everything that no statement searches for is JSON.

Each timing is its own commit, so a killed process loses none that it reported. A store that fails never stops a
measurement: it continues without the store, and a note explains why. A run with a damaged row stays in the file, and a
new run is begun. Two calls of one run take turns by a file lock, which the kernel drops when its holder ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import sqlite3
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs
from attrs import field
from attrs.converters import optional

from cubatch import checks, files, sqlite_file
from cubatch.errors import CubatchError, InvalidArgument, StoreError, WorkerDied
from cubatch.measure.records import Candidate, Measured, Outcome, Timing
from cubatch.tuning.notes import Note, note, sentence
from cubatch.units import visible

WAIT_SECONDS = 300.0
"""Time to wait for another process that measures the same run."""
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
_TIMING_COLUMNS = ("batch_size", "round", "seconds")
_JSON_COLUMNS = ("identity", "conditions", "ladder", "limit", "notes", _INTERFERENCE)
_ROOMIER = 1.1
"""A size that ran out of memory is tried again with this many times the memory: free memory always varies."""
_LOG = logging.getLogger(__name__)
_HASH = re.compile(r"[0-9a-f]{40,}")
_HASH_SHOWN = 12  # characters of a hash in a note
_MAX_DISTURBED = 4  # sentences about interference, of the latest calls


class _DamagedRun(Exception):
    """A run of which a row is no record of cubatch: not JSON, or a value of the wrong type."""

    def __init__(self, run: int, reason: str) -> None:
        super().__init__(run, reason)
        self.run, self.reason = run, reason


def _candidates(rungs: Iterable[Any]) -> tuple[Candidate, ...]:
    return tuple(checks.read(Candidate, rung) for rung in checks.items(rungs))


@attrs.frozen(kw_only=True)
class StoredRun:
    """A run of the store, without its timings and outcomes."""

    id: int  # its number in this store
    identity: Mapping[str, Any] = field(converter=checks.mapping)  # the request
    conditions: Mapping[str, Any] = field(converter=checks.mapping)  # what it was measured with
    budget: float = field(converter=checks.amount)  # the largest measuring time in seconds, of the latest call
    seconds_spent: float = field(converter=checks.amount)  # seconds of measuring so far, over all resumes
    state: str  # "open", which a rerun continues, or "finished"
    created: str  # created, updated: UTC times
    updated: str
    notes: tuple[str, ...] = field(converter=checks.texts)  # the notes of its first call
    # the candidate batch sizes; None if nothing was measured yet
    ladder: tuple[Candidate, ...] | None = field(converter=optional(_candidates))
    # facts of the memory limit for which the candidates were chosen; None before they are
    limit: Mapping[str, Any] | None = field(converter=optional(checks.mapping))
    num_timings: int  # num_timings, num_outcomes: number of rows
    num_outcomes: int
    # sentences about interference of other processes while its timings were taken
    disturbed: tuple[str, ...] = field(converter=checks.texts)


class Run:
    """
    An open run of the store; a context manager and a `records.Keeper`.

    A run without a database (`path` is None, or a store that failed) has the same methods and keeps nothing. A run
    that ends with a CubatchError before its first timing or outcome is deleted.

    Outcomes that are not final are deleted, which reopens a finished run: see `_is_final`.

    Args:
        path: The store's file, created if missing; None caches nothing.
        identity: The request, as a mapping for JSON; compared as a whole.
        conditions: Versions and settings under which it is measured, one field per condition.
        budget: Seconds of measuring that the whole run may take.
        memory_bytes: Bytes that a step may take; None if unknown.
        refresh: Delete the run that would be continued, and start over.
        wait_seconds: Seconds to wait for another process that measures the same run. After that, the store is not used.

    Attributes:
        id: Its number in the store; 0 without a store.
        created: UTC time of its first call.
        earlier: Timings, outcomes and seconds of earlier calls.
        ladder, limit: Candidates and memory limit of the earlier calls; None for a run with nothing measured.
        finished: Whether `earlier` has the final outcome of every candidate, so that nothing is left to measure.
        notes: Notes for the user: cached results that do not apply, a wait, a damaged file, a failed store.
        `disturbed`: Sentences about interference of other processes while `earlier` was taken.

    Raises:
        StoreError: If the file is a directory, another program's database, or from a newer cubatch.
    """

    def __init__(
        self, path: Path | str | None, *, identity: Mapping[str, Any], conditions: Mapping[str, Any], budget: float,
        memory_bytes: int | None = None, refresh: bool = False, wait_seconds: float = WAIT_SECONDS,
    ) -> None:  # fmt: skip
        self.path = None if path is None else Path(path)
        self.earlier = Measured()
        self.ladder: tuple[Candidate, ...] | None = None
        self.limit: Mapping[str, Any] | None = None
        self.finished = False
        self.notes: list[Note] = []
        self.disturbed: tuple[str, ...] = ()
        self._budget, self._memory_bytes = budget, memory_bytes
        self._resources = contextlib.ExitStack()
        self._database: sqlite3.Connection | None = None
        self.id, self.created = 0, _now()
        self._candidates: list[Candidate] = []
        self._has_rows = False
        if path is None:
            return
        try:
            self.path = sqlite_file.place(path)
            self._open(self.path, _to_json(identity), _to_json(conditions), refresh=refresh, wait_seconds=wait_seconds)
        except sqlite_file.ERRORS as error:
            self._disable(error)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._has_rows and isinstance(error, CubatchError):
            self._write("DELETE FROM runs WHERE id = ?", self.id)
        self.close()

    def close(self) -> None:
        """Close the file and release the lock on the run; nothing is stored afterwards."""
        self._database = None
        self._resources.close()

    @property
    def is_kept(self) -> bool:
        """Whether everything so far is written; False without a store, after a failed write, or once closed."""
        return self._database is not None

    @property
    def is_default(self) -> bool:
        """Whether the file is the user's default store, to which `--fresh` and store="refresh" refer."""
        return self.path == sqlite_file.default_path().resolve()

    def candidate(self, candidate: Candidate) -> None:
        """Store a batch size that the search added to the candidates."""
        self._candidates.append(candidate)
        self._update(ladder=[attrs.asdict(each) for each in self._candidates])

    def timing(self, timing: Timing) -> None:
        """Store one timing, unless its batch size and round are already stored."""
        self._has_rows = True
        facts = attrs.asdict(timing, filter=lambda item, value: item.name not in _TIMING_COLUMNS and value is not None)
        self._write(
            "INSERT INTO timings VALUES (?, ?, ?, ?, ?) ON CONFLICT (run, batch_size, round) DO NOTHING",
            self.id, timing.batch_size, timing.round, timing.seconds, _to_json(facts),
        )  # fmt: skip

    def outcome(self, outcome: Outcome) -> None:
        """Store the outcome of a candidate, replacing an earlier one."""
        self._has_rows, facts = True, dict(outcome.facts)
        if outcome.status == "out_of_memory" and self._memory_bytes is not None:  # for a rerun that has more
            facts["memory_bytes"] = self._memory_bytes
        self._write(
            "INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?, ?, ?)",
            self.id, outcome.batch_size, outcome.status, outcome.stop_reason, _to_json(facts),
        )  # fmt: skip

    def spent(self, seconds: float) -> None:
        """Store the total seconds of measuring, earlier calls included."""
        self._update(seconds_spent=seconds)

    def save_ladder(self, candidates: Sequence[Candidate], limit: Mapping[str, Any]) -> None:
        """Store the candidate batch sizes, and the memory limit for which they were chosen, for reruns."""
        self._candidates, self.limit = list(candidates), limit
        self._update(ladder=[attrs.asdict(each) for each in candidates], limit=limit)

    def save_exchange(self, facts: Mapping[str, Any]) -> None:
        """Store the fields of `DataParallel`, the measured cost of the gradient exchange, for reruns."""
        self.limit = {**(self.limit or {}), "exchange": dict(facts)}
        self._update(limit=self.limit)

    def save_disturbed(self, sentences: Sequence[str]) -> None:
        """Store sentences about interference of other processes, for results from these timings."""
        known = tuple(dict.fromkeys([*self.disturbed, *sentences]))[-_MAX_DISTURBED:]
        if known != self.disturbed:
            self.disturbed = known
            self._update(disturbed=known)

    def finish(self) -> None:
        """Mark the run as finished: a rerun without a larger budget measures nothing."""
        self.finished = True
        self._update(state="finished")

    def _update(self, **columns: Any) -> None:
        names = ", ".join(f'"{name}" = ?' for name in columns)
        values = [_to_json(value) if name in _JSON_COLUMNS else value for name, value in columns.items()]
        self._write(f"UPDATE runs SET {names}, updated = ? WHERE id = ?", *values, _now(), self.id)  # noqa: S608 - literals

    def _write(self, statement: str, *values: object) -> int:
        """Execute one SQL statement and return the last row's number; if it fails, disable the store and return 0."""
        try:
            return int(self._database.execute(statement, values).lastrowid or 0) if self._database else 0
        except sqlite_file.ERRORS as error:
            self._disable(error)
            return 0

    def _disable(self, error: Exception) -> None:
        """Close the store and warn the user; the run continues without it."""
        self.close()
        self._warn(note("cache_unusable", path=self.path, reason=sqlite_file.reason(error)))

    def _warn(self, warning: Note) -> None:
        self.notes.append(warning)
        warnings.warn(sentence(warning), stacklevel=2)

    def _open(self, path: Path, identity: str, conditions: str, *, refresh: bool, wait_seconds: float) -> None:
        """Lock the run, open the file, and continue the run or insert it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock(path, identity, wait_seconds)
        self._database = database = sqlite_file.connect(path, SCHEMA, VERSION)
        self._resources.callback(database.close)
        rows = database.execute(
            "SELECT id, conditions FROM runs WHERE identity = ? ORDER BY id DESC", (identity,)
        ).fetchall()
        same = [int(row["id"]) for row in rows if row["conditions"] == conditions]
        if refresh:
            database.executemany("DELETE FROM runs WHERE id = ?", [(number,) for number in same])
        elif rows:
            try:
                if same:
                    self._continue(_read_run(database, same[0]), _read_measured(database, same[0]))
                    return
                differences = _differences(_read_run(database, rows[0]["id"]).conditions, json.loads(conditions))
                self.notes.append(note("cache_conditions", differences="; ".join(differences)))
            except _DamagedRun as error:
                self._warn(note("cache_damaged", path=path, run=error.run, reason=error.reason))
        self.id = self._write(
            "INSERT INTO runs (identity, conditions, budget, notes, created, updated) VALUES (?, ?, ?, ?, ?, ?)",
            identity, conditions, self._budget, _to_json([sentence(each) for each in self.notes]), self.created, _now(),
        )  # fmt: skip

    def _lock(self, path: Path, identity: str, wait_seconds: float) -> None:
        """Lock the run; wait for another process that measures it, and raise TimeoutError if that takes too long."""
        start = time.monotonic()
        for seconds in (0.0, wait_seconds):
            try:
                self._resources.enter_context(sqlite_file.locked(path, _lock_name(identity), seconds))
            except TimeoutError:
                if seconds:
                    raise TimeoutError(f"another process still measures the same run after {seconds:g} s") from None
                _LOG.warning("another process measures the same run; waiting for it, at most %g s", wait_seconds)
            else:
                if seconds:
                    self.notes.append(note("cache_waited", waited_seconds=time.monotonic() - start))
                return

    def _continue(self, run: StoredRun, earlier: Measured) -> None:
        """Continue an earlier run, without the outcomes that are not final."""
        final = tuple(
            each for each in earlier.outcomes if _is_final(each, run, earlier, self._budget, self._memory_bytes)
        )
        dropped = [each.batch_size for each in earlier.outcomes if each not in final]
        is_whole = {step.batch_size for step in run.ladder or ()} <= {outcome.batch_size for outcome in final}
        self.finished = run.state == "finished" and is_whole and not dropped
        self.id, self.created = run.id, run.created
        self.earlier = attrs.evolve(earlier, outcomes=final)
        self._has_rows = bool(earlier.timings or final)
        if self._has_rows:
            self.ladder, self.limit, self.disturbed = run.ladder, run.limit, run.disturbed
            self._candidates = list(run.ladder or ())
        if not self.finished:
            self._update(budget=self._budget, state="open")
            for size in dropped:
                self._write("DELETE FROM outcomes WHERE run = ? AND batch_size = ?", self.id, size)


def _is_final(
    outcome: Outcome, run: StoredRun, earlier: Measured, budget: float, memory_bytes: int | None
) -> bool:  # fmt: skip
    """
    Return whether an outcome of an earlier call still holds, so that the size is not tried again.

    Not final is "interrupted", and the death of a worker, which another process may have caused. Neither is "ok"
    without timings, nor a size that lacked memory which is available now. Under a larger budget than before, "not_run"
    and outcomes that the budget cut short are not final either.

    Args:
        outcome: The outcome of a size.
        run, earlier: The run of the earlier call, and its timings and outcomes.
        budget: Seconds of measuring that the run may take now.
        memory_bytes: Bytes that a step may take now; None if unknown.
    """
    facts, size = outcome.facts, outcome.batch_size
    if outcome.status == "interrupted" or (outcome.status == "error" and facts.get("type") == WorkerDied.__name__):
        return False
    if outcome.status == "ok" and not earlier.of(size):
        return False
    if memory_bytes is not None and outcome.status == "over_limit" and facts.get("limit") == "memory":
        planned = next((step.predicted_peak_bytes for step in run.ladder or () if step.batch_size == size), None)
        needed = facts.get("needed_bytes") or planned
        if needed is not None and needed <= memory_bytes:
            return False
    if memory_bytes is not None and outcome.status == "out_of_memory":
        before = facts.get("memory_bytes")
        if before is not None and memory_bytes >= _ROOMIER * before:
            return False
    is_cut = outcome.status == "not_run" or facts.get("limit") == "budget" or "cut_short" in facts
    return budget <= run.budget or not is_cut


def _read_run(database: sqlite3.Connection, run: int) -> StoredRun:
    row = database.execute(
        "SELECT *, (SELECT count(*) FROM timings WHERE run = id) AS num_timings, "
        "(SELECT count(*) FROM outcomes WHERE run = id) AS num_outcomes FROM runs WHERE id = ?",
        (run,),
    ).fetchone()
    with _written_here(run):
        facts = {
            name: json.loads(value) if name in _JSON_COLUMNS and value is not None else value
            for name, value in dict(row).items()
        }
        return checks.read(StoredRun, facts)


def _read_measured(database: sqlite3.Connection, run: int) -> Measured:
    """Return the timings of a run in the order they were taken, its outcomes, and its seconds of measuring."""
    timings = database.execute("SELECT * FROM timings WHERE run = ? ORDER BY rowid", (run,))
    outcomes = database.execute("SELECT * FROM outcomes WHERE run = ? ORDER BY batch_size", (run,))
    spent = database.execute("SELECT seconds_spent FROM runs WHERE id = ?", (run,)).fetchone()[0]
    with _written_here(run):
        return Measured(
            timings=tuple(
                checks.read(Timing, {name: row[name] for name in _TIMING_COLUMNS} | json.loads(row["facts"]))
                for row in timings
            ),
            outcomes=tuple(checks.read(Outcome, dict(row) | {"facts": json.loads(row["facts"])}) for row in outcomes),
            seconds_spent=spent,
        )


@contextlib.contextmanager
def _written_here(run: int) -> Iterator[None]:
    """Raise _DamagedRun for a row of run number `run` that is no record of cubatch."""
    try:
        yield
    except (ValueError, TypeError, LookupError) as error:
        raise _DamagedRun(run, visible(str(error))) from error


def _to_json(value: object) -> str:
    """Return JSON in one canonical form, so that equal mappings give equal text; NumPy's integers are allowed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=checks.whole)


def _lock_name(identity: str) -> str:
    return hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} was {_shorten(before.get(name))}, is {_shorten(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _shorten(value: object) -> str:
    text = str(value)
    return f"{text[:_HASH_SHOWN]}…" if _HASH.fullmatch(text) else text


def path_of(place: bool | str | Path) -> Path | None:  # noqa: FBT001
    """Return the file of the store for the argument `store`: the default for True and "refresh"; None for False."""
    if place is False:
        return None
    return sqlite_file.default_path() if place is True or place == "refresh" else Path(place)


def check_place(place: object) -> None:
    """
    Check that the argument `store` is a bool, "refresh" or a path in an existing folder.

    Raises:
        InvalidArgument: If `place` is anything else.
    """
    if not isinstance(place, bool | str | Path):
        raise InvalidArgument("store", place, 'True, False, "refresh" or a path')
    if isinstance(place, bool) or place == "refresh":
        return
    with contextlib.suppress(RuntimeError):  # a user without a home: opening the file reports it
        if not str(place) or not files.is_folder(Path(place).expanduser().parent):
            raise InvalidArgument("store", str(place), "a file in a folder that exists", "Create the folder first.")


# --- listing and clearing ------------------------------------------------------------------------------------


def list_runs(path: Path | str) -> list[StoredRun]:
    """
    Return the runs of a store, oldest first; an empty list if there is no file.

    Raises:
        StoreError: If the file cannot be read, it is no store of this version, or a row is damaged.
    """
    with _opened(path) as (database, identities):
        return [_read_run(database, number) for number in identities]


def show(path: Path | str, run_id: int) -> tuple[StoredRun, Measured]:
    """
    Return run number `run_id` with all its timings and outcomes.

    Raises:
        StoreError: If there is no such run, a row of it is damaged, or the file cannot be read.
    """
    with _opened(path, run_id) as (database, _):
        return _read_run(database, run_id), _read_measured(database, run_id)


def clear(path: Path | str, run_id: int | None = None) -> int:
    """
    Delete run number `run_id`, or all runs if it is None, and return the number of deleted runs.

    Raises:
        StoreError: If a run to delete is being measured right now, there is no such run, or the file cannot be read.
            Nothing is deleted then.
    """
    with _opened(path, run_id) as (database, identities), contextlib.ExitStack() as locks:
        chosen = [number for number in identities if run_id in {None, number}]  # a run that begins from now on stays
        for name in sorted({_lock_name(identities[number]) for number in chosen}):
            try:
                locks.enter_context(sqlite_file.locked(sqlite_file.place(path), name, 0.0))
            except TimeoutError:
                raise StoreError(
                    str(path), "another process is measuring a run of this store", "Wait until it ends, or stop it."
                ) from None
        if chosen:
            database.executemany("DELETE FROM runs WHERE id = ?", [(number,) for number in chosen])
        return len(chosen)


@contextlib.contextmanager
def _opened(path: Path | str, run_id: int | None = None) -> Iterator[tuple[sqlite3.Connection, dict[int, str]]]:
    """
    Open a store; yield its database, empty if there is no file, and the identity of each run by number.

    StoreError is raised if the file cannot be read, or lacks the run `run_id` (None: no run is needed).
    """
    try:
        path = sqlite_file.place(path)
        is_there = path.exists() and path.stat().st_size
        opened = sqlite_file.connect(path, SCHEMA, VERSION) if is_there else sqlite3.connect(":memory:")
        with contextlib.closing(opened) as database:
            rows = database.execute("SELECT id, identity FROM runs ORDER BY id") if is_there else ()
            identities = dict(map(tuple, rows))
            if run_id is not None and run_id not in identities:
                known = ", ".join(map(str, identities)) or "none"
                raise StoreError(str(path), f"it holds no run {run_id}", f"It holds: {known}.")
            yield database, identities
    except _DamagedRun as error:
        remedy = f"Delete the run: cubatch store clear {error.run} --store {path}"
        raise StoreError(str(path), f"run {error.run} has a damaged row ({error.reason})", remedy) from error
    except sqlite_file.ERRORS as error:
        raise StoreError(str(path), sqlite_file.reason(error), sqlite_file.remedy(error)) from error
