"""
What to visit next: the rules, asked in this order; the first that names sizes is followed.

When none does, the answer is known, or the budget holds no more.

    asked             sizes asked for by name, each once
    below             the smallest size, where all that were read break the latency limit
    scouts            a few widely spaced sizes, as long as they promise something
    latency_limit     where a step takes as long as it may, while the curve rises there
    unsettled         what was read at a bad time, as it took longer than larger sizes do, or far longer than smaller
                      ones; by the objective latency before it is compared
    lowest_latency    by the objective latency: the largest size that is as fast as the smallest
    zoom              the visit that promises most for its seconds: a size not seen yet, or all contenders once more
    gaps              what lies unseen between sizes that are far apart, one of them near the best, or beyond the
                      largest: a cliff, a peak, a late rise
    memory            where memory ends, or sizes begin to fail otherwise, while the curve rises there
    latency_limit_at_last   the same as latency_limit, where a visit is dear
    believed          what is not far behind, until it was visited twice
    doubts            a size that its neighbours say was read at a bad time, and that would be the answer
    rungs             sizes of the ladder beside the fastest, where no model of time speaks of them: a peak, a cliff
    moved             what may be the best and was not read in the state in which the host is now, where a reference
                      tells of states, and sizes were read in different ones or the answer once in another
    states            where nothing tells: all that are not far behind, in sweeps, where visits to one size disagree,
                      and a second visit to the first of them, which tells whether they do
    contested         the answer and what may be better by far, in sweeps, where a reference is timed
    certain           the answer and its ties, until each has readings enough for an interval; an answer of a single
                      visit has another, even a dear one, and the fastest a cheap one: the best of many readings
                      mostly had luck
    leftover          a size that may be much better, where what is left of the budget holds it
"""

from __future__ import annotations

import itertools
import math

import attrs
import numpy as np
from numpy.typing import NDArray

from cubatch.measure.budget import FEWEST_READINGS
from cubatch.measure.counting import DISTURBED
from cubatch.measure.stopping import MIN_ROUNDS, median
from cubatch.search import race
from cubatch.search.belief import Array, believe
from cubatch.search.history import Record
from cubatch.search.limit_rules import latency_limit, latency_limit_at_last, memory
from cubatch.search.state_rules import contested, moved, states
from cubatch.search.view import KNOWN, SURE, View

WORTH, WORTH_SECONDS, HOST_WORTH_SECONDS = 0.85, 120.0, 1000.0
"""Zooming also ends where the whole budget, or so many seconds, spent as well as the next visit, would not win this
share; the last where a reference is timed, as PyTorch's is on a CPU: visits to a size differ more there."""
MUCH = 2.0  # times the tolerance, that may be lost on average: then what is left of the budget is used
PATIENCE, PATIENCE_SHARE = 9, 0.05
"""Visits that may find nothing better, and of the budget, that they may take: what is believed of teeth is a guess, but
of noisy readings many are wanted."""
SCOUT_SHARE = 0.06  # of what is left, that a scout may take
MOST_CONTENDERS, CONTENDS = 6, 0.3  # of what the best visit promises: who promises less is not in a sweep
VISITS_TO_BELIEVE, SHARE_TO_BELIEVE, BELIEVE_WITHIN = 2, 0.005, 0.06  # visits, of what is left, behind the fastest
CERTAIN_SHARE, TIES_SHARE, UNSETTLED_SHARE = 0.2, 0.002, 0.02  # of what is left: the answer's own readings, others'
SOLE_SHARE, SOLE_BEST_SHARE = 0.5, 0.05  # of what is left, for a second visit to the answer, to the fastest
SHARE_OF_ASKED = 0.1  # the same where few sizes were asked for, and there is nothing better to do
GAP, NEAR, GAP_SHARE = 3.0, 0.5, 0.1  # factor between neighbours, log of what is behind, of what is left
BESIDE, BESIDE_SHARE = 2.0, 0.1  # factor from the fastest, of what is left
BESIDE_LIKELY = 0.5  # probability that it runs and keeps every limit
MOST_VISITS, MOST_VISITS_OF_LATENCY = 30, 6  # what these do not average away, twice as many will not
FAR_LATENCY = 2.0  # times the lowest latency: no larger size is as fast
HALTED, HALTED_SHARE, HALTED_BEHIND = 0.25, 0.1, 0.35  # so much slower than its neighbours say: visited again if cheap
DOUBTFUL = 0.03  # a size that its neighbours say is faster by less was not read at a bad time
LAST = 0.05  # log of what the largest size read may be behind by its neighbours: all that lies beyond is judged by it
LEFTOVER_SHARE = 0.9  # of what is left, that a visit of which seconds are a guess may take where nothing else is left
READINGS = 5  # that a visit is thought to take, when it is judged what it would tell


