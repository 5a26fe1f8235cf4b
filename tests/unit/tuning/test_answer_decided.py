"""What decided: peak, plateau, memory, the latency limit, the budget, the list or max_batch_size."""

from __future__ import annotations

from typing import Any

import pytest

from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Outcome
from cubatch.tuning import answer as answers
from tests.unit.tuning.ends import (
    DROPPED,
    ERROR,
    NO_MEMORY,
    NOT_RUN,
    PLANNED,
    Ended,
    answer_of,
    decide,
    rate,
    rounds,
    steady,
    too_slow,
)


@pytest.mark.parametrize(
    ("seconds", "statuses", "more", "decided_by"),
    [
        ({1: 1.0, 2: 1.0, 4: 4.0}, {}, {}, "peak"),  # 1, 2, 1 samples/s
        ({1: 1.0, 2: 1.0, 4: 4.0}, {4: "dropped"}, {}, "peak"),
        ({1: 1.0, 2: 1.0, 4: 2.0}, {}, {}, "plateau"),  # 1, 2, 2
        ({1: 1.0, 2: 1.0}, {}, {"largest_batch_size": 2}, "memory"),
        ({1: 1.0, 2: 1.0, 3: None}, {3: "out_of_memory"}, {"largest_batch_size": 8}, "memory"),
        ({1: 1.0, 2: 1.0, 4: None}, {4: "over_limit"}, {"largest_batch_size": 2}, "memory"),
        ({1: 1.0, 2: 1.0, 3: 1.5}, {3: "latency"}, {}, "latency_limit"),
        ({1: 1.0, 2: 1.0, 4: None}, {4: "not_run"}, {}, "budget"),
        ({1: 1.0, 2: 1.0, 4: None, 8: None}, {4: "error", 8: "not_run"}, {}, "budget"),
        ({1: 1.0, 2: 1.0}, {}, {"is_listed": True, "largest_batch_size": 2}, "batch_sizes"),
        (
            {1: 1.0, 2: 1.0},
            {},
            {"largest_batch_size": 9, "setting": {"limits": {"max_batch_size": 2}}},
            "max_batch_size",
        ),
        ({1: 1.0, 2: 1.0}, {}, {"largest_batch_size": 2, "setting": {"limits": {"max_batch_size": 9}}}, "memory"),
        ({1: 1.0, 2: 1.0}, {}, {}, "max_batch_size"),  # a callable: there is no plan
    ],
)
def test_what_decided_is_what_became_of_the_larger_sizes(
    seconds: dict[int, float | None], statuses: dict[int, str], more: dict[str, Any], decided_by: str
) -> None:
    """Each of the seven words from the smallest history that calls for it."""
    timings = [timing for n, value in seconds.items() if value for timing in rounds(n, [value] * 5)]
    outcomes = []
    for n in seconds:
        status = statuses.get(n, "ok")
        facts = {"limit": "latency" if status == "latency" else "memory"}
        outcomes.append(Outcome(n, "over_limit" if status == "latency" else status, "", facts))
    measured = Measured(timings=tuple(timings), outcomes=tuple(outcomes))
    result = answers.answer([Candidate(n) for n in seconds], measured, goal=Goal(), **{"setting": {}, **more})
    assert (result.batch_size, result.decided_by) == (2, decided_by)


@pytest.mark.parametrize(
    ("seconds", "answer", "decided_by"), [({1: 1.0, 2: 1.005, 4: 2.0}, 2, "plateau"), ({1: 1.0, 2: 2.0}, 1, "peak")]
)
def test_by_latency_the_largest_flat_size_is_the_answer(
    seconds: dict[int, float], answer: int, decided_by: str
) -> None:
    """A floor that ends at 2 is a plateau; a latency that rises at once has its peak at the smallest."""
    result = answer_of({n: [value] * 5 for n, value in seconds.items()}, goal=Goal(objective="latency"))
    assert (result.batch_size, result.decided_by) == (answer, decided_by)


RISING = {50: rate(50, 50), 100: rate(100, 100)}
TRIED = {8: rate(80, 8), 16: rate(100, 16), 32: rate(60, 32, "dropped")}
TWELVE = {12: rate(50, 12), 24: rate(100, 24)}
LIMITED = {"goal": Goal(latency_limit=2.0)}
STRICT = {"goal": Goal(latency_limit=1.1)}


