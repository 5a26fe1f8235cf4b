"""A disk that is full for a while, a place that may only be read, memory that was short: what is lost is nothing."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from cubatch import sqlite_file
from cubatch.errors import StoreError
from cubatch.measure.records import Candidate, Measured, Outcome
from cubatch.tuning import store, store_writer
from tests.unit.tuning.stored import begin, timing


def fill(run):
    """Let the file grow no more: SQLite reports what a full disk reports."""
    database = run._writer._database
    database.execute(f"PRAGMA max_page_count = {database.execute('PRAGMA page_count').fetchone()[0]}")


def free(run):
    run._writer._database.execute("PRAGMA max_page_count = 1000000")


@pytest.mark.parametrize("when", ["with the next timing", "at the end"])
def test_what_a_full_disk_held_back_is_kept_once_there_is_room(path, monkeypatch, when):
    """Told while it lasts, tried again, and in the end nothing is missing and no note is left."""
    monkeypatch.setattr(store_writer, "AGAIN_SECONDS", 0.0 if when == "with the next timing" else 1e9)
    taken = [timing(number=number) for number in range(1000)]
    with begin(path) as run:
        fill(run)
        with pytest.warns(UserWarning, match=r"not kept yet: .*the disk is full.* it is tried again") as said:
            for one in taken[:-1]:
                run.timing(one)
        assert not run.is_kept
        assert len(said) == len(run.notes) == 1
        free(run)
        run.timing(taken[-1])
        if when == "with the next timing":
            assert run.is_kept
        run.finish()
        assert (run.is_kept, run.notes) == (True, [])
    with begin(path) as run:
        assert run.kept.timings == tuple(taken)
        assert run.finished


def test_a_run_that_a_full_disk_lets_nobody_begin_is_kept_once_there_is_room(path, monkeypatch):
    """The file can be opened and holds another run: this one, of more bytes than are free, waits with its timings."""
    begin(path).close()
    asked, connect = {"spec": "x" * 100_000}, sqlite_file.connect

    def connected(*arguments, **options):
        database = connect(*arguments, **options)
        database.execute(f"PRAGMA max_page_count = {database.execute('PRAGMA page_count').fetchone()[0]}")
        return database

    with monkeypatch.context() as patched:
        patched.setattr(sqlite_file, "connect", connected)
        with pytest.warns(UserWarning, match=r"not kept yet: .*the disk is full.* it is tried again"):
            run = begin(path, identity=asked)
    with run:
        run.timing(timing())
        assert not run.is_kept
        free(run)
        run.finish()
        assert (run.is_kept, run.notes) == (True, [])
    with begin(path, identity=asked) as run:
        assert (run.kept.timings, run.finished, run.notes) == ((timing(),), True, [])
    (kept,) = (one for one in store.list_runs(path) if one.identity == asked)
    assert not kept.notes


ON_TMPFS = """
import json, sys, warnings
from pathlib import Path
from cubatch.tuning import store_writer
from tests.unit.tuning.stored import begin, timing
warnings.simplefilter("ignore")
store_writer.AGAIN_SECONDS = 0.0
folder = Path(sys.argv[1])
with begin(folder / "store.sqlite3") as run:
    run.timing(timing(number=0))
    with (folder / "ballast").open("wb", buffering=0) as ballast:
        try:
            while ballast.write(bytes(4096)):
                pass
        except OSError as error:
            full = error.errno
    for number in range(1, 1000):
        run.timing(timing(number=number))
    while_full = run.is_kept
    (folder / "ballast").unlink()
    run.timing(timing(number=1000))
    run.finish()
    notes = run.notes
with begin(folder / "store.sqlite3") as run:
    print(json.dumps([full, while_full, notes, [one.round for one in run.kept.timings], run.finished]))
