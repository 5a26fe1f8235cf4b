"""The outcome of every batch size when the search ends, as text and as values."""

from __future__ import annotations

import math

from cubatch.measure.records import Outcome
from cubatch.search.curve_posterior import Z_90
from cubatch.search.noise import usable
from cubatch.search.state import SearchState
from cubatch.units import format_percent, format_seconds

FLAT, FAR = 4, 3
"""Larger sizes are ruled out once this many times the recommended size was measured.  Beyond this many times the
largest measured size another algorithm may run."""


def judge_sizes(state: SearchState) -> list[Outcome]:
    """Return the outcome of every candidate and every measured size that has none yet."""
    sizes = sorted({*state.ladder, *state.measured} - {*state.closed})
    return [_judge_measured(state, n) if n in state.measured else _judge_unmeasured(state, n) for n in sizes]


def _judge_measured(state: SearchState, n: int) -> Outcome:
    """Return the outcome of a measured size: "ok", "over_limit", or "dropped" if clearly slower than the fastest."""
    limit = state.goal.latency_limit
    if limit is not None and not state.is_feasible(n):
        text = f"its time of {format_seconds(state.seconds[n])} is above the latency limit of {format_seconds(limit)}"
        return Outcome(n, "over_limit", text, {"limit": "latency"})
    count, trials = len(usable(state.measured[n])), state.trials(n)
    measured = f"{count} timing{'s' * (count > 1)} in {trials} trial{'s' * (trials > 1)}"
    ahead, sd = state.ahead(n, state.fastest)
    if -ahead - Z_90 * sd > state.tolerance:
        text = f"{format_percent(-math.expm1(ahead))} behind batch size {state.fastest} after {measured}"
        return Outcome(n, "dropped", text)
    return Outcome(n, "ok", measured)


def _judge_unmeasured(state: SearchState, n: int) -> Outcome:
    """Return the outcome of a size without timings: "dropped" if it can be ruled out, else "not_run"."""
    best, limit = state.recommended, state.goal.latency_limit
    slower = [size for size in state.measured if size < n and state.seconds[size] > state.most_seconds]
    failed = [size for size in state.failed if max(state.measured, default=n) < size < n]
    if slower and state.extends and (best is None or state.goal.objective == "latency"):
        how = "already takes longer" if best else "breaks the latency limit"
        return Outcome(n, "dropped", f"batch size {slower[0]}, which is smaller, {how}")
    if best is None or not state.extends:
        text = f"the budget of {format_seconds(state.budget)} left no time for a trial of this size"
        return Outcome(n, "not_run", text, {"limit": "budget"})
    if not state.is_accepted(n):
        return Outcome(n, "dropped", "sizes with the same divisors raised an error", {"limit": "divisors"})
    if failed:
        how = "failed" if state.failed[min(failed)] in ("error", "timeout") else "does not fit"
        return Outcome(n, "dropped", f"batch size {min(failed)}, which is smaller, {how}")
    step = float(state.step_seconds[state.place(n)])
    if limit is not None and step > limit:
        text = f"it would take about {format_seconds(step)}, above the latency limit of {format_seconds(limit)}"
        return Outcome(n, "dropped", text, {"limit": "latency"})
    return _judge_by_gain(state, n, best)


def _judge_by_gain(state: SearchState, n: int, best: int) -> Outcome:
    """Return the outcome of an unmeasured size by its possible gain over the recommended size `best`."""
    last, need = max(state.measured), float(state.trial_seconds[state.place(n)])
    if state.goal.objective != "latency" and n > last >= FLAT * best:
        is_far = n > FAR * last
        end = "and sizes far beyond were not measured" if is_far else "so nothing is expected beyond"
        text = f"from batch size {best} to {last} nothing is gained, {end}"
        return Outcome(n, "dropped", text, {"looked_at": False} if is_far else {})
    ahead, sd = state.ahead(n, best)
    most = math.expm1(ahead + Z_90 * sd)
    if (state.goal.objective == "latency" or most > state.tolerance) and not state.affordable(n):
        left = format_seconds(state.left)
        text = f"a trial would take about {format_seconds(need)}, {left} of the budget are left"
        facts = {"limit": "budget", "could_gain": round(most, 3), "needed_seconds": need, "left_seconds": state.left}
        return Outcome(n, "not_run", text, facts)
    how = f"at most {format_percent(most)} better than"
    if not 0 < most <= 1:  # too wide to be useful
        how = "slower than" if most <= 0 else "not expected to be better than"
    return Outcome(n, "dropped", f"by the timings of its neighbors it is {how} batch size {best}")