@pytest.mark.parametrize(
    ("ended", "options", "chosen", "decided_by"),
    [
        # A slower size a little above may be a tooth of a saw; one at twice the size shows the other side.
        ({48: rate(96, 48), 96: rate(100, 96), 100: rate(80, 100)}, {}, 96, "max_batch_size"),
        ({48: rate(96, 48), 96: rate(100, 96), 191: rate(80, 191)}, {}, 96, "max_batch_size"),
        ({48: rate(96, 48), 96: rate(100, 96), 192: rate(80, 192)}, {}, 96, "peak"),
        # A size that might be better was left out; a smaller one keeps nothing from growing.
        ({**TRIED, 64: NOT_RUN}, {}, 16, "budget"),
        ({**TRIED, 64: DROPPED}, {}, 16, "peak"),
        ({4: NOT_RUN, **TRIED, 64: DROPPED}, {}, 16, "peak"),
        # The search adds multiples alone; of a list it adds none, and the largest by the plan is tried as it is.
        ({**TWELVE, 26: too_slow(1.2)}, {"multiple": 2, **STRICT}, 24, "latency_limit"),
        ({**TWELVE, 27: too_slow(1.2)}, {"multiple": 2, **STRICT}, 24, None),
        ({**TWELVE, 32: NO_MEMORY}, {"multiple": 8}, 24, "memory"),
        ({**TWELVE, 33: NO_MEMORY}, {"multiple": 8}, 24, None),
        ({2: rate(50, 2), 4: rate(100, 4), 6: DROPPED, 8: NO_MEMORY}, {"multiple": 8}, 4, "plateau"),
        ({**TWELVE, 32: too_slow(1.2)}, {"multiple": 8, "is_listed": True, **STRICT}, 24, "batch_sizes"),
        ({**TWELVE, 32: PLANNED}, {"multiple": 8, "largest_batch_size": 31}, 24, None),
        # However far above the plan's limit the refused size lies: what counts is how near to it a size ran.
        ({500: rate(100, 500), 4096: PLANNED}, {"largest_batch_size": 510}, 500, "memory"),
        ({500: rate(100, 500), 4096: PLANNED}, {"largest_batch_size": 511}, None, None),
        ({500: rate(100, 500)}, {"largest_batch_size": 510}, 500, "memory"),
        ({500: rate(100, 500)}, {"largest_batch_size": 511}, 500, None),
        ({3: rate(100, 3), 4: ERROR}, {"largest_batch_size": 4}, 3, "memory"),
        ({500: rate(100, 500), 600: DROPPED}, {"largest_batch_size": 600}, None, "plateau"),
        # A size that failed below one that ran is no limit.
        ({**RISING, 101: NO_MEMORY, 110: rate(90, 110, "dropped")}, {}, 100, "max_batch_size"),
        # Memory ends at 401, and the curve is flat from 200 on: the plateau decided.
        ({100: rate(50, 100), 200: rate(100, 200), 400: rate(100, 400), 401: NO_MEMORY}, {}, 200, "plateau"),
        # Where the curve does not rise the limit is not sought: the curve decided, even short of twice the size.
        ({**RISING, 150: rate(100, 150, "dropped"), 180: DROPPED, 190: NO_MEMORY}, LIMITED, 100, "plateau"),
        ({**RISING, 150: rate(90, 150, "dropped"), 180: DROPPED, 190: NO_MEMORY}, LIMITED, 100, "peak"),
        ({**RISING, 150: rate(90, 150, "dropped"), 190: NO_MEMORY}, LIMITED, 100, "peak"),
        ({**RISING, 150: rate(90, 150, "dropped"), 180: ERROR, 190: NO_MEMORY}, LIMITED, 100, None),
        ({**RISING, 150: DROPPED, 190: NO_MEMORY}, LIMITED, 100, "plateau"),
        ({**RISING, 150: rate(90, 150, "dropped"), 180: DROPPED, 190: too_slow(2.2)}, LIMITED, 100, "peak"),
        # Neither the list, nor max_batch_size, nor memory kept it from sizes that raised an error.
        ({8: rate(100, 8), 32: ERROR}, {}, None, None),
        ({8: rate(100, 8), 32: ERROR}, {"is_listed": True}, None, None),
        ({8: rate(100, 8), 32: ERROR}, {"largest_batch_size": 99}, None, None),
    ],
)
def test_what_decided_by_how_the_larger_sizes_ended(
    ended: dict[int, Ended], options: dict[str, Any], chosen: int | None, decided_by: str | None
) -> None:
    """Each case states above its rows what they show."""
    result = decide(ended, **options)
    assert (result.batch_size, result.decided_by) == (chosen, decided_by)


