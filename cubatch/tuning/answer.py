"""
From timings to the recommendation: the best size, its ties, and the limit that decided.

Times, rates and intervals of a result come from the posterior of the recommendation. Raw timings and their reference
steps are stored next to them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

from cubatch.errors import EnergyNotAvailable, NothingMeasured
from cubatch.measure import stopping
from cubatch.measure.budget import LEAST_TIMINGS
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Outcome, Timing
from cubatch.search.noise import usable
from cubatch.search.posterior import Posterior, is_favored
from cubatch.tuning import explain
from cubatch.tuning.decision import UNSEEN, Fate, decide
from cubatch.tuning.notes import Note, sentence
from cubatch.tuning.results import Measurement, TuningResult
from cubatch.tuning.subject import SubjectFacts

_REMEDIES = {
    "not_run": "Raise budget.",
    "out_of_memory": "Free memory, or request smaller batch_sizes.",
    "timeout": "Find out why a step does not end, or leave those sizes out of batch_sizes.",
    "error": "Fix the error, or leave those sizes out of batch_sizes.",
    "interrupted": "Run it again: it continues from its timings if they are cached.",
}
_ALL_FAILED = "Fix the error: every size that was tried raised one."
_UNTRIED = " If only multiples of a number are valid, state it with multiple_of."
_NO_ANSWER = "no batch size can be recommended"  # some were measured, and are over a limit
_NO_FACTS = SubjectFacts()
_SPENT = ("visits", "prepare_seconds", "warmup_seconds", "query_seconds", "first_seconds")


def answer(
    # ladder, measured, goal: the candidates, their timings and outcomes, and the objective
    ladder: Sequence[Candidate],
    measured: Measured,
    *,
    goal: Goal,
    # fields of TuningResult that measuring does not decide; those left out are unknown
    setting: Mapping[str, Any],
    largest_batch_size: int | None = None,  # largest_batch_size, is_listed, multiple: as for `decision.decide`
    is_rough: bool = False,  # whether the largest size may be far off, so that the result has none
    # the largest size that the data set, `multiple_of` or `divides` allows; None if memory or `max_batch_size` is the
    # limit
    largest_allowed: int | None = None,
    is_listed: bool = False,
    # the size that the user has now; it is recommended if no other is better by more than tolerance and noise
    current: int | None = None,
    multiple: int = 1,
    # computed figures of the subject; `occupancy` and `fill` of a size are means over its layers
    facts: SubjectFacts = _NO_FACTS,
    # warnings follow the recommendation, other notes come last. One that withholds the recommendation replaces it, its
    # limit and its reasons. A condition comes before it, in the same text
    notes: Sequence[Note] = (),
    partial: bool = False,  # return a result without a recommendation instead of raising NothingMeasured: after Ctrl-C
) -> TuningResult:
    """
    Return the tuning result: measurements, recommendation, limiting factor and reasons.

    Only candidates with the status "ok" are recommended: see `search.posterior.Posterior.recommend`. `tied_with` holds
    the sizes whose difference from the fastest may be zero, by its 90 % interval. For `decided_by` see
    `decision.decide`.

    Raises:
        NothingMeasured: If no candidate is "ok"; the message lists how they ended.
        EnergyNotAvailable: If energy is the objective and was measured for no candidate.
    """
    refused = {o.batch_size for o in measured.outcomes if o.status == "over_limit" and o.facts.get("limit") == "memory"}
    timings = {c.batch_size: measured.of(c.batch_size) for c in ladder}
    used = {n: usable(taken) for n, taken in timings.items()}
    measured_sizes = {n: taken for n, taken in timings.items() if taken and n not in refused}
    on_host = (setting.get("device") or {}).get("kind") == "cpu"
    posterior = Posterior.of(measured_sizes, goal, on_host=on_host)
    outcomes = {outcome.batch_size: outcome for outcome in measured.outcomes}
    measurements = [
        _measurement(
            candidate,
            outcomes.get(candidate.batch_size, Outcome(candidate.batch_size, "interrupted", "not finished")),
            timings[candidate.batch_size],
            used[candidate.batch_size],
            posterior,
            facts=facts,
            batches=setting.get("accumulate") or 1,
        )
        for candidate in sorted(ladder, key=lambda candidate: candidate.batch_size)
    ]
    header = dict(setting)
    header["limits"] = {"max_batch_size": None, "memory_bytes": None, "latency_seconds": goal.latency_limit} | dict(
        header.get("limits") or {}
    )
    header |= {name: header.get(name) or {} for name in ("device", "environment")}
    able = [
        m.batch_size
        for m in measurements
        if m.status == "ok" and m.value(goal.objective) is not None and posterior.cost_interval(m.batch_size)
    ]
    result = TuningResult(
        **header,
        objective=goal.objective,
        tolerance=goal.tolerance,
        seconds_spent=measured.seconds_spent,
        batch_size=None,
        fastest_batch_size=None,
        current_batch_size=current,
        largest_batch_size=None if is_rough else largest_batch_size,
        largest_measured=max((n for n, taken in timings.items() if taken), default=None),
        tied_with=(),
        decided_by=None,
        reference=posterior.noise.reference,
        reasons=(),
        measurements=tuple(measurements),
    )
    withheld = [sentence(each) for each in notes if each.withholds]
    reasons: list[str] = []
    if able and not withheld:
        favored = None if is_listed else {c.batch_size for c in ladder if is_favored(c)}
        best = posterior.recommend(able, favored)
        equal = (*best.within, *best.equal)
        often = _timed_often(result, equal)
        chosen = current if current in equal else best.batch_size
        if often and chosen not in (*often, current):  # no other size that was timed once is recommended
            chosen = posterior.recommend(often, favored).batch_size
        decision = decide(
            [_fate(m, outcomes.get(m.batch_size), posterior) for m in measurements],
            chosen=chosen,
            fastest=best.fastest,
            ties=best.equal,
            goal=goal,
            largest_batch_size=largest_batch_size,
            max_batch_size=largest_allowed or header["limits"]["max_batch_size"],
            is_listed=is_listed,
            multiple=multiple,
        )
        if is_rough and decision.limit == "memory" and not any(m.status == "out_of_memory" for m in measurements):
            decision = attrs.evolve(decision, limit=None)
        result = _in_loop(
            attrs.evolve(
                result,
                batch_size=chosen,
                fastest_batch_size=best.fastest,
                tied_with=best.equal,
                decided_by=decision.limit,
            )
        )
        throttled_only = [n for n, taken in used.items() if taken and taken[0].throttled]
        reasons = explain.details(result, decision, posterior, outcomes, throttled_only)
    elif not (able or partial):
        if any(m.status == "ok" for m in measurements):
            raise EnergyNotAvailable(str(header["device"].get("name") or "the device"))
        raise _nothing(measurements, goal)
    is_recommended = result.batch_size is not None and explain.is_compared(result)
    lead = withheld or [explain.headline(result, posterior)]
    if is_recommended and (conditions := [sentence(each) for each in notes if each.is_condition]):
        lead = [f"{' '.join(conditions)} If so: {lead[0]}"]
    without = explain.sizes_without_result(result, outcomes)
    first = [sentence(each) for each in notes if each.is_warning]
    last = [sentence(each) for each in notes if not (each.is_warning or each.withholds or each.is_condition)]
    reasons = [*lead, *first, *reasons, *without, *last]
    return attrs.evolve(result, batch_size=result.batch_size if is_recommended else None, reasons=reasons)


def _timed_often(result: TuningResult, sizes: Collection[int]) -> list[int]:
    return [n for n in sizes if len(result.sizes[n].timings_seconds) >= LEAST_TIMINGS]


def _in_loop(result: TuningResult) -> TuningResult:
    """
    Return the result with a recommendation for the loop of data loader and step; unchanged without a loader.

    By throughput, the recommendation is the user's current size, else the smallest measured one, whose loop is within
    the tolerance of the best. Sizes that were timed once count only if no others are within it. `decided_by` is
    "loader" where faster steps, as of larger batches, make no faster loop.
    """
    chosen, rates = result.batch_size, result.loop_rates
    if result.loader is None or chosen is None or result.objective != "throughput" or chosen not in rates:
        return result
    share = 1 - (result.tolerance or 0.0)
    within = [n for n, rate in rates.items() if rate >= share * max(rates.values())]
    current = result.current_batch_size
    size = current if current is not None and current in within else min(_timed_often(result, within) or within)
    steps = {n: result.sizes[n].samples_per_second or 0.0 for n in within}
    is_limit = result.loader.is_bottleneck(steps[size], size, 1 - share)
    is_limit |= any(n > size and share * step > steps[size] for n, step in steps.items())
    measurements = [
        attrs.evolve(m, status="ok", stop_reason="nothing is faster in the loop with the data loader")
        if m.batch_size in within and m.status != "ok"
        else m
        for m in result.measurements
    ]
    limit = "loader" if is_limit else result.decided_by
    return attrs.evolve(result, batch_size=size, decided_by=limit, measurements=measurements)


def _measurement(
    candidate: Candidate,
    outcome: Outcome,
    timings: Sequence[Timing],
    used: Sequence[Timing],
    posterior: Posterior,
    *,
    facts: SubjectFacts,
    batches: int,
) -> Measurement:
    n = candidate.batch_size
    samples = n * batches
    roofline_seconds, layers = facts.roofline_seconds.get(n), facts.layers.get(n, ())
    flops = None if facts.flops_per_sample is None else samples * facts.flops_per_sample
    latency, interval = posterior.seconds_of(n, used)
    joules = posterior.joules_of(n, used)
    return Measurement(
        batch_size=n,
        status=outcome.status,
        reasons=candidate.reasons,
        latency_seconds=latency,
        latency_interval=interval,
        samples_per_second=samples / latency if latency else None,
        throughput_interval=(samples / interval[1], samples / interval[0]) if interval else None,
        timings_seconds=[timing.seconds for timing in used],
        timings_rounds=[timing.round for timing in used],
        timings_steps=[timing.repeats for timing in used],
        longest_steps=[t.longest_step for t in used] if any(t.longest_step for t in used) else None,
        reference_seconds=[t.reference_seconds for t in used] if any(t.reference_seconds for t in used) else None,
        stop_reason=outcome.stop_reason,
        throttled=sum(timing.throttled for timing in timings),
        flops_per_second=flops / latency if latency and flops is not None else None,
        roofline_fraction=roofline_seconds / latency if latency and roofline_seconds is not None else None,
        sm_clock_mhz=_over(stopping.median, used, "sm_clock_mhz"),
        joules_per_sample=joules / samples if joules is not None else None,
        temperature_celsius=_over(max, timings, "temperature_celsius"),
        power_watts=_over(statistics.fmean, used, "power_watts"),
        utilization_percent=_over(statistics.fmean, used, "utilization_percent"),
        used_bytes=_over(max, timings, "used_bytes"),
        peak_bytes=_over(max, timings, "peak_bytes"),
        peak_device_bytes=_over(max, timings, "peak_device_bytes"),
        predicted_peak_bytes=candidate.predicted_peak_bytes,
        predicted_seconds=candidate.predicted_seconds,
        predicted_device_bytes=facts.device_bytes.get(n),
        **{name: outcome.facts.get(name) for name in _SPENT},
        occupancy=_weighted(layers, "occupancy"),
        fill=_weighted(layers, "fill"),
        layers=layers,
    )


def _over(combine: Callable[[list[Any]], Any], timings: Sequence[Timing], name: str) -> Any:
    """Return `combine` of the values of the field `name` of all timings, without None; None if all are None."""
    known = [value for timing in timings if (value := getattr(timing, name)) is not None]
    return combine(known) if known else None


def _weighted(layers: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the mean of field `name` over layers, weighted by their seconds; None if no layer has both."""
    for weight in ("seconds", "predicted_seconds"):
        rows = [layer for layer in layers if layer.get(name) is not None]
        if rows and all(layer.get(weight) is not None for layer in rows) and sum(layer[weight] for layer in rows) > 0:
            total = sum(layer[weight] for layer in rows)
            return float(sum(layer[weight] * layer[name] for layer in rows) / total)
    return None


