"""The outcome of every batch size when the search ends, as text and as values."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cubatch.measure.records import Outcome
from cubatch.search.curve_posterior import Z_90
from cubatch.search.noise import count_trials, usable
from cubatch.search.state import KNOWN, SearchState
from cubatch.units import format_percent, format_seconds

FAR, NEAR = 3.0, 0.5  # factor beyond the largest measured size; log of its loss against the recommended size
FLAT = 4  # factor above the recommended size that must be measured before larger sizes are ruled out


def judge_sizes(state: SearchState) -> list[Outcome]:
    """Return the outcome of every candidate and every measured size that has none yet."""
    sizes = sorted({*state.inputs.ladder, *state.measured} - {*state.inputs.closed})
    return [_judge_measured(state, n) if n in state.measured else _judge_unmeasured(state, n) for n in sizes]


def _judge_measured(state: SearchState, n: int) -> Outcome:
    """Return the outcome of a measured size: "ok", "over_limit", or "dropped" if clearly slower than the fastest."""
    limit = state.goal.latency_limit
    if not state.is_feasible(n) and limit is not None:
        text = f"its time of {format_seconds(state.seconds[n])} is above the latency limit of {format_seconds(limit)}"
        return Outcome(n, "over_limit", text, {"limit": "latency"})
    count, trials, fastest = len(usable(state.measured[n])), count_trials(state.measured[n]), state.fastest or n
    measured = f"{count} timing{'s' * (count > 1)} in {trials} trial{'s' * (trials > 1)}"
    sd = state.posterior.difference_sd(state.place(n), state.place(fastest))
    if -state.gain(n) - Z_90 * sd > state.tolerance:
        by = format_percent(-math.expm1(state.gain(n)))
        return Outcome(n, "dropped", f"{by} behind batch size {fastest} after {measured}")
    return Outcome(n, "ok", measured)


def _judge_unmeasured(state: SearchState, n: int) -> Outcome:
    best = state.recommended
    breaks = [size for size in state.measured if size < n] if best is None else []
    if breaks and state.inputs.extends:
        return Outcome(n, "dropped", f"batch size {breaks[0]}, which is smaller, breaks the latency limit")
    if best is None or not state.inputs.extends:
        text = f"the budget of {format_seconds(state.inputs.budget)} is too little for a trial of this size"
        return Outcome(n, "not_run", text, {"limit": "budget"})
    if not state.is_accepted(n):
        return Outcome(n, "dropped", "sizes with the same divisors raised an error", {"limit": "divisors"})
    if (excluded := next(_exclusions(state, n, best), None)) is not None:
        return Outcome(n, "dropped", *excluded)
    average, most = _gain(state, n)
    if (state.goal.objective == "latency" or average >= KNOWN * state.tolerance) and not state.affordable(n):
        need, left = float(state.trial_seconds[state.place(n)]), state.inputs.left
        reason = f"a trial would take about {format_seconds(need)}, {format_seconds(left)} of the budget are left"
        facts = {"limit": "budget", "could_gain": round(most, 3), "needed_seconds": need, "left_seconds": left}
        return Outcome(n, "not_run", reason, facts)
    how = f"at most {format_percent(most)} better than"
    if not 0 < most <= 1:  # too wide to be useful
        how = "slower than" if most <= 0 else "not expected to be better than"
    return Outcome(n, "dropped", f"by the timings of its neighbors it is {how} batch size {best}")


def _exclusions(state: SearchState, n: int, best: int) -> Iterator[tuple[str, dict[str, object]]]:
    """
    Yield (reason, facts) for each reason, other than its expected gain, to drop the unmeasured size `n`.

    `best` is the recommended size; `facts` are those of the outcome, for programs.
    """
    goal, last = state.goal, max(state.measured)
    if goal.objective == "latency":
        allowed = goal.allowed(state.seconds[state.fastest or best])
        slower = [size for size in state.measured if size < n and state.seconds[size] > allowed]
        if slower:
            yield f"batch size {slower[0]}, which is smaller, already takes longer", {}
    failed = min((size for size in state.inputs.failed if last < size < n), default=None)
    if failed is not None:
        how = "failed" if state.inputs.failed[failed] in ("error", "timeout") else "does not fit"
        yield f"batch size {failed}, which is smaller, {how}", {}
    limit, step = goal.latency_limit, float(state.step_seconds[state.place(n)])
    if limit is not None and step > limit:
        text = f"it would take about {format_seconds(step)}, above the latency limit of {format_seconds(limit)}"
        yield text, {"limit": "latency"}
    if goal.objective != "latency" and n > last >= FLAT * best:
        flat = f"from batch size {best} to {last} nothing is gained, "
        if n > FAR * last and state.gain(last) > -NEAR:  # another algorithm may run there
            yield f"{flat}and sizes far beyond were not measured", {"looked_at": False}
        yield f"{flat}so nothing is expected beyond", {}


def _gain(state: SearchState, n: int) -> tuple[float, float]:
    """Return a size's expected log gain beyond the tolerance, and its largest likely gain as a share."""
    ahead, sd = state.ahead(n)
    z = (state.tolerance - ahead) / sd
    above = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) - z * 0.5 * math.erfc(z / math.sqrt(2))
    return sd * above, math.expm1(ahead + Z_90 * sd)  # E[max(Z - z, 0)] of a standard normal Z
