"""One SQLite file, many processes, and file systems that do not do what SQLite hopes."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from cubatch import dbfile
from cubatch.errors import StoreError

SCHEMA = "CREATE TABLE numbers (number INTEGER)"


def pragma(database, name):
    return database.execute(f"PRAGMA {name}").fetchone()[0]


@pytest.mark.parametrize(
    ("filesystem", "journal", "synchronous"),
    [("ext4", "wal", 1), ("nfs4", "delete", 2), ("fuse.sshfs", "delete", 2), ("", "wal", 1)],
)
def test_the_journal_follows_the_file_system(tmp_path, monkeypatch, filesystem, journal, synchronous):
    """WAL where all users share memory, else the rollback journal; synchronous is 1 (NORMAL) or 2 (FULL)."""
    monkeypatch.setattr(dbfile, "filesystem_type", lambda path: filesystem)
    database = dbfile.connect(tmp_path / "file", SCHEMA, 1)
    assert (pragma(database, "journal_mode"), pragma(database, "synchronous")) == (journal, synchronous)
    database.execute("INSERT INTO numbers VALUES (3)")
    database.close()


def test_a_file_that_moved_to_a_network_leaves_wal(tmp_path, monkeypatch):
    """The journal mode is written in the file, so a store made on a disk must be turned back."""
    dbfile.connect(tmp_path / "file", SCHEMA, 1).close()
    monkeypatch.setattr(dbfile, "filesystem_type", lambda path: "nfs")
    database = dbfile.connect(tmp_path / "file", SCHEMA, 1)
    assert pragma(database, "journal_mode") == "delete"
    database.close()


def test_a_file_system_that_refuses_wal_gets_the_other_journal(tmp_path, monkeypatch):
    """SQLite answers with the mode it could set, not with an error."""

    class Refusing(sqlite3.Connection):
        def execute(self, statement, *values):
            return super().execute(
                "SELECT 'delete'" if statement == "PRAGMA journal_mode = wal" else statement, *values
            )

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *places, **options: connect(*places, factory=Refusing, **options))
    database = dbfile.connect(tmp_path / "file", SCHEMA, 1)
    assert (pragma(database, "journal_mode"), pragma(database, "synchronous")) == ("delete", 2)
    database.close()


def test_filesystem_type_takes_the_innermost_and_latest_mount(monkeypatch):
    """Lines as in proc(5): the deepest mount point that holds the path, the last of two at one place."""
    lines = [
        "1 0 8:1 / / rw shared:1 - ext4 /dev/sda rw",
        "2 1 0:9 / /home rw - autofs systemd rw",
        "3 1 0:10 / /home rw - nfs4 server:/home rw",
        r"4 1 0:11 / /mnt/my\040share rw - cifs //server/share rw",
        "5 1 0:12 / /homework rw - xfs /dev/sdb rw",
    ]
    monkeypatch.setattr(Path, "read_bytes", lambda self: "\n".join(lines).encode())
    expected = {"/home/me/x": "nfs4", "/homework/x": "xfs", "/mnt/my share/x": "cifs", "/mnt/x": "ext4"}
    assert {path: dbfile.filesystem_type(Path(path)) for path in expected} == expected


@pytest.mark.parametrize("name", [b"caf\xe9", b"next\xc2\x85line"])
def test_filesystem_type_bears_any_name_of_a_mount(monkeypatch, name):
    """A stick whose label is no UTF-8, or holds what Python takes for the end of a line, stops no measurement."""
    lines = [b"1 0 8:1 / / rw - ext4 /dev/sda rw", b"2 1 0:9 / /media/" + name + b" rw - vfat /dev/sdb rw"]
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"\n".join(lines))
    found = [dbfile.filesystem_type(Path("/media") / place) for place in (os.fsdecode(name), "x")]
    assert found == ["vfat", "ext4"]


def test_a_failed_transaction_leaves_nothing(tmp_path):
    """All statements of the block are kept or none."""
    database = dbfile.connect(tmp_path / "file", SCHEMA, 1)

    def fail():
        with dbfile.transaction(database):
            database.execute("INSERT INTO numbers VALUES (3)")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert database.execute("SELECT count(*) FROM numbers").fetchone()[0] == 0
    database.close()


def test_a_lock_is_free_again_after_its_holder(tmp_path):
    """One holder per name; another name is another lock; whoever waits too long gets TimeoutError."""
    file = tmp_path / "file"
    with dbfile.locked(file, "a", 0.0), dbfile.locked(file, "b", 0.0):
        again = dbfile.locked(file, "a", 0.0)
        with pytest.raises(TimeoutError, match="held"):
            again.__enter__()
    with dbfile.locked(file, "a", 0.0):
        pass


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (13, "full"),
        (778, "writing it failed"),
        (1032, "read-only"),
        (14, "cannot be opened"),
        (5, "held it"),
        (267, "damaged"),
    ],
)
def test_reasons_follow_the_result_code(code, words):
    """Codes of sqlite.org/rescode.html, extended ones by their last byte; the text of the error says nothing."""
    error = sqlite3.OperationalError("database or disk is anything")
    error.sqlite_errorcode, error.sqlite_errorname = code, "NAME"
    assert words in dbfile.reason(error)
    assert "(NAME)" in dbfile.reason(error)


def test_our_own_mistakes_are_not_taken_for_a_failing_disk():
    """An error that SQLite did not report comes out as it is."""
    with pytest.raises(sqlite3.ProgrammingError):
        dbfile.reason(sqlite3.ProgrammingError("bad parameters"))


def test_a_file_that_never_was_a_database_stays_where_it_is(tmp_path):
    """A script named as the store by mistake is refused and keeps its place and content."""
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\necho mine\n" * 100)
    with pytest.raises(StoreError, match="no database"):
        dbfile.connect(script, SCHEMA, 1, on_damage=lambda _: None)
    assert script.read_text().startswith("#!/bin/sh")
    assert [path.name for path in tmp_path.glob("*damaged*")] == []
