"""The store of timings: what comes back, which run is continued, kills and crowds."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from cubatch.errors import InvalidArgument, StoreError
from cubatch.measure.records import Candidate, Measured, Outcome
from cubatch.tuning import store
from cubatch.tuning.notes import note
from tests.thorough import examples
from tests.unit.tuning.stored import (
    ASKED,
    GIVEN,
    begin,
    outcomes,
    run_child,
    timing,
    timings,
)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(timings, max_size=8, unique_by=lambda timing: (timing.batch_size, timing.round)),
    st.lists(outcomes, max_size=4, unique_by=lambda outcome: outcome.batch_size),
    st.floats(1e-9, 1e9),
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
            assert run.earlier == Measured(
                timings=tuple(kept_timings),
                outcomes=tuple(sorted(kept_outcomes, key=lambda outcome: outcome.batch_size)),
                seconds_spent=seconds,
            )
            assert all(type(kept.throttled) is bool for kept in run.earlier.timings)


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("timings SET facts = '{bad'", "double quotes"),
        ("timings SET seconds = 'soon'", "seconds must be"),
        ('runs SET ladder = \'[{"batch_size": "8"}]\'', "batch_size must be"),
        ("runs SET \"limit\" = '[]'", "limit must be a mapping"),
        ("runs SET budget = 'long'", "budget must be"),
        ("runs SET notes = '5'", "notes must be a list"),
    ],
)
def test_a_damaged_row_costs_its_run_only(path, change, reason):
    """A new run is begun; the note names the file, the reason and how to delete the old run, as does an error."""
    for asked in (ASKED | {"seed": 1}, ASKED):
        with begin(path, identity=asked) as run:
            run.timing(timing())
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(f"UPDATE {change} WHERE {'run' if change.startswith('timings') else 'id'} = 2")
        database.commit()
    message = rf"(?i)run 2 .*{reason}.*cubatch store clear 2\b"
    with pytest.warns(UserWarning, match=message) as warned, begin(path) as run:
        assert (run.earlier, run.is_kept) == (Measured(), True)
        assert str(path) in str(warned[0].message)
        run.timing(timing(seconds=0.5))
    with begin(path) as run:
        assert (run.earlier.timings, run.notes) == ((timing(seconds=0.5),), [])
    with begin(path, identity=ASKED | {"seed": 1}) as run:
        assert run.earlier.timings == (timing(),)
    with pytest.raises(StoreError, match=message):
        store.show(path, 2)
    assert store.clear(path, 2) == 1
    assert [run.id for run in store.list_runs(path)] == [1, 3]


def test_damaged_conditions_stop_no_measurement(path):
    """No difference from them can be named, also in a call under other conditions."""
    with begin(path) as run:
        run.timing(timing())
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE runs SET conditions = '{bad'")
        database.commit()
    with pytest.warns(UserWarning, match="damaged row"), begin(path) as run:
        assert run.is_kept


def test_a_round_is_kept_once(path):
    """Reporting a round again changes nothing, whoever reports it."""
    with begin(path) as run:
        run.timing(timing(seconds=0.25))
        run.timing(timing(seconds=0.5))
    with begin(path) as run:
        run.timing(timing(seconds=0.75))
    with begin(path) as run:
        assert run.earlier.timings == (timing(seconds=0.25),)


def test_the_last_outcome_of_a_size_counts(path):
    """An outcome replaces the one before it."""
    with begin(path) as run:
        run.timing(timing(8))
        run.outcome(Outcome(8, "error", "a mistake"))
        run.outcome(Outcome(8, "ok", "known well enough"))
    with begin(path) as run:
        assert run.earlier.outcomes == (Outcome(8, "ok", "known well enough"),)


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
        assert run.notes == [note("cache_conditions", differences=difference)]
        assert (run.earlier, run.finished) == (Measured(), False)
        run.timing(timing(seconds=0.5))
    assert [kept.conditions for kept in store.list_runs(path)] == [GIVEN, conditions]
    assert difference in store.show(path, 2)[0].notes[0]
    with begin(path, conditions=conditions | {"numpy": "3.0"}) as run:  # the latest run is the one to compare with
        assert run.notes == [note("cache_conditions", differences=f"numpy was {conditions['numpy']}, is 3.0")]
    with begin(path) as run:  # back under the first conditions, the first results hold
        assert (run.notes, run.finished, run.earlier.timings) == ([], True, (timing(seconds=0.25),))
    with begin(path, conditions=conditions) as run:
        assert run.earlier.timings == (timing(seconds=0.5),)


def test_another_question_is_another_run(path):
    """A different identity shares nothing and refuses nothing; the order of keys is no difference."""
    with begin(path) as run:
        run.timing(timing())
    with begin(path, identity=ASKED | {"mode": "inference"}) as run:
        assert (run.earlier, run.notes) == (Measured(), [])
    turned = dict(reversed(ASKED.items()))
    with begin(path, identity=turned, conditions=dict(reversed(GIVEN.items()))) as run:
        assert run.earlier.timings == (timing(),)


def test_refresh_starts_over(path):
    """The run that would be continued is forgotten; those under other conditions are not."""
    other = GIVEN | {"driver": "560"}
    for conditions in (other, GIVEN):
        with begin(path, conditions=conditions) as run:
            run.timing(timing())
            run.finish()
    with begin(path, refresh=True) as run:
        assert (run.earlier, run.finished, run.notes) == (Measured(), False, [])
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
        run.timing(timing(1))
        run.timing(timing(4))
        run.outcome(Outcome(1, "ok", "known well enough"))
        run.outcome(Outcome(2, "not_run", "no budget"))
        run.outcome(Outcome(3, "out_of_memory", "", {"needed_bytes": 5}))
        run.outcome(Outcome(4, "ok", "the budget is spent", {"limit": "budget"}))
        run.finish()
    with begin(path, budget=budget) as run:
        assert {outcome.batch_size: outcome.status for outcome in run.earlier.outcomes} == left
        assert run.finished is finished


def test_the_budget_of_an_unfinished_run_is_that_of_its_latest_call(path):
    """What a killed run might have spent does not decide whether a finished one had enough."""
    with begin(path, budget=90.0) as run:
        run.timing(timing())
    with begin(path, budget=30.0) as run:
        run.outcome(Outcome(2, "not_run", "no budget"))
        run.finish()
    with begin(path, budget=60.0) as run:
        assert (run.earlier.outcomes, run.finished) == ((), False)


def test_interrupted_sizes_are_measured_again(path):
    """What Ctrl-C left is no outcome for a rerun, even of a run that was called finished; its timings stay."""
    with begin(path) as run:
        run.timing(timing(8))
        run.outcome(Outcome(8, "interrupted"))
        run.outcome(Outcome(16, "dropped"))
        run.finish()
    with begin(path) as run:
        assert run.earlier.timings == (timing(8),)
        assert run.earlier.outcomes == (Outcome(16, "dropped"),)
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
        run.timing(timing(1))
        run.timing(timing(2))
        for outcome in (*rest, Outcome(2, "error", "SIGKILL ended it", died)):
            run.outcome(outcome)
        run.finish()
    with begin(path) as run:
        assert (run.earlier.outcomes, run.finished) == (rest, False)
        assert run.earlier.timings == (timing(1), timing(2))
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


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_process_loses_no_timing_that_it_reported(path, seed):
    """SIGKILL at a random moment: every timing whose keeping returned is there, once, and the file is whole."""
    script = """
        with begin(sys.argv[1]) as run:
            start = len(run.earlier.timings)
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
            numbers = [kept.round for kept in run.earlier.timings]
            assert numbers == list(range(len(numbers)))
            assert len(numbers) in {expected, expected + 1}  # the last may have been kept and not yet told
            assert all(kept.seconds == kept.round + 0.5 for kept in run.earlier.timings)


