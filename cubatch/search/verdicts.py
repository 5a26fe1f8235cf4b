"""The outcome of every batch size when the search ends, as text and as values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs

from cubatch.search.state import KNOWN, SURE, SearchState
from cubatch.units import format_percent, format_seconds

FAR, NEAR = 3.0, 0.5  # factor beyond the largest measured size; log of its loss against the recommended size
FLAT = 4  # factor above the recommended size that must be measured before larger sizes are ruled out


@attrs.frozen
class Verdict:
    """Hold how the measuring of a size ended: see `records.Outcome`."""

    status: str
    reason: str
    facts: Mapping[str, object] = attrs.field(factory=dict)


def judge_sizes(state: SearchState) -> dict[int, Verdict]:
    """Return the verdict of every size of the ladder and every measured size."""
    sizes = [n for n in sorted({*state.inputs.ladder, *state.measured}) if n not in state.inputs.closed]
    return {n: _verdict(state, n) for n in sizes}


def _verdict(state: SearchState, n: int) -> Verdict:
    limit, spent = state.goal.latency_limit, f"the budget of {format_seconds(state.inputs.budget)}"
    if n in state.measured and not state.is_feasible(n) and limit is not None:
        text = f"its time of {format_seconds(state.seconds[n])} is above the latency limit of {format_seconds(limit)}"
        return Verdict("over_limit", text, {"limit": "latency"})
    if state.recommended is None or state.fastest is None:
        return _judge_without_recommendation(state, n, spent)
    if n in state.measured:
        return _judge_measured(state, n)
    return _judge_unmeasured(state, n, spent)


def _judge_without_recommendation(state: SearchState, n: int, spent: str) -> Verdict:
    breaks = [size for size in state.measured if size < n]
    if breaks and state.inputs.extends:  # requested sizes are all tried
        return Verdict("dropped", f"batch size {breaks[0]}, which is smaller, breaks the latency limit")
    return Verdict("not_run", f"{spent} is too little for a trial of this size", {"limit": "budget"})


def _judge_measured(state: SearchState, n: int) -> Verdict:
    """Drop a size that is slower than the fastest by more than the tolerance, with 95 % confidence."""
    record, fastest = state.measured[n], state.fastest or n
    count, trials = len(record.usable), record.trials
    measured = f"{count} timing{'s' * (count > 1)} in {trials} trial{'s' * (trials > 1)}"
    sd = state.posterior.difference_sd(state.place(n), state.place(fastest))
    if -state.gain(n) - SURE * sd > state.tolerance:
        by = format_percent(-math.expm1(state.gain(n)))
        return Verdict("dropped", f"{by} behind batch size {fastest} after {measured}")
    return Verdict("ok", measured)


def _judge_unmeasured(state: SearchState, n: int, spent: str) -> Verdict:
    if not state.inputs.extends:
        return Verdict("not_run", f"{spent} is too little for a trial of this size", {"limit": "budget"})
    for rule in (_slower_than_lowest, _above_failed, _above_limit, _far_beyond_flat, _beyond_flat):
        if (reason := rule(state, n)) is not None:
            return Verdict("dropped", reason, _FACTS.get(rule, {}))
    average, most = _gain(state, n)
    if (state.goal.objective == "latency" or average >= KNOWN * state.tolerance) and not state.affordable(n):
        need, left = float(state.trial_seconds[state.place(n)]), state.inputs.left
        reason = f"a trial would take about {format_seconds(need)}, {format_seconds(left)} of the budget are left"
        facts = {"limit": "budget", "could_gain": round(most, 3), "needed_seconds": need, "left_seconds": left}
        return Verdict("not_run", reason, facts)
    if most <= 0:
        return Verdict("dropped", f"by the timings of its neighbors it is slower than batch size {state.recommended}")
    if most > 1:  # too wide to be useful
        reason = f"by the timings of its neighbors it is not expected to be better than batch size {state.recommended}"
        return Verdict("dropped", reason)
    share, rival = format_percent(most), state.recommended
    return Verdict("dropped", f"by the timings of its neighbors it is at most {share} better than batch size {rival}")


def _slower_than_lowest(state: SearchState, n: int) -> str | None:
    if state.goal.objective != "latency" or state.fastest is None:
        return None
    allowed = state.goal.allowed(state.seconds[state.fastest])
    slower = [size for size in state.measured if size < n and state.seconds[size] > allowed]
    return f"batch size {slower[0]}, which is smaller, already takes longer" if slower else None


def _above_failed(state: SearchState, n: int) -> str | None:
    failed = [size for size in state.bounding_failures if max(state.measured) < size < n]
    if not failed:
        return None
    how = "failed" if min(failed) in state.inputs.failure_statuses else "does not fit"
    return f"batch size {min(failed)}, which is smaller, {how}"


def _above_limit(state: SearchState, n: int) -> str | None:
    limit, step = state.goal.latency_limit, float(state.step_seconds[state.place(n)])
    if limit is None or step <= limit:
        return None
    return f"it would take about {format_seconds(step)}, above the latency limit of {format_seconds(limit)}"


def _beyond_flat(state: SearchState, n: int) -> str | None:
    last = max(state.measured)
    if state.goal.objective == "latency" or state.recommended is None or not n > last >= FLAT * state.recommended:
        return None
    return f"from batch size {state.recommended} to {last} nothing is gained, so nothing is expected beyond"


def _far_beyond_flat(state: SearchState, n: int) -> str | None:
    """Return a reason that leaves open sizes far beyond a plateau, where another algorithm may run."""
    last = max(state.measured)
    if _beyond_flat(state, n) is None or n <= FAR * last or state.gain(last) <= -NEAR:
        return None
    return f"from batch size {state.recommended} to {last} nothing is gained, and sizes far beyond were not measured"


_FACTS: dict[Callable[[SearchState, int], str | None], Mapping[str, object]] = {
    _above_limit: {"limit": "latency"},
    _far_beyond_flat: {"looked_at": False},
}


def _gain(state: SearchState, n: int) -> tuple[float, float]:
    """Return the expected gain over the recommended size beyond the tolerance, and the largest likely gain."""
    ahead, sd = state.ahead(n)
    return sd * _mean_above((state.tolerance - ahead) / sd), math.expm1(ahead + SURE * sd)


def _mean_above(z: float) -> float:
    """Return E[max(Z - z, 0)] of a standard normal Z."""
    return math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) - z * 0.5 * math.erfc(z / math.sqrt(2))
