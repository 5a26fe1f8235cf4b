"""
The rules for the next trial.  `next_trials` has their order: the first rule that returns sizes is followed.

If no rule returns a size, the search ends.  The ladder is the list of candidate sizes made before the search.
"""

from __future__ import annotations

import math

import numpy as np

from cubatch.search.curve_posterior import Z_90
from cubatch.search.state import SearchState, is_closed

KNOWN, MUCH, WORTH_SECONDS = 0.5, 2.0, 140.0
"""Learning ends where the expected loss of stopping is less than KNOWN times the tolerance.  Up to MUCH times the
tolerance it also ends if a trial gains too little per second.  Over the budget or WORTH_SECONDS it must add up to 1."""
HOST_LOSS = 45.0
"""On a CPU learning ends where the expected loss is less than this many tolerances times a share of time.  The share is
the seconds spent over WORTH_SECONDS, or over the budget if that is more: 0.32 tolerances a second.  A loss that falls
with the square root of the seconds t falls by loss / (2 t) a second.  So the search ends where another second gains
less than a fixed share.  A fixed limit of 2.5 lost 0.3 % more on 60 fake hosts whose ratios vary by 15 %
(`bench_hosts --family 67 --seeds 3`, cf74b8d0).  Families 61 and 63 chose the value: as little is lost as with 28."""
MOST_CONTENDERS, CONTENDS = 6, 0.3  # of the best expected gain: sizes with less are not in a round
MOST_TRIALS = 30  # of a size: noise that these do not average out is systematic
CONFIRM_TRIALS = 2  # one trial may be lucky
NEIGHBOR, LIKELY = 2.0, 0.5  # factor from the recommended size, and probability that a size runs
CHEAP = 0.05  # share of the time left that a trial may take where little is expected of it
TIMINGS = 5  # expected in a trial, when its value is computed


def next_trials(state: SearchState) -> list[int]:
    """
    Return the sizes to measure next; none if the recommendation is known or the budget holds no trial.

    Several sizes are a round: each gets one trial, in this order.
    """
    if not state.measured:
        return first(state)
    rules = (try_requested, try_smaller, bisect, learn, probe_neighbors, confirm)
    return next((sizes for rule in rules if (sizes := rule(state))), [])


def first(state: SearchState) -> list[int]:
    """Return the smallest size; if it is expensive and latency is not the objective, the best predicted one."""
    waiting = [n for n in sorted(state.ladder) if n not in state.closed]
    model = {n: seconds for n in waiting if (seconds := state.ladder[n].predicted_seconds) is not None}
    trials = {n: state.seconds_of_trial(n, seconds) for n, seconds in model.items()}
    able = [n for n in model if model[n] <= state.most_seconds and trials[n] <= state.left]
    if not able or len(model) < len(waiting) or not state.extends or state.goal.objective == "latency":
        return waiting[:1]
    return waiting[:1] if trials[waiting[0]] <= CHEAP * state.left else [min(able, key=lambda n: model[n] / n)]


def try_requested(state: SearchState) -> list[int]:
    """Return the smallest affordable requested size that was not measured; an empty list if there is none."""
    waiting = [n for n in sorted(state.requested) if n not in state.closed and n not in state.measured]
    return [n for n in waiting if state.affordable(n)][:1]


def try_smaller(state: SearchState) -> list[int]:
    """Return the smallest size to try, first or again, if no measured size may be recommended; else an empty list."""
    if state.recommended is not None:
        return []
    least = min(state.measured)
    over, sd = math.log(state.seconds[least]) - math.log(state.most_seconds), state.posterior.sd[state.place(least)]
    is_sure = state.trials(least) >= (CONFIRM_TRIALS if over > Z_90 * sd else MOST_TRIALS)
    waiting = [n for n in state.sizes if n in state.ladder and (n < least or (n == least and not is_sure))]
    return [n for n in waiting if n not in state.closed and state.affordable(n)][:1]


