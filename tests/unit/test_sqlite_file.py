"""One SQLite file, many processes, and file systems that do not do what SQLite hopes."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from cubatch import sqlite_file
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
    monkeypatch.setattr(sqlite_file, "filesystem_type", lambda path: filesystem)
    database = sqlite_file.connect(tmp_path / "file", SCHEMA, 1)
    assert (pragma(database, "journal_mode"), pragma(database, "synchronous")) == (journal, synchronous)
    database.execute("INSERT INTO numbers VALUES (3)")
    database.close()


def test_a_file_that_moved_to_a_network_leaves_wal(tmp_path, monkeypatch):
    """The journal mode is written in the file, so a store made on a disk must be turned back."""
    sqlite_file.connect(tmp_path / "file", SCHEMA, 1).close()
    monkeypatch.setattr(sqlite_file, "filesystem_type", lambda path: "nfs")
    database = sqlite_file.connect(tmp_path / "file", SCHEMA, 1)
    assert pragma(database, "journal_mode") == "delete"
    database.close()


def test_a_file_system_that_refuses_wal_gets_the_other_journal(tmp_path, monkeypatch):
    """SQLite answers with the mode it could set, not with an error."""

    class Refusing(sqlite_file.Database):
        def execute(self, statement, *values):
            return super().execute(
                "SELECT 'delete'" if statement == "PRAGMA journal_mode = wal" else statement, *values
            )

    monkeypatch.setattr(sqlite_file, "Database", Refusing)
    database = sqlite_file.connect(tmp_path / "file", SCHEMA, 1)
    assert (pragma(database, "journal_mode"), pragma(database, "synchronous")) == ("delete", 2)
    database.close()


def test_a_failed_transaction_leaves_nothing(tmp_path):
    """All statements of the block are kept or none."""
    database = sqlite_file.connect(tmp_path / "file", SCHEMA, 1)

    def fail():
        with sqlite_file.transaction(database):
            database.execute("INSERT INTO numbers VALUES (3)")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert database.execute("SELECT count(*) FROM numbers").fetchone()[0] == 0
    database.close()


def test_a_lock_is_free_again_after_its_holder(tmp_path):
    """One holder per name; another name is another lock; whoever waits too long gets TimeoutError."""
    file = tmp_path / "file"
    with sqlite_file.locked(file, "a", 0.0), sqlite_file.locked(file, "b", 0.0):
        again = sqlite_file.locked(file, "a", 0.0)
        with pytest.raises(TimeoutError, match="held"):
            again.__enter__()
    with sqlite_file.locked(file, "a", 0.0):
        pass


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (13, "full"),
        (778, "writing it failed"),
        (264, "read-only"),
        (1032, "moved or removed"),
        (14, "cannot be opened"),
        (5, "locked"),
        (267, "damaged"),
    ],
)
def test_reasons_follow_the_result_code(code, words):
    """Codes of sqlite.org/rescode.html, extended ones by their last byte; the text of the error says nothing."""
    error = sqlite3.OperationalError("database or disk is anything")
    error.sqlite_errorcode, error.sqlite_errorname = code, "NAME"
    assert words in sqlite_file.reason(error)
    assert "(NAME)" in sqlite_file.reason(error)


def test_our_own_mistakes_are_not_taken_for_a_failing_disk():
    """An error that SQLite did not report comes out as it is."""
    with pytest.raises(sqlite3.ProgrammingError):
        sqlite_file.reason(sqlite3.ProgrammingError("bad parameters"))


def test_a_file_that_never_was_a_database_stays_where_it_is(tmp_path):
    """A script named as the store by mistake is refused and keeps its place and content."""
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\necho mine\n" * 100)
    with pytest.raises(StoreError, match="no database"):
        sqlite_file.connect(script, SCHEMA, 1, on_damage=lambda _: None)
    assert script.read_text().startswith("#!/bin/sh")
    assert [path.name for path in tmp_path.glob("*damaged*")] == []


# --- what looks damaged and is not ---------------------------------------------------------------------------

UNREADABLE = "*** in database main ***\nTree 2 page 2: unable to get the page. error code=266"
WRONG = "*** in database main ***\nTree 2 page 2: btreeInitPage() returns error code 11"


def answering(monkeypatch, *answers):
    """Let each quick_check to come give one of these, a row or the code of an error; after them, the real one."""
    left = list(answers)

    class Answering(sqlite_file.Database):
        def execute(self, statement, *values):
            if not statement.startswith("PRAGMA quick_check") or not left:
                return super().execute(statement, *values)
            answer = left.pop(0)
            if isinstance(answer, str):
                return super().execute("SELECT ?", (answer,))
            error = sqlite3.DatabaseError("injected")
            error.sqlite_errorcode, error.sqlite_errorname = answer, f"INJECTED_{answer}"
            raise error

    monkeypatch.setattr(sqlite_file, "Database", Answering)


@pytest.fixture
def kept(tmp_path):
    """Make a whole file that holds one number."""
    path = tmp_path / "kept.sqlite3"
    database = sqlite_file.connect(path, SCHEMA, 1)
    database.execute("INSERT INTO numbers VALUES (3)")
    database.close()
    return path


def numbers(path):
    """Read the numbers, and that nothing was moved."""
    assert list(path.parent.glob("*damaged*")) == []
    database = sqlite_file.connect(path, SCHEMA, 1)
    found = [row["number"] for row in database.execute("SELECT number FROM numbers")]
    database.close()
    return found


@pytest.mark.parametrize(
    "answers",
    [
        [UNREADABLE],
        [sqlite3.SQLITE_IOERR],
        [WRONG, UNREADABLE],
        [sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_IOERR | 1 << 8],
    ],
    ids=str,
)
def test_a_page_that_cannot_be_read_is_no_damage(monkeypatch, kept, answers):
    """quick_check tells of a failing read by a row that names its code, or by an error, at the first or second look."""
    answering(monkeypatch, *answers)
    with pytest.raises(sqlite3.DatabaseError) as caught:
        sqlite_file.connect(kept, SCHEMA, 1, on_damage=lambda _: None)
    monkeypatch.undo()
    assert "reading or writing it failed" in sqlite_file.reason(caught.value)
    assert numbers(kept) == [3]


@pytest.mark.parametrize("answer", [WRONG, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB])
def test_what_a_second_look_does_not_find_was_no_damage(monkeypatch, kept, answer):
    """A fault that has passed costs nothing: the file is used as it is."""
    answering(monkeypatch, answer)
    moved = []
    database = sqlite_file.connect(kept, SCHEMA, 1, on_damage=moved.append)
    assert [row["number"] for row in database.execute("SELECT number FROM numbers")] == [3]
    database.close()
    assert moved == []


@pytest.mark.parametrize("suffix", ["", "-wal", "-journal"])
def test_a_file_that_plain_reading_fails_on_is_not_moved(monkeypatch, kept, suffix):
    """Whatever SQLite makes of it, EIO from the file or a journal of it is a failing disk, told by the error's text."""
    answering(monkeypatch, WRONG, WRONG)
    unreadable, opened = kept.with_name(kept.name + suffix), Path.open

    def fail(path, *arguments):
        if path == unreadable:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, *arguments)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(OSError, match="Input/output error"):
        sqlite_file.connect(kept, SCHEMA, 1, on_damage=lambda _: None)
    monkeypatch.undo()
    assert numbers(kept) == [3]


