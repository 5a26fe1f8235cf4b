"""One open run of the store: the timings of earlier calls, and writing new ones."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sqlite3
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs

from cubatch import files, sqlite_file
from cubatch.errors import CubatchError
from cubatch.measure.records import Candidate, Measured, Outcome, Timing
from cubatch.tuning import store_tables
from cubatch.tuning.store_tables import TABLES, DamagedRun, StoredRun
from cubatch.units import format_seconds

_LOG = logging.getLogger(__name__)
RETRY_SECONDS = 1.0  # between two attempts to write to a full disk
_HASH = re.compile(r"[0-9a-f]{40,}")
_MAX_DISTURBED = 4  # sentences about interference, of the latest calls
_MEASURED_LIMITS = ("exchange", "page_faults")  # entries of `limit` that were measured
_HASH_SHOWN = 12  # characters of a hash in a note


class Run:
    """
    One open run of the store; a `records.Keeper`.

    Made by `open_run`.  A run without a database (`store=False`, or a store that failed) has the same methods and keeps
    nothing.  A write that fails because the disk is full is repeated with the next one.  After `finish` each write
    is the last attempt, so that `notes` and `is_kept` are final.  A run that ends with a CubatchError before its first
    timing or outcome is deleted.

    Attributes:
        kept: Timings, outcomes and seconds of earlier calls.
        ladder, limit: Candidates and memory limit of the earlier calls; None for a run with nothing measured.
        finished: Whether `kept` is the whole run.
        notes: Sentences for the user: refused results, a wait, a damaged file, a lost store.
        disturbed: Sentences about interference of other processes while `kept` was taken.
        was_begun_anew: Whether it replaces a run whose timings were disturbed.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.kept = Measured()
        self.ladder: tuple[Candidate, ...] | None = None
        self.limit: Mapping[str, Any] | None = None
        self.finished = False
        self.notes: list[str] = []
        self.disturbed: tuple[str, ...] = ()
        self.was_begun_anew = False
        self._resources = contextlib.ExitStack()
        self._database: sqlite3.Connection | None = None
        self._id = 0  # of no run yet
        self._pending: list[tuple[Callable[..., int | None], tuple[object, ...]]] = []
        self._pending_note = ""
        self._next_attempt = 0.0
        self._insert: Callable[[sqlite3.Connection, int, Sequence[str]], int] | None = None
        self._memory_bytes: int | None = None
        self._candidates: list[Candidate] = []
        self._has_rows = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._has_rows and (isinstance(error, CubatchError) or (self.was_begun_anew and error is not None)):
            self._write(store_tables.delete_run)
        self.close()

    def close(self) -> None:
        """Write what is pending, and close the file."""
        self._write(is_last=True)
        self._database = None
        self._resources.close()

    @property
    def is_kept(self) -> bool:
        """Whether everything so far is written."""
        return self._database is not None and not self._pending

    @property
    def anew(self) -> str:
        """How to discard the cached timings: the option is for the user's own store only."""
        if self.path == sqlite_file.default_path().resolve():
            return "--fresh (store='refresh') measures anew"
        return "with another store the same call measures anew"

    def candidate(self, candidate: Candidate) -> None:
        """Write a size that the search added to the ladder."""
        self._candidates.append(candidate)
        self._write(store_tables.update_run, "ladder", self._ladder_text())

    def _ladder_text(self) -> str:
        return store_tables.to_json([attrs.asdict(candidate) for candidate in self._candidates])

    def timing(self, timing: Timing) -> None:
        """Write one timing; a round that is already there stays as it is."""
        self._has_rows = True
        self._write(store_tables.insert_timing, timing)

    def outcome(self, outcome: Outcome) -> None:
        """Write the outcome of a candidate, in place of an earlier one."""
        self._has_rows = True
        if outcome.status == "out_of_memory" and self._memory_bytes is not None:  # for a rerun that has more
            outcome = attrs.evolve(outcome, facts={**outcome.facts, "memory_bytes": self._memory_bytes})
        self._write(store_tables.replace_outcome, outcome)

    def spent(self, seconds: float) -> None:
        """Write the measuring time so far, over all resumes."""
        self._write(store_tables.update_run, "seconds_spent", seconds)

    def save_ladder(self, candidates: Sequence[Candidate], limit: Mapping[str, Any]) -> None:
        """Write the candidates and the memory limit that they were chosen under; reruns use them with the timings."""
        self._candidates = list(candidates)
        self._write(store_tables.update_run, "ladder", self._ladder_text())
        self._save_limit(limit)

    def _save_limit(self, limit: Mapping[str, Any]) -> None:
        self.limit = limit
        self._write(store_tables.update_run, '"limit"', store_tables.to_json(limit))

    def save_exchange(self, facts: Mapping[str, Any]) -> None:
        """Write the facts of the exchange between devices, with the limit."""
        self._save_limit({**(self.limit or {}), "exchange": dict(facts)})

    def save_disturbed(self, sentences: Sequence[str]) -> None:
        """Write sentences about interference of other processes, for results from these timings."""
        known = tuple(dict.fromkeys([*self.disturbed, *sentences]))[-_MAX_DISTURBED:]
        if known != self.disturbed:
            self.disturbed = known
            self._write(store_tables.update_run, "disturbed", store_tables.to_json(list(known)))

    def begin_anew(self) -> None:
        """
        Leave the earlier timings where they are, and measure the same candidates in a new run.

        The new run continues even if it is disturbed: otherwise a busy machine would never finish one.
        """
        self.kept, self.disturbed, self._has_rows, self.was_begun_anew = Measured(), (), False, True
        if self._insert is not None:
            self._write(self._insert, tuple(self.notes))
            limit = self.limit or {}
            self.save_ladder(self._candidates, {name: limit[name] for name in limit if name not in _MEASURED_LIMITS})

    def finish(self) -> None:
        """Mark the run as whole: a rerun without a larger budget measures nothing."""
        self.finished = True
        self._write(store_tables.update_run, "state", "finished")

    def _write(
        self, statement: Callable[..., int | None] | None = None, *values: object, is_last: bool = False
    ) -> None:
        """Commit a statement with all that are pending; after a failure that may pass, they stay pending."""
        if self._database is None:
            return
        is_last = is_last or self.finished
        if statement is not None:
            self._pending.append((statement, values))
        if self._pending_note and not is_last and time.monotonic() < self._next_attempt:
            return
        run = self._id
        try:
            with sqlite_file.transaction(self._database) if self._pending else contextlib.nullcontext():
                for pending, arguments in self._pending:
                    run = pending(self._database, run, *arguments) or run
        except (sqlite3.DatabaseError, OSError) as error:
            if is_last or not sqlite_file.is_passing(error):
                self._disable(sqlite_file.reason(error))
                return
            self._next_attempt = time.monotonic() + RETRY_SECONDS
            if not self._pending_note:
                why = sqlite_file.reason(error)
                self._pending_note = f"not kept yet: the store {self.path} cannot be written: {why}; it is tried again"
                self._say(self._pending_note)
        else:
            self._id, self._pending = run, []
            self._drop_pending_note()

    def _disable(self, reason: str) -> None:
        """Go on measuring without the store, and say so once."""
        self._database = None
        self._resources.close()
        self._drop_pending_note()
        self._say(f"not kept: the store {self.path} cannot be used: {reason}; measuring goes on without it")

    def _drop_pending_note(self) -> None:
        if self._pending_note:
            self.notes.remove(self._pending_note)
            self._pending_note = ""

    def _say(self, note: str) -> None:
        self.notes.append(note)
        warnings.warn(note, stacklevel=2)

    def _begin(
        self,
        path: Path,
        *,
        identity: str,
        conditions: str,
        budget: float,
        memory_bytes: int | None,
        refresh: bool,
        wait_seconds: float,
    ) -> None:
        """Lock the run, open the file, and find the run or insert it."""
        refusal: OSError | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self._lock(path, store_tables.lock_name(identity), wait_seconds):
                self._disable(f"another process still measures the same run after {wait_seconds:g} s")
                return
            database = sqlite_file.connect(path, *TABLES, on_replaced=self._say_replaced)
        except OSError as error:
            if not (sqlite_file.is_read_only(error) and files.is_file(path)):
                raise
            database, refusal = sqlite_file.copy_in_memory(path, *TABLES), error
        self._resources.callback(database.close)
        self._memory_bytes = memory_bytes
        self._insert = lambda database, _, notes: store_tables.insert_run(
            database, identity=identity, conditions=conditions, budget=budget, notes=notes
        )
        with sqlite_file.transaction(database):
            run = self._find(database, identity, conditions, refresh=refresh)
            if run is not None:
                store_tables.reopen(database, run, self.kept, budget, memory_bytes)
                self.kept = store_tables.read_measured(database, run.id)
                self.finished = store_tables.read_run(database, run.id).state == "finished"
        self._has_rows = bool(self.kept.timings or self.kept.outcomes)
        if run is not None and self._has_rows:
            self.ladder, self.limit, self.disturbed = run.ladder, run.limit, run.disturbed
            self._candidates = list(run.ladder or ())
        if refusal is None:
            self._database, self._id = database, 0 if run is None else run.id
            if run is None:
                self._write(self._insert, tuple(self.notes))
        elif not self.finished:
            self._disable(sqlite_file.reason(refusal))

    def _say_replaced(self, old: Path, reason: str) -> None:
        self._say(f"the store {self.path} was {reason}; it was renamed to {old} and a new one begun")

    def _lock(self, path: Path, digest: str, wait_seconds: float) -> bool:
        """Lock the run, after waiting for another process that measures it; return whether that succeeded."""
        start = time.monotonic()
        for seconds in (0.0, wait_seconds):
            with contextlib.suppress(TimeoutError):
                self._resources.enter_context(sqlite_file.locked(path, digest, seconds))
                if seconds:
                    waited = format_seconds(time.monotonic() - start)
                    self.notes.append(f"another process measures the same run: waited {waited} for it")
                return True
            if not seconds:
                _LOG.warning("another process measures the same run; waiting for it, at most %g s", wait_seconds)
        return False

    def _find(self, database: sqlite3.Connection, identity: str, conditions: str, *, refresh: bool) -> StoredRun | None:
        """Return the run to continue, with `kept` read; if there are only others, note how their conditions differ."""
        rows = database.execute(
            "SELECT id, conditions FROM runs WHERE identity = ? ORDER BY id DESC", (identity,)
        ).fetchall()
        same = [int(row["id"]) for row in rows if row["conditions"] == conditions]
        self.was_begun_anew = len(same) > 1 and not refresh
        if refresh:
            for number in same:
                store_tables.delete_run(database, number)
            return None
        for number in same or [row["id"] for row in rows[:1]]:
            try:
                run = store_tables.read_run(database, number)
                if same:
                    self.kept = store_tables.read_measured(database, number)
                    return run
            except DamagedRun as damage:
                self._say(f"{damage}; it is left in {self.path}, and measured anew")
            else:
                differences = "; ".join(_differences(run.conditions, json.loads(conditions)))
                self.notes.append(f"kept results refused: {differences}")
        return None


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name the fields that differ, with both values."""
    return [
        f"{name} was {_shorten(before.get(name))}, is {_shorten(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _shorten(value: object) -> str:
    """
    Format a condition; of a hash, only the first characters.

    Example:
        >>> _shorten("2.1"), _shorten("0123456789abcdef" * 4)
        ('2.1', '0123456789ab…')
    """
    text = str(value)
    return f"{text[:_HASH_SHOWN]}…" if _HASH.fullmatch(text) else text
