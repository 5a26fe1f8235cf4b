"""One run of the store, open for more: what was kept of it, and what is being kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import sqlite3
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs

from cubatch import sqlite_file
from cubatch.errors import CubatchError
from cubatch.measure.records import Candidate, Measured, Outcome, Timing
from cubatch.tuning import store_tables
from cubatch.tuning.store_tables import TABLES, UPGRADES, DamagedRun, StoredRun
from cubatch.tuning.store_writer import Writer
from cubatch.units import format_seconds

_LOG = logging.getLogger(__name__)
_HASH = re.compile(r"[0-9a-f]{40,}")
_MOST_TOLD = 4  # sentences about others, of the latest calls
_TAKEN = ("exchange", "page_faults")  # of what is kept beside the limit: what was measured of steps
_HASH_SHOWN = 12  # characters of it: two that differ do so within them


class Run:
    """
    One run of the store, open for more; a `records.Keeper`.

    Made by `open_run`.  A run without a database (`store=False`, or a store that failed) answers the same
    calls and keeps nothing.

    One that ends with an error of ours before anything is kept leaves nothing behind: what was asked made no sense.

    Attributes:
        kept: Timings, outcomes and seconds that earlier calls left; all of them still apply.
        ladder, limit: What was decided when it was measured last; None for a run with nothing measured.
        finished: Whether `kept` is the whole run, so that nothing is left to measure.
        notes: What a person should know: refused results, a wait, a damaged file, a lost store.
        caveats: What is told before all else of an answer: who else was busy, and that nothing was measured now.
        disturbed: What was told of others who were busy while what is kept was taken.
        was_begun_anew: Whether it was begun in the place of another, whose timings were disturbed.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.kept = Measured()
        self.ladder: tuple[Candidate, ...] | None = None
        self.limit: Mapping[str, Any] | None = None
        self.finished = False
        self.notes: list[str] = []
        self.caveats: list[str] = []
        self.disturbed: tuple[str, ...] = ()
        self.was_begun_anew = False
        self._resources = contextlib.ExitStack()
        self._writer: Writer | None = None
        self._held_note = ""
        self._memory_bytes: int | None = None
        self._candidates: list[Candidate] = []
        self._begin_row: Callable[[sqlite3.Connection, int, Sequence[str]], int] | None = None
        self._has_rows = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_nonsense = isinstance(error, CubatchError)  # which nobody will ask again
        if not self._has_rows and (is_nonsense or (self.was_begun_anew and error is not None)):
            self._write(store_tables.delete_run)
        self.close()

    def close(self) -> None:
        """Let go of the file and of the lock, after a last try to write what was held back; what was kept stays."""
        self._write_last()
        self._writer = None
        self._resources.close()

    @property
    def is_kept(self) -> bool:
        """Whether what is measured now is being kept."""
        return self._writer is not None and self._writer.trouble is None

    @property
    def anew(self) -> str:
        """How what was kept before is measured anew: with an option in the user's own store only."""
        if self.path == sqlite_file.default_path().resolve():
            return "--fresh (store='refresh') measures anew"
        return "with another store the same call measures anew"

    def candidate(self, candidate: Candidate) -> None:
        """Keep a size that the search added to the ladder."""
        self._candidates.append(candidate)
        self._write(store_tables.update_run, "ladder", self._ladder_text())

    def _ladder_text(self) -> str:
        return store_tables.to_json([attrs.asdict(candidate) for candidate in self._candidates])

    def timing(self, timing: Timing) -> None:
        """Keep one timing; a round that is already there stays as it is."""
        self._has_rows = True
        self._write(store_tables.insert_timing, timing)

    def outcome(self, outcome: Outcome) -> None:
        """Keep how a candidate's measuring ended, in place of what was said of it before."""
        self._has_rows = True
        if outcome.status == "out_of_memory" and self._memory_bytes is not None:  # for a rerun that has more
            outcome = attrs.evolve(outcome, facts={**outcome.facts, "memory_bytes": self._memory_bytes})
        self._write(store_tables.replace_outcome, outcome)

    def spent(self, seconds: float) -> None:
        """Keep the seconds of measuring that the run took so far, over all resumes."""
        self._write(store_tables.update_run, "seconds_spent", seconds)

    def save_ladder(self, candidates: Sequence[Candidate], limit: Mapping[str, Any]) -> None:
        """
        Keep the ladder and the memory limit it was made under, for reruns.

        A run that ends before its first timing or outcome gives neither back.
        """
        self._candidates = list(candidates)
        self.limit = limit
        self._write(store_tables.update_run, "ladder", self._ladder_text())
        self._write(store_tables.update_run, '"limit"', store_tables.to_json(limit))

    def save_exchange(self, facts: Mapping[str, Any]) -> None:
        """Keep what devices exchange in a step of the answer's size, beside the limit."""
        self.limit = {**(self.limit or {}), "exchange": dict(facts)}
        self._write(store_tables.update_run, '"limit"', store_tables.to_json(self.limit))

    def save_disturbed(self, told: Sequence[str]) -> None:
        """Keep what is told of others who were busy meanwhile, for whoever is answered from these timings."""
        known = tuple(dict.fromkeys([*self.disturbed, *told]))[-_MOST_TOLD:]
        if known != self.disturbed:
            self.disturbed = known
            self._write(store_tables.update_run, "disturbed", store_tables.to_json(list(known)))

    def begin_anew(self) -> None:
        """
        Leave the timings that are kept where they are, and measure the same candidates in another run.

        That one is gone on with whatever disturbs it: beginning anew each time would never end.
        """
        self.kept, self.disturbed, self._has_rows, self.was_begun_anew = Measured(), (), False, True
        if (begin := self._begin_row) is not None:
            self._write(begin, tuple(self.notes))
            limit = self.limit or {}
            self.save_ladder(self._candidates, {name: limit[name] for name in limit if name not in _TAKEN})

    def finish(self) -> None:
        """Say that the run is whole: a rerun with no larger budget measures nothing."""
        self.finished = True
        self._write(store_tables.update_run, "state", "finished")
        self._write_last()

    def _write(self, statement: Callable[..., int | None], *values: object) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(statement, *values)
        except (sqlite3.DatabaseError, OSError) as error:
            self._go_unkept(sqlite_file.reason(error))
        else:
            self._tell_held(self._writer.trouble)

    def _write_last(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.flush(is_last=True)
        except (sqlite3.DatabaseError, OSError) as error:
            self._go_unkept(sqlite_file.reason(error))
        else:
            self._tell_held(None)

    def _tell_held(self, trouble: str | None) -> None:
        """Say once that something is held back, for as long as it is."""
        if trouble is not None and not self._held_note:
            self._held_note = f"not kept yet: the store {self.path} cannot be written: {trouble}; it is tried again"
            self._say(self._held_note)
        elif trouble is None and self._held_note:
            self.notes.remove(self._held_note)
            self._held_note = ""

    def _go_unkept(self, reason: str) -> None:
        """Give up the store, not the measurement, and say so once."""
        self._writer = None
        self._resources.close()
        note = f"not kept: the store {self.path} cannot be used: {reason}; measuring goes on without it"
        if self._held_note:  # which was said
            self.notes[self.notes.index(self._held_note)] = note
            self._held_note = ""
        else:
            self._say(note)

    def _say(self, note: str) -> None:
        self.notes.append(note)
        warnings.warn(note, stacklevel=2)

    def _say_damaged(self, aside: Path) -> None:
        self._say(f"the store {self.path} was damaged; it was moved to {aside} and a new one begun")

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
        """Take the run's lock, open the file, find the run or begin it."""
        digest = hashlib.sha256(identity.encode()).hexdigest()
        refusal: OSError | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self._takes_turn(path, digest, wait_seconds):
                self._go_unkept(f"another process still measures the same run after {wait_seconds:g} s")
                return
            database = sqlite_file.connect(path, *TABLES, upgrades=UPGRADES, on_damage=self._say_damaged)
        except OSError as error:
            if not (sqlite_file.is_read_only(error) and is_there(path)):
                raise
            database, refusal = sqlite_file.copied(path, *TABLES, upgrades=UPGRADES), error
        self._resources.callback(database.close)
        self._memory_bytes = memory_bytes
        self._begin_row = lambda database, _, notes: store_tables.insert_run(
            database, identity_sha256=digest, identity=identity, conditions=conditions, budget=budget, notes=notes
        )
        with sqlite_file.transaction(database):
            run = self._find(database, digest, conditions, refresh=refresh)
            if run is not None:
                store_tables.reopen(database, run, self.kept, budget, memory_bytes)
                self.kept = store_tables.read_measured(database, run.id)
                self.finished = store_tables.read_run(database, run.id).state == "finished"
        self._has_rows = bool(self.kept.timings or self.kept.outcomes)
        if run is not None and self._has_rows:
            self.ladder, self.limit, self.disturbed = run.ladder, run.limit, run.disturbed
            self._candidates = list(run.ladder or ())
        if refusal is None:
            self._writer = Writer(database, 0 if run is None else run.id)
            if run is None:  # held back where the disk is full, as what comes later
                self._write(self._begin_row, tuple(self.notes))
        elif not self.finished:
            self._go_unkept(sqlite_file.reason(refusal))

    def _takes_turn(self, path: Path, digest: str, wait_seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            self._resources.enter_context(sqlite_file.locked(path, digest, 0.0))
            return True
        note = "another process measures the same run"
        _LOG.warning("%s; waiting for it, at most %g s", note, wait_seconds)
        asked = time.monotonic()
        with contextlib.suppress(TimeoutError):
            self._resources.enter_context(sqlite_file.locked(path, digest, wait_seconds))
            self.notes.append(f"{note}: waited {format_seconds(time.monotonic() - asked)} for it")
            return True
        return False

    def _find(self, database: sqlite3.Connection, digest: str, conditions: str, *, refresh: bool) -> StoredRun | None:
        """Find the run that may be continued, and read it whole; where there are only others, say what differs."""
        rows = database.execute(
            "SELECT id, conditions FROM runs WHERE identity_sha256 = ? ORDER BY id DESC", (digest,)
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


def is_there(path: Path) -> bool:
    """Say whether there is a file that may be read."""
    try:
        return path.is_file() and os.access(path, os.R_OK)
    except OSError:  # in a folder that may not be entered
        return False


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name the fields that differ, with both values."""
    return [
        f"{name} was {_told(before.get(name))}, is {_told(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _told(value: object) -> str:
    """
    Write a condition, a hash by its beginning.

    Example:
        >>> _told("2.1"), _told("0123456789abcdef" * 4)
        ('2.1', '0123456789ab…')
    """
    text = str(value)
    return f"{text[:_HASH_SHOWN]}…" if _HASH.fullmatch(text) else text