def test_damage_is_what_every_look_finds(monkeypatch, kept):
    """Read to its end and wrong twice: moved aside, and a new file begun."""
    answering(monkeypatch, WRONG, WRONG)
    moved = []
    sqlite_file.connect(kept, SCHEMA, 1, on_damage=moved.append).close()
    assert moved[0].name.startswith("kept.sqlite3.damaged-")
    aside = sqlite3.connect(moved[0])
    assert aside.execute("SELECT number FROM numbers").fetchall() == [(3,)]
    aside.close()


def test_a_file_in_use_is_not_moved(monkeypatch, kept):
    """Its user would go on writing where nobody looks; once it is closed, it is moved."""
    user = sqlite_file.connect(kept, SCHEMA, 1)
    answering(monkeypatch, WRONG, WRONG, WRONG)
    with pytest.raises(OSError, match="another run has it open"):
        sqlite_file.connect(kept, SCHEMA, 1, on_damage=lambda _: None)
    assert not user.has_moved()
    user.close()
    moved = []
    sqlite_file.connect(kept, SCHEMA, 1, on_damage=moved.append).close()
    assert len(moved) == 1


def test_who_moved_a_damaged_file_shares_the_new_one(monkeypatch, kept):
    """Being alone with it ends with the moving: the next user need not wait."""
    answering(monkeypatch, WRONG, WRONG)
    first = sqlite_file.connect(kept, SCHEMA, 1, on_damage=lambda _: None)
    second = sqlite_file.connect(kept, SCHEMA, 1)
    assert not first.has_moved()
    first.close()
    second.close()


@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
def test_a_file_that_is_no_longer_there_is_noticed(kept, how):
    """By its device and inode, so that a new file of the same name is none of ours."""
    database = sqlite_file.connect(kept, SCHEMA, 1)
    assert not database.has_moved()
    if how == "removed":
        kept.unlink()
    else:
        kept.rename(kept.with_name("elsewhere"))
    if how == "replaced":
        kept.touch()
    assert database.has_moved()
    database.close()


# --- places that are none ------------------------------------------------------------------------------------


def failing(monkeypatch, statement, code):
    """Let a statement fail with this result code."""

    class Failing(sqlite_file.Database):
        def execute(self, text, *values):
            if text != statement:
                return super().execute(text, *values)
            error = sqlite3.OperationalError("injected")
            error.sqlite_errorcode, error.sqlite_errorname = code, f"INJECTED_{code}"
            raise error

    monkeypatch.setattr(sqlite_file, "Database", Failing)


