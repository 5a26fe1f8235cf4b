"""
Which limit kept the recommended size from being larger: one rule for measured and for predicted sizes.

The rule looks at the outcomes of the larger sizes only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs

from cubatch.measure.goal import Goal
from cubatch.measure.records import TIMED

SPAN = 2  # a peak needs sizes up to this many times the recommended one
NEAR_SHARE = 0.02  # a limit is met if the largest size that ran lies within this share below it, or 1
FAILURE = "failure"  # of a larger size; no code of `decided_by`
_REFUSED, _FAILED = ("out_of_memory", "over_limit"), ("error", "timeout")


UNSEEN = "unseen"
"""Status of a size far beyond the others, of which nothing is known."""


@attrs.frozen
class Fate:
    """The outcome of one batch size, reduced to the fields that decide the limiting factor."""

    batch_size: int  # the size
    status: str  # one of `records.STATUSES`, or UNSEEN
    cost: tuple[float, float] | None = None  # interval (low, high) of the median of `Goal.cost`; None without a timing
    breaks_latency: bool = False  # whether a step takes longer than the latency limit


@attrs.frozen
class Decision:
    """The reason why the recommended batch size is not larger, and the sizes that show it."""

    limit: str | None  # one of `results.DECIDED_BY`; None if no limit was met, or a larger size was interrupted
    top: int  # the largest size that ran within every limit, or the recommended one
    reach: int  # the largest size below `edge` that was timed, or ruled out by timings of its neighbors
    # the next limit or failure above `top`: its size, and "memory", "latency_limit" or FAILURE. None if none is known
    edge: tuple[int, str] | None


def decide(
    fates: Sequence[Fate],  # outcomes of all candidates, ascending by size
    *,
    # chosen, fastest, ties: the recommended size, the one with the best median, and those that equal the fastest
    chosen: int,
    fastest: int,
    ties: Collection[int],
    goal: Goal,
    largest_batch_size: int | None,  # the largest that fits by the memory plan; None without a plan
    max_batch_size: int | None,  # the largest that is allowed; None for no such limit
    is_listed: bool,  # whether the user gave the list of batch sizes
    multiple: int = 1,  # the search adds multiples of this size
) -> Decision:
    """
    Return which limit kept the recommended batch size from being larger.

    It is the first that holds:

        None            a larger size was interrupted, in a partial result
        budget          a larger size is "not_run": the budget ended before it, and it might be better
        memory          the largest that ran is less than twice the recommended one, and the next larger size that
                        failed ran out of memory and lies within 2 % or 1 of it, or so near that the search has no size
                        to try between them; or the plan's limit lies within 2 % or 1
        latency_limit   likewise; the next larger size that failed takes longer than latency_limit
        peak            sizes up to twice the recommended one or more were timed, or dropped by timings of their
                        neighbors, and the largest that was timed is clearly worse than the fastest: its interval lies
                        beyond the tolerance from that of the fastest, and they are not tied. Also if a limit ends the
                        sizes earlier, farther than 2 % from the largest that ran, and all candidates between are
                        dropped: there the curve did not rise
        plateau         likewise, and it is not clearly worse, or no larger size had to be timed
        batch_sizes     the user's list has nothing larger: at all, or below the size that failed
        max_batch_size  the sizes reach the end of the ladder, and nothing larger was allowed: by `max_batch_size`, the
                        data set, `multiple_of` or `divides`
        None            no limit was met: the sizes above the largest that ran ended in errors or timeouts, or lie in a
                        gap below the one that failed, neither tried nor ruled out

    Sizes above one that failed do not count, regardless of the timings below it.

    By latency, larger sizes are expected to be slower. If any was timed, it is "peak" for a recommended size that has
    the lowest latency itself, and "plateau" for a larger one.
    """
    by_size = {fate.batch_size: fate for fate in fates}
    larger = [fate for n, fate in sorted(by_size.items()) if n > chosen]
    seen = [fate.batch_size for fate in larger if fate.status in TIMED]
    timed = [n for n in seen if by_size[n].cost is not None]
    top = max(timed, default=chosen)
    fits = None if largest_batch_size is None else max(largest_batch_size, top)  # a size that ran fits
    edge = _edge(larger, top, _limit(larger, top, fits, max_batch_size, is_listed=is_listed))
    reach = max((n for n in seen if edge is None or n <= max(top, edge[0])), default=chosen)
    statuses = {fate.status for fate in larger}
    limit: str | None
    if seen and goal.objective == "latency":
        limit = "peak" if chosen == fastest else "plateau"
    elif statuses & {"interrupted", "not_run"}:
        limit = None if "interrupted" in statuses else "budget"
    elif top < SPAN * chosen and edge is not None and _is_met(top, edge[0], by_size, 1 if is_listed else multiple):
        limit = None if edge[1] == FAILURE else edge[1]
    elif reach >= SPAN * chosen or (reach > chosen and not is_listed and _is_ruled_out_below(edge, top, larger)):
        limit = "peak" if timed and top not in ties and _is_worse(by_size[top], by_size[fastest], goal) else "plateau"
    elif edge is not None and edge[1] == FAILURE:
        limit = None
    elif is_listed and (edge is not None or reach == max(by_size)):
        limit = "batch_sizes"
    else:
        limit = "max_batch_size" if edge is None and is_near(reach, max(by_size)) else None
    return Decision(limit, top, reach, edge)


def _limit(
    larger: Sequence[Fate], top: int, largest: int | None, allowed: int | None, *, is_listed: bool
) -> tuple[int, str] | None:
    """
    Return the first limit above `top` as (size, "memory" or "latency_limit"); None if there is none.

    The size is the smallest that exceeds the limit; of a memory plan, the largest that fits. `top` ran within every
    limit, `largest` fits by the plan, and `allowed` is the user's; None: no such limit.
    """
    for fate in larger:
        if fate.batch_size <= top or not (fate.status in _REFUSED or fate.breaks_latency):
            continue
        if fate.breaks_latency:
            return fate.batch_size, "latency_limit"
        is_planned = fate.status == "over_limit" and largest is not None
        return (largest or fate.batch_size) if is_planned else fate.batch_size, "memory"
    is_end = not is_listed and largest is not None and (allowed is None or allowed > largest)
    return (largest, "memory") if is_end and largest is not None else None


def _edge(larger: Sequence[Fate], top: int, limit: tuple[int, str] | None) -> tuple[int, str] | None:
    """
    Return the given limit, or (batch size, FAILURE) if a smaller size above `top` failed for another reason.

    The result is None if there is neither a limit nor a failure.
    """
    failure = next((fate.batch_size for fate in larger if fate.batch_size > top and fate.status in _FAILED), None)
    if failure is None or (limit is not None and (limit[0] < failure or is_near(top, limit[0]))):
        return limit
    return failure, FAILURE


def _is_ruled_out_below(edge: tuple[int, str] | None, top: int, larger: Sequence[Fate]) -> bool:
    """
    Return whether all batch sizes between `top`, the largest that ran, and the next limit were ruled out as no better.

    `edge` is the limit as (size, kind); without one, None, the result is False.
    """
    if edge is None:
        return False
    between = [fate for fate in larger if top < fate.batch_size <= edge[0] and fate.status not in _REFUSED]
    return all(fate.status == "dropped" for fate in between)


def _is_worse(last: Fate, best: Fate, goal: Goal) -> bool:
    """
    Return whether the cost of `last` is above that of `best` by more than the tolerance, beyond their intervals.

    The low end of `last` is compared with the high end of `best`. False if `last` or `best` has no timing.
    """
    return last.cost is not None and best.cost is not None and last.cost[0] > goal.allowed(best.cost[1])


def _is_met(ran: int, edge: int, by_size: Mapping[int, Fate], multiple: int) -> bool:
    """Return whether no batch size is left to try between `ran`, the largest size that ran, and the limit `edge`."""
    failed = by_size.get(edge)
    has_failed = failed is not None and (failed.status == "out_of_memory" or failed.breaks_latency)
    is_next = ran // multiple == (edge - 1) // multiple and not any(ran < n < edge for n in by_size)
    return is_near(ran, edge) or (has_failed and is_next)


def is_near(ran: int, edge: int) -> bool:
    """Return whether a limit is within 2 % or 1 of a size that ran."""
    return edge - ran <= max(1, NEAR_SHARE * ran)