def learn(state: SearchState) -> list[int]:
    """Return the size with the largest expected gain per second, or several measured ones; else an empty list."""
    if state.recommended is None or state.goal.objective == "latency":
        return []
    is_paired, loss = state.fitted.noise.is_paired, state.expected_loss / state.tolerance
    worth_seconds = max(state.budget, WORTH_SECONDS)
    if loss < (HOST_LOSS * (state.budget - state.left) / worth_seconds if is_paired else KNOWN):
        return []
    gains = state.knowledge_gradient(state.fitted.noise.variance(TIMINGS))
    gains[[n in state.closed or state.trials(n) >= MOST_TRIALS for n in state.sizes]] = 0.0
    rate = np.where(state.trial_seconds <= state.left, gains / state.trial_seconds, 0.0)
    best = int(rate.argmax())
    is_worth = is_paired or loss > MUCH or rate[best] * worth_seconds >= 1.0
    if rate[best] <= 0.0 or not is_worth:
        return []
    if state.sizes[best] not in state.measured:
        return [state.sizes[best]]
    promising = [n for n in state.measured if gains[state.place(n)] >= CONTENDS * gains[best]]
    ranked = sorted(promising, key=lambda n: -gains[state.place(n)])
    contenders = dict.fromkeys([state.recommended, state.sizes[best], *ranked])
    return state.shuffled([n for n in contenders if state.affordable(n)][:MOST_CONTENDERS])


def bisect(state: SearchState) -> list[int]:
    """
    Return a size between the largest within the limits and the smallest beyond one, if it is worth a trial.

    The limits are memory and the latency limit; by the objective latency also the longest step within the tolerance.
    The posterior shows where a limit of seconds lies; between a size that ran and one that failed it is the middle.
    """
    able = [n for n in state.measured if n not in state.failed and state.seconds[n] <= state.most_seconds]
    if not able:
        return []
    low, is_latency = max(able), state.goal.objective == "latency"
    beyond, errors = {n for n in (*state.measured, *state.failed) if n > low}, {n for n in state.errors if n > low}
    beyond = beyond - errors or (errors if len(errors) > 1 else set())  # one error may concern that size alone
    high = min(beyond, default=0)
    sizes = [n for n in state.sizes if low <= n and (not high or n <= high)]
    inside = [n for n in sizes if n not in (low, high) and n not in state.closed]
    if not inside or (high and is_closed(low, high)):
        return []
    seconds = np.maximum.accumulate([state.step_seconds[state.place(n)] for n in sizes])
    if seconds[-1] > state.most_seconds:
        target = float(np.interp(state.most_seconds, seconds, sizes))
    elif high or is_latency:
        target = math.sqrt(low * high) if high else inside[-1]
    else:
        return []
    nearest = min(inside, key=lambda n: abs(n - target))
    rise = state.ahead(inside[-1], state.fastest)[0]
    share = 1.0 if is_latency or rise >= KNOWN * state.tolerance else CHEAP if rise > 0 else 0.0
    return [nearest] if state.affordable(nearest, share) else []


def probe_neighbors(state: SearchState) -> list[int]:
    """
    Return the nearest unmeasured size within a factor of two of the recommended size, if its trial is cheap.

    Without this rule a search of a fake host takes 2 s less and loses as little, but it may miss a peak of 20 %.
    """
    if state.recommended is None or state.goal.objective == "latency" or not state.extends:
        return []
    waiting = [n for n in state.sizes if n in state.ladder and n not in state.measured]
    cheap = [n for n in waiting if state.feasibility[state.place(n)] >= LIKELY and state.affordable(n, CHEAP)]
    apart = {n: max(n, state.recommended) / min(n, state.recommended) for n in cheap}
    return [n for n, factor in sorted(apart.items(), key=lambda item: item[1]) if factor <= NEIGHBOR][:1]


def confirm(state: SearchState) -> list[int]:
    """
    Return the recommended batch size, or the user's current one, if it lacks a second trial; else an empty list.

    `learn` reserves no time for it: that raised the mean regret of 108 fake devices from 7.6 to 8.4 % at 2 s of budget.
    """
    compared = dict.fromkeys([state.recommended or 0, *(state.requested if state.extends else ())])
    lacking = [n for n in compared if n in state.measured and state.trials(n) < CONFIRM_TRIALS]
    return [n for n in lacking if n not in state.closed and state.affordable(n)][:1]
