"""A walk that was cut off goes on: nothing is lost, nothing measured twice, and budgets hold over all runs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Outcome, Recorder, Timing
from cubatch.search.events import Event
from cubatch.tuning import answer, ladder
from cubatch.tuning.request import Request
from cubatch.tuning.store import Run
from tests.fakes import FakeDevice, affine
from tests.unit.search.walking import FLAT, SIZES, Sessions, given, go, outcome_of, share_of_best, statuses, stop_after


def rerun(*, adds: bool) -> tuple[FakeDevice, list[Candidate], dict[str, Any]]:
    """Return a device, its ladder and the options of a search that adds sizes or does not."""
    steps = ladder.plain(Request(max_batch_size=512)) if adds else given()
    more: dict[str, Any] = {"extend": functools.partial(ladder.between, steps=steps)} if adds else {}
    return FakeDevice(affine(0.02, 1e-4), noise=0.003, seed=5), steps, more


@functools.cache
def alone(adds: bool) -> Measured:
    """Return the search that was not cut off."""
    device, steps, more = rerun(adds=adds)
    return go(device, steps, **more)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("count", [1, 2, 8, 21, 55])
def test_a_kill_at_any_point_loses_nothing(count: int, *, adds: bool) -> None:
    """Cut off after any number of timings, a rerun keeps all of them, repeats none, and answers as well."""
    device, steps, more = rerun(adds=adds)
    book = Recorder()
    try:
        go(device, steps, keeper=book, progress=stop_after(count), **more)
    except KeyboardInterrupt:
        assert len(book.measured.timings) == count
        assert "interrupted" in statuses(book.measured).values()
    kept = book.measured
    added = Recorder()
    whole = go(device, steps, earlier=kept, keeper=added, **more)
    before = {(timing.batch_size, timing.round) for timing in kept.timings}
    new = [(timing.batch_size, timing.round) for timing in added.measured.timings]
    assert not before & set(new)
    assert len(new) == len(set(new))
    assert whole.timings[: len(kept.timings)] == kept.timings
    assert whole.added[: len(kept.added)] == kept.added
    assert "interrupted" not in statuses(whole).values()
    assert {rung.batch_size for rung in (*steps, *whole.added)} == set(statuses(whole))
    assert whole.seconds_spent >= kept.seconds_spent
    answers = [answer.answer([*steps, *m.added], m, goal=Goal(), setting={}).batch_size for m in (whole, alone(adds))]
    assert device.throughput(answers[0]) >= 0.985 * device.throughput(answers[1])


def test_a_finished_run_makes_no_runner() -> None:
    """With an outcome for every size nothing is left to do, whatever the outcomes are."""
    outcomes = [
        Outcome(n, status)
        for n, status in zip(
            SIZES, ("dropped", "out_of_memory", "timeout", "error", "over_limit", "not_run", "ok", "ok"), strict=True
        )
    ]
    kept = Measured(outcomes=tuple(outcomes), seconds_spent=5.0)
    assert go(lambda: pytest.fail("a runner was made"), given(), earlier=kept) == kept


def test_interrupted_is_not_final() -> None:
    """A size that Ctrl-C cut off is measured to its end."""
    kept = Measured(timings=(Timing(batch_size=8, round=0, seconds=0.02),), outcomes=(Outcome(8, "interrupted"),))
    measured = go(FakeDevice(FLAT), given(8), earlier=kept)
    assert statuses(measured) == {8: "ok"}
    assert len(measured.timings) > 3


def test_the_budget_bounds_the_sum_over_resumes() -> None:
    """59.9 of 60 s are gone: a tenth of a second is left, and a visit that it does not hold is not begun."""
    kept = Measured(timings=(Timing(batch_size=1, round=0, seconds=0.02),), seconds_spent=59.9)
    measured = go(FakeDevice(FLAT, noise=0.3), given(), earlier=kept)
    assert 59.9 <= measured.seconds_spent < 60.1
    assert "not_run" in statuses(measured).values()
    spent = Measured(timings=kept.timings, seconds_spent=60.0)
    measured = go(lambda: pytest.fail("a runner was made"), given(), earlier=spent)
    assert measured.seconds_spent == 60.0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_keeps_everything_and_goes_on_up(error: type[BaseException]) -> None:
    """Timings, the time spent and "interrupted" are kept, the runner is closed, and the exception arrives as it was."""
    book = Recorder()
    sessions = Sessions(FakeDevice(FLAT, noise=0.05))
    with pytest.raises(error):
        go(sessions, given(), keeper=book, progress=stop_after(7, error))
    assert len(book.measured.timings) == 7
    assert set(statuses(book.measured).values()) == {"interrupted"}
    assert outcome_of(book.measured, 128).stop_reason == "the run was interrupted after 0 timings of this size"
    assert book.measured.seconds_spent > 0
    assert sessions.opened[0].closed


def test_each_timing_is_kept_as_it_is_taken() -> None:
    """When a timing's event arrives, the keeper has it."""
    book = Recorder()

    def progress(event: Event) -> None:
        if event.kind == "timing":
            last = book.measured.timings[-1]
            assert (last.batch_size, last.round) == (event.batch_size, event.round)

    go(FakeDevice(FLAT), given(), keeper=book, progress=progress)
    assert book.measured.timings


