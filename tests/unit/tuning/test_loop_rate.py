"""A result for a loop with a data loader: the recommendation, its rate, and what the loader allows."""

from __future__ import annotations

import json

import attrs
import pytest

from cubatch.frameworks.loader_rate import LoaderRate
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Outcome, Timing
from cubatch.tuning.answer import answer
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from cubatch.tuning.subjects.bounded_subject import loader_seconds

RATES = ("samples_per_second", "step_samples_per_second", "loader_samples_per_second")
STEPS = {2: 300.0, 8: 1000.0, 64: 5000.0, 256: 9000.0}  # samples/s of the step alone


def result(
    loader=None, *, steps=STEPS, dropped=(), failed=(), current=None, objective="throughput", scatter=0.0, once=()
):
    """Answer from five timings in two trials, one of sizes in `once`; `scatter`: by which share they differ at most."""
    timings = [
        Timing(batch_size=n, round=10 * trial + place, seconds=n / step * (1 + scatter * (place + trial) / 5))
        for n, step in steps.items()
        for trial in range(2)
        for place in range(5)
        if n not in once or place == trial == 0
    ]
    outcomes = [Outcome(n, "dropped" if n in dropped else "ok") for n in steps]
    untimed = [] if current is None or current in steps else [current]
    outcomes += [*(Outcome(n, "not_run") for n in untimed), *(Outcome(n, "error") for n in failed)]
    measured = Measured(timings=tuple(timings), outcomes=tuple(outcomes))
    untimed += failed
    candidates = [Candidate(n) for n in (*steps, *untimed)]
    setting = {"loader": loader}
    return answer(candidates, measured, goal=Goal(objective=objective), setting=setting, current=current)


def rate(samples_per_second, workers=2):
    return LoaderRate(
        batch_size=16, num_workers=workers, samples_per_second=samples_per_second, num_samples=1000, drop_last=False
    )


@pytest.mark.parametrize(
    ("loader", "workers", "size", "loop"),
    [
        (250.0, 2, 2, 250.0),  # slower than every step: the smallest size does as well
        (1000.0, 2, 8, 1000.0),
        (1005.0, 2, 8, 1000.0),  # within the tolerance of 1 %
        (2000.0, 2, 64, 2000.0),
        (20_000.0, 2, 256, 9000.0),  # faster than every step: nothing changes
        (1000.0, 0, 256, 900.0),  # in turns, every gain of the step counts: 1 / (1/9000 + 1/1000)
        (10.0, 0, 8, 1 / (1 / 1000 + 1 / 10)),  # 9.9; the best is 9.99
    ],
)
def test_the_smallest_size_that_loses_nothing_in_the_loop_is_recommended(loader, workers, size, loop):
    """By the arithmetic of a loader and a step that overlap, or take turns without worker processes."""
    found = result(rate(loader, workers), dropped=(2, 8))
    assert found.batch_size == size
    assert found.samples_per_second == pytest.approx(loop, rel=1e-3)
    assert found.step_samples_per_second == pytest.approx(STEPS[size], rel=1e-3)
    assert found.loader_samples_per_second == loader
    assert all(json.loads(found.to_json())[name] == getattr(found, name) for name in RATES)
    assert found.sizes[size].status == "ok"
    assert (found.decided_by == "loader") == (size != 256)
    assert TuningResult.from_json(found.to_json()) == found


def test_a_size_timed_once_is_not_recommended_for_the_loop():
    """A loader of 250 samples/s is slower than every step: 8 does as well as 2, which was timed once."""
    assert result(rate(250.0), once=(2,)).batch_size == 8


@pytest.mark.parametrize(("top", "decided"), [(8950.0, "loader"), (9500.0, "plateau")])
def test_the_largest_size_is_bound_by_the_loader_too(top, decided):
    """
    With batches of 256 the loader delivers more than with 64, but no more than the step of 9 000 samples/s takes.

    A faster step would gain nothing, no matter what limits the sizes; with 9 500 samples/s it would gain 5 %.
    """
    loader = attrs.evolve(rate(top), rates={64: 4000.0, 256: top})
    found = result(loader)
    assert found.batch_size == 256
    assert (found.decided_by == "loader") == (decided == "loader")
    assert ("the data loader is the bottleneck" in found.reasons[0]) == (decided == "loader")
    assert "gain nothing" not in found.reasons[0]  # batches of 512 may be delivered faster still


