"""What became of every size when the search ends, in words and for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs

from cubatch.search.view import KNOWN, SURE, View
from cubatch.units import format_percent, format_seconds

FAR, NEAR = 3.0, 0.5  # factor beyond the largest measured size, log of what that is behind the answer
FLAT = 4  # how far beyond the answer must have been looked, to expect nothing of what lies farther


@attrs.frozen
class Verdict:
    """How the measuring of a size ended: see `records.Outcome`."""

    status: str
    reason: str
    facts: Mapping[str, object] = attrs.field(factory=dict)


def verdicts(view: View) -> dict[int, Verdict]:
    """Say of every size of the ladder and every one that was visited how it ended."""
    sizes = [n for n in sorted({*view.of.ladder, *view.read}) if n not in view.of.closed]
    return {n: _verdict(view, n) for n in sizes}


def _verdict(view: View, n: int) -> Verdict:
    limit, spent = view.goal.latency_limit, f"the budget of {format_seconds(view.of.budget)}"
    if n in view.read and not view.is_able(n) and limit is not None:
        text = f"its time of {format_seconds(view.seconds[n])} is above the latency limit of {format_seconds(limit)}"
        return Verdict("over_limit", text, {"limit": "latency"})
    if view.answer is None or view.fastest is None:
        return _without_answer(view, n, spent)
    if n in view.read:
        return _of_read(view, n)
    return _of_unread(view, n, spent)


def _without_answer(view: View, n: int, spent: str) -> Verdict:
    breaks = [size for size in view.read if size < n]
    if breaks and view.of.extends:  # where sizes were asked for by name, each is visited that the budget holds
        return Verdict("dropped", f"batch size {breaks[0]}, which is smaller, breaks the latency limit")
    return Verdict("not_run", f"{spent} does not hold a visit", {"limit": "budget"})


def _of_read(view: View, n: int) -> Verdict:
    """Rule out what is behind the fastest by more than the tolerance, whatever its interval leaves open."""
    record, fastest = view.read[n], view.fastest or n
    count, trials = len(record.usable), record.trials
    measured = f"{count} timing{'s' * (count > 1)} in {trials} trial{'s' * (trials > 1)}"
    sd = view.belief.difference_sd(view.place(n), view.place(fastest))
    if -view.gain(n) - SURE * sd > view.tolerance:
        by = format_percent(-math.expm1(view.gain(n)))
        return Verdict("dropped", f"{by} behind batch size {fastest} after {measured}")
    return Verdict("ok", measured)


def _of_unread(view: View, n: int, spent: str) -> Verdict:
    if not view.of.extends:
        return Verdict("not_run", f"{spent} does not hold a visit", {"limit": "budget"})
    for rule in (_slower_than_lowest, _above_failed, _above_limit, _far_beyond_flat, _beyond_flat):
        if (reason := rule(view, n)) is not None:
            return Verdict("dropped", reason, _FACTS.get(rule, {}))
    average, most = _gain(view, n)
    if (view.goal.objective == "latency" or average >= KNOWN * view.tolerance) and not view.affordable(n):
        need, left = float(view.visit_seconds[view.place(n)]), view.of.left
        reason = f"a visit would take about {format_seconds(need)}, {format_seconds(left)} of the budget are left"
        facts = {"limit": "budget", "could_gain": round(most, 3), "needed_seconds": need, "left_seconds": left}
        return Verdict("not_run", reason, facts)
    if most <= 0:
        return Verdict("dropped", f"by the timings of its neighbors it is slower than batch size {view.answer}")
    if most > 1:  # a bound that bounds nothing
        reason = f"by the timings of its neighbors it is not expected to be better than batch size {view.answer}"
        return Verdict("dropped", reason)
    reason = (
        f"by the timings of its neighbors it is at most {format_percent(most)} better than batch size {view.answer}"
    )
    return Verdict("dropped", reason)


def _slower_than_lowest(view: View, n: int) -> str | None:
    if view.goal.objective != "latency" or view.fastest is None:
        return None
    allowed = view.goal.allowed(view.seconds[view.fastest])
    slower = [size for size in view.read if size < n and view.seconds[size] > allowed]
    return f"batch size {slower[0]}, which is smaller, already takes longer" if slower else None


def _above_failed(view: View, n: int) -> str | None:
    failed = [size for size in view.walls if max(view.read) < size < n]
    if not failed:
        return None
    how = "failed" if min(failed) in view.of.broken else "does not fit"
    return f"batch size {min(failed)}, which is smaller, {how}"


def _above_limit(view: View, n: int) -> str | None:
    limit, step = view.goal.latency_limit, float(view.steps[view.place(n)])
    if limit is None or step <= limit:
        return None
    return f"it would take about {format_seconds(step)}, above the latency limit of {format_seconds(limit)}"


def _beyond_flat(view: View, n: int) -> str | None:
    last = max(view.read)
    if view.goal.objective == "latency" or view.answer is None or not n > last >= FLAT * view.answer:
        return None
    return f"from batch size {view.answer} to {last} nothing is gained, so nothing is expected beyond"


def _far_beyond_flat(view: View, n: int) -> str | None:
    """Rule nothing out far beyond a plateau, where another algorithm may run."""
    last = max(view.read)
    if _beyond_flat(view, n) is None or n <= FAR * last or view.gain(last) <= -NEAR:
        return None
    return f"from batch size {view.answer} to {last} nothing is gained, and what lies far beyond was not looked at"


_FACTS: dict[Callable[[View, int], str | None], Mapping[str, object]] = {
    _above_limit: {"limit": "latency"},
    _far_beyond_flat: {"looked_at": False},
}


def _gain(view: View, n: int) -> tuple[float, float]:
    """Say how much better than the answer a size may be: beyond the tolerance on average, and at most."""
    ahead, sd = view.ahead(n)
    return sd * _mean_above((view.tolerance - ahead) / sd), math.expm1(ahead + SURE * sd)


def _mean_above(z: float) -> float:
    """Give the mean of what a standard normal number exceeds z by."""
    return math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) - z * 0.5 * math.erfc(z / math.sqrt(2))
