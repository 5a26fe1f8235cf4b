"""
The store: every timing of every run, kept in one SQLite file as it is taken.

A run is one *identity* (what was asked for) measured under one set of *conditions* (what it was
measured with).  A second call with the same identity and the same conditions continues the run; the
same identity under other conditions begins a new one, and a note says which fields differ.

Each timing is its own commit, so a kill loses none that was reported (see `sqlite_file`).  The store may
fail but never stops a measurement: while a disk is full, what comes is held back and tried again; where nothing
can be written (a read-only place), the run goes on unkept and says so once.  Damaged files are moved aside, never
deleted, and not while another run has them open; a file that somebody moved all the same is noticed and said.  A
run of which a field is damaged is named and left, and another begun.  Two tuners of one run take turns by a file
lock, which the kernel drops when its holder is killed.  Whoever copies the file while it is in use must copy
`store.sqlite3-wal` too: the latest rows are there.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cubatch import files, sqlite_file
from cubatch.errors import InvalidArgument, StoreError
from cubatch.measure.records import Measured
from cubatch.tuning import store_tables
from cubatch.tuning.store_tables import TABLES, UPGRADES, DamagedRun, StoredRun
from cubatch.tuning.stored_run import Run, is_there

__all__ = ["Run", "check_place", "clear", "list_runs", "open_run", "path_of", "show"]

WAIT_SECONDS = 300.0  # for another tuner of the same run


def open_run(
    path: Path | str | None,
    *,
    identity: Mapping[str, Any],
    conditions: Mapping[str, Any],
    budget: float,
    memory_bytes: int | None = None,
    refresh: bool = False,
    wait_seconds: float = WAIT_SECONDS,
) -> Run:
    """
    Open the run of this identity, or begin it.

    Outcomes that a kill or Ctrl-C left as "interrupted" are dropped, so that they are measured again, and so are
    errors by the death of a worker, and what was refused for memory that there is now; a larger budget than before
    also drops "not_run" and what the budget cut short.  Each of these makes a finished run open again.

    Where the file may only be read, what is kept in it applies all the same, and what is measured now is not kept.

    Args:
        path: The store's file, made if missing; None keeps nothing.
        identity: What is asked for, as a mapping that JSON can hold; compared as a whole.
        conditions: What it is measured with, one field per condition.
        budget: Seconds of measuring that the whole run may take.
        memory_bytes: What a step may take now; None where nothing is known of it.
        refresh: Forget the run that would be continued, and start over.
        wait_seconds: How long to wait for another process that measures the same run; after that
            this one measures unkept.

    Returns:
        Run: use it as a context manager.  `notes` says what a person should know.

    Raises:
        StoreError: If the file is a directory, another program's database, or from a newer cubatch.

    Example:
        >>> import tempfile
        >>> from cubatch.measure.records import Timing
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
            memory_bytes=memory_bytes,
            refresh=refresh,
            wait_seconds=wait_seconds,
        )
    except (sqlite3.DatabaseError, OSError) as error:
        run._go_unkept(sqlite_file.reason(error))  # noqa: SLF001
    except BaseException:
        run.close()
        raise
    return run


def path_of(place: bool | str | Path) -> Path | None:  # noqa: FBT001
    """Say which file `store=` means; None for none."""
    if place is False:
        return None
    return sqlite_file.default_path() if place is True or place == "refresh" else Path(place)


def check_place(place: object) -> None:
    """
    Refuse what names no store.

    Raises:
        InvalidArgument: Naming the argument `store`.
    """
    if not isinstance(place, bool | str | Path):
        raise InvalidArgument("store", place, 'True, False, "refresh" or a path')
    if isinstance(place, bool) or place == "refresh":
        return
    with contextlib.suppress(RuntimeError):  # a user without a home: whoever opens the file says so
        if not str(place) or not files.is_folder(Path(place).expanduser().parent):
            raise InvalidArgument("store", str(place), "a file in a folder that is there")


def list_runs(path: Path | str) -> list[StoredRun]:
    """
    List the runs of a store, oldest first, those that are damaged by their numbers; none where there is no file.

    Raises:
        StoreError: If the file cannot be read, is damaged, or is no store of this version.
    """
    with _opened(path) as database:
        ids = database.execute("SELECT id FROM runs ORDER BY id").fetchall() if database else []
        return [_listed(database, row["id"]) for row in ids] if database else []


def _listed(database: sqlite3.Connection, run: int) -> StoredRun:
    try:
        return store_tables.read_run(database, run)
    except DamagedRun as damage:
        return store_tables.damaged(database, damage)


def show(path: Path | str, run_id: int) -> tuple[StoredRun, Measured]:
    """
    Give one run with all its timings and outcomes.

    Raises:
        StoreError: If there is no such run, it is damaged, or the file cannot be read.
    """
    with _opened(path) as database:
        known = database.execute("SELECT id FROM runs").fetchall() if database else []
        if database is None or run_id not in [row["id"] for row in known]:
            raise _no_such_run(path, run_id, known)
        try:
            return store_tables.read_run(database, run_id), store_tables.read_measured(database, run_id)
        except DamagedRun as damage:
            raise StoreError(str(path), str(damage), f"Forget it: cubatch store clear {run_id}.") from damage


def clear(path: Path | str, run_id: int | None = None) -> int:
    """
    Forget one run, or all runs.

    Returns:
        How many runs were forgotten.

    Raises:
        StoreError: If a run of them is being measured right now, or there is no such run; nothing is forgotten then.
    """
    with _opened(path, is_written=True) as database, contextlib.ExitStack() as locks:
        rows = database.execute("SELECT id, identity_sha256 FROM runs").fetchall() if database else []
        chosen = [row for row in rows if run_id in {None, row["id"]}]  # a run that begins from now on stays
        if run_id is not None and not chosen:
            raise _no_such_run(path, run_id, rows)
        if database is None:
            return 0
        for digest in sorted({row["identity_sha256"] for row in chosen}):
            try:
                locks.enter_context(sqlite_file.locked(sqlite_file.place(path), digest, 0.0))
            except TimeoutError:
                raise StoreError(str(path), "a run in it is being measured", "Wait for it to end, or end it.") from None
        return database.executemany("DELETE FROM runs WHERE id = ?", [(row["id"],) for row in chosen]).rowcount


def _no_such_run(path: Path | str, run_id: int, known: Sequence[sqlite3.Row]) -> StoreError:
    held = ", ".join(map(str, sorted(row["id"] for row in known))) or "none"
    return StoreError(str(path), f"it holds no run {run_id}", f"It holds: {held}.")


@contextlib.contextmanager
def _opened(path: Path | str, *, is_written: bool = False) -> Iterator[sqlite3.Connection | None]:
    """Open a store to look at it, where it may only be read a copy of it; None where there is none."""
    try:
        path = sqlite_file.place(path)
        if not path.exists() or not path.stat().st_size:  # looking writes nothing
            yield None
            return
        try:
            opened = sqlite_file.connect(path, *TABLES, upgrades=UPGRADES)
        except OSError as error:
            if is_written or not (sqlite_file.is_read_only(error) and is_there(path)):
                raise
            opened = sqlite_file.copied(path, *TABLES, upgrades=UPGRADES)
        with contextlib.closing(opened) as database:
            yield database
    except (sqlite3.DatabaseError, OSError) as error:
        raise StoreError(str(path), sqlite_file.reason(error), "Name another path.") from error
