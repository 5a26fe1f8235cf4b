"""The store where places fail, and what is shown and cleared."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import stat
import subprocess
import tempfile
import warnings
from pathlib import Path

import attrs
import platformdirs
import pytest

from cubatch import sqlite_file
from cubatch.errors import StoreError
from cubatch.measure.kernel_choice import Winners, forget, path_beside
from cubatch.measure.records import Candidate, Measured, Outcome
from cubatch.tuning import store, store_tables
from tests.unit.tuning.stored import (
    ASKED,
    GIVEN,
    begin,
    run_child,
    timing,
)

# --- places that fail ----------------------------------------------------------------------------------------


def damaged(path, how):
    """Make a store with one timing and damage its file."""
    with begin(path) as run:
        for number in range(2000):
            run.timing(timing(number=number))
    content = path.read_bytes()
    if how == "text":
        path.write_bytes(b"this is no database\n" * 100)
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "zeroed page":
        path.write_bytes(content[:8192] + bytes(4096) + content[12288:])
    return path.read_bytes()


@pytest.mark.parametrize("how", ["text", "cut", "zeroed page"])
def test_a_damaged_file_is_moved_aside_and_said(path, how):
    """The old bytes are kept under another name, a new store is begun, and the note says where they went."""
    content = damaged(path, how)
    with pytest.warns(UserWarning, match="was damaged"), begin(path) as run:
        assert run.is_kept
        assert run.kept == Measured()
        run.timing(timing())
    (aside,) = path.parent.glob("store.sqlite3.damaged-*")
    assert re.fullmatch(r"store\.sqlite3\.damaged-\d{8}T\d{6}\.\d{6}Z", aside.name)
    assert aside.read_bytes() == content
    assert str(aside) in run.notes[0]
    with begin(path) as run:
        assert run.notes == []
        assert run.kept.timings == (timing(),)


def test_the_journals_of_a_damaged_file_go_with_it(path):
    """Another process may still have the file open; what it wrote must not be played into the new one."""
    damaged(path, "")
    other = sqlite3.connect(path)
    other.execute("UPDATE runs SET seconds_spent = 7")
    path.write_bytes(b"this is no database\n" * 1000)
    with pytest.warns(UserWarning, match="was damaged"), begin(path) as run:
        run.timing(timing())
    assert {file.name[-3:] for file in path.parent.glob("store.sqlite3.damaged-*Z-*")} == {"wal", "shm"}
    other.close()
    with begin(path) as run:
        assert run.kept == Measured(timings=(timing(),))


def test_many_that_find_damage_move_it_once(path):
    """The second to notice finds a good file and leaves it alone."""
    damaged(path, "text")
    script = """
        warnings.simplefilter("ignore")
        with begin(sys.argv[1], identity={"number": int(sys.argv[2])}) as run:
            run.timing(timing())
    """
    children = [run_child(script, path, number) for number in range(6)]
    errors = [child.communicate(timeout=60)[1] for child in children]
    assert [child.returncode for child in children] == [0] * 6, errors
    assert len(list(path.parent.glob("*.damaged-*"))) == 1
    assert len(store.list_runs(path)) == 6


def finding(monkeypatch, row):
    """Let quick_check answer with this row, whatever the file holds."""

    class Finding(store.sqlite_file.Database):
        def execute(self, statement, *values):
            if statement.startswith("PRAGMA quick_check"):
                return super().execute("SELECT ?", (row,))
            return super().execute(statement, *values)

    monkeypatch.setattr(store.sqlite_file, "Database", Finding)


def test_a_store_that_another_process_measures_into_is_not_moved(path, monkeypatch):
    """Damage that the second comer sees leaves the first one's file in place; the second goes unkept and says why."""
    script = """
        with begin(sys.argv[1]) as run:
            run.timing(timing(8))
            print("kept", flush=True)
            sys.stdin.readline()
            run.timing(timing(16))
            run.finish()
            print(run.notes, flush=True)
    """
    with run_child(script, path, stdin=subprocess.PIPE) as first:
        assert first.stdout.readline() == "kept\n"
        finding(monkeypatch, "Tree 2 page 2: btreeInitPage() returns error code 11")
        with pytest.warns(UserWarning, match="not kept: .* another run has it open"):
            begin(path, identity={"spec": "another"}).close()
        monkeypatch.undo()
        out, err = first.communicate("\n", timeout=60)
    assert (out, err) == ("[]\n", "")
    assert not list(path.parent.glob("*.damaged-*"))
    with begin(path) as run:
        assert run.kept.timings == (timing(8), timing(16))
        assert run.finished