def test_six_processes_keep_at_once(path):
    """Different runs share the file from its creation on; nobody fails, nothing is lost."""
    script = """
        with begin(sys.argv[1], identity={"number": int(sys.argv[2])}) as run:
            assert run.is_kept, run.notes
            for number in range(25):
                run.timing(timing(int(sys.argv[2]) + 1, number))
            run.finish()
            assert run.is_kept, run.notes
    """
    children = [run_child(script, path, number) for number in range(6)]
    errors = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [0] * 6, errors
    runs = store.list_runs(path)
    assert sorted(run.identity["number"] for run in runs) == list(range(6))
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
        assert second.earlier.timings == (timing(8),)
        assert [note.code for note in second.notes] == ["cache_waited"]


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
        assert run.earlier.timings == (timing(seconds=1.0),)


def test_a_killed_tuner_blocks_nobody(path):
    """The kernel drops the lock with its holder."""
    with run_child("run = begin(sys.argv[1]); print(run.is_kept, flush=True); sys.stdin.read()", path) as child:
        assert child.stdout.readline() == "True\n"
        child.kill()
        child.wait()
        with begin(path, wait_seconds=10.0) as run:
            assert run.is_kept


# --- timings of a busy machine --------------------------------------------------------------------------------


def test_what_was_told_of_others_comes_back_with_the_timings(path):
    """Whoever is answered from them must know; a call that met nobody adds timings and takes nothing back."""
    told = ["Other processes kept 1.9 of 2 CPUs busy."]
    with begin(path) as run:
        run.timing(timing(8))
        run.save_disturbed(told)
    with begin(path) as run:
        assert run.disturbed == tuple(told)
        run.save_disturbed([])
    with begin(path, budget=90.0) as run:
        assert run.disturbed == tuple(told)
        run.save_disturbed([*told, "Another cubatch was measuring."])
    assert [kept.disturbed for kept in store.list_runs(path)] == [(*told, "Another cubatch was measuring.")]


@pytest.mark.parametrize("measured", ["nothing", "now", "before"])
def test_a_question_that_made_no_sense_is_not_listed(path, measured):
    """An error of ours before anything was kept leaves no run; timings stay, whenever they were taken."""
    if measured == "before":
        with begin(path) as run:
            run.timing(timing(8))
    with contextlib.suppress(InvalidArgument), begin(path) as run:
        run.save_ladder([Candidate(8)], {})
        if measured == "now":
            run.timing(timing(8))
        raise InvalidArgument("module", "misspelt:build", "there")
    assert [kept.num_timings for kept in store.list_runs(path)] == ([] if measured == "nothing" else [1])
