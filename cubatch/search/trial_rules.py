"""
The rules for the next trial, in order of priority.  The first rule that returns sizes is followed.

If no rule returns a size, the search ends.  The ladder is the list of candidate sizes made before the search.  The
curve is throughput against batch size.  Contenders are measured sizes that may still be recommended.

    try_requested     sizes that the user requested, each once
    try_smaller       the smallest size, if all measured sizes exceed the latency limit
    bisect_latency    sizes around the largest one within the latency limit, while the curve rises there
    bisect_lowest     for the lowest latency: sizes around the largest one that is as fast as the smallest
    learn             the trial with the largest expected gain per second: a new size, or another of all contenders
    bisect_memory     sizes around the largest one that fits into memory, while the curve rises there
    probe_neighbors   sizes of the ladder next to the recommended size: a peak between them would not show
    confirm           the recommended size and the user's current one, until each has two trials (three if two disagree)
"""

from __future__ import annotations

import math

import numpy as np

from cubatch.measure.stopping import MIN_ROUNDS
from cubatch.search import acquisition, bisection
from cubatch.search.curve_posterior import Z_90
from cubatch.search.noise import count_trials, trial_costs, usable
from cubatch.search.state import KNOWN, SearchState

WORTH, WORTH_SECONDS = 0.85, 120.0
"""Learning also ends if the gain per second of the next trial, over the whole budget or this many seconds, is less
than this share.  It goes on while the expected loss is above MUCH times the tolerance."""
MUCH = 2.0
HOST_KNOWN = 2.5
"""On a CPU learning ends where the expected loss is less than this many tolerances.  A limit on the gain per second
fell with the seconds spent.  It ended learning after 10 s, also where the noise left the best size open.  60 fake
hosts that chose nothing (`bench_hosts --family 67 --seeds 3`, ratios that vary by 5 %): mean regret 0.78 -> 0.57 %,
8.9 -> 11.4 s.  Families 61 and 63 chose the value."""
FIRST_SHARE = 0.06  # of the time left: a smallest size that takes more is not tried first, if one is predicted better
MOST_CONTENDERS, CONTENDS = 6, 0.3  # of the best expected gain: sizes with less are not in a round
CONFIRM_TRIALS, DISAGREE = 2, 0.05  # one trial may be lucky; if two differ by more, a third decides
NEIGHBOR, NEIGHBOR_SHARE, LIKELY = 2.0, 0.03, 0.5
"""Factor from the recommended size, share of the time left, and probability that it runs."""
MOST_TRIALS, MOST_TRIALS_OF_LATENCY = 30, 6  # noise that these do not average out is systematic
AT_LIMIT, LIMIT_SHARE = 2.0, 0.02  # factor to a limit that may affect the recommendation; share of the time left
TIMINGS = 5  # expected in a trial, when its value is computed


def next_trials(state: SearchState) -> list[int]:
    """
    Return the sizes to measure next; none if the recommendation is known or the budget holds no trial.

    Several sizes are a round: each gets one trial, in this order.
    """
    if not state.measured:
        return first(state)
    rules = (
        try_requested, try_smaller, bisect_latency, bisect_lowest, learn, bisect_memory, probe_neighbors, confirm,
    )  # fmt: skip
    return next((sizes for rule in rules if (sizes := rule(state))), [])


def first(state: SearchState) -> list[int]:
    """
    Return the first size to measure: the smallest, or the best predicted one if the smallest is expensive.

    By the objective latency the smallest size is the fastest.
    """
    waiting, model = [n for n in sorted(state.inputs.ladder) if n not in state.inputs.closed], state.inputs.model
    if not waiting or model is None or not state.inputs.extends or state.goal.objective == "latency":
        return waiting[:1]
    known = [n for n in waiting if n in model]
    if not known or state.inputs.trial_seconds(known[0], model[known[0]]) <= FIRST_SHARE * state.inputs.left:
        return waiting[:1]
    limit = state.goal.latency_limit or math.inf
    able = [n for n in known if model[n] <= limit and state.inputs.trial_seconds(n, model[n]) <= state.inputs.left]
    return [min(able or known[:1], key=lambda n: model[n] / n)]


def try_requested(state: SearchState) -> list[int]:
    """Return the smallest affordable requested size that was not measured; an empty list if there is none."""
    waiting = [n for n in state.inputs.requested if n not in state.inputs.closed and n not in state.measured]
    return [n for n in sorted(waiting) if state.affordable(n)][:1]


def try_smaller(state: SearchState) -> list[int]:
    """Return the smallest size to try, first or again, if no measured size may be recommended; else an empty list."""
    if state.recommended is not None:
        return []
    least = min(state.measured)
    waiting = [n for n in sorted(state.inputs.ladder) if n < least]
    if count_trials(state.measured[least]) < trials_wanted(state, least):
        waiting.append(least)
    return [n for n in waiting if n not in state.inputs.closed and state.affordable(n)][:1]


def bisect_latency(state: SearchState) -> list[int]:
    """Return a size between the largest within the latency limit and the smallest beyond it, if it is worth a trial."""
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
    """Return a size between the largest that ran and the smallest larger one that failed, if it is worth a trial."""
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
    Return a size between the ends of a gap at a limit, if the objective rises there and the budget holds a trial.

    `low` is within the limit and `high` beyond it; `guess` is the expected size at the limit, None if unknown. Where
    the objective rises by less than the tolerance, only a cheap trial is worth it.
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