@pytest.mark.parametrize(
    ("rates", "workers", "size", "loop"),
    [
        ({2: 100.0, 64: 400.0}, 2, 64, 400.0),  # workers pass small batches on slowly: 2 would reach 100
        ({8: 4000.0, 64: 4000.0, 256: 1500.0}, 0, 64, 1 / (1 / 5000 + 1 / 4000)),  # large ones are joined slowly
    ],
)
def test_a_loader_has_its_rate_at_each_size(rates, workers, size, loop):
    """The size whose loop is fastest is recommended, with the rate of that loop, also after reading it from JSON."""
    loader = attrs.evolve(rate(400.0, workers), rates=rates)
    found = result(loader)
    assert found.batch_size == size
    assert found.samples_per_second == pytest.approx(loop, rel=1e-3)
    assert found.loader_samples_per_second == pytest.approx(rates[size])
    assert TuningResult.from_json(found.to_json()).loop_rates == found.loop_rates


def test_the_reasons_have_both_rates_and_the_epoch(monkeypatch):
    """The loader's 250 samples/s, the workers that would feed the fastest step, and the last incomplete batch."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    found = result(rate(250.0))
    first, second, third, *_ = found.reasons
    assert "of the step alone" in found.table()
    assert "of the step alone" not in attrs.evolve(found, loader=None).table()
    assert "250 samples/s" in first
    assert "4 workers would deliver about 500 samples/s" in second
    assert "500 batches of 2" in third
    for count, last in ((1000, "16 batches of 64, the last of 40 samples"), (961, "of 64, the last of 1 sample.")):
        assert last in result(attrs.evolve(rate(2000.0), num_samples=count)).reasons[2]


@pytest.mark.parametrize(("failed", "is_named"), [([1], True), ([3], False), ([], False)])
def test_an_incomplete_batch_of_a_size_that_failed_is_named_with_a_remedy(failed, is_named):
    """pytorch#7716: a batch norm raises an error at the end of each epoch, whose last batch has one sample."""
    found = result(attrs.evolve(rate(2000.0), num_samples=961), failed=failed)
    assert found.batch_size == 64
    assert ("drop_last=True" in found.reasons[2]) == is_named


def test_no_reason_of_the_step_alone_contradicts_the_loop():
    """Where the loader decides, neither a limit of the sizes nor idle devices are named."""
    reasons = " ".join(result(rate(250.0), dropped=(2,)).reasons)
    assert "limiting factor" not in reasons
    assert "idle" not in reasons
    assert result(rate(250.0)).choices()[2] == 0.0


def test_sizes_whose_loops_are_equally_fast_are_not_dropped():
    """Their steps alone are slower, which the loader hides: only 2, whose loop is slower, stays dropped."""
    found = result(rate(1000.0), dropped=(2, 8, 64))
    assert list(found.choices()) == [8, 64, 256]
    assert {n: found.sizes[n].status for n in STEPS} == {2: "dropped", 8: "ok", 64: "ok", 256: "ok"}


@pytest.mark.parametrize(("current", "size", "first"), [(8, 8, "Keep batch size 8: "), (2, 64, "times as fast as 2")])
def test_the_current_size_is_compared_in_the_loop(current, size, first):
    """It is kept where its loop is as fast as any, though its step alone is slower; else the ratio is that of loops."""
    loader = rate(900.0 if current == size else 2000.0)
    found = result(loader, current=current)
    assert found.batch_size == size
    assert first in found.reasons[0]
    assert found.comparison == pytest.approx(1.0 if current == size else 2000.0 / 300.0, rel=1e-3)
    if current != size:
        assert f"{2000.0 / 300.0:.3g} times" in found.reasons[0]


def test_a_kept_size_is_not_called_the_smallest():
    """The loops of all sizes are equally fast: 64 is kept, and 2 would do as well."""
    found = result(rate(250.0), current=64)
    assert found.batch_size == 64
    assert "within 1 % of the fastest (256)" in found.reasons[0]
    assert "smallest" not in found.reasons[0]


def test_a_current_size_that_was_not_timed_is_named_in_the_first_sentence():
    """The budget ended before 16, so that nothing says how it compares."""
    found = result(rate(250.0), current=16)
    assert "Batch size 16 was not tried" in found.reasons[0]
    assert found.comparison is None


