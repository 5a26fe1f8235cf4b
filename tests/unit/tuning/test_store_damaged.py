"""A run of which one field is not what was written: named, left, and no trouble for the others."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import warnings
import zlib

import attrs
import pytest

from cubatch.errors import CubatchError, StoreError
from cubatch.measure.records import Candidate, Measured, Outcome
from cubatch.report.tables import common
from cubatch.report.tables import store as table
from cubatch.tuning import store, store_tables
from tests.thorough import examples
from tests.unit.tuning.stored import ASKED, GIVEN, begin, timing

OTHER = {"spec": {"name": "another"}}


def make(path):
    """Keep two whole runs of different questions."""
    for identity in (ASKED, OTHER):
        with begin(path, identity=identity) as run:
            run.save_ladder([Candidate(8, ("asked for",), 4096, 1e-3)], {"memory_bytes": 9000, "largest_batch_size": 8})
            run.timing(timing(8, 0, 0.25, sm_clock_mhz=1500.0, peak_bytes=4096, power_watts=300.0))
            run.timing(timing(8, 1, 0.26))
            run.outcome(Outcome(8, "ok", "2 readings", {"visits": 1, "prepare_seconds": 0.1}))
            run.spent(1.5)
            run.finish()


def tamper(path, statement, *values):
    database = sqlite3.connect(path)
    database.execute(statement, values)
    database.commit()
    database.close()


def look(path):
    """Do all that a user can do with a store; nothing but our own errors may come of it."""
    for identity in (ASKED, OTHER):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with begin(path, identity=identity) as run:
                kept = run.kept
        assert all(0 < kept_timing.seconds < 1e308 for kept_timing in kept.timings)
    runs = [common.plain(run) for run in store.list_runs(path)]
    assert table.runs(runs, str(path)).text(100)
    for run in runs:
        try:
            stored, measured = store.show(path, run["id"])
        except StoreError:
            continue
        assert table.run(common.plain(stored), common.plain(measured))[0].text(100)


RUN = "UPDATE runs SET {} = ? WHERE id = 1"
TIMING = "UPDATE timings SET {} = ? WHERE run = 1 AND round = 0"
OUTCOME = "UPDATE outcomes SET {} = ? WHERE run = 1"
NO_JSON = ("", "{", "null", "3", "[1]", '{"a": NaN}', b"\xff\xfe", '"' + "[" * 100_000)
TAMPERED = [
    *((RUN, name, value) for name in ("identity", "ladder", '"limit"', "notes") for value in NO_JSON),
    *((RUN, "seconds_spent", value) for value in (-1e9, 1e300, "many", b"x")),
    *((RUN, "budget", value) for value in (-1.0, 0.0, "many")),
    *((RUN, "state", value) for value in ("", "done", b"open")),
    (RUN, "created", b"\xff"),
    (RUN, "notes", "[3]"),
    (RUN, "identity", '{"spec":{"name":"other"}}'),
    (RUN, "ladder", json.dumps([attrs.asdict(Candidate(8))] * 2)),
    (RUN, "ladder", json.dumps([attrs.asdict(Candidate(8)) | {"batch_size": -8}])),
    (RUN, "ladder", json.dumps([attrs.asdict(Candidate(8)) | {"colour": "red"}])),
    (RUN, "ladder", '[{"batch_size": 8}]'),
    (RUN, '"limit"', '{"memory_bytes": "a"}'),
    (RUN, '"limit"', '{"page_faults": [3]}'),
    *((RUN, "disturbed", value) for value in (*NO_JSON, "[3]") if value != "null"),
    *((TIMING, "seconds", value) for value in (-0.25, 0.0, 1e-300, 9e999, "slow", b"x", 0.250001)),
    *((TIMING, "batch_size", value) for value in (-8, 0, "x", 2**40, 9)),
    *((TIMING, "round", value) for value in (-1, 7, 1.5)),
    *((TIMING, "repeats", value) for value in (-3, 0, 1.5, 2)),
    *((TIMING, "throttled", value) for value in (2, "no", 1)),
    *((TIMING, "sm_clock_mhz", value) for value in (-1.0, "fast", 1501.0)),
    *((TIMING, "joules", value) for value in (-1.0, 1.0)),
    *((TIMING, "peak_bytes", value) for value in (-1, 4097)),
    *((TIMING, "event_reasons", value) for value in (-1, 4)),
    *((TIMING, "power_watts", value) for value in (-1.0, "much", 301.0, None)),
    *((TIMING, "temperature_celsius", value) for value in (-1.0, 61.0)),
    *((TIMING, "utilization_percent", value) for value in (-1.0, 101.0, 97.0)),
    *((TIMING, "used_bytes", value) for value in (-1, 4)),
    *((OUTCOME, "status", value) for value in ("fine", b"ok", "")),
    *((OUTCOME, "batch_size", value) for value in (-8, "x")),
    *((OUTCOME, "facts", value) for value in (*NO_JSON, '{"visits": "x"}', '{"prepare_seconds": -1}')),
    (OUTCOME, "stop_reason", b"\xff"),
]


@pytest.mark.parametrize(("statement", "column", "value"), TAMPERED, ids=lambda value: repr(value)[-40:])
def test_a_damaged_run_is_named_and_left_and_others_are_read(path, statement, column, value):
    """Whatever one field holds, nothing but our own errors comes out, and no value that no measuring gave."""
    make(path)
    tamper(path, statement.format(column), value)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with begin(path) as run:
            assert run.is_kept
            assert run.kept == Measured()
            assert not run.finished
            run.timing(timing(8, 0, 0.5))
    (warning,) = said
    field = {TIMING: "the timing of batch size ", OUTCOME: "the outcome of batch size "}.get(
        statement, column.strip('"')
    )
    assert str(warning.message).startswith(f"run 1 is damaged: {field}")
    with begin(path) as run:  # what was begun instead goes on
        assert run.kept.timings == (timing(8, 0, 0.5),)
        assert run.notes == []
    with begin(path, identity=OTHER) as run:
        assert (run.finished, run.notes, len(run.kept.timings)) == (True, [], 2)
    listed = {run.id: run for run in store.list_runs(path)}
    assert listed[2].state == "finished"
    assert table.runs([common.plain(run) for run in listed.values()], str(path)).text(100)
    if statement == RUN:
        assert listed[1].state == "damaged"
        assert listed[1].notes[0].startswith("run 1 is damaged: ")
        with pytest.raises(StoreError, match="cubatch store clear 1"):
            store.show(path, 1)
    assert store.clear(path, 1) == 1


def test_conditions_that_changed_by_themselves_are_other_conditions(path):
    """They are what decides which run applies: one letter more, and it is refused by the name of the field."""
    make(path)
    tamper(path, "UPDATE runs SET conditions = ? WHERE id = 1", store_tables.to_json(GIVEN | {"driver": "551"}))
    with begin(path) as run:
        assert run.notes == ["kept results refused: driver was 551, is 550"]
    tamper(path, "UPDATE runs SET conditions = ?", "{")
    with pytest.warns(UserWarning, match="run 3 is damaged: conditions "), begin(path) as run:
        assert run.kept == Measured()


def test_an_answer_whose_timings_are_gone_is_measured_again(path):
    """An outcome "ok" without a timing is no outcome: the run is open, and the size too."""
    make(path)
    tamper(path, "DELETE FROM timings WHERE run = 1")
    with begin(path) as run:
        assert (run.finished, run.kept.outcomes, run.notes) == (False, (), [])


def test_a_finished_run_that_lacks_outcomes_is_open(path):
    """Else a rerun would say "run it again" for ever; its timings still apply."""
    make(path)
    tamper(path, "DELETE FROM outcomes WHERE run = 1")
    with begin(path) as run:
        assert not run.finished
        assert len(run.kept.timings) == 2


@pytest.mark.parametrize("seed", range(examples(20)))
def test_no_flipped_bit_gives_a_traceback_or_a_figure_that_nobody_measured(path, seed):
    """A bit, a byte or a block of the file: it is whole, it is moved aside, a run is named, or nothing has changed."""
    make(path)
    written = {(8, 0): 0.25, (8, 1): 0.26}
    content, draw = bytearray(path.read_bytes()), random.Random(seed)
    for place in draw.sample(range(100, len(content)), draw.choice([1, 2, 8])):
        content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    for identity in (ASKED, OTHER):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with begin(path, identity=identity) as run:
                    kept = {(kept.batch_size, kept.round): kept.seconds for kept in run.kept.timings}
            except CubatchError:
                continue
        assert kept.items() <= written.items()
    with contextlib.suppress(CubatchError):
        look(path)


ADDED_LATER = ("reference_batch_size", "reference_before_seconds", "reference_after_seconds")
ADDED = ("event_reasons", "temperature_celsius", "power_watts", "utilization_percent", "used_bytes")


def dropped(*of_timings):
    """Give the statements that take away what came with later versions."""
    statements = [f"ALTER TABLE timings DROP COLUMN {name}" for name in (*ADDED_LATER, *of_timings)]
    return [*statements, "ALTER TABLE runs DROP COLUMN disturbed"]


REFERENCE = {"reference_batch_size": 4, "reference_before_seconds": 5e-3, "reference_after_seconds": 6e-3}


def test_a_store_of_before_has_no_reference_and_its_checksums_hold(path):
    """Version 4 summed up what it had: a GPU's vitals, and not what a reference took."""
    make(path)
    old, new = timing(8, 1, 0.26, power_watts=80.0), timing(8, 2, 0.27, **REFERENCE)
    tamper(path, "DELETE FROM timings WHERE batch_size != 8 OR round != 1")
    as_written = b"[1,8,1,0.26,1,0,null,null,null,null,null,null,80.0,null,null]"  # run, then version 4's columns
    tamper(path, "UPDATE timings SET power_watts = 80.0, checksum = ?", zlib.crc32(as_written))
    for statement in (*(f"ALTER TABLE timings DROP COLUMN {name}" for name in ADDED_LATER), "PRAGMA user_version = 4"):
        tamper(path, statement)
    with begin(path) as run:
        assert run.kept.timings == (old,)
        run.timing(new)
    with begin(path) as run:
        assert run.kept.timings == (old, new)
    tamper(path, "UPDATE timings SET reference_after_seconds = 6e-6 WHERE round = 2")
    with pytest.warns(UserWarning, match="run 1 is damaged: the timing of batch size 8 in round 2"):
        begin(path).close()


