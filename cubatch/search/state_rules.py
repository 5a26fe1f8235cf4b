"""What to visit next where visits to a size differ by more than sizes do, or the host has states, each for seconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

from cubatch.measure.records import Timing
from cubatch.search.history import Record
from cubatch.search.view import View

DISAGREE, DISAGREE_SD = 0.05, 4.0  # by how much visits to one size do: as a log, in standard deviations of a reading
WITHIN, MOST_VISITS, SHARE = 0.2, 4, 0.25  # behind the fastest, visits to each, of what is left
BY_FAR, RISK, MOST_CONTESTED = 2.0, 0.05, 6  # times the tolerance, that a size is better by; visits to each


def moved(view: View) -> list[int]:
    """
    Name the sizes that may be the best and were not read in the state in which the host is now.

    Only where what was read tells of states, and not all that may be the best were read in one; or where what broke the
    latency limit in the other state may keep it in that in which sizes are compared.  Also where the answer was visited
    once only in that state and the host has left it: more visits to the answer alone would compare it with nothing.
    """
    state, met = view.state, [n for n in view.of.visited if n in view.read]
    if state is None or view.fastest is None or not met:
        return []
    limit = view.goal.latency_limit or math.inf
    within = [n for n, record in view.read.items() if record.seconds > limit and view.is_able(n)]
    contenders = [n for n in view.read if n in state.contenders or n in within]
    last = view.read[met[-1]].timings[-1]
    now = state.is_quick if state.was_held_up(last) else state.was_quick(last)
    is_sure = now == state.is_quick or view.answer is None or view.read[view.answer].comparable_visits > 1
    if is_sure and all(view.read[n].is_comparable for n in contenders):
        return []

    def is_known(timing: Timing) -> bool:
        return state.was_quick(timing) == now and not state.was_held_up(timing)

    unknown = [n for n in contenders if not any(map(is_known, view.read[n].timings))]
    return _swept(view, unknown, most_visits=2 * MOST_VISITS)


def states(view: View) -> list[int]:
    """
    Name the sizes that are not far behind, where visits to one disagree; until then that which was visited first.

    What was visited once may have met a slow state then, be it that it broke the latency limit there.  Where a clock is
    read, or a reference is timed, it tells of them.
    """
    if view.answer is None or view.fastest is None or view.goal.objective == "latency":
        return []
    timings = itertools.chain.from_iterable(record.timings for record in view.read.values())
    if view.has_reference or any(timing.sm_clock_mhz is not None for timing in timings):
        return []
    costs = {n: record.cost or math.inf for n, record in view.read.items() if n not in view.of.failed}
    limit, reach = view.goal.latency_limit or math.inf, 1 - WITHIN
    near = [n for n in costs if costs[n] * reach <= costs[view.fastest] and view.read[n].seconds * reach <= limit]
    telling = [n for n in near if n not in view.of.visited[:1]]  # the first of a run meets a cold process
    if any(_do_disagree(view.read[n], view.noise.reading) for n in telling):
        sweep = _swept(view, near, MOST_VISITS)
        return sweep if sweep != [view.fastest] else []
    due = [n for n in _earliest(view, telling) if n not in view.of.closed and view.read[n].visits < MOST_VISITS]
    return [n for n in due if view.affordable(n, SHARE)]


def contested(view: View) -> list[int]:
    """
    Name the answer and the sizes that were read and may be better by far, where a reference is timed.

    As PyTorch's is on a CPU: there visits differ by some percent, so that the best of several sizes had luck.
    """
    if view.answer is None or view.goal.objective == "latency" or not view.has_reference:
        return []
    able = [n for n in view.read if n != view.answer and view.is_able(n)]
    rivals = [n for n in able if view.likely_ahead(n, BY_FAR * view.tolerance) > RISK]
    sweep = _swept(view, [view.answer, *rivals], MOST_CONTESTED)
    return sweep if sweep != [view.answer] else []


def _swept(view: View, sizes: Sequence[int], most_visits: int) -> list[int]:
    """Give the best of those that may be visited again, as many as a sweep may take, shuffled."""
    due = [n for n in sizes if n not in view.of.closed and view.read[n].visits < most_visits]
    due.sort(key=lambda n: view.read[n].cost or math.inf)
    spent = itertools.accumulate(float(view.visit_seconds[view.place(n)]) for n in due)
    return view.shuffled(due[: sum(seconds <= SHARE * view.of.left for seconds in spent)])


def _earliest(view: View, near: Collection[int]) -> list[int]:
    """Give the size that was visited first, unless it was again after half of the others had been."""
    visits = [n for n in view.of.visited if n in near]
    others = [place for place, n in enumerate(visits) if n != visits[0]]
    again = others and visits[0] in visits[others[(len(others) - 1) // 2] :]
    return visits[:1] if others and not again else []


def _do_disagree(record: Record, reading: float) -> bool:
    """Whether visits to a size differ by far more than its readings do."""
    visits = record.least_of_visits
    return math.log(max(visits) / min(visits)) > max(DISAGREE, DISAGREE_SD * reading)
