"""The store where places fail, and what is shown and cleared."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import stat
import tempfile
import warnings
from pathlib import Path

import attrs
import platformdirs
import pytest

from cubatch import sqlite_file
from cubatch.errors import StoreError
from cubatch.kernels.choice import Winners, winners_path
from cubatch.measure.records import Candidate, Measured, Outcome
from cubatch.tuning import store
from tests.unit.tuning.stored import (
    ASKED,
    GIVEN,
    begin,
    timing,
)

# --- places that fail ----------------------------------------------------------------------------------------


def test_a_damaged_store_is_a_warning_and_stays(path):
    """The run measures without it; the note names the file, which another program may need."""
    content = b"this is no database\n" * 100
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=str(path)), begin(path) as run:
        run.timing(timing())
    assert not run.is_kept
    assert [note.code for note in run.notes] == ["cache_unusable"]
    assert path.read_bytes() == content


@pytest.mark.parametrize(("table", "timings"), [("timings", 0), ("outcomes", 1)])
def test_a_finished_run_that_lacks_rows_is_open(path, table, timings):
    """An "ok" without timings is no outcome, and a candidate without an outcome is not finished."""
    with begin(path) as run:
        run.save_ladder([Candidate(8)], {})
        run.timing(timing(8))
        run.outcome(Outcome(8, "ok"))
        run.finish()
    database = sqlite3.connect(path)
    database.execute(f"DELETE FROM {table}")
    database.commit()
    database.close()
    with begin(path) as run:
        assert (run.finished, run.earlier.outcomes, len(run.earlier.timings)) == (False, (), timings)


def test_a_full_disk_ends_the_caching_only(path):
    """One note and one warning; what was written before stays, and the run goes on."""
    with begin(path) as run:
        pages = run._database.execute("PRAGMA page_count").fetchone()[0]
        run._database.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.warns(UserWarning, match="the disk is full") as warned:
            for number in range(900):
                run.timing(timing(number=number))
            run.finish()
        assert not run.is_kept
        assert [note.code for note in run.notes] == ["cache_unusable"]
        assert len(warned) == 1
    with begin(path) as run:
        assert 0 < len(run.earlier.timings) < 900
        assert not run.finished


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
            assert run.earlier.timings == (timing(),)


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
    Winners(winners_path(sqlite_file.default_path()), gpu="a", sources="b").put("p", "k", {"k": 1.0})
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
    assert (run.earlier, run.ladder, run.notes, run.is_kept, run.finished) == (Measured(), None, [], False, True)


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
        assert run.earlier == Measured()
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
        with pytest.raises(StoreError, match="measuring a run"):
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
            with pytest.raises(StoreError, match="measuring a run"):
                store.clear(name)
        run.timing(timing())
    assert store.clear(f"~/{link.name}") == 1


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


def test_winners_lie_beside_the_file_that_a_link_leads_to(tmp_path):
    """Clearing a store by its path forgets what was timed through a link to it."""
    (tmp_path / "link.sqlite3").symlink_to(tmp_path / "kept.sqlite3")
    assert winners_path(tmp_path / "link.sqlite3") == winners_path(tmp_path / "kept.sqlite3")


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
        assert {outcome.batch_size for outcome in run.earlier.outcomes} == left
        assert run.finished == (len(left) == 4)
        assert run.earlier.timings == (timing(64),)