def test_a_store_that_cannot_be_read_is_left_alone(path, monkeypatch):
    """A failing disk is not the file's fault: unkept for this run, with the reason; all is there once it reads."""
    with begin(path) as run:
        run.timing(timing(8))
    finding(monkeypatch, "Tree 4 page 4: unable to get the page. error code=266")
    with pytest.warns(UserWarning, match=r"not kept: .* reading or writing it failed \(SQLITE_IOERR_READ\)"):
        begin(path).close()
    with pytest.raises(StoreError, match="reading or writing it failed"):
        store.list_runs(path)
    monkeypatch.undo()
    with begin(path) as run:
        assert (run.kept.timings, run.notes) == ((timing(8),), [])


@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
def test_a_store_that_goes_away_under_a_run_is_said_once(path, how):
    """What is written into a file that nobody finds is not kept; the run says so and measures on."""
    with begin(path) as run:
        run.timing(timing(8))
        aside = store.sqlite_file._move_aside(path)
        if how == "removed":
            aside.unlink()
        if how == "replaced":
            path.touch()
        with pytest.warns(UserWarning, match="not kept: .* moved or removed while in use") as said:
            run.timing(timing(16))
            run.finish()
        assert len(said) == len(run.notes) == 1
        assert not run.is_kept
    if how != "removed":
        assert store.show(aside, 1)[0].num_timings == 2


def test_looking_at_a_damaged_store_does_not_move_it(path):
    """List, show and clear say what is wrong and touch nothing."""
    content = damaged(path, "text")
    for look in (store.list_runs, store.clear, lambda path: store.show(path, 1)):
        with pytest.raises(StoreError, match="damaged"):
            look(path)
    assert path.read_bytes() == content


def test_a_full_disk_is_said_once_and_measuring_goes_on(path):
    """What was kept before it was full stays; after that nothing is kept, and nothing raises."""
    with begin(path) as run:
        pages = run._writer._database.execute("PRAGMA page_count").fetchone()[0]
        run._writer._database.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.warns(UserWarning, match="the disk is full") as said:
            for number in range(5000):
                run.timing(timing(number=number))
            run.spent(3.0)
            run.finish()
        assert len(said) == len(run.notes) == 1
        assert not run.is_kept
    with begin(path) as run:
        assert 0 < len(run.kept.timings) < 5000
        assert not run.finished


def test_a_file_that_may_not_grow_is_said_once(path):
    """The same from the operating system: a write that fails ends the keeping, not the process."""
    with begin(path):
        pass
    script = """
        import resource
        size = Path(sys.argv[1]).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50_000, size + 50_000))
        with warnings.catch_warnings(record=True) as said, begin(sys.argv[1]) as run:
            warnings.simplefilter("always")
            for number in range(3000):
                run.timing(timing(number=number))
        print(len(said), run.is_kept, run.notes)
    """
    with run_child(script, path) as child:
        out, err = child.communicate(timeout=60)
    assert out.startswith("1 False ['not kept: "), out + err


