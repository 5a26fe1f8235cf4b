"""
SQLite files that several processes share: opening, checking, locking, and the reasons of failures.

With the rollback journal and `synchronous=OFF` a commit outlives a killed process and waits for no disk: 0.3 ms. A
power cut may damage the file, which the next process reports. The journal also works on a network file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from cubatch.errors import StoreError
from cubatch.units import visible

ERRORS = (sqlite3.Error, OSError, UnicodeError)
"""What a file that cannot be used raises; UnicodeError: `sqlite3` decodes names and messages, also damaged ones."""
BUSY_SECONDS = 30.0  # to wait for one write of another process
_MAGIC = b"SQLite format 3\0"


def place(path: Path | str) -> Path:
    """
    Return the absolute path of a file, which need not exist, with links and ~ resolved.

    Raises StoreError if the path is empty, invalid, or exists and is no regular file.  Raises OSError for links in a
    circle or a user without a home.
    """
    try:
        file = Path(path).expanduser().resolve()
    except ValueError as error:  # a zero byte
        raise StoreError(repr(str(path)), str(error), "Name a file.") from error
    except RuntimeError as error:  # a user without a home, links in a circle
        raise OSError(str(error)) from error
    if not str(path) or (file.exists() and not file.is_file()):
        raise StoreError(repr(str(path)), "it is no regular file", "Name a file.")
    return file


def connect(path: Path, schema: str, version: int) -> sqlite3.Connection:
    """
    Open an SQLite file, check it, and create its tables if it has none.

    Args:
        schema: CREATE statements of the tables.
        version: The number of the schema, stored as `user_version`.

    Returns:
        A connection that commits each statement, with foreign keys on and `sqlite3.Row` rows.

    Raises:
        StoreError: If the file belongs to another program or a newer version.
        sqlite3.Error, OSError, UnicodeError: If the file cannot be opened, is damaged, no database or of an older
            version.
    """
    with locked(path, "open", BUSY_SECONDS):  # of two that create the tables, one would fail
        if path.exists() and path.stat().st_size:
            with path.open("rb") as file:
                if file.read(len(_MAGIC)) != _MAGIC:  # SQLite takes a few bytes for an empty database
                    raise _unusable("file is not a database", sqlite3.SQLITE_NOTADB)
        database = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        database.row_factory = sqlite3.Row
        try:
            is_new = _check(database, path, schema, version)
            database.execute("PRAGMA foreign_keys = ON")
            database.execute("PRAGMA synchronous = OFF")
            if is_new:
                database.executescript(f"BEGIN IMMEDIATE; {schema}; PRAGMA user_version = {version}; COMMIT;")
        except BaseException:
            database.close()
            raise
        return database


def _check(database: sqlite3.Connection, path: Path, schema: str, version: int) -> bool:
    """
    Return whether the database is new: it has neither tables nor a version number.

    Raises StoreError if it is of another program or a newer version, sqlite3.DatabaseError if it is damaged or older.
    """
    number = database.execute("PRAGMA user_version").fetchone()[0]
    tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not number and not tables:
        return True
    if not number or tables.isdisjoint(re.findall(r"CREATE TABLE (\w+)", schema)):
        raise StoreError(str(path), "it is another program's database")
    words = f"it has schema {number}, this cubatch uses {version}"
    if number > version:
        raise StoreError(str(path), words, "Update cubatch, pass store=False, or another path.")
    if number < version:
        raise _unusable(words, sqlite3.SQLITE_SCHEMA)
    report = database.execute("PRAGMA quick_check(1)").fetchone()[0]
    if report != "ok":
        code = re.search(r"error code[ =](\d+)", report)  # of a read that failed; without one it is damage
        raise _unusable(report, int(code[1]) if code else sqlite3.SQLITE_CORRUPT)
    return False


def _unusable(report: str, code: int) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(report)
    error.sqlite_errorcode = code
    return error


@contextlib.contextmanager
def locked(path: Path, name: str, seconds: float) -> Iterator[None]:
    """
    Hold the lock file `name` in the folder PATH.locks during the block; raise TimeoutError after waiting `seconds`.

    It is a file lock, which the kernel drops when its holder ends. The lock file is never removed: two processes, of
    which the second creates the file again, would both hold a lock.
    """
    deadline = time.monotonic() + seconds
    folder = path.with_name(path.name + ".locks")
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / name).open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    what = f"another process held {file.name} for {seconds:g} s"
                    raise TimeoutError(f"{what}; wait until it ends") from None
                time.sleep(0.05)
        yield


def reason(error: Exception) -> str:
    """Return why the database cannot be used, as a phrase; the type of `error` is in `ERRORS`."""
    if isinstance(error, OSError):
        return error.strerror or str(error).removesuffix(".")
    words = {
        sqlite3.SQLITE_FULL: "the disk is full",
        sqlite3.SQLITE_READONLY: "the file or its folder is read-only",
        sqlite3.SQLITE_CANTOPEN: "the file cannot be opened",
        sqlite3.SQLITE_IOERR: "reading or writing it failed",
        sqlite3.SQLITE_BUSY: f"it was locked for {BUSY_SECONDS:g} s",
        sqlite3.SQLITE_CORRUPT: "the file is damaged; delete it",
        sqlite3.SQLITE_NOTADB: "the file is damaged, or no database; if it was a store, delete it",
        sqlite3.SQLITE_SCHEMA: "the file is from an older cubatch; delete it",
    }
    return f"{words.get(_code(error), 'SQLite failed')} ({visible(str(error))})"


def remedy(error: Exception) -> str:
    """Return what to do about a database that cannot be used for this `reason`, as a sentence."""
    is_deleted = _code(error) in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_SCHEMA}
    return "The next run creates a new one." if is_deleted else "Name another path."


def _code(error: Exception) -> int:
    """Return the primary result code of SQLite; 0 for another error."""
    code: int = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code


def default_path() -> Path:
    """Return the default path of the SQLite file of cached timings, in the user's cache directory."""
    try:
        folder = platformdirs.user_cache_dir("cubatch")
    except RuntimeError:  # a user without a home: opening the file reports it
        folder = "~/.cache/cubatch"
    return Path(folder) / "store.sqlite3"