def test_timings_beside_the_fixed_operation_of_version_5_are_read_as_timings_without_a_reference(path):
    """Version 5 timed a sine as the reference, whose figure means nothing now; the timing itself is kept."""
    make(path)
    tamper(path, "DELETE FROM timings WHERE batch_size != 8 OR round != 1")
    for statement in (
        *(f"ALTER TABLE timings DROP COLUMN {name}" for name in ADDED_LATER),
        "ALTER TABLE timings ADD COLUMN reference_seconds REAL",
        "UPDATE timings SET reference_seconds = 4e-6, checksum = 1",
        "PRAGMA user_version = 5",
    ):
        tamper(path, statement)
    with begin(path) as run:
        assert run.kept.timings == (timing(8, 1, 0.26),)
        run.timing(timing(8, 2, 0.27, **REFERENCE))
    with begin(path) as run:
        assert len(run.kept.timings) == 2


def test_a_store_of_before_tells_of_nobody_and_is_gone_on_with(path):
    """Version 3 had no column for others who were busy."""
    make(path)
    for statement in (*dropped(), "PRAGMA user_version = 3"):
        tamper(path, statement)
    with begin(path) as run:
        assert (len(run.kept.timings), run.disturbed) == (2, ())
        run.save_disturbed(["busy"])
    with begin(path) as run:
        assert run.disturbed == ("busy",)


