"""
The store: every timing of every run, in one SQLite file, written as it is taken.

A run is one *identity* (the request) measured under one set of *conditions* (drivers, libraries, sources). A second
call with equal identity and conditions continues the run. Other conditions begin a new run, and a note names the
fields that differ.

Each timing is its own commit, so a killed process loses none that it reported. A store that fails never stops a
measurement: it continues without the store, and a note explains why. Damaged files, and those of older versions, are
renamed and a new one is begun. Two calls of one run take turns by a file lock, which the kernel drops when its holder
ends. A copy of the file while it is in use needs `store.sqlite3-wal` too, which has the latest rows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs

from cubatch import files, sqlite_file
from cubatch.errors import CubatchError, InvalidArgument, StoreError
from cubatch.measure.records import Candidate, Measured, Outcome, Timing
from cubatch.tuning import store_tables
from cubatch.tuning.notes import Note, note, sentence
from cubatch.tuning.store_tables import TABLES, DamagedRun, StoredRun

WAIT_SECONDS = 300.0
"""Time to wait for another process that measures the same run."""
_LOG = logging.getLogger(__name__)
_HASH = re.compile(r"[0-9a-f]{40,}")
_HASH_SHOWN = 12  # characters of a hash in a note
_MAX_DISTURBED = 4  # sentences about interference, of the latest calls
_MEASURED_LIMITS = ("exchange", "page_faults")  # entries of `limit` that were measured


class Run:
    """
    An open run of the store; a context manager and a `records.Keeper`.

    A run without a database (`path` is None, or a store that failed) has the same methods and keeps nothing. A run
    that ends with a CubatchError before its first timing or outcome is deleted.

    Outcomes that are not final are deleted, which reopens a finished run: see `store_tables.final_outcomes`.

    Args:
        path: The store's file, created if missing; None caches nothing.
        identity: The request, as a mapping for JSON; compared as a whole.
        conditions: What it is measured with, one field per condition.
        budget: Seconds of measuring that the whole run may take.
        memory_bytes: Available memory of a step; None if unknown.
        refresh: Delete the run that would be continued, and start over.
        wait_seconds: Time to wait for another process that measures the same run. After that, the store is not used.

    Attributes:
        earlier: Timings, outcomes and seconds of earlier calls.
        ladder, limit: Candidates and memory limit of the earlier calls; None for a run with nothing measured.
        finished: Whether `earlier` is the whole run.
        notes: What the user should know: cached results that do not apply, a wait, a damaged file, a failed store.
        `disturbed`: Sentences about interference of other processes while `earlier` was taken.
        was_started_over: Whether it replaces a run with interference.

    Raises:
        StoreError: If the file is a directory, another program's database, or from a newer cubatch.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path, request = Path(folder.name) / "store.sqlite3", {"spec": "mlp"}
        >>> with Run(path, identity=request, conditions={"numpy": "2.0"}, budget=60.0) as run:
        ...     run.timing(Timing(batch_size=32, round=0, seconds=0.25))
        >>> with Run(path, identity=request, conditions={"numpy": "2.0"}, budget=60.0) as run:
        ...     [timing.seconds for timing in run.earlier.timings]
        [0.25]
        >>> with Run(path, identity=request, conditions={"numpy": "2.1"}, budget=60.0) as run:
        ...     run.earlier.timings, [sentence(each) for each in run.notes]
        ((), ['Cached timings do not apply: numpy was 2.0, is 2.1.'])
        >>> folder.cleanup()
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
        self.was_started_over = False
        self._identity, self._conditions = store_tables.to_json(identity), store_tables.to_json(conditions)
        self._budget, self._memory_bytes = budget, memory_bytes
        self._resources = contextlib.ExitStack()
        self._database: sqlite3.Connection | None = None
        self._id = 0
        self._candidates: list[Candidate] = []
        self._has_rows = False
        if path is None:
            return
        try:
            self.path = sqlite_file.place(path)
            self._open(self.path, refresh=refresh, wait_seconds=wait_seconds)
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
        if not self._has_rows and (isinstance(error, CubatchError) or (self.was_started_over and error is not None)):
            self._write(store_tables.delete_run)
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._database = None
        self._resources.close()

    @property
    def is_kept(self) -> bool:
        """Whether everything so far is written."""
        return self._database is not None

    @property
    def is_default(self) -> bool:
        """Whether it is in the user's own store, which `--fresh` and store="refresh" refer to."""
        return self.path == sqlite_file.default_path().resolve()

    def candidate(self, candidate: Candidate) -> None:
        """Write a size that the search added to the ladder."""
        self._candidates.append(candidate)
        self._update(ladder=self._candidates_json())

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
        self._update(seconds_spent=seconds)

    def save_ladder(self, candidates: Sequence[Candidate], limit: Mapping[str, Any]) -> None:
        """Write the candidates and the memory limit that they were chosen under; reruns use them with the timings."""
        self._candidates, self.limit = list(candidates), limit
        self._update(ladder=self._candidates_json(), limit=store_tables.to_json(limit))

    def save_exchange(self, facts: Mapping[str, Any]) -> None:
        """Write the facts of the exchange between devices, with the limit."""
        self.limit = {**(self.limit or {}), "exchange": dict(facts)}
        self._update(limit=store_tables.to_json(self.limit))

    def save_disturbed(self, sentences: Sequence[str]) -> None:
        """Write sentences about interference of other processes, for results from these timings."""
        known = tuple(dict.fromkeys([*self.disturbed, *sentences]))[-_MAX_DISTURBED:]
        if known != self.disturbed:
            self.disturbed = known
            self._update(disturbed=store_tables.to_json(list(known)))

    def start_over(self) -> None:
        """
        Leave the earlier timings where they are, and measure the same candidates in a new run.

        The new run continues even if other processes interfere: otherwise a busy machine would never finish one.
        """
        self.earlier, self.disturbed, self._has_rows, self.was_started_over = Measured(), (), False, True
        self._insert()
        limit = self.limit or {}
        self.save_ladder(self._candidates, {name: limit[name] for name in limit if name not in _MEASURED_LIMITS})

    def finish(self) -> None:
        """Mark the run as whole: a rerun without a larger budget measures nothing."""
        self.finished = True
        self._update(state="finished")

    def _candidates_json(self) -> str:
        return store_tables.to_json([attrs.asdict(candidate) for candidate in self._candidates])

    def _update(self, **columns: str | float) -> None:
        self._write(store_tables.update_run, columns)

    def _write(self, statement: Callable[..., object], *values: object) -> None:
        """Commit one statement; if it fails, go on without the store."""
        if self._database is not None:
            try:
                statement(self._database, self._id, *values)
            except sqlite_file.ERRORS as error:
                self._disable(error)

    def _insert(self) -> None:
        def insert(database: sqlite3.Connection, _: int) -> None:
            self._id = store_tables.insert_run(
                database, identity=self._identity, conditions=self._conditions, budget=self._budget,
                notes=[sentence(each) for each in self.notes],
            )  # fmt: skip

        self._write(insert)

    def _disable(self, error: Exception) -> None:
        """Go on measuring without the store, and report it once."""
        self.close()
        self._warn(note("cache_unusable", path=self.path, reason=sqlite_file.reason(error)))

    def _warn(self, warning: Note) -> None:
        self.notes.append(warning)
        warnings.warn(sentence(warning), stacklevel=2)

    def _open(self, path: Path, *, refresh: bool, wait_seconds: float) -> None:
        """Lock the run, open the file, and find the run or insert it."""
        refusal: OSError | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock(path, wait_seconds)
            database = sqlite_file.connect(path, *TABLES, on_replaced=self._report_replaced)
        except OSError as error:
            if not (sqlite_file.is_read_only(error) and files.is_file(path)):
                raise
            database, refusal = sqlite_file.open_read_only(path, *TABLES), error
        self._resources.callback(database.close)
        run = self._find(database, refresh=refresh)
        dropped = [] if run is None else self._take_over(run)
        if refusal is not None:
            if not self.finished:
                raise refusal
            return
        self._database = database
        if run is None:
            self._insert()
        elif not self.finished:
            self._write(store_tables.reopen, self._budget, dropped)

    def _lock(self, path: Path, wait_seconds: float) -> None:
        """Lock the run, after waiting for another process that measures it."""
        start, name = time.monotonic(), store_tables.lock_name(self._identity)
        for seconds in (0.0, wait_seconds):
            try:
                self._resources.enter_context(sqlite_file.locked(path, name, seconds))
            except TimeoutError:
                if seconds:
                    raise TimeoutError(f"another process still measures the same run after {seconds:g} s") from None
                _LOG.warning("another process measures the same run; waiting for it, at most %g s", wait_seconds)
            else:
                if seconds:
                    self.notes.append(note("cache_waited", waited_seconds=time.monotonic() - start))
                return

    def _report_replaced(self, old: Path, reason: str) -> None:
        self._warn(note("cache_replaced", path=self.path, reason=reason, old=old))

    def _find(self, database: sqlite3.Connection, *, refresh: bool) -> StoredRun | None:
        """Return the run to continue, and read `earlier`; otherwise note how the conditions of the last run differ."""
        rows = database.execute(
            "SELECT id, conditions FROM runs WHERE identity = ? ORDER BY id DESC", (self._identity,)
        ).fetchall()
        same = [int(row["id"]) for row in rows if row["conditions"] == self._conditions]
        self.was_started_over = len(same) > 1 and not refresh
        if refresh:
            for number in same:
                store_tables.delete_run(database, number)
            return None
        for number in same or [row["id"] for row in rows[:1]]:
            try:
                run = store_tables.read_run(database, number)
                if same:
                    self.earlier = store_tables.read_measured(database, number)
                    return run
            except DamagedRun as damage:
                self._warn(note("cache_damaged", path=self.path, reason=damage))
            else:
                differences = "; ".join(_differences(run.conditions, json.loads(self._conditions)))
                self.notes.append(note("cache_conditions", differences=differences))
        return None

    def _take_over(self, run: StoredRun) -> list[int]:
        """Continue an earlier run; return the sizes whose outcomes are not final."""
        final = store_tables.final_outcomes(run, self.earlier, self._budget, self._memory_bytes)
        dropped = [outcome.batch_size for outcome in self.earlier.outcomes if outcome not in final]
        is_whole = {step.batch_size for step in run.ladder or ()} <= {outcome.batch_size for outcome in final}
        self.finished = run.state == "finished" and is_whole and not dropped
        self._id, self.earlier = run.id, attrs.evolve(self.earlier, outcomes=final)
        self._has_rows = bool(self.earlier.timings or final)
        if self._has_rows:
            self.ladder, self.limit, self.disturbed = run.ladder, run.limit, run.disturbed
            self._candidates = list(run.ladder or ())
        return dropped


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the fields that differ, with both values."""
    return [
        f"{name} was {_shorten(before.get(name))}, is {_shorten(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _shorten(value: object) -> str:
    text = str(value)
    return f"{text[:_HASH_SHOWN]}…" if _HASH.fullmatch(text) else text


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
            raise InvalidArgument("store", str(place), "a file in a folder that exists")


# --- listing and clearing ------------------------------------------------------------------------------------


def list_runs(path: Path | str) -> list[StoredRun]:
    """
    Return the runs of a store, oldest first; an empty list if there is no file.

    Raises:
        StoreError: If the file cannot be read, a run is damaged, or it is no store of this version.
    """
    with _opened(path) as database:
        return [store_tables.read_run(database, number) for number in _identities(database)] if database else []


def show(path: Path | str, run_id: int) -> tuple[StoredRun, Measured]:
    """
    Return one run with all its timings and outcomes.

    Raises:
        StoreError: If there is no such run, it is damaged, or the file cannot be read.
    """
    with _opened(path) as database:
        if database is None or run_id not in _identities(database):
            raise _no_such_run(path, run_id, _identities(database))
        return store_tables.read_run(database, run_id), store_tables.read_measured(database, run_id)


def clear(path: Path | str, run_id: int | None = None) -> int:
    """
    Delete one run, or all runs, and return their number.

    Raises:
        StoreError: If one of them is being measured right now, or there is no such run; nothing is deleted then.
    """
    with _opened(path, is_written=True) as database, contextlib.ExitStack() as locks:
        identities = _identities(database)
        if run_id is not None and run_id not in identities:
            raise _no_such_run(path, run_id, identities)
        if database is None:
            return 0
        chosen = [number for number in identities if run_id in {None, number}]  # a run that begins from now on stays
        for name in sorted({store_tables.lock_name(identities[number]) for number in chosen}):
            try:
                locks.enter_context(sqlite_file.locked(sqlite_file.place(path), name, 0.0))
            except TimeoutError:
                raise StoreError(
                    str(path), "another process is measuring a run of this store", "Wait until it ends, or stop it."
                ) from None
        for number in chosen:
            store_tables.delete_run(database, number)
        return len(chosen)


def _identities(database: sqlite3.Connection | None) -> dict[int, str]:
    """Return the identity of each run by its number, ascending."""
    return dict(map(tuple, database.execute("SELECT id, identity FROM runs ORDER BY id"))) if database else {}


def _no_such_run(path: Path | str, run_id: int, numbers: Iterable[int]) -> StoreError:
    known = ", ".join(map(str, numbers)) or "none"
    return StoreError(str(path), f"it holds no run {run_id}", f"It holds: {known}.")


@contextlib.contextmanager
def _opened(path: Path | str, *, is_written: bool = False) -> Iterator[sqlite3.Connection | None]:
    """Open a store for reading, or for writing if `is_written`; yield None if it is missing or empty."""
    try:
        path = sqlite_file.place(path)
        if not path.exists() or not path.stat().st_size:
            yield None
            return
        opener = sqlite_file.connect if is_written else sqlite_file.open_read_only
        with contextlib.closing(opener(path, *TABLES)) as database:
            is_empty = not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            yield None if is_empty else database  # another process is creating its tables
    except DamagedRun as damage:
        raise StoreError(str(path), str(damage), f"Delete it: cubatch store clear {damage.run}.") from damage
    except sqlite_file.ERRORS as error:
        raise StoreError(str(path), sqlite_file.reason(error), "Name another path.") from error