def test_seconds_are_kept_after_every_visit() -> None:
    """A kill between two visits loses none of the time that was spent before."""
    told: list[tuple[int, float]] = []

    class Keeps(Recorder):
        def spent(self, seconds: float) -> None:
            told.append((len(self.measured.timings), seconds))
            super().spent(seconds)

    measured = go(FakeDevice(FLAT), given(), keeper=Keeps())
    assert len(told) > len(SIZES)
    assert told == sorted(told)
    assert told[-1] == (len(measured.timings), measured.seconds_spent)


def test_a_larger_budget_reopens_what_was_not_run_and_added_sizes_stay(tmp_path: Path) -> None:
    """A rerun's ladder holds the sizes that were added; with more seconds none is left over for lack of time."""
    device = FakeDevice(affine(0.3, 0.02), noise=0.002)
    asked: dict[str, Any] = {"path": tmp_path / "store.sqlite3", "identity": {"spec": "x"}, "conditions": {}}
    steps = ladder.plain(Request(max_batch_size=512))
    extend = functools.partial(ladder.between, steps=steps)
    with Run(**asked, budget=15.0) as run:
        run.save_ladder(steps, {})
        first = go(device, steps, earlier=run.earlier, keeper=run, budget=15.0, extend=extend)
        run.finish()
    assert "not_run" in statuses(first).values()
    with Run(**asked, budget=15.0) as run:
        assert run.finished
        assert {c.batch_size for c in run.ladder or ()} == {c.batch_size for c in (*steps, *first.added)}
    with Run(**asked, budget=300.0) as run:
        assert not run.finished
        assert run.ladder is not None
        assert run.earlier.timings == first.timings
        second = go(device, run.ladder, earlier=run.earlier, keeper=run, budget=300.0, extend=extend)
        run.finish()
    assert "not_run" not in statuses(second).values()
    assert second.timings[: len(first.timings)] == first.timings
    result = answer.answer([*run.ladder, *second.added], second, goal=Goal(), setting={})
    assert share_of_best(device, result, 512) >= 0.97
    with Run(**asked, budget=300.0) as run:
        assert run.finished
        assert run.earlier.timings == second.timings
        assert {c.batch_size for c in run.ladder or ()} == set(statuses(second))


def test_a_kept_leader_that_no_longer_fits_leaves_the_answer_to_the_others() -> None:
    """After a kill the fastest size is planned above what memory is left: the others are judged among themselves."""
    device = FakeDevice(affine(1e-3, 1e-5), noise=0.002)
    kept = tuple(go(device, given()).timings)
    most = max(timing.batch_size for timing in kept)
    measured = go(device, [Candidate(n, over_limit=n == most) for n in SIZES], earlier=Measured(timings=kept))
    statuses = {outcome.batch_size: outcome.status for outcome in measured.outcomes}
    assert statuses[most] == "over_limit"
    assert "ok" in {status for n, status in statuses.items() if n != most}