def _fate(measurement: Measurement, outcome: Outcome | None, posterior: Posterior) -> Fate:
    cost = posterior.cost_interval(measurement.batch_size)
    is_unseen = outcome is not None and outcome.facts.get("looked_at") is False and cost is None
    return Fate(
        measurement.batch_size,
        UNSEEN if is_unseen else measurement.status,
        cost=cost,
        breaks_latency=outcome is not None and outcome.facts.get("limit") == "latency",
    )


def _nothing(measurements: Sequence[Measurement], goal: Goal) -> NothingMeasured:
    first = min(measurements, key=lambda m: m.batch_size, default=None)
    if first is not None and first.status == "over_limit" and first.exceeds(goal.latency_limit):
        # All larger ones take longer still: only another limit helps.
        smaller = " or allow smaller batch sizes" if first.batch_size > 1 else ""
        reason = f"batch size {explain.breaks_latency_limit(first, goal.latency_limit or 0.0)}"
        return NothingMeasured(reason, f"Raise latency_limit{smaller}.", _NO_ANSWER)
    statuses = {m.status for m in measurements}
    reason = explain.count_statuses(measurements, {"latency_seconds": goal.latency_limit}) or "there are no candidates"
    untried = {"dropped", "not_run"}
    if "error" in statuses and statuses <= {"error", *untried} and not any(m.latency_seconds for m in measurements):
        return NothingMeasured(reason, _ALL_FAILED + _UNTRIED * ("not_run" in statuses))
    if "error" in statuses:  # a larger budget does not help
        statuses.discard("not_run")
    over = [m.exceeds(goal.latency_limit) for m in measurements if m.status == "over_limit"]
    remedies = [remedy for status, remedy in _REMEDIES.items() if status in statuses]
    remedies += ["Raise memory_limit."] if not all(over) else []
    remedies += ["Raise latency_limit."] if any(over) else []
    if any(over):
        return NothingMeasured(reason, " ".join(remedies), _NO_ANSWER)
    return NothingMeasured(reason, " ".join(remedies))