"""


def test_a_file_system_that_is_full_loses_nothing(tmp_path):
    """On a tmpfs of 16 MiB, filled to the last block and emptied again: all is kept, nothing is left to be said."""
    mount = 'mount -t tmpfs -o size=16m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    apart = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*apart[:3], "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody mount a file system of their own")
    done = subprocess.run([*apart, tmp_path, sys.executable, ON_TMPFS], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    full, while_full, notes, rounds, finished = json.loads(done.stdout)
    assert full == errno.ENOSPC
    assert (while_full, notes) == (False, [])
    assert rounds == list(range(1001))
    assert finished


def test_what_was_held_back_is_tried_a_last_time_when_a_run_is_closed(path, monkeypatch):
    """Also of a run that was interrupted and never finished."""
    monkeypatch.setattr(store_writer, "AGAIN_SECONDS", 1e9)
    run = begin(path)
    fill(run)
    with pytest.warns(UserWarning, match="not kept yet"):
        for number in range(1000):
            run.timing(timing(number=number))
    free(run)
    run.close()
    assert run.notes == []
    with begin(path) as again:
        assert len(again.kept.timings) == 1000


def test_a_disk_that_stays_full_is_one_note(path):
    """What was said once is not said again, and in the end the note tells that it was not kept."""
    with begin(path) as run:
        fill(run)
        with pytest.warns(UserWarning, match="not kept yet") as said:
            for number in range(1000):
                run.timing(timing(number=number))
            run.finish()
        assert len(said) == 1
        assert not run.is_kept
        (note,) = run.notes
        assert note.startswith("not kept: ")
        assert "the disk is full" in note
    with begin(path) as run:
        assert not run.finished


# --- places that may only be read ----------------------------------------------------------------------------


@pytest.fixture
def read_only():
    """Make a place of a store with a finished run in which nobody may write, and be nobody."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        file = Path(place) / "store.sqlite3"
        with begin(file) as run:
            run.save_ladder([Candidate(8)], {})
            run.timing(timing(8))
            run.outcome(Outcome(8, "ok", "one reading"))
            run.finish()
        with begin(file, identity={"spec": "begun"}) as run:
            run.timing(timing(16))
        user = os.geteuid()
        made = (file, file.with_name("store.sqlite3.locks"), Path(place))
        for one in made:
            one.chmod(one.stat().st_mode & ~stat.S_IWUSR)
        if user == 0:
            os.seteuid(65534)  # the rights of a file mean nothing to root
        try:
            yield file
        finally:
            os.seteuid(user)
            Path(place).chmod(0o755)


def test_a_finished_run_in_a_read_only_place_is_the_answer(read_only):
    """Nothing is measured anew, so nothing need be kept, and there is nothing to say."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with begin(read_only) as run:
            assert (run.finished, run.kept.timings, run.notes) == (True, (timing(8),), [])


def test_an_unfinished_run_in_a_read_only_place_goes_on_unkept(read_only):
    """What was kept still applies; that what is measured now is not kept is said once."""
    with pytest.warns(UserWarning, match="not kept: .*Permission denied") as said:
        run = begin(read_only, identity={"spec": "begun"})
    assert (run.kept.timings, run.is_kept) == ((timing(16),), False)
    run.timing(timing(16, 1))
    run.finish()
    run.close()
    assert len(said) == len(run.notes) == 1
    with pytest.warns(UserWarning, match="not kept"):
        assert begin(read_only, identity={"spec": "begun"}).kept.timings == (timing(16),)


def test_a_store_in_a_read_only_place_can_be_looked_at(read_only):
    """List and show need no lock there; clearing does, and is refused."""
    assert [run.num_timings for run in store.list_runs(read_only)] == [1, 1]
    assert store.show(read_only, 1)[1].timings == (timing(8),)
    with pytest.raises(StoreError, match="Permission denied"):
        store.clear(read_only, 1)


def test_a_read_only_file_system_is_such_a_place(path, monkeypatch):
    """EROFS instead of missing rights: the same."""
    with begin(path) as run:
        run.timing(timing(8))

    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(sqlite_file, "_lock_file", refuse)
    assert [run.num_timings for run in store.list_runs(path)] == [1]
    with pytest.warns(UserWarning, match="Read-only file system"), begin(path) as run:
        assert run.kept.timings == (timing(8),)
    with pytest.warns(UserWarning, match="Read-only file system"), begin(path.with_name("none.sqlite3")) as run:
        assert run.kept == Measured()


# --- memory that was short -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory_bytes", "left"),
    [
        (None, {8, 16, 32, 64}),
        (4095, {8, 16, 32, 64}),
        (4096, {16, 32, 64}),  # the plan of 8 fits now
        (6000, {32, 64}),  # and what the runner said of 16
        (8799, {32, 64}),
        (8800, {64}),  # a tenth more than where 32 ran out of it: what is free always differs
    ],
)
def test_memory_refusals_hold_as_long_as_memory_is_short(path, memory_bytes, left):
    """Sizes that fit today are open again, others keep their outcome, and a run that lost some is open."""
    with begin(path, memory_bytes=8000) as run:
        run.save_ladder([Candidate(n, predicted_peak_bytes=512 * n) for n in (8, 16, 32, 64)], {})
        run.timing(timing(64))
        run.outcome(Outcome(8, "over_limit", "planned above the memory limit", {"limit": "memory"}))
        run.outcome(Outcome(16, "over_limit", "", {"limit": "memory", "needed_bytes": 6000}))
        run.outcome(Outcome(32, "out_of_memory", "", {}))
        run.outcome(Outcome(64, "over_limit", "too slow", {"limit": "latency"}))
        run.finish()
    with begin(path, memory_bytes=memory_bytes) as run:
        assert {outcome.batch_size for outcome in run.kept.outcomes} == left
        assert run.finished == (len(left) == 4)
        assert run.kept.timings == (timing(64),)