def test_what_lies_above_a_size_that_failed_was_not_looked_at() -> None:
    """48 ran, 64 fails, and 96 to 512 are dropped for that: no readings judged them, and nothing is a plateau."""
    timings = {**steady((48, 1.0)), 64: [], 96: [], 512: []}
    for status, decided_by in (("error", None), ("timeout", None), ("out_of_memory", None)):
        result = answer_of(timings, {64: status, 96: "dropped", 512: "dropped"})
        assert result.decided_by == decided_by
        assert not any("estimated up to" in reason for reason in result.reasons)


def test_the_size_that_met_a_limit_is_named() -> None:
    """300 ran and 306 did not: both are in the sentence, and so are what 36 takes and the latency limit."""
    result = answer_of({**steady((300, 1.0)), 306: []}, {306: "out_of_memory"})
    assert result.decided_by == "memory"
    assert any("300" in reason and "306" in reason for reason in result.reasons)
    slow = decide({35: rate(35, 35), 36: too_slow(1.2)}, Goal(latency_limit=1.1))
    assert slow.decided_by == "latency_limit"
    assert any(all(fact in reason for fact in ("35", "36", "1.20 s", "1.10 s")) for reason in slow.reasons)


def test_smaller_sizes_that_failed_are_not_what_ended_the_ladder() -> None:
    """An error below the largest timing leaves the decision to memory, and so does none at all."""
    for failed in ({16: "error"}, {}):
        seconds = {**steady((8, 1.0)), **{n: [] for n in failed}, **steady((32, 2.0))}
        result = answer_of(seconds, failed, largest_batch_size=32)
        assert (result.batch_size, result.decided_by) == (32, "memory")
        assert any(reason.startswith("Memory is the limit: nothing larger than 32") for reason in result.reasons)


