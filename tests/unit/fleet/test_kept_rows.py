"""What a worker keeps reaches the caller's store, row by row."""

from __future__ import annotations

import pytest

from cubatch.fleet import kept_rows, on_worker, tune_fleet
from cubatch.measure.records import Outcome
from cubatch.tuning import store
from tests.unit.tuning.stored import ASKED, begin, timing


@pytest.fixture
def places(tmp_path):
    return tmp_path / "worker.sqlite3", tmp_path / "caller.sqlite3"


def test_a_run_that_is_begun_anew_on_a_worker_is_another_in_the_callers_store(places):
    """New timings have the rounds of old ones, and would be taken for them; a later worker is given the new run."""
    worker, caller = places
    with begin(caller) as run:
        run.timing(timing(8, 0, 0.5))
        run.save_disturbed(["busy"])
    with tune_fleet._Keep(caller, ASKED["spec"], refresh=False) as keep:
        for message in keep.known():
            with kept_rows.opened(worker, message) as run:
                kept_rows.replay(run, message)
        said = on_worker._Said(worker, keep.take)
        with begin(worker) as run:
            assert run.disturbed == ("busy",)
            run.begin_anew()
            run.timing(timing(8, 0, 0.25))
            said.rest()
            run.timing(timing(8, 1, 0.26))
            run.outcome(Outcome(8, "ok"))
            run.finish()
        said.rest()
    old, new = (store.show(caller, run.id) for run in store.list_runs(caller))
    assert old[1].timings == (timing(8, 0, 0.5),)
    assert new[1].timings == (timing(8, 0, 0.25), timing(8, 1, 0.26))
    assert (new[0].state, new[0].disturbed) == ("finished", ())
    (known,) = kept_rows.about(caller, {"spec": ASKED["spec"]})
    assert [one["seconds"] for one in known["timings"]] == [0.25, 0.26]
