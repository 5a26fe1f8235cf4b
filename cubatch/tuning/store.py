"""
The store: every timing of every run, kept in one SQLite file as it is taken.

A run is one *identity* (what was asked for) measured under one set of *conditions* (what it was
measured with).  A second call with the same identity and the same conditions continues the run; the
same identity under other conditions begins a new one, and a note says which fields differ.

Each timing is its own commit, so a kill loses none that was reported (see `sqlite_file`).  The store may
fail but never stops a measurement: where it cannot be written (full disk, read-only place), the run
goes on unkept and says so once.  Damaged files are moved aside, never deleted, and not while another run
has them open; a file that somebody moved all the same is noticed and said.  Two tuners of one run take
turns by a file lock, which the kernel drops when its holder is killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs

from cubatch import sqlite_file
from cubatch.errors import StoreError
from cubatch.measure.records import Candidate, Measured, Outcome, Timing
from cubatch.tuning import store_tables
from cubatch.tuning.store_tables import StoredRun
from cubatch.units import format_seconds

WAIT_SECONDS = 300.0  # for another tuner of the same run

_LOG = logging.getLogger(__name__)


class Run:
    """
    One run of the store, open for more; a `records.Keeper`.

    Made by `open_run`.  A run without a database (`store=False`, or a store that failed) answers the same
    calls and keeps nothing.

    Attributes:
        kept: Timings, outcomes and seconds that earlier calls left; all of them still apply.
        ladder, limit: What was decided when the run began; None for a run with nothing measured.
        finished: Whether `kept` is the whole run, so that nothing is left to measure.
        notes: What a person should know: refused results, a wait, a damaged file, a lost store.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.kept = Measured()
        self.ladder: tuple[Candidate, ...] | None = None
        self.limit: Mapping[str, Any] | None = None
        self.finished = False
        self.notes: list[str] = []
        self._resources = contextlib.ExitStack()
        self._database: sqlite_file.Database | None = None
        self._id = 0
        self._candidates: list[Candidate] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file and of the lock; what was kept stays."""
        self._database = None
        self._resources.close()

    @property
    def is_kept(self) -> bool:
        """Whether what is measured now is being kept."""
        return self._database is not None

    def candidate(self, candidate: Candidate) -> None:
        """Keep a size that the search added to the ladder."""
        self._candidates.append(candidate)
        self._write(store_tables.update_run, "ladder", self._ladder_text())

    def _ladder_text(self) -> str:
        return store_tables.to_json([attrs.asdict(candidate) for candidate in self._candidates])

    def timing(self, timing: Timing) -> None:
        """Keep one timing; a round that is already there stays as it is."""
        self._write(store_tables.insert_timing, timing)

    def outcome(self, outcome: Outcome) -> None:
        """Keep how a candidate's measuring ended, in place of what was said of it before."""
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
        self._write(store_tables.update_run, "ladder", self._ladder_text())
        self._write(store_tables.update_run, '"limit"', store_tables.to_json(limit))

    def finish(self) -> None:
        """Say that the run is whole: a rerun with no larger budget measures nothing."""
        self.finished = True
        self._write(store_tables.update_run, "state", "finished")

    def _write(self, statement: Callable[..., None], *values: object) -> None:
        if self._database is None:
            return
        try:
            statement(self._database, self._id, *values)
            is_lost = self._database.has_moved()
        except (sqlite3.DatabaseError, OSError) as error:
            self._go_unkept(sqlite_file.reason(error))
        else:
            if is_lost:
                self._go_unkept("it was moved or removed while in use, with what was kept in it so far")

    def _go_unkept(self, reason: str) -> None:
        """Give up the store, not the measurement, and say so once."""
        self.close()
        note = f"not kept: the store {self.path} cannot be used: {reason}; measuring goes on without it"
        self.notes.append(note)
        warnings.warn(note, stacklevel=2)

    def _say_damaged(self, aside: Path) -> None:
        note = f"the store {self.path} was damaged; it was moved to {aside} and a new one begun"
        self.notes.append(note)
        warnings.warn(note, stacklevel=2)

    def _begin(
        self, path: Path, *, identity: str, conditions: str, budget: float, refresh: bool, wait_seconds: float
    ) -> None:
        """Take the run's lock, open the file, find the run or begin it."""
        digest = hashlib.sha256(identity.encode()).hexdigest()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._take_turn(path, digest, wait_seconds)
        except TimeoutError:
            self._go_unkept(f"another process still measures the same run after {wait_seconds:g} s")
            return
        database = sqlite_file.connect(path, store_tables.SCHEMA, store_tables.VERSION, on_damage=self._say_damaged)
        self._resources.callback(database.close)
        with sqlite_file.transaction(database):
            known = self._find(database, digest, conditions, refresh=refresh)
            self._id = known or store_tables.insert_run(
                database,
                identity_sha256=digest,
                identity=identity,
                conditions=conditions,
                budget=budget,
                notes=self.notes,
            )
            store_tables.reopen(database, self._id, budget)
            self.kept = store_tables.read_measured(database, self._id)
            run = store_tables.read_run(database, self._id)
        self.finished = run.state == "finished"
        if self.kept.timings or self.kept.outcomes:
            self.ladder, self.limit = run.ladder, run.limit
            self._candidates = list(run.ladder or ())
        self._database = database

    def _take_turn(self, path: Path, digest: str, wait_seconds: float) -> None:
        try:
            self._resources.enter_context(sqlite_file.locked(path, digest, 0.0))
        except TimeoutError:
            note = "another process measures the same run"
            _LOG.warning("%s; waiting for it, at most %g s", note, wait_seconds)
            asked = time.monotonic()
            self._resources.enter_context(sqlite_file.locked(path, digest, wait_seconds))
            self.notes.append(f"{note}: waited {format_seconds(time.monotonic() - asked)} for it")

    def _find(self, database: sqlite3.Connection, digest: str, conditions: str, *, refresh: bool) -> int | None:
        """Find the run that may be continued; where there are only others, say what differs."""
        rows = database.execute(
            "SELECT id, conditions FROM runs WHERE identity_sha256 = ? ORDER BY id DESC", (digest,)
        ).fetchall()
        same = [int(row["id"]) for row in rows if row["conditions"] == conditions]
        if refresh:
            database.executemany("DELETE FROM runs WHERE id = ?", [(run,) for run in same])
        elif same:
            return same[0]
        elif rows:
            differences = "; ".join(_differences(json.loads(rows[0]["conditions"]), json.loads(conditions)))
            self.notes.append(f"kept results refused: {differences}")
        return None


