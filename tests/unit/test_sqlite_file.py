"""A SQLite file that processes share: its journal, its locks, its version, and damage."""

from __future__ import annotations

import functools
import sqlite3

import pytest

from cubatch import sqlite_file
from cubatch.errors import StoreError

SCHEMA = "CREATE TABLE numbers (number INTEGER)"


@pytest.fixture
def file(tmp_path):
    """A file with two thousand rows."""
    path = tmp_path / "file.sqlite3"
    database = sqlite_file.connect(path, SCHEMA, 1)
    database.execute("BEGIN")
    database.executemany("INSERT INTO numbers VALUES (?)", [(number,) for number in range(2000)])
    database.execute("COMMIT")
    database.close()
    return path


def test_a_lock_is_free_again_after_its_holder(tmp_path):
    """One holder per name; another name is another lock; a wait that is too long raises TimeoutError."""
    path = tmp_path / "file"
    with sqlite_file.locked(path, "a", 0.0), sqlite_file.locked(path, "b", 0.0):
        again = sqlite_file.locked(path, "a", 0.0)
        with pytest.raises(TimeoutError, match="held"):
            again.__enter__()
    with sqlite_file.locked(path, "a", 0.0):
        pass


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (13, "full"),
        (778, "writing it failed"),
        (264, "read-only"),
        (14, "cannot be opened"),
        (5, "locked"),
        (267, "damaged"),
        (26, "no database"),
    ],
)
def test_reasons_follow_the_result_code(code, words):
    """Codes of sqlite.org/rescode.html, extended ones by their last byte; the user has one thing to do, not two."""
    error = sqlite3.OperationalError("anything")
    error.sqlite_errorcode = code
    assert words in sqlite_file.reason(error)
    is_deleted = "delete" in sqlite_file.reason(error)
    assert is_deleted != ("path" in sqlite_file.remedy(error))
    assert is_deleted == (code in {267, 26})


def damage(path, how):
    content = path.read_bytes()
    if how == "text":
        path.write_bytes(b"this is no database\n" * 100)
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "zeroed page":
        path.write_bytes(content[:8192] + bytes(4096) + content[12288:])
    else:
        database = sqlite3.connect(path)
        database.execute("PRAGMA user_version = 0" if how == "no version" else "PRAGMA user_version = 1")
        database.close()
    return path.read_bytes()


@pytest.mark.parametrize(
    ("how", "version", "reason"),
    [
        ("text", 1, "no database"),
        ("cut", 1, "damaged"),
        ("zeroed page", 1, "damaged"),
        ("old", 2, "older cubatch; delete"),
    ],
)
def test_a_damaged_or_old_file_is_an_error(file, how, version, reason):
    """Its content stays, and the reason names the remedy."""
    content = damage(file, how)
    with pytest.raises(sqlite3.DatabaseError) as caught:
        sqlite_file.connect(file, SCHEMA, version)
    assert reason in sqlite_file.reason(caught.value)
    assert file.read_bytes() == content


def test_files_of_others_are_errors(file, tmp_path):
    """A newer version, and another program's database: the message names the reason."""
    other = tmp_path / "other.sqlite3"
    database = sqlite3.connect(other)
    database.execute("CREATE TABLE accounts (name TEXT)")
    database.close()
    for path, version, words in ((file, 0, "Update cubatch"), (other, 1, "another program")):
        with pytest.raises(StoreError, match=words):
            sqlite_file.connect(path, SCHEMA, version)
    byte = tmp_path / "byte"
    byte.write_bytes(b"x")
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        sqlite_file.connect(byte, SCHEMA, 1)


def test_a_read_that_fails_is_no_damage(file, monkeypatch):
    """`quick_check` reports it like damage, with the result code of the read (266)."""

    class Failing(sqlite3.Connection):
        def execute(self, statement, *values):
            if statement.startswith("PRAGMA quick_check"):
                return super().execute("SELECT 'Tree 4 page 4: unable to get the page. error code=266'")
            return super().execute(statement, *values)

    monkeypatch.setattr(sqlite_file.sqlite3, "connect", functools.partial(sqlite3.connect, factory=Failing))
    with pytest.raises(sqlite3.DatabaseError, match="unable to get") as caught:
        sqlite_file.connect(file, SCHEMA, 1)
    assert "reading or writing it failed" in sqlite_file.reason(caught.value)


@pytest.mark.parametrize("name", ["", "a\0b", "."])
def test_no_file_can_be_there(tmp_path, monkeypatch, name):
    """An empty name, a zero byte, a directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="Name a file"):
        sqlite_file.place(name)


def test_a_place_is_where_a_link_leads(file):
    """Locks lie next to the file itself."""
    link = file.with_name("link")
    link.symlink_to(file)
    assert sqlite_file.place(link) == file.resolve()