def test_a_store_of_before_has_no_vitals_and_its_checksums_hold(path):
    """Version 2 summed up what it had: its timings are read, without what it did not keep, and damage is noticed."""
    make(path)
    tamper(path, "DELETE FROM timings WHERE power_watts IS NOT NULL")
    as_written = b"[1,8,1,0.26,1,0,null,null,null,null]"  # run, then what version 2 had columns for
    tamper(path, "UPDATE timings SET checksum = ? WHERE run = 1", zlib.crc32(as_written))
    for statement in (*dropped(*ADDED), "PRAGMA user_version = 2"):
        tamper(path, statement)
    new = timing(8, 2, 0.27, event_reasons=4, temperature_celsius=61.0, used_bytes=9)
    with begin(path) as run:
        assert run.kept.timings == (timing(8, 1, 0.26),)
        run.timing(new)
    with begin(path) as run:
        assert run.kept.timings == (timing(8, 1, 0.26), new)
    tamper(path, "UPDATE timings SET seconds = 0.25 WHERE round = 1")
    with pytest.warns(UserWarning, match="run 1 is damaged: the timing of batch size 8 in round 1"):
        begin(path).close()


def test_a_store_of_before_has_no_checksums_and_is_read(path):
    """Version 1 had no such column: its timings are taken as they are, those that come have one, once and for all."""
    make(path)
    for statement in (*dropped("checksum", *ADDED), "PRAGMA user_version = 1"):
        tamper(path, statement)
    for expected in (2, 3):
        with begin(path) as run:
            assert len(run.kept.timings) == expected
            run.timing(timing(8, 2, 0.27))
    tamper(path, "UPDATE timings SET seconds = 0.28 WHERE round = 2")
    with pytest.warns(UserWarning, match="run 1 is damaged: the timing of batch size 8 in round 2"):
        begin(path).close()