def open_run(
    path: Path | str | None,
    *,
    identity: Mapping[str, Any],
    conditions: Mapping[str, Any],
    budget: float,
    refresh: bool = False,
    wait_seconds: float = WAIT_SECONDS,
) -> Run:
    """
    Open the run of this identity, or begin it.

    Outcomes that a kill or Ctrl-C left as "interrupted" are dropped, so that they are measured again, and so are
    errors by the death of a worker; a larger budget than before also drops "not_run" and what the budget cut short.
    Each of these makes a finished run open again.

    Args:
        path: The store's file, made if missing; None keeps nothing.
        identity: What is asked for, as a mapping that JSON can hold; compared as a whole.
        conditions: What it is measured with, one field per condition.
        budget: Seconds of measuring that the whole run may take.
        refresh: Forget the run that would be continued, and start over.
        wait_seconds: How long to wait for another process that measures the same run; after that
            this one measures unkept.

    Returns:
        Run: use it as a context manager.  `notes` says what a person should know.

    Raises:
        StoreError: If the file is a directory, another program's database, or from a newer cubatch.

    Example:
        >>> import tempfile
        >>> place = tempfile.TemporaryDirectory()
        >>> asked, given = {"spec": "mlp"}, {"path": Path(place.name) / "store.sqlite3", "budget": 60.0}
        >>> with open_run(identity=asked, conditions={"numpy": "2.0"}, **given) as run:
        ...     run.timing(Timing(batch_size=32, round=0, seconds=0.25))
        >>> with open_run(identity=asked, conditions={"numpy": "2.0"}, **given) as run:
        ...     [timing.seconds for timing in run.kept.timings]
        [0.25]
        >>> with open_run(identity=asked, conditions={"numpy": "2.1"}, **given) as run:
        ...     run.kept.timings, run.notes
        ((), ['kept results refused: numpy was 2.0, is 2.1'])
        >>> place.cleanup()
    """
    if path is None:
        return Run(None)
    run = Run(Path(path))
    try:
        run.path = sqlite_file.place(path)
        run._begin(  # noqa: SLF001 - the other half of this function
            run.path,
            identity=store_tables.to_json(identity),
            conditions=store_tables.to_json(conditions),
            budget=budget,
            refresh=refresh,
            wait_seconds=wait_seconds,
        )
    except (sqlite3.DatabaseError, OSError) as error:
        run._go_unkept(sqlite_file.reason(error))  # noqa: SLF001
    except BaseException:
        run.close()
        raise
    return run