@pytest.mark.parametrize(
    ("ran", "failed", "decided_by"),
    [
        (100, {102: NO_MEMORY}, "memory"),
        (100, {103: NO_MEMORY}, None),
        (3, {4: NO_MEMORY}, "memory"),
        (3, {5: NO_MEMORY}, None),
        (100, {102: too_slow(1.2)}, "latency_limit"),
        (100, {103: too_slow(1.2)}, None),
        (100, {102: too_slow(1.2), 103: NO_MEMORY}, "latency_limit"),
        (100, {101: ERROR, 102: NO_MEMORY}, "memory"),
        (100, {103: NO_MEMORY, 200: NO_MEMORY}, None),
        (100, {101: DROPPED, 102: NO_MEMORY}, "memory"),
    ],
)
def test_a_limit_decided_only_where_it_was_met_within_2_percent_or_1(
    ran: int, failed: dict[int, Ended], decided_by: str | None
) -> None:
    """Between 100 that ran and 103 that failed there may be a better one, so neither memory nor latency is blamed."""
    result = decide({ran // 2: rate(50, ran // 2), ran: rate(100, ran), **failed}, Goal(latency_limit=1.1))
    assert (result.batch_size, result.decided_by) == (ran, decided_by)
    if decided_by is None:
        assert f"nothing between {ran} and {min(failed)}" in " ".join(result.reasons)


@pytest.mark.parametrize(("allowed", "decided_by"), [(96, "max_batch_size"), (None, "memory")])
def test_what_ran_fits_whatever_the_plan_says(allowed: int | None, decided_by: str) -> None:
    """96 ran while there was more memory, of which 50 fit now: what ended the sizes lies at 96, and not below it."""
    setting = {"limits": {"max_batch_size": allowed}}
    result = decide({48: rate(50, 48), 96: rate(100, 96)}, largest_batch_size=50, setting=setting)
    assert (result.batch_size, result.decided_by) == (96, decided_by)
    assert any(
        reason.startswith(("max_batch_size is the limit", "Memory is")) and "96" in reason for reason in result.reasons
    )


def test_sizes_dropped_without_a_timing_count_as_looked_at() -> None:
    """Their neighbours' readings rule out 512 and more: up to there the curve gains nothing, which is a plateau."""
    result = decide({64: rate(80, 64), 128: rate(100, 128), 256: DROPPED, 512: DROPPED}, largest_batch_size=10_000)
    assert (result.batch_size, result.decided_by) == (128, "plateau")
    assert "measured up to 128, estimated up to 512" in " ".join(result.reasons)
    assert decide({64: rate(80, 64), 128: rate(100, 128), 256: DROPPED, 300: ERROR}).decided_by == "plateau"
    result = decide({64: rate(100, 64), 128: rate(100, 128), 512: DROPPED}, largest_batch_size=10_000)
    assert "measured up to 128, estimated up to 512" in " ".join(result.reasons)


@pytest.mark.parametrize(
    ("far", "decided_by"),
    [
        ([1.05, 1.06, 1.05, 1.06, 1.05], "peak"),  # worse by 5 % throughout
        ([1.3, 1.06, 0.8, 1.4, 0.9], "plateau"),  # its interval reaches the fastest's
        ([1.005] * 5, "plateau"),  # worse throughout, and within the tolerance
        ([1.05, 1.06, 1.05], "peak"),  # too few for an interval: all of them are worse
        ([1.5, 1.06, 0.8], "plateau"),
        ([1.05], "peak"),
    ],
)
def test_a_peak_needs_intervals_apart_or_with_few_timings_all_of_them(far: list[float], decided_by: str) -> None:
    """A median 5 % behind is no fall while the timings of the two overlap."""
    result = answer_of({64: [0.64] * 7, 256: [2.56 * one for one in far]}, {256: "dropped"})
    assert (result.batch_size, result.decided_by) == (64, decided_by)


@pytest.mark.parametrize(("next_size", "decided_by"), [(102, "latency_limit"), (103, "plateau")])
def test_a_size_dropped_for_the_latency_limit_ends_the_sizes(next_size: int, decided_by: str) -> None:
    """It was never read, and by its neighbours it takes too long: nothing else kept the answer from being larger."""
    outcomes = (Outcome(100, "ok"), Outcome(next_size, "dropped", "too slow", {"limit": "latency"}))
    measured = Measured(timings=tuple(rounds(100, [0.5] * 5)), outcomes=outcomes)
    ladder, setting = [Candidate(100), Candidate(next_size)], {"limits": {"max_batch_size": next_size}}
    result = answers.answer(ladder, measured, goal=Goal(latency_limit=0.505), setting=setting)
    assert result.decided_by == decided_by


def test_a_list_decided_where_it_holds_nothing_up_to_the_size_that_failed() -> None:
    """Nothing between 16 and 1000 was asked for, so that 1000 does not fit says little about 16."""
    for failed in (NO_MEMORY, PLANNED, too_slow(1.5)):
        result = decide(
            {16: rate(100, 16), 1000: failed}, Goal(latency_limit=1.0), is_listed=True, largest_batch_size=900
        )
        assert result.decided_by == "batch_sizes"
        assert any("nothing between 16 and 1000" in reason for reason in result.reasons)
    slower = {50: rate(100, 50), 75: rate(60, 75, "dropped"), 200: NO_MEMORY}
    assert decide(slower, is_listed=True).decided_by == "batch_sizes"
    assert decide(slower).decided_by == "peak"
    assert decide({16: rate(100, 16), 17: NO_MEMORY}, is_listed=True).decided_by == "memory"


def test_max_batch_size_decided_where_the_sizes_looked_at_reach_it() -> None:
    """Also where the last was dropped by its neighbours' readings."""
    for last in (rate(100, 12), DROPPED):
        setting = {"limits": {"max_batch_size": 12}}
        result = decide({4: rate(50, 4), 8: rate(100, 8), 12: last}, setting=setting)
        assert (result.batch_size, result.decided_by) == (8, "max_batch_size")
        assert any("max_batch_size is the limit: sizes above 12" in reason for reason in result.reasons)


def test_by_latency_a_larger_size_that_was_looked_at_shows_the_rise() -> None:
    """Timed or ruled out, and whatever else the budget left open."""
    goal = Goal(objective="latency")
    assert decide({1: Ended(1.0), 2: DROPPED, 4: NOT_RUN}, goal).decided_by == "peak"
    assert decide({1: Ended(1.0), 2: Ended(1.005), 4: Ended(2.0), 8: NOT_RUN}, goal).decided_by == "plateau"
    assert decide({1: Ended(1.0), 4: NOT_RUN}, goal).decided_by == "budget"