@pytest.mark.parametrize("code", ["SHMOPEN", "SHMSIZE", "SHMLOCK", "SHMMAP"])
def test_a_file_system_without_shared_memory_gets_the_other_journal(tmp_path, monkeypatch, code):
    """One that no list knows: SQLite says that it cannot map the index of the log, and the rollback journal works."""
    failing(monkeypatch, "PRAGMA journal_mode = wal", getattr(sqlite3, f"SQLITE_IOERR_{code}"))
    database = sqlite_file.connect(tmp_path / "file", SCHEMA, 1)
    assert (pragma(database, "journal_mode"), pragma(database, "synchronous")) == ("delete", 2)
    database.execute("INSERT INTO numbers VALUES (3)")
    database.close()
    assert numbers(tmp_path / "file") == [3]


def test_another_failure_of_the_journal_is_one(tmp_path, monkeypatch):
    """Only what is about shared memory has another way."""
    failing(monkeypatch, "PRAGMA journal_mode = wal", sqlite3.SQLITE_IOERR_READ)
    with pytest.raises(sqlite3.OperationalError):
        sqlite_file.connect(tmp_path / "file", SCHEMA, 1)


def test_a_file_system_without_locks_is_called_one(tmp_path, monkeypatch):
    """Locks that fail at once are no other process that holds them."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(sqlite_file.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available") as caught:
        sqlite_file.connect(tmp_path / "file", SCHEMA, 1)
    assert sqlite_file.reason(caught.value) == "No locks available"


def test_a_log_of_a_small_run_stays_small(kept):
    """Its pages go into the file after 50 of them, 200 KiB, so that a nearly full disk holds the log."""
    database = sqlite_file.connect(kept, SCHEMA, 1)
    assert pragma(database, "wal_autocheckpoint") == 50
    database.execute("INSERT INTO numbers VALUES (4)")
    for number in range(500):
        database.execute("UPDATE numbers SET number = ?", (number,))
    assert kept.with_name("kept.sqlite3-wal").stat().st_size < 60 * (4096 + 24) + 32
    database.close()


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077], ids=oct)
def test_only_the_owner_may_hold_the_locks(tmp_path, mask):
    """As only the owner may write the file: under any umask the folder of locks is closed to others."""
    before = os.umask(mask)
    try:
        sqlite_file.connect(tmp_path / "file", SCHEMA, 1).close()
    finally:
        os.umask(before)
    assert (tmp_path / "file.locks").stat().st_mode & 0o777 == 0o700


def test_what_is_no_regular_file_is_refused_and_nothing_is_left_beside_it(tmp_path):
    """A device or a pipe is no database, and no folder of locks is made next to it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path(os.devnull)):
        with pytest.raises(StoreError, match="no regular file"):
            sqlite_file.place(path)
    with pytest.raises(StoreError, match="no name"):
        sqlite_file.place("")
    assert [found.name for found in tmp_path.iterdir()] == ["pipe"]


def test_a_link_into_a_folder_that_is_not_there_is_refused(tmp_path):
    """Folders are made for the default place only; a link whose file is not there yet is a place like any other."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone" / "file")
    with pytest.raises(StoreError, match=r"a link to .*gone/file, and that folder is not there"):
        sqlite_file.place(link)
    link.unlink()
    link.symlink_to(tmp_path / "file")
    assert sqlite_file.place(link) == (tmp_path / "file").resolve()


# --- where nothing may be written ----------------------------------------------------------------------------


def test_a_copy_is_what_the_file_holds_and_changes_nothing(kept):
    """Read without a lock or a journal; what is written to the copy is in no file."""
    before = kept.read_bytes()
    copy = sqlite_file.copied(kept, SCHEMA, 1)
    assert [row["number"] for row in copy.execute("SELECT number FROM numbers")] == [3]
    copy.execute("INSERT INTO numbers VALUES (4)")
    copy.close()
    assert kept.read_bytes() == before
    assert numbers(kept) == [3]


def test_a_file_whose_latest_rows_are_in_its_journal_is_not_copied(kept):
    """Without the journal they would be missing, and nobody would say so."""
    user = sqlite_file.connect(kept, SCHEMA, 1)
    user.execute("INSERT INTO numbers VALUES (4)")
    with pytest.raises(OSError, match=r"its latest rows are in kept\.sqlite3-wal"):
        sqlite_file.copied(kept, SCHEMA, 1)
    user.close()


def test_a_file_of_an_older_version_is_brought_up_to_date(kept):
    """Each step from the version that is found on, once, whatever number of statements it has."""
    add = "ALTER TABLE numbers ADD COLUMN"
    steps = {2: f"{add} name TEXT", 3: f"{add} size INTEGER; {add} age INTEGER"}
    for _ in range(2):
        database = sqlite_file.connect(kept, SCHEMA, 3, upgrades=steps)
        rows = database.execute("SELECT number, name, size, age FROM numbers")
        assert [tuple(row) for row in rows] == [(3, None, None, None)]
        assert pragma(database, "user_version") == 3
        database.close()
