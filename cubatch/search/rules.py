"""
What to measure next: the rules, asked in this order; the first that names sizes is followed.

When none does, the answer is known, or the budget holds no more.

    ask_named         sizes asked for by name, each once
    go_below          the smallest size, where all that were measured break the latency limit
    scout             a few widely spaced sizes, while they promise something
    bisect_latency    where a step takes as long as it may, while the curve rises there
    bisect_lowest     by the objective latency: the largest size that is as fast as the smallest
    learn             the trial that promises most for its seconds: a new size, or all contenders once more
    fill_gaps         what lies unmeasured between sizes that are far apart, one of them near the best
    bisect_memory     where memory ends, or sizes begin to fail otherwise, while the curve rises there
    probe_neighbors   sizes of the ladder next to the fastest: a peak that no smooth curve shows
    confirm           the recommended and the fastest size, until no answer rests on one trial, or on two that disagree
    spend_rest        a size whose steps are a guess, where nothing else is left to do with the budget
"""

from __future__ import annotations

import itertools
import math

import attrs
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
share."""
HOST_WORTH_SECONDS, PATIENCE_SECONDS = 60.0, 10.0
"""The same of paired timings, whose noise no budget removes; after so many seconds in proportion less."""
SCOUT_SHARE = 0.06  # of what is left, that a scout may take
MOST_CONTENDERS, CONTENDS = 6, 0.3  # of what the best trial promises: what promises less is not in a round
CONFIRM_TRIALS, DISAGREE = 2, 0.05  # an answer on one trial may be luck; of two that differ by more a third decides
MUCH, REST_SHARE = 2.0, 0.9  # times the tolerance, that may be lost: a guess may then take this share of what is left
NEIGHBOR, NEIGHBOR_SHARE, LIKELY = 2.0, 0.03, 0.5  # factor from the fastest, of what is left, probability that it runs
GAP, NEAR, GAP_SHARE = 3.0, 0.5, 0.1  # factor between neighbors, log of what is behind, of what is left
MOST_TRIALS, MOST_TRIALS_OF_LATENCY = 30, 6  # what these do not average away, twice as many will not
FAR_LATENCY = 2.0  # times the lowest latency: no larger size is as fast
TIMINGS = 5  # that a trial is expected to give, when its value is computed


def next_visits(view: View) -> list[int]:
    """
    Return the sizes to measure next; none where the answer is known or the budget holds no trial.

    Several sizes are a round: each once, in this order.
    """
    if not view.read:
        return first(view)
    rules = (
        ask_named, go_below, scout, bisect_latency, bisect_lowest, learn, fill_gaps, bisect_memory,
        probe_neighbors, confirm, spend_rest,
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
    if not known or view.of.visit_seconds(known[0], model[known[0]]) <= SCOUT_SHARE * view.of.left:
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


def scout(view: View) -> list[int]:
    """Return the next of the widely spaced sizes, while the answer may lie there."""
    if not view.of.extends or view.answer is None:
        return []
    open_sizes = [n for n in view.of.ladder if n not in view.of.closed or n in view.read]
    listed = race.scouts(open_sizes, _predicted_rates(view, open_sizes))
    for n in listed:
        if n in view.read or any(max(view.read) < size < n for size in view.walls):
            continue
        if view.goal.objective == "latency":
            hopeless = view.steps[view.place(max(view.read))] > FAR_LATENCY * view.seconds[view.answer]
        else:
            gains = race.learning(view.field, _variance(view), _measured(view))
            hopeless = len(view.read) >= 3 and gains[view.place(n)] < KNOWN * view.tolerance / len(listed)  # noqa: PLR2004
        return [] if hopeless or not view.affordable(n, SCOUT_SHARE) else [n]
    return []


def _predicted_rates(view: View, sizes: list[int]) -> dict[int, float] | None:
    """Return predicted samples per second, where all these sizes have a prediction."""
    model = view.of.model
    if model is None or view.goal.objective != "throughput" or any(n not in model for n in sizes):
        return None
    return {n: n / model[n] for n in sizes}


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
    if rate[best] * _seconds_worth(view) < WORTH:
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
        return max(view.of.budget, WORTH_SECONDS)
    spent = view.of.budget - view.of.left
    return HOST_WORTH_SECONDS * min(1.0, PATIENCE_SECONDS / max(spent, 1e-9))


def fill_gaps(view: View) -> list[int]:
    """Return a size of the ladder in the middle of a wide gap next to a size that is not far behind."""
    if view.answer is None or view.goal.objective == "latency":
        return []
    able = sorted(n for n in view.read if view.is_able(n))
    for low, high in itertools.pairwise(able):
        near = max(view.gain(low), view.gain(high)) > -NEAR
        inside = [n for n in view.of.ladder if low < n < high and n in view.sizes and n not in view.read]
        if high > GAP * low and near and inside:
            size = min(inside, key=lambda n: abs(math.log(n * n / (low * high))))
            if view.affordable(size, GAP_SHARE):
                return [size]
    return []


def probe_neighbors(view: View) -> list[int]:
    """Return the nearest size of the ladder that was not measured, within a factor of two of the fastest, if cheap."""
    if view.fastest is None or view.goal.objective == "latency" or not view.of.extends:
        return []
    waiting = [n for n in view.of.ladder if n not in view.read and n not in view.of.closed]
    cheap = [n for n in waiting if view.allowed[view.place(n)] >= LIKELY and view.affordable(n, NEIGHBOR_SHARE)]
    apart = {n: max(n, view.fastest) / min(n, view.fastest) for n in cheap}
    return [n for n, factor in sorted(apart.items(), key=lambda item: item[1]) if factor <= NEIGHBOR][:1]


def confirm(view: View) -> list[int]:
    """Return the recommended and the fastest size, while they lack a second trial or timings for an interval."""
    if view.answer is None or view.fastest is None:
        return []
    wanted = [n for n in dict.fromkeys([view.answer, view.fastest]) if n not in view.of.closed]
    return view.shuffled([n for n in wanted if timings_wanted(view, n) and view.affordable(n)])


def timings_wanted(view: View, n: int) -> int:
    """Return how many timings a size that may be recommended still lacks."""
    if n not in (view.answer, view.fastest) or n not in view.read:
        return 0
    record = view.read[n]
    if record.trials >= MOST_TRIALS_OF_LATENCY:
        return 0
    return max(0, MIN_ROUNDS - len(record.usable), int(record.trials < trials_wanted(view, n)))


def trials_wanted(view: View, n: int) -> int:
    """Return how many trials a size needs before it is relied on: one more where two disagree."""
    costs = trial_costs(view.read[n], view.noise)
    return CONFIRM_TRIALS + (len(costs) > 1 and max(costs) - min(costs) > DISAGREE)


def spend_rest(view: View) -> list[int]:
    """Return an unmeasured size that may be much better, where its trial takes no more than all that is left."""
    if view.answer is None or view.goal.objective == "latency" or view.noise.is_paired:
        return []
    bold = View(attrs.evolve(view.of, untried_share=REST_SHARE))
    if bold.lost.mean() < MUCH * bold.tolerance:
        return []
    gains = race.learning(bold.field, _variance(bold), _measured(bold))
    gains[[n in bold.of.closed or n in bold.read or not bold.affordable(n) for n in bold.sizes]] = 0.0
    best = int((gains / bold.visit_seconds).argmax())
    return [bold.sizes[best]] if gains[best] >= KNOWN * bold.tolerance else []


def _variance(view: View) -> Array:
    """Return the variance of what one more trial says, by size."""
    return np.full(len(view.sizes), view.noise.variance(TIMINGS))


def _measured(view: View) -> NDArray[np.bool_]:
    return np.array([n in view.read and view.is_able(n) for n in view.sizes])