def list_runs(path: Path | str) -> list[StoredRun]:
    """
    List the runs of a store, oldest first; none where there is no file.

    Raises:
        StoreError: If the file cannot be read, is damaged, or is no store of this version.
    """
    with _opened(path) as database:
        ids = database.execute("SELECT id FROM runs ORDER BY id").fetchall() if database else []
        return [store_tables.read_run(database, row["id"]) for row in ids] if database else []


def show(path: Path | str, run_id: int) -> tuple[StoredRun, Measured]:
    """
    Give one run with all its timings and outcomes.

    Raises:
        StoreError: If there is no such run, or the file cannot be read.
    """
    with _opened(path) as database:
        known = [row["id"] for row in database.execute("SELECT id FROM runs")] if database else []
        if database is None or run_id not in known:
            raise StoreError(
                str(path), f"it holds no run {run_id}", f"It holds: {', '.join(map(str, sorted(known))) or 'none'}."
            )
        return store_tables.read_run(database, run_id), store_tables.read_measured(database, run_id)


def clear(path: Path | str, run_id: int | None = None) -> int:
    """
    Forget one run, or all runs.

    Returns:
        How many runs were forgotten.

    Raises:
        StoreError: If a run of them is being measured right now, or there is no such run; nothing is forgotten then.
    """
    if run_id is not None:
        show(path, run_id)
    with _opened(path) as database, contextlib.ExitStack() as locks:
        if database is None:
            return 0
        rows = database.execute("SELECT id, identity_sha256 FROM runs").fetchall()
        chosen = [row for row in rows if run_id in {None, row["id"]}]  # a run that begins from now on stays
        for digest in sorted({row["identity_sha256"] for row in chosen}):
            try:
                locks.enter_context(sqlite_file.locked(sqlite_file.place(path), digest, 0.0))
            except TimeoutError:
                raise StoreError(str(path), "a run in it is being measured", "Wait for it to end, or end it.") from None
        return database.executemany("DELETE FROM runs WHERE id = ?", [(row["id"],) for row in chosen]).rowcount


@contextlib.contextmanager
def _opened(path: Path | str) -> Iterator[sqlite3.Connection | None]:
    """Open a store to look at it; None where there is none."""
    try:
        path = sqlite_file.place(path)
        if not path.exists() or not path.stat().st_size:  # looking writes nothing
            yield None
            return
        with contextlib.closing(sqlite_file.connect(path, store_tables.SCHEMA, store_tables.VERSION)) as database:
            yield database
    except (sqlite3.DatabaseError, OSError) as error:
        raise StoreError(str(path), sqlite_file.reason(error), "Name another path.") from error


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name the fields that differ, with both values."""
    return [
        f"{name} was {before.get(name)}, is {now.get(name)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