def test_a_read_only_place_is_said_once_and_measuring_goes_on():
    """Neither a folder nor a file that may not be written stops anything."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        file = Path(place) / "store.sqlite3"
        with begin(file) as run:
            run.timing(timing())
        user = os.geteuid()
        for made in (file, file.with_name("store.sqlite3.locks"), Path(place)):
            made.chmod(made.stat().st_mode & ~stat.S_IWUSR)
        try:
            if user == 0:
                os.seteuid(65534)  # the rights of a file mean nothing to root
            for target in (file, Path(place) / "deeper" / "store.sqlite3"):
                with pytest.warns(UserWarning, match="Permission denied") as said, begin(target) as run:
                    run.save_ladder([Candidate(1)], {})
                    run.timing(timing(seconds=9.0))
                    run.outcome(Outcome(1, "ok"))
                    run.finish()
                assert len(said) == len(run.notes) == 1
        finally:
            os.seteuid(user)
            Path(place).chmod(0o755)
        file.chmod(0o644)
        with begin(file) as run:
            assert run.kept.timings == (timing(),)


def test_a_home_that_may_not_be_entered_stops_nothing():
    """As in a container whose user is not the image's: measuring goes on unkept, and looking at the store says why."""
    with tempfile.TemporaryDirectory() as home:
        file, user = Path(home) / "store.sqlite3", os.geteuid()
        Path(home).chmod(0)
        try:
            if user == 0:
                os.seteuid(65534)
            with pytest.warns(UserWarning, match="Permission denied"), begin(file) as run:
                run.timing(timing())
            assert not run.is_kept
            with pytest.raises(StoreError, match="Permission denied"):
                store.list_runs(file)
        finally:
            os.seteuid(user)
            Path(home).chmod(0o755)


def test_a_user_without_a_home_measures_unkept(monkeypatch, tmp_path):
    """Neither HOME nor an entry among the users: nothing is kept, a note says so, and no folder `~` is made."""

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.warns(UserWarning, match="home directory"), begin(sqlite_file.default_path()) as run:
        run.timing(timing())
    assert not run.is_kept
    with pytest.raises(StoreError, match="home directory"):
        store.list_runs(sqlite_file.default_path())
    Winners(path_beside(sqlite_file.default_path()), gpu="a", sources="b").put("p", "k", {"k": 1.0})
    assert not list(tmp_path.iterdir())


def test_nothing_is_kept_without_a_path():
    """`store=False` is the same run without a file, and no reason to warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with begin(None) as run:
            run.save_ladder([Candidate(1)], {})
            run.timing(timing())
            run.outcome(Outcome(1, "ok"))
            run.spent(1.0)
            run.finish()
    assert (run.kept, run.ladder, run.notes, run.is_kept, run.finished) == (Measured(), None, [], False, True)


def test_what_is_not_our_store_is_refused(path):
    """A newer schema, another program's database and a folder are left as they are, with the reason."""
    path.parent.mkdir()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE accounts (name TEXT)")
    database.close()
    with pytest.raises(StoreError, match="another program's database"):
        begin(path)
    choices = path.with_name("choices.sqlite3")
    Winners(choices, gpu="a", sources="b").put("p", "k", {"k": 1.0})
    with pytest.raises(StoreError, match="another program's database"):  # its version is the same number
        begin(choices)
    with pytest.raises(StoreError, match="another program's database"):
        store.list_runs(choices)
    newer = path.with_name("newer.sqlite3")
    with begin(newer):
        pass
    database = sqlite3.connect(newer)
    database.execute(f"PRAGMA user_version = {store_tables.VERSION + 1}")
    database.close()
    with pytest.raises(
        StoreError, match=rf"schema {store_tables.VERSION + 1}, this cubatch knows {store_tables.VERSION}"
    ) as caught:
        begin(newer)
    assert caught.value.path == str(newer)
    with pytest.raises(StoreError, match="directory"):
        begin(path.parent)
    assert not list(path.parent.glob("*.damaged-*"))


# --- looking and clearing ------------------------------------------------------------------------------------


def test_list_and_show_tell_what_is_kept(path):
    """A stored run has all that a table of it needs, and its measurements on request."""
    assert store.list_runs(path) == []
    assert not path.exists()
    with begin(path) as run:
        run.save_ladder([Candidate(8, ("asked for",))], {"limit_bytes": 1})
        run.timing(timing(8))
        run.outcome(Outcome(8, "ok"))
        run.spent(2.5)
        run.finish()
    (kept,) = store.list_runs(path)
    assert (kept.id, kept.identity, kept.conditions, kept.state) == (1, ASKED, GIVEN, "finished")
    assert (kept.budget, kept.seconds_spent, kept.num_timings, kept.num_outcomes) == (60.0, 2.5, 1, 1)
    assert kept.ladder == (Candidate(8, ("asked for",)),)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", kept.updated)
    assert json.dumps(attrs.asdict(kept))  # what --json needs
    assert store.show(path, 1) == (
        kept,
        Measured(timings=(timing(8),), outcomes=(Outcome(8, "ok"),), seconds_spent=2.5),
    )
    with pytest.raises(StoreError, match=r"no run 7.*It holds: 1\."):
        store.show(path, 7)


