"""
What kept the answer from being larger: one rule for what was measured and for what was predicted.

It looks at what became of the larger sizes, and at nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs

from cubatch.measure.goal import Goal
from cubatch.measure.records import TIMED

SPAN = 2  # how far beyond the answer must have been looked to say that it lies inside
NEAR_SHARE = 0.02  # how near to what failed the largest that ran must lie, or 1, for its limit to have been met
FAILURE = "failure"  # that ends the sizes, beside the limits: no code of `decided_by`
_REFUSED, _FAILED = ("out_of_memory", "over_limit"), ("error", "timeout")


UNSEEN = "unseen"
"""What became of a size far beyond what was looked at, of which nothing is known."""


@attrs.frozen
class Fate:
    """
    What became of one size.

    Attributes:
        batch_size: The size.
        status: One of `records.STATUSES`, or UNSEEN.
        cost: Where the median of `Goal.cost` lies: (low, high); None where there is no reading of it.
        breaks_latency: A step takes longer than the latency limit.
    """

    batch_size: int
    status: str
    cost: tuple[float, float] | None = None
    breaks_latency: bool = False


@attrs.frozen
class Decision:
    """
    What ended the sizes above the answer.

    Attributes:
        limit: One of `results.DECIDED_BY`; None where nothing of it holds.
        top: The largest that ran within every limit, or the answer.
        reach: The largest that was looked at below the next limit: timed, or ruled out by its neighbours' readings.
        edge: Where the next limit or failure above `top` lies, and which: "memory", "latency_limit" or FAILURE; None
            where none is known.
    """

    limit: str | None
    top: int
    reach: int
    edge: tuple[int, str] | None


def decide(
    fates: Sequence[Fate],
    *,
    chosen: int,
    fastest: int,
    ties: Collection[int],
    goal: Goal,
    largest_batch_size: int | None,
    max_batch_size: int | None,
    asked: bool,
    multiple: int = 1,
) -> Decision:
    """
    Say what kept the answer from being larger.

    The first that holds:

        None            a larger size was interrupted, in a partial result
        budget          a larger size is "not_run": the budget ended before it, and it might be better
        memory          the largest that ran is less than twice the answer, and the next larger size that failed, which
                        ran out of memory, lies within 2 % or 1 of it, or so near that the search has no size to try
                        between; or the plan's limit lies within 2 % or 1
        latency_limit   likewise; the next larger size that failed takes longer than latency_limit
        peak            sizes up to twice the answer or more were looked at (timed, or dropped by their neighbours'
                        readings), and the largest that was timed is clearly worse than the fastest: its interval, or
                        with fewer than 5 timings all of them and what visits differ by, lies beyond the tolerance from
                        that of the fastest, and paired rounds do not tie the two.  Also where a limit ends the sizes
                        earlier, farther than 2 % from the largest that ran, and all candidates between are dropped:
                        there the curve did not rise
        plateau         likewise, and it is not clearly worse, or no larger size had to be timed
        batch_sizes     nothing larger is in the list that was asked for: at all, or below the size that failed
        max_batch_size  the sizes looked at reach the end of the ladder, and nothing larger was allowed
        None            nothing of this holds: the sizes above the largest that ran ended in errors or timeouts, or lie
                        in a gap below the one that failed, neither tried nor ruled out.  No limit was met, so none
                        is named; the reasons say which size failed with what, and what is not known

    Sizes above one that failed are never looked at, whatever the readings below say of them.

    By latency, a rise of the larger sizes is the rule: where any was looked at, it is "peak" if the answer itself has
    the lowest latency, "plateau" if it is larger than the one that has.

    Args:
        fates: Of every candidate, ascending.
        chosen: The answer.
        fastest: The size with the best median.
        ties: Sizes that cannot be told from the fastest.
        goal: What was to be as good as possible.
        largest_batch_size: The largest that fits by the plan; None where there is no plan.
        max_batch_size: The largest that is allowed; None for no such limit.
        asked: Whether the user gave the list of batch sizes.
        multiple: Of which sizes that the search adds are multiples.

    Example:
        >>> fates = [Fate(8, "ok", (1.0, 1.0)), Fate(16, "ok", (0.9, 0.9)), Fate(32, "ok", (1.1, 1.1))]
        >>> decide(fates, chosen=16, fastest=16, ties=(), goal=Goal(), largest_batch_size=None, max_batch_size=None,
        ...        asked=False).limit
        'peak'
    """
    by_size = {fate.batch_size: fate for fate in fates}
    larger = [fate for n, fate in sorted(by_size.items()) if n > chosen]
    looked = [fate.batch_size for fate in larger if fate.status in TIMED]
    timed = [n for n in looked if by_size[n].cost is not None]
    top = max(timed, default=chosen)
    fits = None if largest_batch_size is None else max(largest_batch_size, top)  # what ran does, whatever the plan says
    edge = _edge(larger, top, _limit(larger, top, fits, max_batch_size, asked=asked))
    reach = max((n for n in looked if edge is None or n <= max(top, edge[0])), default=chosen)
    statuses = {fate.status for fate in larger}
    limit: str | None
    if looked and goal.objective == "latency":
        limit = "peak" if chosen == fastest else "plateau"
    elif statuses & {"interrupted", "not_run"}:
        limit = None if "interrupted" in statuses else "budget"
    elif top < SPAN * chosen and edge is not None and _is_met(top, edge[0], by_size, 1 if asked else multiple):
        limit = None if edge[1] == FAILURE else edge[1]
    elif reach >= SPAN * chosen or (reach > chosen and not asked and _is_ruled_out_below(edge, top, larger)):
        limit = "peak" if timed and top not in ties and _is_worse(by_size[top], by_size[fastest], goal) else "plateau"
    elif edge is not None and edge[1] == FAILURE:
        limit = None
    elif asked and (edge is not None or reach == max(by_size)):
        limit = "batch_sizes"
    else:
        limit = "max_batch_size" if edge is None and _is_near(reach, max(by_size)) else None
    return Decision(limit, top, reach, edge)


def _limit(
    larger: Sequence[Fate], top: int, largest: int | None, allowed: int | None, *, asked: bool
) -> tuple[int, str] | None:
    """Find the next limit above the largest that ran."""
    for fate in larger:
        if fate.batch_size <= top or not (fate.status in _REFUSED or fate.breaks_latency):
            continue
        if fate.breaks_latency:
            return fate.batch_size, "latency_limit"
        is_planned = fate.status == "over_limit" and largest is not None
        return (largest or fate.batch_size) if is_planned else fate.batch_size, "memory"
    is_end = not asked and largest is not None and (allowed is None or allowed > largest)
    return (largest, "memory") if is_end and largest is not None else None


def _edge(larger: Sequence[Fate], top: int, limit: tuple[int, str] | None) -> tuple[int, str] | None:
    """Give the limit, or a failure that comes before it."""
    failure = next((fate.batch_size for fate in larger if fate.batch_size > top and fate.status in _FAILED), None)
    if failure is None or (limit is not None and (limit[0] < failure or _is_near(top, limit[0]))):
        return limit
    return failure, FAILURE


def _is_ruled_out_below(edge: tuple[int, str] | None, top: int, larger: Sequence[Fate]) -> bool:
    """Say whether all between the largest that ran and the next limit is dropped: there the curve did not rise."""
    if edge is None:
        return False
    between = [fate for fate in larger if top < fate.batch_size <= edge[0] and fate.status not in _REFUSED]
    return all(fate.status == "dropped" for fate in between)


def _is_worse(last: Fate, best: Fate, goal: Goal) -> bool:
    """Say whether a size is worse than the fastest by more than the tolerance, whatever their intervals leave open."""
    return last.cost is not None and best.cost is not None and last.cost[0] > goal.allowed(best.cost[1])


def _is_met(ran: int, edge: int, by_size: Mapping[int, Fate], multiple: int) -> bool:
    """Say whether nothing is left to try below a limit; what the plan allows was to be tried itself."""
    failed = by_size.get(edge)
    has_failed = failed is not None and (failed.status == "out_of_memory" or failed.breaks_latency)
    is_next = ran // multiple == (edge - 1) // multiple and not any(ran < n < edge for n in by_size)
    return _is_near(ran, edge) or (has_failed and is_next)


def _is_near(ran: int, edge: int) -> bool:
    return edge - ran <= max(1, NEAR_SHARE * ran)