def next_visits(view: View) -> list[int]:
    """
    Say which sizes to visit next; nothing where the answer is known or the budget holds no visit.

    Several sizes are a sweep: each once, in this order.
    """
    if not view.read:
        return first(view)
    rules = (
        asked,
        below,
        scouts,
        latency_limit,
        unsettled,
        lowest_latency,
        zoom,
        gaps,
        memory,
        latency_limit_at_last,
        believed,
        doubts,
        rungs,
        moved,
        states,
        contested,
        certain,
        leftover,
    )
    return next((found for rule in rules if (found := rule(view))), [])


def first(view: View) -> list[int]:
    """
    Name the smallest size, or, where even its steps are dear by the model, the best size by the model.

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


def asked(view: View) -> list[int]:
    """Name the smallest size asked for by name that was not visited."""
    if view.of.extends:
        return []
    waiting = [n for n in view.of.ladder if n not in view.of.closed and n not in view.read]
    return [n for n in sorted(waiting) if view.affordable(n)][:1]


def below(view: View) -> list[int]:
    """Name the smallest size, where all that were read break the latency limit: once more, if it was read once."""
    if view.answer is not None:
        return []
    least = min(view.read)
    waiting = [n for n in sorted(view.of.ladder) if n < least]
    if view.read[least].visits < VISITS_TO_BELIEVE:
        waiting.append(least)
    return [n for n in waiting if n not in view.of.closed and view.affordable(n)][:1]


def scouts(view: View) -> list[int]:
    """Name the next scout, while the answer may lie there."""
    if not view.of.extends or view.answer is None:
        return []
    open_sizes = [n for n in view.of.ladder if n not in view.of.closed or n in view.read]
    rates = None
    if view.model is not None and view.goal.objective != "latency":
        rates = {n: n / view.model[n] for n in open_sizes}
    listed = race.scouts(open_sizes, rates)
    for n in listed:
        if n in view.read or any(max(view.read) < size < n for size in view.walls):
            continue
        if view.goal.objective == "latency":
            hopeless = view.steps[view.place(max(view.read))] > FAR_LATENCY * view.read[view.answer].seconds
        else:
            gains = race.learning(view.field, _variance(view), _visited(view))
            hopeless = len(view.read) >= 3 and gains[view.place(n)] < KNOWN * view.tolerance / len(listed)  # noqa: PLR2004
        if hopeless or not view.affordable(n, SCOUT_SHARE):
            return []
        return [n]
    return []


def lowest_latency(view: View) -> list[int]:
    """By the objective latency: bisect the ladder for the largest size that takes no longer than is allowed."""
    if view.goal.objective != "latency" or view.fastest is None:
        return []
    allowed = view.goal.allowed(view.read[view.fastest].seconds)
    low = max(n for n, record in view.read.items() if view.is_able(n) and record.seconds <= allowed)
    above = [n for n in view.read if n > low][:1]
    inside = [n for n in view.sizes if low < n < min(above, default=n + 1) and n in view.of.ladder]
    if inside:
        likely = [n for n in inside if view.steps[view.place(n)] <= allowed]
        size = likely[-1] if likely else inside[0]
        return [size] if view.affordable(size) else []
    near = [n for n in dict.fromkeys([view.fastest, low, *above]) if n not in view.of.closed and view.affordable(n)]
    unsure = [n for n in near if _unsure(view, n, allowed) and view.read[n].visits < MOST_VISITS_OF_LATENCY]
    return view.shuffled(near) if unsure else []


def _unsure(view: View, n: int, allowed: float) -> bool:
    """Whether the readings of a size do not tell on which side of a bound it lies."""
    record = view.read[n]
    sd = math.sqrt(view.noise.variance(len(record.counting), record.comparable_visits))
    return n != view.fastest and abs(math.log(record.seconds / allowed)) < SURE * sd


def zoom(view: View) -> list[int]:
    """Name the visit that promises most for its seconds, or the contenders of a sweep."""
    if view.answer is None or view.goal.objective == "latency" or _has_lost_patience(view):
        return []
    if view.lost.mean() < KNOWN * view.tolerance:
        return []
    gains = race.learning(view.field, _variance(view), _visited(view))
    gains[[n in view.of.closed or (n in view.read and view.read[n].visits >= MOST_VISITS) for n in view.sizes]] = 0.0
    rate = np.where(view.visit_seconds <= view.within_reach, gains / view.visit_seconds, 0.0)
    best = int(rate.argmax())
    enough = HOST_WORTH_SECONDS if view.has_reference else WORTH_SECONDS
    if rate[best] * max(view.of.budget, enough) < WORTH:
        return []
    if view.sizes[best] not in view.read:
        return [view.sizes[best]]
    promising = sorted((place for place, n in enumerate(view.sizes) if n in view.read), key=lambda place: -gains[place])
    contenders = [view.answer, view.sizes[best]]
    contenders += [view.sizes[place] for place in promising if gains[place] >= CONTENDS * gains[best]]
    return view.shuffled([n for n in dict.fromkeys(contenders) if view.affordable(n)][:MOST_CONTENDERS])


def gaps(view: View) -> list[int]:
    """
    Name a size of the ladder in the middle of a wide gap beside a size that is not far behind.

    Or, where the largest that was read is one and the ladder goes on for as much, the last that is affordable: another
    algorithm may run there.
    """
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
    last = able[-1]
    if not view.of.extends or view.gain(last) <= -NEAR:
        return []
    beyond = [n for n in view.of.ladder if n > GAP * last and n in view.sizes and n not in view.read]
    likely = [n for n in beyond if view.may_run[view.place(n)] >= BESIDE_LIKELY and view.affordable(n, GAP_SHARE)]
    return [max(likely)] if likely else []


def believed(view: View) -> list[int]:
    """Name the sizes that are not far behind and were hardly visited, where that is cheap."""
    if view.answer is None or view.fastest is None:
        return []
    reach = math.log(1 / (1 - BELIEVE_WITHIN))
    once = [n for n, record in view.read.items() if n not in view.of.closed and _is_hardly_read(view, n, record)]
    near = [n for n in once if view.goal.objective == "latency" or view.gain(n) > -reach]
    share = SHARE_TO_BELIEVE if view.of.extends else SHARE_OF_ASKED
    return view.shuffled([n for n in near if view.affordable(n, share)])


def unsettled(view: View) -> list[int]:
    """
    Name a size that was read at a bad time, by what others take or a reference: as if it had not been read.

    By the objective latency also the answer itself, where all that is known of it are its very first steps.
    """
    is_latency = view.goal.objective == "latency"
    share = CERTAIN_SHARE if is_latency else UNSETTLED_SHARE
    found = [n for n in sorted(view.suspects) if n not in view.of.closed and view.affordable(n, share)]
    if not found and is_latency and view.answer is not None and view.read[view.answer].visits == 1:
        found = [n for n in [view.answer] if n not in view.of.closed and _is_dear_to_settle(view, n)]
    return found[:1]


def _is_dear_to_settle(view: View, n: int) -> bool:
    """Whether a size was read once or twice only, since its steps are dear, and the budget holds some more."""
    return len(view.read[n].counting) < FEWEST_READINGS and readings_wanted(view, n) > 0


def certain(view: View) -> list[int]:
    """Name the answer, the fastest and what ties with them, while they lack readings for an interval."""
    if view.answer is None or view.fastest is None:
        return []
    return view.shuffled([n for n in _ties(view) if n not in view.of.closed and readings_wanted(view, n)])


def readings_wanted(view: View, n: int) -> int:
    """
    Say how many readings a size that may be the answer still wants, where they cost a small share of what is left.

    The answer is worth a larger share than its ties, and a second visit half of all; to the fastest a twentieth.
    """
    if n not in view.read or n not in _ties(view):
        return 0
    record = view.read[n]
    few = max(0, MIN_ROUNDS - len(record.counting), int(record.comparable_visits < VISITS_TO_BELIEVE))
    if record.visits >= MOST_VISITS_OF_LATENCY or not few:
        return 0
    visit, left = float(view.visit_seconds[view.place(n)]), view.of.left
    if visit + (few - 1) * record.seconds <= (CERTAIN_SHARE if n == view.answer else TIES_SHARE) * left:
        return few
    share = {view.fastest: SOLE_BEST_SHARE, view.answer: SOLE_SHARE}.get(n, 0.0)  # both may be one
    return 1 if record.visits < VISITS_TO_BELIEVE and visit <= share * left else 0


def _ties(view: View) -> list[int]:
    """Give the answer, the fastest, and the sizes between which readings do not choose."""
    if view.answer is None or view.fastest is None:
        return []
    best = view.read[view.fastest].cost or math.inf
    near = [n for n, one in view.read.items() if view.is_able(n) and (one.cost or math.inf) <= view.goal.allowed(best)]
    return list(dict.fromkeys([view.answer, view.fastest, *near]))[:MOST_CONTENDERS]


def _is_hardly_read(view: View, n: int, record: Record) -> bool:
    """Whether a size was visited less often than it takes to believe it, or to give the answer an interval."""
    wanted = MIN_ROUNDS if n in (view.answer, view.fastest) else 1
    few = len(record.counting) < wanted and record.visits < 2 * VISITS_TO_BELIEVE
    is_new = record.comparable_visits < VISITS_TO_BELIEVE and record.visits < 2 * VISITS_TO_BELIEVE
    return few or is_new


def doubts(view: View) -> list[int]:
    """Name a size that its neighbours say was read at a bad time, and that may be the answer."""
    if view.answer is None:
        return []
    sizes = [n for n in view.read if n != view.answer and view.is_able(n) and n not in view.of.closed]
    return [n for n in sizes if view.affordable(n) and _is_doubtful(view, n)][:1]


def _is_doubtful(view: View, n: int) -> bool:
    """Whether a size was visited once in its state, or visits disagree, and it is the answer by its neighbours."""
    record, others = view.read[n], [seen for seen in view.seen if seen.batch_size != n]
    is_latency = view.goal.objective == "latency"
    visits = [median(costs) for costs in record.step_costs().values()]  # of two that disagree either may be wrong
    wanted = VISITS_TO_BELIEVE + (len(visits) > 1 and max(visits) > (1 + DISTURBED) * min(visits))
    if (
        len(visits) >= wanted
        or record.visits > 2 * VISITS_TO_BELIEVE
        or not others
        or (is_latency and not record.is_fresh)
    ):
        return False
    expected = math.exp(believe(others, [n], view.model).mean[0]) / (1 if is_latency else n)
    read = record.cost or math.inf
    behind = math.log(expected) + view.field.value[view.field.answer]
    if expected * (1 + HALTED) < read and behind < HALTED_BEHIND and view.affordable(n, HALTED_SHARE):
        return True
    last = n == max(view.read) and any(size > n and size not in view.of.closed for size in view.sizes)
    return not is_latency and expected * (1 + DOUBTFUL) < read and behind < (LAST if last else 0.0)


def rungs(view: View) -> list[int]:
    """
    Name the nearest size of the ladder beside the fastest that was not read.

    What is believed of teeth is a guess.  Of a module's sizes one may be faster than both its neighbours: the last
    whose results the C library keeps.
    """
    if view.of.model is not None or view.fastest is None or view.goal.objective == "latency" or not view.of.extends:
        return []
    waiting = [n for n in view.of.ladder if n not in view.read and n not in view.of.closed]
    likely = [n for n in waiting if view.allowed[view.place(n)] >= BESIDE_LIKELY and view.affordable(n, BESIDE_SHARE)]
    apart = {n: max(n, view.fastest) / min(n, view.fastest) for n in likely}
    return [n for n, factor in sorted(apart.items(), key=lambda item: item[1]) if factor <= BESIDE][:1]


def leftover(view: View) -> list[int]:
    """
    Name a size that was not read, where so much may be gained that the budget left over is for it, dear or not.

    Also one whose steps are guesses: there is nothing else that the budget could be kept for.
    """
    if view.answer is None or view.goal.objective == "latency" or _has_lost_patience(view):
        return []
    bold = View(attrs.evolve(view.of, untried_share=LEFTOVER_SHARE))
    if bold.lost.mean() < MUCH * bold.tolerance:
        return []
    gains = race.learning(bold.field, _variance(bold), _visited(bold))
    gains[[n in bold.of.closed or n in bold.read or not bold.affordable(n) for n in bold.sizes]] = 0.0
    best = int((gains / bold.visit_seconds).argmax())
    return [bold.sizes[best]] if gains[best] >= KNOWN * bold.tolerance else []


def _has_lost_patience(view: View) -> bool:
    of = view.of
    return of.fruitless >= PATIENCE and of.fruitless_seconds >= PATIENCE_SHARE * of.budget


def _variance(view: View) -> Array:
    """Of what one more visit would read of each size."""
    return np.full(len(view.sizes), view.noise.variance(READINGS))


def _visited(view: View) -> NDArray[np.bool_]:
    return np.array([n in view.read and view.is_able(n) for n in view.sizes])
