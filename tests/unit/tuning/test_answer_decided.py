"""What decided: peak, plateau, memory, the latency limit, the budget, the list or max_batch_size."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest

from cubatch.measure.goal import Goal
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
    too_slow,
)

TWO = {1: Ended(1.0), 2: Ended(1.0)}
RISING = {50: rate(50, 50), 100: rate(100, 100)}
TRIED = {8: rate(80, 8), 16: rate(100, 16), 32: rate(60, 32, "dropped")}
TWELVE = {12: rate(50, 12), 24: rate(100, 24)}
FITS = {48: rate(50, 48), 96: rate(100, 96)}
SOLE = {16: rate(100, 16)}
LIMITED, STRICT, LATENCY = ({"goal": goal} for goal in (
    Goal(latency_limit=2.0), Goal(latency_limit=1.1), Goal(objective="latency"),
))  # fmt: skip
TIMEOUT, LATE = Ended(status="timeout"), Ended(status="dropped", limit="latency")
ABOVE = {"largest_batch_size": 10_000}


def allows(most: int | None, **more: Any) -> dict[str, Any]:
    return {"setting": {"limits": {"max_batch_size": most}}, **more}


def met(ran: int, failed: dict[int, Ended], decided_by: str | None) -> tuple[Any, ...]:
    """A case in which a size ran and larger ones failed."""
    return {ran // 2: rate(50, ran // 2), ran: rate(100, ran), **failed}, STRICT, ran, decided_by


@pytest.mark.parametrize(
    ("ended", "options", "chosen", "decided_by"),
    [
        # Each of the seven words from the smallest history that calls for it.
        ({**TWO, 4: Ended(4.0)}, {}, 2, "peak"),
        ({**TWO, 4: Ended(4.0, "dropped")}, {}, 2, "peak"),
        ({**TWO, 4: Ended(2.0)}, {}, 2, "plateau"),
        (TWO, {"largest_batch_size": 2}, 2, "memory"),
        ({**TWO, 3: NO_MEMORY}, {"largest_batch_size": 8}, 2, "memory"),
        ({**TWO, 4: PLANNED}, {"largest_batch_size": 2}, 2, "memory"),
        ({**TWO, 3: too_slow(1.5)}, {}, 2, "latency_limit"),
        ({**TWO, 4: NOT_RUN}, {}, 2, "budget"),
        ({**TWO, 4: ERROR, 8: NOT_RUN}, {}, 2, "budget"),
        (TWO, {"is_listed": True, "largest_batch_size": 2}, 2, "batch_sizes"),
        (TWO, allows(2, largest_batch_size=9), 2, "max_batch_size"),
        (TWO, allows(9, largest_batch_size=2), 2, "memory"),
        (TWO, {}, 2, "max_batch_size"),  # a callable: there is no plan
        # By latency a floor that ends at 2 is a plateau; a latency that rises at once has its peak at the smallest.
        ({1: Ended(1.0), 2: Ended(1.005), 4: Ended(2.0)}, LATENCY, 2, "plateau"),
        ({1: Ended(1.0), 2: Ended(2.0)}, LATENCY, 1, "peak"),
        ({1: Ended(1.0), 2: DROPPED, 4: NOT_RUN}, LATENCY, ANY, "peak"),
        ({1: Ended(1.0), 2: Ended(1.005), 4: Ended(2.0), 8: NOT_RUN}, LATENCY, 2, "plateau"),
        ({1: Ended(1.0), 4: NOT_RUN}, LATENCY, ANY, "budget"),
        # A slower size a little above may be a tooth of a saw; one at twice the size shows the other side.
        ({48: rate(96, 48), 96: rate(100, 96), 100: rate(80, 100)}, {}, 96, "max_batch_size"),
        ({48: rate(96, 48), 96: rate(100, 96), 191: rate(80, 191)}, {}, 96, "max_batch_size"),
        ({48: rate(96, 48), 96: rate(100, 96), 192: rate(80, 192)}, {}, 96, "peak"),
        # A size that might be better was left out; a smaller one keeps nothing from growing.
        ({**TRIED, 64: NOT_RUN}, {}, 16, "budget"),
        ({**TRIED, 64: DROPPED}, {}, 16, "peak"),
        ({4: NOT_RUN, **TRIED, 64: DROPPED}, {}, 16, "peak"),
        ({8: Ended(1.0), 16: ERROR, 32: Ended(2.0)}, {"largest_batch_size": 32}, 32, "memory"),
        ({8: Ended(1.0), 32: Ended(2.0)}, {"largest_batch_size": 32}, 32, "memory"),
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
        # 96 ran while there was more memory, of which 50 fit now: what ended the sizes lies at 96, and not below it.
        (FITS, allows(96, largest_batch_size=50), 96, "max_batch_size"),
        (FITS, allows(None, largest_batch_size=50), 96, "memory"),
        # A limit decided only where it was met within 2 percent, or 1: between them there may be a better size.
        met(100, {102: NO_MEMORY}, "memory"),
        met(100, {103: NO_MEMORY}, None),
        met(3, {4: NO_MEMORY}, "memory"),
        met(3, {5: NO_MEMORY}, None),
        met(100, {102: too_slow(1.2)}, "latency_limit"),
        met(100, {103: too_slow(1.2)}, None),
        met(100, {102: too_slow(1.2), 103: NO_MEMORY}, "latency_limit"),
        met(100, {101: ERROR, 102: NO_MEMORY}, "memory"),
        met(100, {103: NO_MEMORY, 200: NO_MEMORY}, None),
        met(100, {101: DROPPED, 102: NO_MEMORY}, "memory"),
        # A size dropped for the latency limit was never timed: by its neighbors it takes too long.
        ({100: Ended(0.5), 102: LATE}, allows(102, goal=Goal(latency_limit=0.505)), ANY, "latency_limit"),
        ({100: Ended(0.5), 103: LATE}, allows(103, goal=Goal(latency_limit=0.505)), ANY, "plateau"),
        # A size that failed below one that ran is no limit.
        ({**RISING, 101: NO_MEMORY, 110: rate(90, 110, "dropped")}, {}, 100, "max_batch_size"),
        # Memory ends at 401, and the curve is flat from 200 on: the plateau decided.
        ({100: rate(50, 100), 200: rate(100, 200), 400: rate(100, 400), 401: NO_MEMORY}, {}, 200, "plateau"),
        # Sizes dropped without a timing are ruled out by their neighbors: up to there the curve gains nothing.
        ({64: rate(80, 64), 128: rate(100, 128), 256: DROPPED, 512: DROPPED}, ABOVE, 128, "plateau"),
        ({64: rate(80, 64), 128: rate(100, 128), 256: DROPPED, 300: ERROR}, {}, 128, "plateau"),
        # What is dropped because a size below it failed was judged by no timing.
        *(({48: Ended(1.0), 64: failed, 96: DROPPED, 512: DROPPED}, {}, ANY, None)
          for failed in (ERROR, TIMEOUT, NO_MEMORY)),
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
        # A list holds nothing between 16 and 1000, so that 1000 does not fit says little about 16.
        *(({**SOLE, 1000: failed}, {"is_listed": True, "largest_batch_size": 900, "goal": Goal(latency_limit=1.0)},
           ANY, "batch_sizes") for failed in (NO_MEMORY, PLANNED, too_slow(1.5))),
        ({50: rate(100, 50), 75: rate(60, 75, "dropped"), 200: NO_MEMORY}, {"is_listed": True}, ANY, "batch_sizes"),
        ({50: rate(100, 50), 75: rate(60, 75, "dropped"), 200: NO_MEMORY}, {}, ANY, "peak"),
        ({**SOLE, 17: NO_MEMORY}, {"is_listed": True}, ANY, "memory"),
        # max_batch_size, also where the last size was ruled out by its neighbors.
        *(({4: rate(50, 4), 8: rate(100, 8), 12: last}, allows(12), 8, "max_batch_size")
          for last in (rate(100, 12), DROPPED)),
    ],
)  # fmt: skip
def test_what_decided_by_how_the_larger_sizes_ended(
    ended: dict[int, Ended], options: dict[str, Any], chosen: int | None, decided_by: str | None
) -> None:
    """Each case states above its rows what they show."""
    result = decide(ended, **options)
    assert (result.batch_size, result.decided_by) == (chosen, decided_by)


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