def test_clear_forgets_one_run_or_all(path):
    """Nothing of a forgotten run stays, and its number is not used again."""
    assert store.clear(path) == 0
    for number in range(3):
        with begin(path, identity={"number": number}) as run:
            run.timing(timing())
            run.outcome(Outcome(8, "ok"))
    assert store.clear(path, 3) == 1
    with pytest.raises(StoreError, match="no run 3"):
        store.clear(path, 3)
    with begin(path, identity={"number": 2}) as run:
        assert run.kept == Measured()
    assert [run.id for run in store.list_runs(path)] == [1, 2, 4]
    assert store.clear(path) == 3
    database = sqlite3.connect(path)
    left = [database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("timings", "outcomes")]
    database.close()
    assert left == [0, 0]


def test_a_run_that_is_being_measured_is_not_cleared(path):
    """Clearing it would lose what comes next; nothing else is cleared either."""
    with begin(path, identity={"number": 1}):
        pass
    with begin(path) as run:
        with pytest.raises(StoreError, match="being measured"):
            store.clear(path)
        run.timing(timing())
        assert run.is_kept
    assert len(store.list_runs(path)) == 2


def test_one_file_under_two_names_is_one_store(path, tmp_path, monkeypatch):
    """Through a link or from the home folder: whoever measures the run is noticed, so nothing is measured twice."""
    monkeypatch.setenv("HOME", str(tmp_path))
    link = tmp_path / "link.sqlite3"
    with begin(path) as run:
        link.symlink_to(path)
        for name in (link, f"~/{link.name}"):
            with pytest.warns(UserWarning, match="still measures"), begin(name, wait_seconds=0.1) as second:
                assert not second.is_kept
            with pytest.raises(StoreError, match="is being measured"):
                store.clear(name)
        run.timing(timing())
    assert store.clear(f"~/{link.name}") == 1


def test_a_run_that_begins_while_others_are_cleared_stays(path, monkeypatch):
    """It is none of those that were asked about, and has its lock already."""
    with begin(path):
        pass
    begun, locked = [], store.sqlite_file.locked

    def lock(place, name, seconds):
        if seconds == 0 and not begun:
            begun.append("now")
            begun[:] = [begin(path, identity={"spec": "other"})]
        return locked(place, name, seconds)

    monkeypatch.setattr(store.sqlite_file, "locked", lock)
    assert store.clear(path) == 1
    with begun[0] as other:
        other.timing(timing())
        assert other.is_kept
    (left,) = store.list_runs(path)
    assert left.num_timings == 1


def test_the_store_is_in_the_users_cache(monkeypatch, tmp_path):
    """The default place follows the platform's convention, which on Linux is XDG_CACHE_HOME."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sqlite_file.default_path() == tmp_path / "cubatch" / "store.sqlite3"
    assert sqlite_file.default_path().parent == Path(platformdirs.user_cache_dir("cubatch"))


def test_looking_writes_nothing(tmp_path):
    """An empty file, such as a script may have made for a store to come, stays empty."""
    path = tmp_path / "store.sqlite3"
    path.touch()
    assert (store.list_runs(path), store.clear(path), path.stat().st_size) == ([], 0, 0)


@pytest.mark.parametrize("place", ["", "a\0b"], ids=["a folder", "a zero byte"])
def test_looking_at_what_is_no_file_is_refused(tmp_path, place):
    """Nothing is written beside a folder, and no error of Python's comes through."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for look in (store.list_runs, store.clear, forget):
        with pytest.raises(StoreError):
            look(folder / place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_winners_lie_beside_the_file_that_a_link_leads_to(tmp_path):
    """Clearing a store by its path forgets what was timed through a link to it."""
    (tmp_path / "link.sqlite3").symlink_to(tmp_path / "kept.sqlite3")
    assert path_beside(tmp_path / "link.sqlite3") == path_beside(tmp_path / "kept.sqlite3")
