"""What was measured is kept whatever happens, given back only where it applies, and never in the way of measuring."""

from __future__ import annotations

import json
import os
import random
import re
import sqlite3
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import warnings
from pathlib import Path

import attrs
import platformdirs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cubatch
from cubatch import sqlite_file
from cubatch.errors import StoreError
from cubatch.measure.kernel_choice import Winners, forget, path_beside
from cubatch.measure.records import Candidate, Measured, Outcome, Timing
from cubatch.tuning import store, store_tables
from cubatch.tuning.store import open_run
from tests.thorough import examples

ROOT = Path(cubatch.__file__).parents[1]
ASKED = {"spec": {"name": "mlp"}, "mode": "training", "seed": 0}
GIVEN = {"driver": "550", "numpy": "2.0.1", "threads": 4}


def begin(path, **changes):
    arguments = {"identity": ASKED, "conditions": GIVEN, "budget": 60.0} | changes
    return open_run(path, **arguments)


def timing(batch_size=32, number=0, seconds=0.25, **facts):
    return Timing(batch_size=batch_size, round=number, seconds=seconds, **facts)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "store.sqlite3"


def run_child(script, *arguments, **options):
    """Start a Python that has `begin` and `timing` of this file."""
    prelude = "import sys; from tests.unit.tuning.test_store import *\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + textwrap.dedent(script), *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


# --- what comes back -----------------------------------------------------------------------------------------