def bisect_lowest(state: SearchState) -> list[int]:
    """
    Return the next sizes to time to find the largest size whose latency is within the tolerance of the lowest.

    The list is empty for other objectives.
    """
    if state.goal.objective != "latency" or state.fastest is None:
        return []
    allowed = state.goal.allowed(state.seconds[state.fastest])
    low = max(n for n in state.measured if state.is_feasible(n) and state.seconds[n] <= allowed)
    above = [n for n in state.measured if n > low][:1]
    inside = [n for n in state.sizes if low < n < min(above, default=n + 1) and n in state.inputs.ladder]
    if inside:
        likely = [n for n in inside if state.step_seconds[state.place(n)] <= allowed]
        size = likely[-1] if likely else inside[0]
        return [size] if state.affordable(size) else []
    ends = dict.fromkeys([state.fastest, low, *above])
    near = [n for n in ends if n not in state.inputs.closed and state.affordable(n)]
    unsure = [
        n for n in near if _is_unsure(state, n, allowed) and count_trials(state.measured[n]) < MOST_TRIALS_OF_LATENCY
    ]
    return state.shuffled(near) if unsure else []


def _is_unsure(state: SearchState, n: int, allowed: float) -> bool:
    """Return whether it is uncertain if a step of size `n` takes longer than the allowed seconds."""
    timings = state.measured[n]
    sd = math.sqrt(state.noise.variance(len(usable(timings)), count_trials(timings)))
    return n != state.fastest and abs(math.log(state.seconds[n] / allowed)) < Z_90 * sd


def learn(state: SearchState) -> list[int]:
    """Return the unmeasured size with the largest expected gain per second, or measured sizes for another round."""
    if state.recommended is None or state.goal.objective == "latency":
        return []
    if state.losses.mean() < (HOST_KNOWN if state.noise.is_paired else KNOWN) * state.tolerance:
        return []
    is_answer = np.array([n in state.measured and state.is_feasible(n) for n in state.sizes])
    gains = acquisition.knowledge_gradient(state.acquisition_inputs, state.noise.variance(TIMINGS), is_answer)
    ended = {*state.inputs.closed, *(n for n, taken in state.measured.items() if count_trials(taken) >= MOST_TRIALS)}
    gains[[n in ended for n in state.sizes]] = 0.0
    left = state.affordable_seconds - _seconds_to_confirm(state)
    rate = np.where(state.trial_seconds <= left, gains / state.trial_seconds, 0.0)
    best = int(rate.argmax())
    if rate[best] <= 0.0 or (not state.noise.is_paired and rate[best] * _seconds_worth(state) < WORTH):
        return []
    if state.sizes[best] not in state.measured:
        return [state.sizes[best]]
    promising = [n for n in state.measured if gains[state.place(n)] >= CONTENDS * gains[best]]
    promising.sort(key=lambda n: -gains[state.place(n)])
    contenders = dict.fromkeys([state.recommended, state.sizes[best], *promising])
    return state.shuffled([n for n in contenders if state.affordable(n)][:MOST_CONTENDERS])


def _seconds_worth(state: SearchState) -> float:
    """Return the seconds of measuring over which the expected gain per second of a trial must add up to `WORTH`."""
    return math.inf if state.losses.mean() > MUCH * state.tolerance else max(state.inputs.budget, WORTH_SECONDS)


def probe_neighbors(state: SearchState) -> list[int]:
    """Return the nearest unmeasured size within a factor of two of the recommended size, if its trial is cheap."""
    if state.recommended is None or state.goal.objective == "latency" or not state.inputs.extends:
        return []
    waiting = [n for n in state.sizes if n in state.inputs.ladder and n not in state.measured]
    cheap = [n for n in waiting if state.feasibility[state.place(n)] >= LIKELY and state.affordable(n, NEIGHBOR_SHARE)]
    apart = {n: max(n, state.recommended) / min(n, state.recommended) for n in cheap}
    return [n for n, factor in sorted(apart.items(), key=lambda item: item[1]) if factor <= NEIGHBOR][:1]


def confirm(state: SearchState) -> list[int]:
    """Return the recommended or the user's current size, if it lacks a second trial or timings; else an empty list."""
    waiting = [n for n in _compared(state) if n not in state.inputs.closed and timings_wanted(state, n)]
    return [n for n in waiting if state.affordable(n)][:1]


def _seconds_to_confirm(state: SearchState) -> float:
    """Return the seconds of the trials that `confirm` would take; 0 for each that the budget does not hold."""
    waiting = [n for n in _compared(state) if n not in state.inputs.closed and timings_wanted(state, n)]
    return sum(float(state.trial_seconds[state.place(n)]) for n in waiting if state.affordable(n))


def timings_wanted(state: SearchState, n: int) -> int:
    """Return the number of timings that the recommended or the user's current size lacks; 0 for other sizes."""
    if n not in _compared(state):
        return 0
    timings = state.measured[n]
    trials = count_trials(timings)
    if trials >= MOST_TRIALS_OF_LATENCY:
        return 0
    return max(0, MIN_ROUNDS - len(usable(timings)), int(trials < trials_wanted(state, n)))


def _compared(state: SearchState) -> list[int]:
    current = state.inputs.requested if state.inputs.extends else ()
    return [n for n in dict.fromkeys([state.recommended, *current]) if n in state.measured]


def trials_wanted(state: SearchState, n: int) -> int:
    """Return the number of trials that a size needs to be recommended: one more if its trials disagree."""
    costs = trial_costs(state.measured[n], state.noise, state.goal)
    return CONFIRM_TRIALS + (len(costs) > 1 and max(costs) - min(costs) > DISAGREE)
