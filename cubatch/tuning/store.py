"""
The store: every timing of every run, in one SQLite file, written as it is taken.

A run is one *identity* (what was asked for) measured under one set of *conditions* (what it was measured with).  A
second call with equal identity and conditions continues the run; other conditions begin a new one, and a note names the
fields that differ.

Each timing is its own commit, so a kill loses none that was reported.  A store that fails never stops a measurement: it
continues without the store and a note says so.  Damaged files, and those of older versions, are renamed and a new one
begun.  Two calls of one run take turns by a file lock, which the kernel drops when its holder ends.  A copy of the file
while it is in use needs `store.sqlite3-wal` too, which has the latest rows.
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
from cubatch.tuning.store_tables import TABLES, DamagedRun, StoredRun
from cubatch.tuning.stored_run import Run

__all__ = ["Run", "check_place", "clear", "list_runs", "open_run", "path_of", "show"]

WAIT_SECONDS = 300.0  # for another call that measures the same run


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

    Outcomes that are not final are deleted, which reopens a finished run: interruptions, deaths of a worker, refusals
    for memory that is available now; with a larger budget than before also "not_run" and what the budget cut short.

    Args:
        path: The store's file, created if missing; None keeps nothing.
        identity: What is asked for, as a mapping for JSON; compared as a whole.
        conditions: What it is measured with, one field per condition.
        budget: Seconds of measuring that the whole run may take.
        memory_bytes: Available memory of a step; None if unknown.
        refresh: Delete the run that would be continued, and start over.
        wait_seconds: Time to wait for another process that measures the same run; after that, measure without the
            store.

    Returns:
        Run, a context manager.

    Raises:
        StoreError: If the file is a directory, another program's database, or from a newer cubatch.

    Example:
        >>> import tempfile
        >>> from cubatch.measure.records import Timing
        >>> folder = tempfile.TemporaryDirectory()
        >>> asked, given = {"spec": "mlp"}, {"path": Path(folder.name) / "store.sqlite3", "budget": 60.0}
        >>> with open_run(identity=asked, conditions={"numpy": "2.0"}, **given) as run:
        ...     run.timing(Timing(batch_size=32, round=0, seconds=0.25))
        >>> with open_run(identity=asked, conditions={"numpy": "2.0"}, **given) as run:
        ...     [timing.seconds for timing in run.kept.timings]
        [0.25]
        >>> with open_run(identity=asked, conditions={"numpy": "2.1"}, **given) as run:
        ...     run.kept.timings, run.notes
        ((), ['kept results refused: numpy was 2.0, is 2.1'])
        >>> folder.cleanup()
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
        run._disable(sqlite_file.reason(error))  # noqa: SLF001
    except BaseException:
        run.close()
        raise
    return run


def path_of(place: bool | str | Path) -> Path | None:  # noqa: FBT001
    """Return the file that `store=` means; None for none."""
    if place is False:
        return None
    return sqlite_file.default_path() if place is True or place == "refresh" else Path(place)


def check_place(place: object) -> None:
    """
    Check the argument `store`.

    Raises:
        InvalidArgument: If it names no store.
    """
    if not isinstance(place, bool | str | Path):
        raise InvalidArgument("store", place, 'True, False, "refresh" or a path')
    if isinstance(place, bool) or place == "refresh":
        return
    with contextlib.suppress(RuntimeError):  # a user without a home: opening the file reports it
        if not str(place) or not files.is_folder(Path(place).expanduser().parent):
            raise InvalidArgument("store", str(place), "a file in a folder that is there")


def list_runs(path: Path | str) -> list[StoredRun]:
    """
    List the runs of a store, oldest first, damaged ones by their numbers; an empty list if there is no file.

    Raises:
        StoreError: If the file cannot be read, is damaged, or is no store of this version.
    """
    with _opened(path) as database:
        return [_read_or_damaged(database, number) for number in _numbers(database)] if database else []


def _read_or_damaged(database: sqlite3.Connection, run: int) -> StoredRun:
    try:
        return store_tables.read_run(database, run)
    except DamagedRun as damage:
        return store_tables.damaged(database, damage)


def show(path: Path | str, run_id: int) -> tuple[StoredRun, Measured]:
    """
    Return one run with all its timings and outcomes.

    Raises:
        StoreError: If there is no such run, it is damaged, or the file cannot be read.
    """
    with _opened(path) as database:
        if database is None or run_id not in _numbers(database):
            raise _no_such_run(path, run_id, _numbers(database))
        try:
            return store_tables.read_run(database, run_id), store_tables.read_measured(database, run_id)
        except DamagedRun as damage:
            raise StoreError(str(path), str(damage), f"Delete it: cubatch store clear {run_id}.") from damage


def clear(path: Path | str, run_id: int | None = None) -> int:
    """
    Delete one run, or all runs, and return their number.

    Raises:
        StoreError: If one of them is being measured right now, or there is no such run; nothing is deleted then.
    """
    with _opened(path, is_written=True) as database, contextlib.ExitStack() as locks:
        numbers = _numbers(database)
        if run_id is not None and run_id not in numbers:
            raise _no_such_run(path, run_id, numbers)
        if database is None:
            return 0
        chosen = [number for number in numbers if run_id in {None, number}]  # a run that begins from now on stays
        for digest in sorted({store_tables.lock_name_of(database, number) for number in chosen}):
            try:
                locks.enter_context(sqlite_file.locked(sqlite_file.place(path), digest, 0.0))
            except TimeoutError:
                raise StoreError(str(path), "a run in it is being measured", "Wait for it to end, or end it.") from None
        return database.executemany("DELETE FROM runs WHERE id = ?", [(number,) for number in chosen]).rowcount


def _numbers(database: sqlite3.Connection | None) -> list[int]:
    return [row["id"] for row in database.execute("SELECT id FROM runs ORDER BY id")] if database else []


def _no_such_run(path: Path | str, run_id: int, numbers: Sequence[int]) -> StoreError:
    held = ", ".join(map(str, numbers)) or "none"
    return StoreError(str(path), f"it holds no run {run_id}", f"It holds: {held}.")


@contextlib.contextmanager
def _opened(path: Path | str, *, is_written: bool = False) -> Iterator[sqlite3.Connection | None]:
    """Open a store, for reading unless it is written; yield None if there is none."""
    try:
        path = sqlite_file.place(path)
        if not path.exists() or not path.stat().st_size:
            yield None
            return
        opener = sqlite_file.connect if is_written else sqlite_file.open_read_only
        with contextlib.closing(opener(path, *TABLES)) as database:
            is_empty = not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            yield None if is_empty else database  # another process is creating its tables
    except (sqlite3.DatabaseError, OSError) as error:
        raise StoreError(str(path), sqlite_file.reason(error), "Name another path.") from error