sizes = st.integers(1, 10**12)
amounts = st.none() | st.floats(1e-12, 1e12)
timings = st.builds(
    Timing,
    batch_size=sizes,
    round=st.integers(0, 10**6),
    seconds=st.floats(min_value=5e-324, allow_infinity=False, allow_nan=False),
    repeats=st.integers(1, 10**9),
    throttled=st.booleans(),
    sm_clock_mhz=amounts,
    joules=amounts,
    peak_bytes=st.none() | st.integers(0, 2**62),
    peak_device_bytes=st.none() | st.integers(0, 2**62),
)
facts = st.dictionaries(st.text(), st.none() | st.text() | st.integers() | st.floats(allow_nan=False) | st.booleans())
outcomes = st.builds(
    Outcome, batch_size=sizes, status=st.sampled_from(["ok", "dropped", "error"]), stop_reason=st.text(), facts=facts
)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(timings, max_size=8, unique_by=lambda timing: (timing.batch_size, timing.round)),
    st.lists(outcomes, max_size=4, unique_by=lambda outcome: outcome.batch_size),
    st.floats(0, 1e9),
)
def test_every_bit_comes_back(kept_timings, kept_outcomes, seconds):
    """Timings return in the order they were taken, outcomes by size, floats exactly, unknown as None."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "store.sqlite3"
        with begin(file) as run:
            for kept in kept_timings:
                run.timing(kept)
            for outcome in kept_outcomes:
                run.outcome(outcome)
            run.spent(seconds)
        with begin(file) as run:
            assert run.kept == Measured(
                timings=tuple(kept_timings),
                outcomes=tuple(sorted(kept_outcomes, key=lambda outcome: outcome.batch_size)),
                seconds_spent=seconds,
            )
            assert all(type(kept.throttled) is bool for kept in run.kept.timings)


def test_ladder_and_limit_come_back_with_the_first_timing(path):
    """They are what the timings were taken under; without any, a rerun decides anew."""
    ladder = [Candidate(8, ("power of two",), 4096, 1e-3), Candidate(9, ("asked for",), over_limit=True)]
    with begin(path) as run:
        assert (run.ladder, run.limit) == (None, None)
        run.save_ladder(ladder, {"limit_bytes": 8000})
    with begin(path) as run:
        assert (run.ladder, run.limit) == (None, None)
        run.save_ladder(ladder, {"limit_bytes": 9000})
        run.timing(timing())
    with begin(path) as run:
        assert run.ladder == tuple(ladder)
        assert run.limit == {"limit_bytes": 9000}


def test_a_store_with_a_column_of_before_is_read_and_gone_on_with(path):
    """Files made before `runs` lost its column `kernels` still have it; their runs list, continue and begin."""
    with begin(path) as run:
        run.timing(timing(8))
    database = sqlite3.connect(path)
    database.execute("ALTER TABLE runs ADD COLUMN kernels TEXT")
    database.close()
    with begin(path) as run:
        run.timing(timing(16))
        assert run.kept.timings == (timing(8),)
    with begin(path, identity={"spec": "another"}):
        pass
    assert [kept.num_timings for kept in store.list_runs(path)] == [2, 0]


def test_a_round_is_kept_once(path):
    """Reporting a round again changes nothing, whoever reports it."""
    with begin(path) as run:
        run.timing(timing(seconds=0.25))
        run.timing(timing(seconds=0.5))
    with begin(path) as run:
        run.timing(timing(seconds=0.75))
    with begin(path) as run:
        assert run.kept.timings == (timing(seconds=0.25),)


def test_the_last_outcome_of_a_size_counts(path):
    """An outcome replaces the one before it."""
    with begin(path) as run:
        run.outcome(Outcome(8, "error", "a mistake"))
        run.outcome(Outcome(8, "ok", "known well enough"))
    with begin(path) as run:
        assert run.kept.outcomes == (Outcome(8, "ok", "known well enough"),)


# --- which run is continued ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conditions", "difference"),
    [
        (GIVEN | {"driver": "560"}, "driver was 550, is 560"),
        (GIVEN | {"numpy": "2.1.0", "threads": 8}, "numpy was 2.0.1, is 2.1.0; threads was 4, is 8"),
        (GIVEN | {"cuda": "12.9"}, "cuda was None, is 12.9"),
    ],
)
def test_results_under_other_conditions_are_refused_by_name(path, conditions, difference):
    """Each field that differs is named with both values; measuring starts anew and the old run stays."""
    with begin(path) as run:
        run.timing(timing(seconds=0.25))
        run.finish()
    with begin(path, conditions=conditions) as run:
        assert run.notes == [f"kept results refused: {difference}"]
        assert (run.kept, run.finished) == (Measured(), False)
        run.timing(timing(seconds=0.5))
    assert [kept.conditions for kept in store.list_runs(path)] == [GIVEN, conditions]
    assert store.show(path, 2)[0].notes == (f"kept results refused: {difference}",)
    with begin(path, conditions=conditions | {"numpy": "3.0"}) as run:  # the latest run is the one to compare with
        assert run.notes == [f"kept results refused: numpy was {conditions['numpy']}, is 3.0"]
    with begin(path) as run:  # back under the first conditions, the first results hold
        assert (run.notes, run.finished, run.kept.timings) == ([], True, (timing(seconds=0.25),))
    with begin(path, conditions=conditions) as run:
        assert run.kept.timings == (timing(seconds=0.5),)


def test_another_question_is_another_run(path):
    """A different identity shares nothing and refuses nothing; the order of keys is no difference."""
    with begin(path) as run:
        run.timing(timing())
    with begin(path, identity=ASKED | {"mode": "inference"}) as run:
        assert (run.kept, run.notes) == (Measured(), [])
    turned = dict(reversed(ASKED.items()))
    with begin(path, identity=turned, conditions=dict(reversed(GIVEN.items()))) as run:
        assert run.kept.timings == (timing(),)


def test_refresh_starts_over(path):
    """The run that would be continued is forgotten; those under other conditions are not."""
    other = GIVEN | {"driver": "560"}
    for conditions in (other, GIVEN):
        with begin(path, conditions=conditions) as run:
            run.timing(timing())
            run.finish()
    with begin(path, refresh=True) as run:
        assert (run.kept, run.finished, run.notes) == (Measured(), False, [])
    assert [(kept.conditions, kept.num_timings) for kept in store.list_runs(path)] == [(other, 1), (GIVEN, 0)]


@pytest.mark.parametrize(
    ("budget", "left", "finished"),
    [
        (30.0, {1: "ok", 2: "not_run", 3: "out_of_memory", 4: "ok"}, True),
        (60.0, {1: "ok", 2: "not_run", 3: "out_of_memory", 4: "ok"}, True),
        (61.0, {1: "ok", 3: "out_of_memory"}, False),
    ],
)
def test_only_a_larger_budget_reopens_what_the_budget_cut(path, budget, left, finished):
    """With more seconds, sizes that were not run or cut short are open again; the rest stays final."""
    with begin(path) as run:
        run.outcome(Outcome(1, "ok", "known well enough"))
        run.outcome(Outcome(2, "not_run", "no budget"))
        run.outcome(Outcome(3, "out_of_memory", "", {"needed_bytes": 5}))
        run.outcome(Outcome(4, "ok", "the budget is spent", {"limit": "budget"}))
        run.finish()
    with begin(path, budget=budget) as run:
        assert {outcome.batch_size: outcome.status for outcome in run.kept.outcomes} == left
        assert run.finished is finished


def test_the_budget_of_an_unfinished_run_is_that_of_its_latest_call(path):
    """What a killed run might have spent does not decide whether a finished one had enough."""
    with begin(path, budget=90.0) as run:
        run.timing(timing())
    with begin(path, budget=30.0) as run:
        run.outcome(Outcome(2, "not_run", "no budget"))
        run.finish()
    with begin(path, budget=60.0) as run:
        assert (run.kept.outcomes, run.finished) == ((), False)


def test_interrupted_sizes_are_measured_again(path):
    """What Ctrl-C left is no outcome for a rerun, even of a run that was called finished; its timings stay."""
    with begin(path) as run:
        run.timing(timing(8))
        run.outcome(Outcome(8, "interrupted"))
        run.outcome(Outcome(16, "dropped"))
        run.finish()
    with begin(path) as run:
        assert run.kept.timings == (timing(8),)
        assert run.kept.outcomes == (Outcome(16, "dropped"),)
        assert not run.finished


def test_the_death_of_a_worker_is_not_final(path):
    """Who ended it may have been another: its size is measured again, once the others are kept as they were."""
    died, failed = {"type": "WorkerDied", "message": "SIGKILL ended it"}, {"type": "ValueError", "message": "no"}
    rest = (
        Outcome(1, "ok", "judged by its 5 timings", {"cut_short": True} | died),  # it has run, and is judged by that
        Outcome(4, "error", "no", failed),
        Outcome(8, "out_of_memory", "", {"type": "OutOfMemory", "needed_bytes": 5}),
        Outcome(16, "dropped"),
        Outcome(32, "over_limit", "", {"limit": "memory"}),
        Outcome(64, "timeout", "", {"type": "TimedOut"}),
        Outcome(128, "not_run", "", {"limit": "budget"}),
    )
    with begin(path) as run:
        run.timing(timing(2))
        for outcome in (*rest, Outcome(2, "error", "SIGKILL ended it", died)):
            run.outcome(outcome)
        run.finish()
    with begin(path) as run:
        assert (run.kept.outcomes, run.finished) == (rest, False)
        assert run.kept.timings == (timing(2),)
        run.finish()
    with begin(path) as run:
        assert run.finished


def test_sizes_that_the_search_added_are_kept_with_the_ladder(path):
    """A rerun's ladder holds them, those of two runs after each other too, with their reasons and plans."""
    steps = [Candidate(1, ("power of two",)), Candidate(8, ("memory limit",), predicted_peak_bytes=7)]
    added = [Candidate(5, ("between 1 and 8",), predicted_peak_bytes=4, predicted_seconds=0.5), Candidate(3)]
    with begin(path) as run:
        run.save_ladder(steps, {"memory_bytes": 9})
        run.candidate(added[0])
        run.timing(timing(5))
    with begin(path) as run:
        assert run.ladder == (*steps, added[0])
        run.candidate(added[1])
    with begin(path) as run:
        assert run.ladder == (*steps, *added)
        assert run.limit == {"memory_bytes": 9}


