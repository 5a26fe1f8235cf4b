"""What to measure next where sizes end: at a latency limit, or where memory does."""

from __future__ import annotations

from cubatch.search import bisection
from cubatch.search.view import KNOWN, View

AT_LIMIT, LIMIT_SHARE = 2.0, 0.02  # how far above the answer a limit decides it; of what is left


def bisect_latency(view: View) -> list[int]:
    """Return a size between the largest that keeps the latency limit and the smallest that does not."""
    limit = view.goal.latency_limit
    if limit is None or view.answer is None or view.goal.objective == "latency":
        return []
    low = max(n for n in view.read if view.is_able(n))
    high = min((n for n in view.read if n > low and view.seconds[n] > limit), default=None)
    first = view.seconds[low]
    if high is not None:
        last = view.seconds[high]
    else:  # by the posterior, until one is measured
        beyond = [n for n in view.sizes if n > low and n not in view.of.closed and view.steps[view.place(n)] > limit]
        if not beyond or not view.affordable(beyond[0]):
            return []
        high, last = beyond[0], float(view.steps[view.place(beyond[0])])
        if bisection.is_met(low, high) or not any(low < n < high for n in view.sizes):
            return [high]
    return _in_gap(view, low, high, low + (limit - first) / (last - first) * (high - low))


def bisect_memory(view: View) -> list[int]:
    """Return a size between the largest that ran and the smallest that ran out of memory or failed otherwise."""
    able = [n for n in view.read if view.is_able(n)]
    if not able or view.goal.objective == "latency":
        return []
    low = max(able)
    ends = [n for n in view.walls if n > low] or [n for n in view.of.failed if n > low]
    high = min(ends, default=None)
    if high is None or any(low < n < high for n in view.read):  # what ran and breaks a limit ends the sizes earlier
        return []
    return _in_gap(view, low, high, None)


def _in_gap(view: View, low: int, high: int, guess: float | None) -> list[int]:
    """
    Narrow the gap of a limit, while the curve rises there and the budget holds a trial.

    Where it rises by less than the tolerance, the end of what may be the answer is worth only what is cheap.
    """
    inside = [n for n in view.sizes if low < n < high]
    if not inside:
        return []
    rise = view.gain(inside[-1])
    is_at_limit = view.answer is not None and low < AT_LIMIT * view.answer
    share = 1.0 if rise >= KNOWN * view.tolerance else LIMIT_SHARE if rise > 0 and is_at_limit else 0.0
    wanted = bisection.between(low, high, guess, view.of.multiple)
    if wanted is None:
        return []
    like = min(inside, key=lambda n: abs(n - wanted))  # a size whose trial has an expected time
    size = wanted if view.of.extends and wanted not in view.of.closed else like
    return [size] if size not in view.of.closed and view.affordable(like, share) else []
