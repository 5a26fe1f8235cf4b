"""Rules for the next batch size at a latency limit or at the end of memory."""

from __future__ import annotations

from cubatch.search import bisection
from cubatch.search.state import KNOWN, SearchState

AT_LIMIT, LIMIT_SHARE = 2.0, 0.02  # factor to a limit that may affect the recommendation; share of the time left


def bisect_latency(state: SearchState) -> list[int]:
    """Return a size between the largest within the latency limit and the smallest beyond it."""
    limit = state.goal.latency_limit
    if limit is None or state.recommended is None or state.goal.objective == "latency":
        return []
    low = max(n for n in state.measured if state.is_feasible(n))
    high = min((n for n in state.measured if n > low and state.seconds[n] > limit), default=None)
    first = state.seconds[low]
    if high is not None:
        last = state.seconds[high]
    else:  # from the posterior, until a size beyond the limit is measured
        beyond = [
            n
            for n in state.sizes
            if n > low and n not in state.inputs.closed and state.step_seconds[state.place(n)] > limit
        ]
        if not beyond or not state.affordable(beyond[0]):
            return []
        high, last = beyond[0], float(state.step_seconds[state.place(beyond[0])])
        if bisection.is_closed(low, high) or not any(low < n < high for n in state.sizes):
            return [high]
    return _in_gap(state, low, high, low + (limit - first) / (last - first) * (high - low))


def bisect_memory(state: SearchState) -> list[int]:
    """Return a size between the largest that ran and the smallest that ran out of memory or failed otherwise."""
    able = [n for n in state.measured if state.is_feasible(n)]
    if not able or state.goal.objective == "latency":
        return []
    low = max(able)
    above = [n for n in state.inputs.failed if n > low]
    ends = [n for n in state.bounding_failures if n > low] or (above if len(above) > 1 else [])
    high = min(ends, default=None)
    if high is None or any(
        low < n < high for n in state.measured
    ):  # a size that ran over a limit ends the ladder earlier
        return []
    return _in_gap(state, low, high, None)


def _in_gap(state: SearchState, low: int, high: int, guess: float | None) -> list[int]:
    """
    Return a size in the gap of a limit, if the curve rises there and the budget holds a trial.

    Where it rises by less than the tolerance, only a cheap trial is worth it.
    """
    inside = [n for n in state.sizes if low < n < high]
    if not inside:
        return []
    rise = state.gain(inside[-1])
    is_at_limit = state.recommended is not None and low < AT_LIMIT * state.recommended
    share = 1.0 if rise >= KNOWN * state.tolerance else LIMIT_SHARE if rise > 0 and is_at_limit else 0.0
    target = bisection.next_size(low, high, guess, state.inputs.multiple)
    if target is None:
        return []
    nearest = min(inside, key=lambda n: abs(n - target))  # a size whose trial has an expected time
    is_allowed = state.inputs.accepts(target) and state.is_accepted(target, is_new=True)
    size = target if state.inputs.extends and is_allowed and target not in state.inputs.closed else nearest
    return [size] if size not in state.inputs.closed and state.affordable(nearest, share) else []