# --- kills and crowds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_process_loses_no_timing_that_it_reported(path, seed):
    """SIGKILL at a random moment: every timing whose keeping returned is there, once, and the file is whole."""
    script = """
        with begin(sys.argv[1]) as run:
            start = len(run.kept.timings)
            for number in range(start, start + 100_000):
                run.timing(timing(32, number, seconds=number + 0.5))
                sys.stdout.write(f"{number}\\n")
                sys.stdout.flush()
    """
    moments, expected = random.Random(seed), 0
    for _ in range(2):
        with run_child(script, path) as child:
            reported = [child.stdout.readline() for _ in range(moments.randrange(1, 400))]
            child.kill()
            reported += child.stdout.readlines()
        expected = max(expected, *(int(line) + 1 for line in reported if line.endswith("\n")))
        with begin(path) as run:
            assert run.notes == []
            numbers = [kept.round for kept in run.kept.timings]
            assert numbers == list(range(len(numbers)))
            assert len(numbers) in {expected, expected + 1}  # the last may have been kept and not yet told
            assert all(kept.seconds == kept.round + 0.5 for kept in run.kept.timings)


def test_sixteen_processes_keep_at_once(path):
    """Different runs share the file from its creation on; nobody fails, nothing is lost."""
    script = """
        with begin(sys.argv[1], identity={"number": int(sys.argv[2])}) as run:
            assert run.is_kept, run.notes
            for number in range(25):
                run.timing(timing(int(sys.argv[2]) + 1, number))
            run.finish()
            assert run.is_kept, run.notes
    """
    children = [run_child(script, path, number) for number in range(16)]
    errors = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [0] * 16, errors
    runs = store.list_runs(path)
    assert sorted(run.identity["number"] for run in runs) == list(range(16))
    assert {(run.num_timings, run.state) for run in runs} == {(25, "finished")}


