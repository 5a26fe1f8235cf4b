"""The rule by which a forecast recommends a batch size, of networks and of traced modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from cubatch.errors import InvalidArgument
from cubatch.estimate.predictions import Z90, StepPrediction
from cubatch.measure import goal as goals
from cubatch.measure.goal import Goal
from cubatch.search import bisection
from cubatch.tuning.decision import Fate, decide
from cubatch.tuning.forecast_record import Forecast, PassShare
from cubatch.tuning.ladder import Ladder
from cubatch.tuning.request import Request
from cubatch.tuning.sharpen import Sharpened
from cubatch.units import format_seconds


def sizes_that_fit(ladder: Ladder, where: str) -> list[int]:
    """Return the sizes of a ladder that fit; raise InvalidArgument if none does."""
    sizes = [step.batch_size for step in ladder.candidates if not step.over_limit]
    if not sizes:
        wanted = f"at most {ladder.largest}, the largest that fits on {where}"
        raise InvalidArgument("batch_sizes", ladder.candidates[0].batch_size, wanted)
    return sizes


def at_latency_limit(
    request: Request, step: StepPrediction, seconds_at: Callable[[Sequence[int]], Iterable[float]]
) -> list[int]:  # fmt: skip
    """Return the largest size within the latency limit and the next one, if they lie in a gap of the ladder."""
    sizes, seconds = step.batch_sizes, step.seconds
    limit = math.inf if request.goal.latency_limit is None else request.goal.latency_limit
    last = max((place for place, took in enumerate(seconds) if took <= limit), default=-1)
    if request.limits.batch_sizes is not None or last < 0 or last + 1 == len(sizes):
        return []
    low, high = sizes[last], sizes[last + 1]
    inside = range(low, high + 1, max(1, int(bisection.CLOSED * low)))
    if bisection.is_closed(low, high):
        return []
    within = [n for n, took in zip(inside, seconds_at(inside), strict=True) if took <= limit]
    top = max(within, default=low)
    return [n for n in (top, top + inside.step) if low < n < high]


def draft(
    facts: Mapping[str, Any], request: Request, ladder: Ladder, sharpened: Sharpened, *,
    roofline_seconds: Mapping[int, float], shares: Callable[[int], tuple[PassShare, ...]],
) -> Forecast:  # fmt: skip
    """
    Apply the rule of the recommendation to predicted seconds; reasons and notes are added later.

    Args:
        facts: Fields of the forecast about the workload: spec, device, mode, ...
        request: The request.
        ladder: The candidates.
        sharpened: Their predicted times.
        roofline_seconds: Lower bounds by batch size.
        shares: Returns the passes of a step, by the place of its batch size.
    """
    goal, limits, device = request.goal, request.limits, facts["device"]
    step, sizes = sharpened.step, sharpened.step.batch_sizes
    seconds = dict(zip(sizes, map(float, step.seconds), strict=True))
    values = {n: s if goal.objective == "latency" else n / s for n, s in seconds.items()}
    limit = goal.latency_limit
    allowed = {n: value for n, value in values.items() if limit is None or seconds[n] <= limit}
    if not allowed:
        wanted = f"at least {format_seconds(min(seconds.values()))}, the shortest step predicted on {device}"
        raise InvalidArgument("latency_limit", limit, wanted)
    chosen, fastest = goals.pick(allowed, goal)
    ties = _ties(values, allowed, fastest, sharpened)
    decision = decide(
        [_fate(rung.batch_size, seconds.get(rung.batch_size), goal) for rung in ladder.candidates], chosen=chosen,
        fastest=fastest, ties=ties, goal=goal, largest_batch_size=ladder.largest,
        max_batch_size=limits.max_batch_size, is_listed=limits.batch_sizes is not None,
    )  # fmt: skip
    return Forecast(
        **facts,
        objective=goal.objective,
        tolerance=goal.tolerance,
        limits={
            "max_batch_size": limits.max_batch_size,
            "memory_bytes": ladder.memory_bytes,
            "latency_seconds": limit,
        },
        candidates=tuple(
            attrs.evolve(rung, predicted_seconds=seconds.get(rung.batch_size)) for rung in ladder.candidates
        ),
        seconds=seconds,
        interval={n: (float(low), float(high)) for n, low, high in zip(sizes, step.low, step.high, strict=True)},
        peak_bytes={rung.batch_size: rung.predicted_peak_bytes or 0 for rung in ladder.candidates},
        roofline_seconds=roofline_seconds,
        batch_size=chosen,
        fastest_batch_size=fastest,
        largest_batch_size=ladder.largest or chosen,
        tied_with=ties,
        decided_by=decision.limit,
        reasons=(),
        passes=shares(sizes.index(chosen)),
        notes=(),
    )


def _ties(values: Mapping[int, float], allowed: Iterable[int], fastest: int, sharpened: Sharpened) -> tuple[int, ...]:
    """Return the sizes whose ratio to the fastest is 1 within the model's 90 % interval."""
    place, covariance = {n: index for index, n in enumerate(values)}, sharpened.covariance
    best, tied = place[fastest], []
    for n in allowed:
        own = place[n]
        variance = covariance[own, own] + covariance[best, best] - 2 * covariance[own, best]
        if n != fastest and abs(np.log(values[n] / values[fastest])) <= Z90 * np.sqrt(max(variance, 0.0)):
            tied.append(n)
    return tuple(tied)


def _fate(batch_size: int, seconds: float | None, goal: Goal) -> Fate:
    if seconds is None:  # it does not fit
        return Fate(batch_size, "over_limit")
    cost = goal.cost(batch_size, seconds=seconds, joules=None)
    is_slow = goal.latency_limit is not None and seconds > goal.latency_limit
    interval = None if cost is None else (cost, cost)
    return Fate(batch_size, "over_limit" if is_slow else "ok", interval, breaks_latency=is_slow)