def test_the_first_sentence_of_a_loop_says_how_sure_it_is():
    """The budget ended after two of three sizes, whose timings differ by up to five times."""
    found = result(rate(20_000.0, 0), steps={2: 300.0, 8: 1000.0}, current=64, scatter=4.0)
    assert "of the 2 sizes that were measured within the budget" in found.reasons[0]
    assert f"± {100 * found.sizes[8].half_width:.1f} %" in found.reasons[0]
    assert "±" not in result(rate(250.0), scatter=4.0).reasons[0]  # the loader decides, not the step


def test_a_loop_faster_than_its_parts_is_explained():
    """Loader and step deliver 250 and 300 samples/s at a size of 2, the loop that was run twice as many."""
    faster = result(attrs.evolve(rate(250.0), loop_ratios={2: 2.0}))
    assert "the machine changed its speed" in " ".join(faster.reasons)
    assert f"{faster.samples_per_second:.0f} samples/s in a loop" in faster.reasons[0]
    assert "the machine changed its speed" not in " ".join(
        result(attrs.evolve(rate(250.0), loop_ratios={2: 0.9})).reasons
    )


@pytest.mark.parametrize(("loader", "is_limit"), [(20_000.0, False), (250.0, True)])
def test_a_loop_that_was_run_changes_rates_and_no_decision(loader, is_limit):
    """All rates are four fifths of what the parts predict; older results have no such ratio."""
    steps = {2: 300.0, 64: 9000.0, 256: 9000.0}
    before = result(rate(loader), steps=steps)
    after = result(attrs.evolve(rate(loader), loop_ratios={64: 0.8}), steps=steps)
    assert after.loop_rates == pytest.approx({n: 0.8 * found for n, found in before.loop_rates.items()})
    assert after.batch_size == before.batch_size
    assert (after.decided_by == "loader") == (before.decided_by == "loader") == is_limit
    mapping = json.loads(before.to_json())
    del mapping["loader"]["loop_ratios"]
    assert TuningResult.from_json(json.dumps(mapping)) == before


def test_loops_of_several_sizes_decide_between_them():
    """By its parts 64 is as fast as 256; as loops they reach 4/5 and 1/2 of that, and 128 what lies between."""
    steps = {2: 300.0, 64: 9000.0, 128: 9000.0, 256: 9000.0}
    loader = attrs.evolve(rate(20_000.0), loop_ratios={64: 0.5, 256: 0.8})
    found = result(loader, steps=steps)
    assert found.loop_rates == pytest.approx({2: 150.0, 64: 4500.0, 128: 5850.0, 256: 7200.0}, rel=1e-3)
    assert found.batch_size == 256


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_the_loader_is_named_whatever_decides(objective):
    """A loop that it slows says so, also where the size stays or another objective decides."""
    found = result(rate(1000.0, workers=0), objective=objective)
    assert any("The data loader by itself delivers" in reason for reason in found.reasons)
    assert found.samples_per_second < found.step_samples_per_second


def test_a_result_without_a_loader_has_the_rate_of_its_step():
    """And no rate of a loader."""
    found = result()
    assert found.samples_per_second == found.step_samples_per_second
    assert found.loader_samples_per_second is None


@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_a_rate_is_positive(wrong):
    """A file with another is rejected as data."""
    with pytest.raises(ValueError, match="must be from"):
        rate(wrong)


@pytest.mark.parametrize(("budget", "seconds"), [(5.0, 1.0), (60.0, 6.0), (600.0, 10.0)])
def test_a_loader_is_timed_for_a_tenth_of_the_budget(budget, seconds):
    """At least long enough for a rate, and no longer than one needs."""
    assert loader_seconds(Request(budget=budget)) == pytest.approx(seconds)


@pytest.mark.parametrize("best", [64, 256])
def test_the_best_loop_is_compared_with_that_of_the_chosen_size(best):
    """By its step 256 is the fastest; the loop that was run says which is, and both sentences agree with it."""
    ratios = {64: 0.5, 256: 0.4} if best == 64 else {64: 0.5, 256: 0.499}
    loader = attrs.evolve(rate(20_000.0), loop_ratios=ratios)
    found = result(loader, steps={64: 9000.0, 256: 9050.0})
    assert found.batch_size == 64
    assert f"({best})" in found.reasons[0] or best == 64
    text = [reason for reason in found.reasons if "best" in reason]
    assert text == (
        [] if best == 64 else ["The best loop reaches 4 517 samples/s at 256; that of 64 reaches 99.6 % of it."]
    )