def test_a_second_tuner_waits_for_the_first(path):
    """It takes over when the first is done, has all that the first kept, and says that it waited."""
    with begin(path) as first:
        found = []
        thread = threading.Thread(target=lambda: found.append(begin(path, wait_seconds=60.0)))
        thread.start()
        first.timing(timing(8))
        first.finish()
        thread.join(timeout=0.3)
        assert thread.is_alive()
    thread.join(timeout=60.0)
    with found[0] as second:
        assert second.finished
        assert second.kept.timings == (timing(8),)
        assert re.fullmatch("another process measures the same run: waited .* for it", second.notes[0])


def test_a_second_tuner_that_waited_long_enough_measures_unkept(path):
    """It says so, and what it measures does not mix with the first one's rounds."""
    with begin(path) as first:
        with pytest.warns(UserWarning, match="another process still measures the same run after 0.1 s"):
            second = begin(path, wait_seconds=0.1)
        assert not second.is_kept
        second.timing(timing(seconds=9.0))
        second.close()
        first.timing(timing(seconds=1.0))
    with begin(path) as run:
        assert run.kept.timings == (timing(seconds=1.0),)


def test_a_killed_tuner_blocks_nobody(path):
    """The kernel drops the lock with its holder."""
    with run_child("run = begin(sys.argv[1]); print(run.is_kept, flush=True); sys.stdin.read()", path) as child:
        assert child.stdout.readline() == "True\n"
        child.kill()
        child.wait()
        with begin(path, wait_seconds=10.0) as run:
            assert run.is_kept


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
        pages = run._database.execute("PRAGMA page_count").fetchone()[0]
        run._database.execute(f"PRAGMA max_page_count = {pages + 2}")
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
    with pytest.raises(StoreError, match=r"no run 7.*\[1\]"):
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
