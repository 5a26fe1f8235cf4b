"""
One SQLite file that many processes share, and that may be damaged, full, or far away.

Writers wait for each other (`BUSY_SECONDS`).  In WAL mode with `synchronous=NORMAL` a commit is a write
into the page cache of the kernel, which outlives a killed process and costs microseconds; only a
power cut may lose the last ones, and it never damages the file.  WAL needs memory that all users of
the file share, so on a network file system the older rollback journal takes its place.

A disk that cannot be read is no damage.  What looks damaged is looked at again, by whoever has the file
to himself, and moved aside only if all of it could be read and SQLite still says so.

Errors are recognised by type and SQLite's result code, never by their text.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import platformdirs

from cubatch.errors import StoreError
from cubatch.mounts import filesystem_type, is_network

BUSY_SECONDS = 30.0  # for one write of another process

_MAGIC = b"SQLite format 3\0"
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_REPORTED = ("SQLITE_CORRUPT", "SQLITE_IOERR", "SQLITE_NOMEM")
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_PASSING = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
_NO_SHARED_MEMORY = frozenset({
    sqlite3.SQLITE_IOERR_SHMOPEN, sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_SHMLOCK, sqlite3.SQLITE_IOERR_SHMMAP,
})  # fmt: skip
_JOURNALS = ("-wal", "-shm", "-journal")
_WAL_PAGES = 50  # of 4 KiB, after which they go into the file: a run of 30 KB needs no journal of megabytes
Upgrades = Mapping[int, str]
"""By version, the statement that makes it of the version before."""
_PIECE_BYTES = 1 << 20


class Database(sqlite3.Connection):
    """
    An open file, marked as in use by a lock that all its users share, so that nobody moves it aside meanwhile.

    The kernel drops the mark of a process that ends, however it ends.
    """

    _mark: BinaryIO | None = None
    _path: Path
    _place: tuple[int, int]

    def mark(self, path: Path, mark: BinaryIO) -> None:
        """Take over the shared lock until the file is closed, and remember which file it is."""
        found = path.stat()
        self._mark, self._path, self._place = mark, path, (found.st_dev, found.st_ino)

    def has_moved(self) -> bool:
        """
        Say whether another file, or none, is now where this one was: nobody will find what is written here.

        Raises:
            OSError: If the place cannot be reached.
        """
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return True
        return (found.st_dev, found.st_ino) != self._place

    def close(self) -> None:
        """Close the file, then say that it is no longer in use."""
        super().close()
        if self._mark is not None:
            self._mark.close()


def place(path: Path | str) -> Path:
    """
    Say which file a path leads to, through links too, since locks lie beside the file.

    Raises:
        StoreError: If no file can be there.
        OSError: If the place cannot be reached.
    """
    if "\0" in str(path):
        raise StoreError(repr(str(path)), "a path cannot hold a zero byte", "Name a file.")
    if not str(path):
        raise StoreError("''", "it has no name", "Name a file.")
    try:
        named = Path(path).expanduser()
        found = named.resolve()
    except RuntimeError as error:  # a user without a home, links in a circle
        raise OSError(str(error)) from error
    if found.is_dir():
        raise StoreError(str(path), "it is a directory", "Name a file in it.")
    if found.exists() and not found.is_file():  # a device, a pipe
        raise StoreError(str(path), "it is no regular file", "Name a file.")
    if named.is_symlink() and not found.parent.is_dir():
        raise StoreError(str(path), f"it is a link to {found}, and that folder is not there", "Make the folder first.")
    return found


def connect(
    path: Path,
    schema: str,
    version: int,
    *,
    upgrades: Upgrades | None = None,
    on_damage: Callable[[Path], None] | None = None,
) -> Database:
    """
    Open the file, check it, and make its tables if it has none.

    Args:
        path: The file.
        schema: CREATE statements of the newest version.
        version: Its number, kept as `user_version`.
        upgrades: For files of older versions.
        on_damage: A damaged file is moved aside, a new one begun, and this called with where the old one
            is.  Without it, damage is an error.  A file that another user has open is never moved.

    Returns:
        A connection that commits each statement, with foreign keys on and `sqlite3.Row` rows.

    Raises:
        StoreError: If the file is from a newer version, or another program's database.
        sqlite3.DatabaseError: Whatever SQLite reports; `reason` says what it means.
        OSError: If the place cannot be used.
    """
    # One at a time: two that switch the journal at once fail each other, two that find damage move a good file.
    with locked(path, "open", BUSY_SECONDS), contextlib.ExitStack() as undo:
        mark = undo.enter_context(_lock_file(path, "used"))
        fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
        try:
            database = _open(path, schema, version, upgrades)
        except sqlite3.DatabaseError as error:
            if on_damage is None or _code(error) not in _DAMAGED:
                raise
            database = _look_again(path, schema, version, upgrades, mark, on_damage)
        undo.callback(database.close)
        database.mark(path, mark)
        undo.pop_all()
    return database


def copied(path: Path, schema: str, version: int, *, upgrades: Upgrades | None = None) -> Database:
    """
    Read a file into memory where nothing may be written, not even a lock; what is written to the copy is kept nowhere.

    Raises:
        StoreError: As `connect`.
        sqlite3.DatabaseError: Whatever SQLite reports.
        OSError: If its latest rows are still in its journal, which is not read where nothing may be written.
    """
    journal = path.with_name(path.name + "-wal")
    if journal.exists() and journal.stat().st_size:
        raise OSError(errno.EROFS, f"its latest rows are in {journal.name}, which cannot be read there", str(path))
    database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False, factory=Database)
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as source:
            source.backup(database)
        _set_up(database, path, schema, version, upgrades)
    except BaseException:
        database.close()
        raise
    return database


def is_read_only(error: OSError) -> bool:
    """Say whether a place may only be read, or not even that."""
    return error.errno in _READ_ONLY


def _look_again(
    path: Path, schema: str, version: int, upgrades: Upgrades | None, mark: BinaryIO, on_damage: Callable[[Path], None]
) -> Database:
    """
    Open a file that looked damaged: in place if it was a passing fault, else anew with the old one moved aside.

    Raises:
        OSError: If somebody else has it open, or not all of it can be read.
    """
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        words = "it looks damaged, and is not moved aside while another run has it open"
        raise OSError(errno.EBUSY, words, str(path)) from None
    # Closing the file drops every lock that SQLite holds on it in this process; nobody here has it open now.
    begins = _read_whole(path)
    try:
        database = _open(path, schema, version, upgrades)
    except sqlite3.DatabaseError as error:
        if _code(error) not in _DAMAGED:
            raise
        if path.suffix != ".sqlite3" and begins != _MAGIC:  # somebody's script or spec must stay where it is
            raise StoreError(str(path), "it is no database", "Name a new file, or one that cubatch made.") from error
        on_damage(_move_aside(path))
        database = _open(path, schema, version, upgrades)
    fcntl.flock(mark, fcntl.LOCK_SH)
    return database


def _read_whole(path: Path) -> bytes:
    """Read the file and its journals to their ends, so that a disk that fails says so; give the first bytes."""
    for suffix in ("-wal", "-journal"):
        with contextlib.suppress(FileNotFoundError), path.with_name(path.name + suffix).open("rb") as journal:
            while journal.read(_PIECE_BYTES):
                pass
    with path.open("rb") as file:
        begins = file.read(len(_MAGIC))
        while file.read(_PIECE_BYTES):
            pass
    return begins


def _open(path: Path, schema: str, version: int, upgrades: Upgrades | None) -> Database:
    database = sqlite3.connect(
        path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, factory=Database
    )
    try:
        _set_up(database, path, schema, version, upgrades)
    except BaseException:
        database.close()
        raise
    return database


def _set_up(database: Database, path: Path, schema: str, version: int, upgrades: Upgrades | None) -> None:
    """Check what is in an open file, choose how it is written, and make the tables that it lacks."""
    database.row_factory = sqlite3.Row
    database.text_factory = _decoded
    found = database.execute("PRAGMA user_version").fetchone()[0]
    _check(database, path, found, version, schema)
    database.execute("PRAGMA foreign_keys = ON")
    _choose_journal(database, path)
    if found == version:
        return
    newer = [statement for number, statement in sorted((upgrades or {}).items()) if number > found]
    with transaction(database):
        for statement in (";".join(newer) if found else schema).split(";"):
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {version}")


def _decoded(text: bytes) -> str:
    """Read text; bytes that are no UTF-8 become surrogates, which whoever checks a field refuses."""
    return text.decode(errors="surrogateescape")


def _check(database: sqlite3.Connection, path: Path, found: int, version: int, schema: str) -> None:
    """Refuse what is not ours, and find damage before it is built upon."""
    if found > version:
        reason = f"it has schema {found}, this cubatch knows {version}"
        raise StoreError(str(path), reason, "Update cubatch, pass store=False, or another path.")
    there = {row["name"] for row in database.execute("SELECT name FROM sqlite_master")}
    if not there.issuperset(re.findall(r"CREATE TABLE (\w+)", schema)) if found else there:
        raise StoreError(str(path), "it is another program's database")
    report = database.execute("PRAGMA quick_check(1)").fetchone()[0]
    if report != "ok":
        raise _reported(report)


def _reported(report: str) -> sqlite3.DatabaseError:
    """
    Make an error of a row of quick_check, which tells of damage, but also, by result code, of failing reads.

    Example:
        >>> _reported("Tree 4 page 4: unable to get the page. error code=266").sqlite_errorname
        'SQLITE_IOERR_READ'
    """
    named = re.search(r"error code[ =](\d+)", report)
    code = int(named[1]) if named else sqlite3.SQLITE_CORRUPT
    error = sqlite3.DatabaseError(report)
    names = (name for name, value in vars(sqlite3).items() if value == code and name.startswith(_REPORTED))
    error.sqlite_errorcode, error.sqlite_errorname = code, next(names, f"result code {code}")
    return error


def _choose_journal(database: sqlite3.Connection, path: Path) -> None:
    def journal(mode: str) -> str:
        return str(database.execute(f"PRAGMA journal_mode = {mode}").fetchone()[0])

    def has_wal() -> bool:
        try:
            return journal("wal") == "wal"
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", None) not in _NO_SHARED_MEMORY:
                raise
            return False

    if is_network(filesystem_type(path)) or not has_wal():
        journal("delete")
        database.execute("PRAGMA synchronous = FULL")
    else:
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Keep all statements of the block or none."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back already
            database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


@contextlib.contextmanager
def locked(path: Path, name: str, seconds: float) -> Iterator[None]:
    """
    Hold a named lock beside the file, waiting for it at most so long (TimeoutError).

    It is a file lock of the kernel's, which drops it when the holder ends, however it ends.  The lock's file
    stays: removing one that another process is about to lock would let two in.
    """
    deadline = time.monotonic() + seconds
    with _lock_file(path, name) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"another process held {file.name} for {seconds:g} s") from None
                time.sleep(0.05)
        yield


def _lock_file(path: Path, name: str) -> BinaryIO:
    place = path.with_name(path.name + ".locks")
    place.mkdir(mode=0o700, exist_ok=True)  # as the file, which SQLite lets nobody else write either
    return (place / name).open("ab")


def _move_aside(path: Path) -> Path:
    """Rename a damaged file and its journals, which would be played into a new file of that name."""
    aside = f"{path.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
    for suffix in (*_JOURNALS, ""):
        file = path.with_name(path.name + suffix)
        if file.exists():
            file.rename(path.with_name(aside + suffix))
    return path.with_name(aside)


def reason(error: sqlite3.Error | OSError) -> str:
    """Say in words why the file cannot be used."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    words = {
        sqlite3.SQLITE_FULL: "the disk is full",
        sqlite3.SQLITE_READONLY: "the place is read-only",
        sqlite3.SQLITE_CANTOPEN: "the file cannot be opened",
        sqlite3.SQLITE_IOERR: "reading or writing it failed",
        sqlite3.SQLITE_BUSY: f"it was locked for {BUSY_SECONDS:g} s, or its file system has no locks",
        sqlite3.SQLITE_CORRUPT: "the file is damaged; the next run moves it aside",
        sqlite3.SQLITE_NOTADB: "the file is damaged; the next run moves it aside",
        sqlite3.SQLITE_READONLY_DBMOVED: "the file was moved or removed while it was in use",
    }
    code = _code(error)
    if code is None:
        raise error  # SQLite reported nothing: a mistake in our own call
    return f"{words.get(error.sqlite_errorcode, words.get(code, 'SQLite failed'))} ({error.sqlite_errorname})"


def is_passing(error: sqlite3.Error | OSError) -> bool:
    """Say whether the next write may succeed: the disk is full, or failed once."""
    return isinstance(error, sqlite3.Error) and _code(error) in _PASSING


def _code(error: sqlite3.Error) -> int | None:
    """Give the primary result code; None for an error that SQLite did not report."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def default_path() -> Path:
    """Say where the store is when no path is given: in the user's cache directory."""
    try:
        folder = platformdirs.user_cache_dir("cubatch")
    except RuntimeError:  # nobody's home: whoever opens it says so
        folder = "~/.cache/cubatch"
    return Path(folder) / "store.sqlite3"
