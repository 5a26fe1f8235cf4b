"""
What to measure next: the rules, asked in this order; the first that names sizes is followed.

When none does, the answer is known, or the budget holds no more.

    ask_named         sizes asked for by name, each once
    go_below          the smallest size, where all that were measured break the latency limit
    bisect_latency    where a step takes as long as it may, while the curve rises there
    bisect_lowest     by the objective latency: the largest size that is as fast as the smallest
    learn             the trial that promises most for its seconds: a new size, or all contenders once more
    bisect_memory     where memory ends, or sizes begin to fail otherwise, while the curve rises there
    probe_neighbors   sizes of the ladder next to the recommended size: a peak that no smooth curve shows
    confirm           the recommended size, until it rests on two trials, or on three where two disagree
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cubatch.measure.stopping import MIN_ROUNDS
from cubatch.search import race
from cubatch.search.belief import Array
from cubatch.search.limit_rules import bisect_latency, bisect_memory
from cubatch.search.noise import trial_costs
from cubatch.search.view import KNOWN, SURE, View

WORTH, WORTH_SECONDS = 0.85, 120.0
"""Learning also ends where the whole budget, or so many seconds, spent as well as the next trial, would not win this
share; but not while MUCH times the tolerance may be lost."""
MUCH = 2.0
HOST_WORTH_SECONDS, PATIENCE_SECONDS = 60.0, 10.0
"""The same of paired timings, whose noise no budget removes; after so many seconds in proportion less."""
FIRST_SHARE = 0.06  # of what is left, that the smallest size may take where the prediction knows a better one
MOST_CONTENDERS, CONTENDS = 6, 0.3  # of what the best trial promises: what promises less is not in a round
CONFIRM_TRIALS, DISAGREE = 2, 0.05  # an answer on one trial may be luck; of two that differ by more a third decides
NEIGHBOR, NEIGHBOR_SHARE, LIKELY = 2.0, 0.03, 0.5  # factor from the answer, of what is left, probability that it runs
MOST_TRIALS, MOST_TRIALS_OF_LATENCY = 30, 6  # what these do not average away, twice as many will not
TIMINGS = 5  # that a trial is expected to give, when its value is computed


def next_visits(view: View) -> list[int]:
    """
    Return the sizes to measure next; none where the answer is known or the budget holds no trial.

    Several sizes are a round: each once, in this order.
    """
    if not view.read:
        return first(view)
    rules = (
        ask_named, go_below, bisect_latency, bisect_lowest, learn, bisect_memory, probe_neighbors, confirm,
    )  # fmt: skip
    return next((sizes for rule in rules if (sizes := rule(view))), [])


def first(view: View) -> list[int]:
    """
    Return the smallest size, or, where even its steps are expensive by the prediction, the best predicted size.

    By the objective latency the smallest is the one that is best.
    """
    waiting, model = [n for n in sorted(view.of.ladder) if n not in view.of.closed], view.of.model
    if not waiting or model is None or not view.of.extends or view.goal.objective == "latency":
        return waiting[:1]
    known = [n for n in waiting if n in model]
    if not known or view.of.visit_seconds(known[0], model[known[0]]) <= FIRST_SHARE * view.of.left:
        return waiting[:1]
    limit = view.goal.latency_limit or math.inf
    able = [n for n in known if model[n] <= limit and view.of.visit_seconds(n, model[n]) <= view.of.left]
    return [min(able or known[:1], key=lambda n: model[n] / n)]


def ask_named(view: View) -> list[int]:
    """Return the smallest size asked for by name that was not measured."""
    if view.of.extends:
        return []
    waiting = [n for n in view.of.ladder if n not in view.of.closed and n not in view.read]
    return [n for n in sorted(waiting) if view.affordable(n)][:1]


def go_below(view: View) -> list[int]:
    """Return the smallest size, where all that were measured break the latency limit: again, if it had one trial."""
    if view.answer is not None:
        return []
    least = min(view.read)
    waiting = [n for n in sorted(view.of.ladder) if n < least]
    if view.read[least].trials < trials_wanted(view, least):
        waiting.append(least)
    return [n for n in waiting if n not in view.of.closed and view.affordable(n)][:1]


def bisect_lowest(view: View) -> list[int]:
    """By the objective latency: bisect the ladder for the largest size that takes no longer than is allowed."""
    if view.goal.objective != "latency" or view.fastest is None:
        return []
    allowed = view.goal.allowed(view.seconds[view.fastest])
    low = max(n for n in view.read if view.is_able(n) and view.seconds[n] <= allowed)
    above = [n for n in view.read if n > low][:1]
    inside = [n for n in view.sizes if low < n < min(above, default=n + 1) and n in view.of.ladder]
    if inside:
        likely = [n for n in inside if view.steps[view.place(n)] <= allowed]
        size = likely[-1] if likely else inside[0]
        return [size] if view.affordable(size) else []
    near = [n for n in dict.fromkeys([view.fastest, low, *above]) if n not in view.of.closed and view.affordable(n)]
    unsure = [n for n in near if _is_unsure(view, n, allowed) and view.read[n].trials < MOST_TRIALS_OF_LATENCY]
    return view.shuffled(near) if unsure else []


def _is_unsure(view: View, n: int, allowed: float) -> bool:
    """Return whether the timings of a size do not tell on which side of a bound it lies."""
    record = view.read[n]
    sd = math.sqrt(view.noise.variance(len(record.usable), record.trials))
    return n != view.fastest and abs(math.log(view.seconds[n] / allowed)) < SURE * sd


def learn(view: View) -> list[int]:
    """Return the size whose trial promises most for its seconds, or the contenders of a round."""
    if view.answer is None or view.goal.objective == "latency":
        return []
    if view.lost.mean() < KNOWN * view.tolerance:
        return []
    gains = race.learning(view.field, _variance(view), _measured(view))
    gains[[n in view.of.closed or (n in view.read and view.read[n].trials >= MOST_TRIALS) for n in view.sizes]] = 0.0
    rate = np.where(view.visit_seconds <= view.within_reach, gains / view.visit_seconds, 0.0)
    best = int(rate.argmax())
    if rate[best] <= 0.0 or rate[best] * _seconds_worth(view) < WORTH:
        return []
    if view.sizes[best] not in view.read:
        return [view.sizes[best]]
    promising = sorted((place for place, n in enumerate(view.sizes) if n in view.read), key=lambda place: -gains[place])
    contenders = [view.answer, view.sizes[best]]
    contenders += [view.sizes[place] for place in promising if gains[place] >= CONTENDS * gains[best]]
    return view.shuffled([n for n in dict.fromkeys(contenders) if view.affordable(n)][:MOST_CONTENDERS])


def _seconds_worth(view: View) -> float:
    """Return over how many seconds the gain of the next trial must add up to be worth it."""
    if not view.noise.is_paired:
        return math.inf if view.lost.mean() > MUCH * view.tolerance else max(view.of.budget, WORTH_SECONDS)
    spent = view.of.budget - view.of.left
    return HOST_WORTH_SECONDS * min(1.0, PATIENCE_SECONDS / max(spent, 1e-9))


def probe_neighbors(view: View) -> list[int]:
    """Return the nearest unmeasured size of the ladder within a factor of two of the answer, if its trial is cheap."""
    if view.answer is None or view.goal.objective == "latency" or not view.of.extends:
        return []
    waiting = [n for n in view.of.ladder if n not in view.read and n not in view.of.closed]
    cheap = [n for n in waiting if view.allowed[view.place(n)] >= LIKELY and view.affordable(n, NEIGHBOR_SHARE)]
    apart = {n: max(n, view.answer) / min(n, view.answer) for n in cheap}
    return [n for n, factor in sorted(apart.items(), key=lambda item: item[1]) if factor <= NEIGHBOR][:1]


def confirm(view: View) -> list[int]:
    """Return the recommended size, while it lacks a second trial or timings for an interval."""
    n = view.answer
    return [n] if n and n not in view.of.closed and timings_wanted(view, n) and view.affordable(n) else []


def timings_wanted(view: View, n: int) -> int:
    """Return how many timings a size that may be recommended still lacks."""
    if n != view.answer or n not in view.read:
        return 0
    record = view.read[n]
    if record.trials >= MOST_TRIALS_OF_LATENCY:
        return 0
    return max(0, MIN_ROUNDS - len(record.usable), int(record.trials < trials_wanted(view, n)))


def trials_wanted(view: View, n: int) -> int:
    """Return how many trials a size needs before it is relied on: one more where two disagree."""
    costs = trial_costs(view.read[n], view.noise)
    return CONFIRM_TRIALS + (len(costs) > 1 and max(costs) - min(costs) > DISAGREE)


def _variance(view: View) -> Array:
    """Return the variance of what one more trial says, by size."""
    return np.full(len(view.sizes), view.noise.variance(TIMINGS))


def _measured(view: View) -> NDArray[np.bool_]:
    return np.array([n in view.read and view.is_able(n) for n in view.sizes])
