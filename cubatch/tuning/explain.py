"""
Every sentence about a result or a prediction: what to use, how sure that is, why, and what else to know.

The sentences are made once, from typed values, and kept in `reasons`: the table, the page, the notebook and the JSON
show the same text.  The first one is enough: the recommendation, its value, and how sure it is.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from cubatch.estimate.cubatch_kernels import MOVED_SHARE
from cubatch.estimate.predictions import ModelNote
from cubatch.hardware import architectures
from cubatch.hardware.facts import Device
from cubatch.hardware.waves import busiest_sm_blocks, fill
from cubatch.measure.budget import LEAST_TIMINGS
from cubatch.measure.records import Outcome
from cubatch.measure.stopping import MIN_ROUNDS
from cubatch.network.passes import Pass
from cubatch.search.posterior import Posterior
from cubatch.tuning.anchors import Anchor
from cubatch.tuning.decision import FAILURE, SPAN, Decision, is_near
from cubatch.tuning.forecast_record import Forecast, PassShare, alike
from cubatch.tuning.results import NOISY_SHARE, BatchSizeResult, Measurement, TuningResult
from cubatch.tuning.sharpen import Sharpened
from cubatch.units import (
    format_count,
    format_counted,
    format_objective,
    format_percent,
    format_seconds,
    format_tenths,
    format_value,
    join_words,
    visible,
)

_FLOOR_SHARE = 0.1  # latencies this near to the lowest count as the same
_GUESS_SHARE = 0.5  # half an interval beyond this share of its median makes the recommendation a guess
_FAR, _FEW = 4, 2  # times the largest timed size, and timed sizes: what is farther or from fewer is a guess
_AGREES = 1.1  # of the slower of loader and step: a loop cannot be faster than both
_MAX_SIZES = 6  # named in a sentence
_MAX_PASSES = 3  # passes named in a sentence
_MAX_REASON = 160  # characters of a foreign message in a sentence; the measurement keeps all of it

_BEST = {"throughput": "fastest", "latency": "lowest latency", "energy": "best samples per joule"}
_END = {"throughput": "smallest", "latency": "largest", "energy": "smallest"}  # of the sizes that are as good
_EQUAL = {"throughput": "equally fast", "latency": "equally fast", "energy": "equally efficient"}
_WORSE = {"throughput": "are slower", "latency": "take longer", "energy": "use more energy per sample"}
_REFUSED = ("out_of_memory", "over_limit")
Outcomes = Mapping[int, Outcome]
_NONE: Outcomes = MappingProxyType({})
_FAILED = {"out_of_memory": "ran out of memory", "timeout": "timed out", "error": "failed"}
_MODEL_NOTES = {
    "counted_clocks": "Times of cubatch kernels are clocks counted in the compiled code; they were hardly fitted here.",
    "fitted_on_h200": (
        "Times of cubatch kernels are clocks counted in the compiled code; those of products were fitted on an H200."
    ),
    "bytes_only": (
        "No times of layers that only move bytes, such as norms and activations, are published: they are predicted "
        "from {share} of the data sheet's bandwidth."
    ),
    "float32_arithmetic": "{value} without Tensor Cores is computed in float32.",
    "tensor_core_rate": (
        "The Tensor Core rate of {device} is unknown: that of its architecture is assumed, which some boards halve."
    ),
    "grouped_or_dilated": (
        "No times of grouped, depthwise and dilated convolutions are published: their predictions are rough."
    ),
    "attention": "No times of attention are published: it is predicted as the sum of its matrix products.",
    "tensor_cores_of_v100": (
        "Tensor Cores were measured on a V100 only: those of {device} are assumed to reach the same share of their "
        "rate."
    ),
    "host_bound": (
        "At small batch sizes the host launches operators more slowly than the GPU computes them: {value} µs each are "
        "assumed in the forward pass, of which hosts take 0.56 to 1.8 times as much."
    ),
    "device_not_measured": (
        "The model was not fitted to measurements of {device} ({value}): it uses the data sheet and related GPUs."
    ),
    "dtype_not_measured": "No times in {value} are published: those of float16 are used, at the rate of {value}.",
    "channels_padded": (
        "Channels that are no multiple of {value} are assumed to be padded; without padding, such layers took up to "
        "ten times as long."
    ),
}
"""Sentences of `ModelNote`, by code."""
_COUNTED = ("counted_clocks", "fitted_on_h200")
_UNTRIED = "Experimental kernels count where they apply: {}. By default they are off, because no GPU has run them yet."
_UNPAIRED = "No reference step was timed: a host that changes its speed during the run distorts the comparison."
MEMORY_OF_ENGINE = "Memory is planned for cubatch's own engine; a framework takes more, so that less fits."
MEMORY_OF_MODULE = "Memory is that of the step's tensors; workspaces and unused blocks of the allocator come on top."


# --- measured results -----------------------------------------------------------------------------------------


def headline(result: TuningResult, posterior: Posterior) -> str:
    """Return sentences for a user: the recommendation, its value, and how certain it is."""
    if result.batch_size is None:
        return _interrupted(result)
    n, current = result.batch_size, result.current_batch_size
    chosen, equal = result.sizes[n], _equal(result)
    value = f"{_value(result, n)}{_doubt(result, chosen)}"
    if not is_compared(result):
        return _not_compared(result, n, value)
    is_loop = _is_loop(result)
    if current is not None or is_loop:
        return _in_loop(result, chosen) if is_loop else _against_current(result, posterior, current or 0, value)
    if len(result.sizes) == 1:
        alone = " No other size was requested." if result.decided_by == "batch_sizes" else ""
        return f"Use batch size {n}: {value}.{alone}"
    if n in equal and len(equal) > 1:
        limits, end = f"{_within_limits(result)}{_within_budget(result)}", _END[result.objective]
        is_end = n == equal[-1 if end == "largest" else 0] or result.shares[n] < 1 - (result.tolerance or 0.0)
        why = "" if is_end else f", the {end} expected within {_tolerance(result)} of the best{limits}"
        best = f", the {_BEST[result.objective]}{limits}" if is_end and limits else ""
        alike_ = f"Sizes {_span(equal, result)} are {_EQUAL[result.objective]} within the noise{best}."
        return f"Use batch size {n}: {value}{why}{_failure(result, n)}. {alike_}"
    return f"Use batch size {n}: {value}, {_rank(result, n)}{_failure(result, n)}."


def _failure(result: TuningResult, n: int) -> str:
    """Return a phrase on the failure for no lack of memory that ends the sizes above `n`; empty text if none does."""
    ran = result.largest_measured or 0
    failed = (m for m in result.sizes.values() if m.status in ("error", "timeout") and m.batch_size > ran)
    end = next(failed, None) if ran < SPAN * n else None
    return "" if end is None else f"; {end.batch_size} {_FAILED[end.status]}"


def _is_loop(result: TuningResult) -> bool:
    """Return whether the recommendation is explained by rates of the loop with the data loader, not of the step."""
    step, loop = result.step_samples_per_second or 0.0, result.samples_per_second
    differs = loop is not None and abs(loop - step) > (result.tolerance or 0.0) * step
    return result.decided_by == "loader" or (result.objective == "throughput" and differs)


def _not_compared(result: TuningResult, n: int, value: str) -> str:
    is_cut = any(m.status == "not_run" for m in result.sizes.values())
    within = f" within {format_seconds(result.budget_seconds)}" if is_cut and result.budget_seconds else ""
    if _count_timed(result) > 1:
        what = "your size" if n == result.current_batch_size else "the best so far"
        if len(result.sizes[n].timings_seconds) >= LEAST_TIMINGS:
            remedy = "Or measure on a quiet machine."
            return f"No recommendation: the result of {n}, {what}, is too uncertain{within}: {value}. {remedy}"
        return f"No recommendation: {n}, {what}, was timed only once{within}: {value}. Raise budget."
    failed = sum(m.status in _FAILED for m in result.sizes.values())
    count = f" ({format_counted(failed, 'other size')} failed)" if failed else ""
    remedy = ": raise budget" if is_cut else f"{count}: name other sizes in batch_sizes"
    alone = f"Only batch size {n} was measured{within}: {value}."
    return f"{alone} It was compared with no other size, so there is no recommendation{remedy}."


def is_compared(result: TuningResult) -> bool:
    """
    Return whether the timings support the recommended batch size.

    It is the only candidate, lies right below a limit, or others were timed too.  Then it needs LEAST_TIMINGS timings,
    and an interval no wider than its rate.
    """
    if len(result.sizes) == 1 or result.decided_by in ("memory", "latency_limit"):
        return True
    chosen = result.sizes[result.batch_size or 0]
    is_guess = (chosen.half_width or 0.0) > _GUESS_SHARE
    return _count_timed(result) > 1 and len(chosen.timings_seconds) >= LEAST_TIMINGS and not is_guess


def _count_timed(result: BatchSizeResult) -> int:
    return sum(m.latency_seconds is not None for m in result.sizes.values())


def _against_current(result: TuningResult, posterior: Posterior, current: int, value: str) -> str:
    """
    Return a sentence to keep the user's batch size, or on how much better the recommended one is.

    `current` is the user's size, and `value` the objective at the recommended size as text.
    """
    n, fastest, shares = result.batch_size or 0, result.fastest_batch_size or 0, result.shares
    best = f"the {_BEST[result.objective]}{_within_limits(result)} ({fastest}){_within_budget(result)}"
    if n == current == fastest:
        return f"Keep batch size {n}: {value}, {_rank(result, n)}."
    if n == current and shares[n] < 1 - (result.tolerance or 0.0):
        return f"Keep batch size {n}: {value}, not distinguishable by its timings from {best}."
    if n == current:
        return f"Keep batch size {n}: {value}, within {_tolerance(result)} of {best}."
    if current not in shares:
        return f"Use batch size {n}: {value}, {_rank(result, n)}. {_no_value(result.sizes[current])}."
    ratio = shares[n] / shares[current]
    if result.objective == "throughput":
        low, high = posterior.ratio_interval(current, n)
        gain = f"{ratio:.3g} times ({math.exp(low):.3g} to {math.exp(high):.3g}) as fast as {current}"
    elif result.objective == "latency":
        gain = f"{1 / ratio:.3g} times the latency of {current}"
    else:
        gain = f"{ratio:.3g} times the samples per joule of {current}"
    return f"Use batch size {n}: {value}, {gain}."


def _no_value(present: Measurement) -> str:
    ended = {**_FAILED, "over_limit": "exceeds a limit", "not_run": "was not tried: raise budget"}
    return f"Batch size {present.batch_size} {ended.get(present.status, 'was not measured')}"


def details(
    result: TuningResult, decision: Decision, posterior: Posterior, outcomes: Outcomes, throttled_only: Sequence[int]
) -> list[str]:  # fmt: skip
    """
    Return sentences on why no other batch size is recommended, and on the conditions of the timings.

    Args:
        decision: The limit that kept the recommended size from being larger.
        posterior: The posterior of the step cost by batch size.
        outcomes: The outcome of each size.
        throttled_only: Sizes whose timings were all throttled.
    """
    of_step = [
        *_fastest(result),
        *_noisy_ties(result),
        *_limit(result, decision, outcomes),
        *_floor(result),
        *_at_chosen(result.sizes[result.batch_size or 0]),
        *_noisy(result),
    ]
    return [
        *_loader(result),
        *([] if result.decided_by == "loader" else of_step),
        *_conditions(result, posterior, throttled_only),
    ]


def _in_loop(result: TuningResult, chosen: Measurement) -> str:
    n, rates, current = chosen.batch_size, result.loop_rates, result.current_batch_size
    value = f"{format_objective(rates[n], 'throughput')} in a loop with the data loader{_doubt(result, chosen)}"
    word, unknown = "Keep" if n == current else "Use", ""
    if current in rates and current != n:
        rank = f"{rates[n] / rates[current]:.3g} times as fast as {current}"
    else:
        fastest = max(rates, key=lambda m: (rates[m], m))
        near = f"within {_tolerance(result)} of the fastest ({fastest}){_within_budget(result)}"
        rank = near if n == current != fastest else _rank(result, n, fastest)  # a smaller size may do as well
        unknown = "" if current in (None, n) else f" {_no_value(result.sizes[current or 0])}."
    ending = ""
    if result.decided_by == "loader" and result.loader is not None:
        rate, before = result.loader.rate_at(n), max((m for m in rates if m < n), default=n)
        is_open = n == max(rates) and result.loader.rate_at(before) < (1 - (result.tolerance or 0.0)) * rate
        # The loader may deliver still more in batches above the largest measured size.
        ending = "; the data loader is the bottleneck" if is_open else "; larger batches gain nothing"
    return f"{word} batch size {n}: {value}, {rank}{ending}.{unknown}"


def _loader(result: TuningResult) -> list[str]:
    """Return sentences on the rates of data loader and step, and on the batches of an epoch; none without a loader."""
    rate, n = result.loader, result.batch_size or 0
    if rate is None:
        return []
    step, fastest = (result.sizes[size].samples_per_second or 0.0 for size in (n, result.fastest_batch_size or n))
    own = rate.rate_at(n)
    delivered, alone = (format_objective(value, "throughput") for value in (own, step))
    where = f"with {format_counted(rate.num_workers, 'worker')}" if rate.num_workers else "in the process that trains"
    where += " on the CPUs of the step" if rate.delay_seconds and result.is_slowed(n) else ""
    text = f"The data loader by itself delivers {delivered} {where}, the step by itself {alone}"
    enough = rate.workers_for(fastest)
    if enough > rate.num_workers and result.is_slowed(result.fastest_batch_size or n):
        more = enough * own / max(1, rate.num_workers)
        text += f"; {format_counted(enough, 'worker')} would deliver about {format_objective(more, 'throughput')}"
    if n in rate.loop_ratios and n in result.loop_rates:
        text += f". In one loop, as it was run, they reach {format_objective(result.loop_rates[n], 'throughput')}"
        if result.loop_rates[n] > _AGREES * min(own, step):
            text += ", more than the slower of the two alone: the machine changed its speed between these timings"
    epoch = rate.steps(n)
    if epoch is None:
        return [f"{text}."]
    last = f", the last of {format_counted(epoch[1], 'sample')}" if epoch[1] else ""
    if epoch[1] in result.sizes and result.sizes[epoch[1]].status in ("error", "timeout"):
        last += ", a size that failed: set drop_last=True"
    return [f"{text}.", f"An epoch has {format_count(epoch[0])} batch{'' if epoch[0] == 1 else 'es'} of {n}{last}."]


def sizes_without_result(result: TuningResult, outcomes: Outcomes) -> list[str]:
    """Return sentences on batch sizes without a result, with the reason, and on the largest that fits in memory."""
    facts, ran = {n: outcome.facts for n, outcome in outcomes.items()}, result.largest_measured or 0
    sizes = list(result.sizes.values())
    untried = [m for m in sizes if m.status == "not_run"]
    unreached = [m for m in sizes if m.status == "interrupted" and m.latency_seconds is None]
    dropped = [m for m in sizes if m.status == "dropped" and m.latency_seconds is None]
    alike = [m for m in dropped if facts.get(m.batch_size, {}).get("limit") == "divisors"]
    end = next((m for m in sizes if m.status in _FAILED and m.batch_size > ran), None)
    above = [m for m in dropped if end is not None and m.batch_size > end.batch_size and m not in alike]
    below = [m for m in dropped if m not in above and m not in alike]
    gains = [facts.get(m.batch_size, {}).get("could_gain") for m in untried]
    gain = max((each for each in gains if each is not None), default=math.inf)
    is_guess = gain > 1 or _count_timed(result) <= _FEW or any(m.batch_size > _FAR * ran for m in untried)
    gained = "" if is_guess else f" (up to {_percent(gain)} to gain)"
    limit = result.limits.get("latency_seconds")
    closed = [m for m in sizes if m.status not in ("not_run", "interrupted") and not m.exceeds(limit)]
    others = count_statuses(closed, result.limits)
    failed = "" if end is None else f"{end.batch_size} {_FAILED[end.status]}"
    why = "Not tried, because sizes with the same divisors raised an error"
    return [
        *_that_hold(
            (alike, f"{why}: {_names(alike)}. State what is accepted with multiple_of or divides."),
            (below, f"Not expected to be better, from the timings of neighbors: {_names(below)}."),
            (above, f"Not tried, because {failed}: {_names(above)}."),
            (untried, f"Not tried for lack of time{gained}: {_names(untried)}. Raise budget."),
            (unreached, f"Not reached before the interruption: {_names(unreached)}."),
            (others, f"Without a result: {others}."),
        ),
        *_largest(result),
    ]


def count_statuses(measurements: Sequence[Measurement], limits: Mapping[str, float | None]) -> str:
    """Return a phrase on batch sizes that failed or exceed a limit, by outcome, with the reason of the first."""
    limit = limits.get("latency_seconds")
    ways: dict[str, list[Measurement]] = {}
    for m in measurements:
        if m.status in ("ok", "dropped"):
            continue
        way = m.status.replace("_", " ")
        if m.status == "over_limit":
            way = "above the latency limit" if m.exceeds(limit) else "over the memory limit"
        ways.setdefault(way, []).append(m)
    counted = {way: f" at {len(group)} sizes" * (way == "error" and len(group) > 1) for way, group in ways.items()}
    named = {way: f"{_names(group)}{_first_reason(group, limit)}" for way, group in ways.items()}
    return "; ".join(f"{way}{counted[way]}: {named[way]}" for way in ways)


def breaks_latency_limit(measurement: Measurement, limit: float) -> str:
    """Return a phrase with the step time of a batch size and the latency limit that it exceeds."""
    seconds, count = format_seconds(measurement.latency_seconds or 0.0), _count(len(measurement.timings_seconds))
    return f"{measurement.batch_size} takes {seconds} ({count}), above the latency limit of {format_seconds(limit)}"


def _interrupted(result: TuningResult) -> str:
    values = {n: value[0] for n, m in result.sizes.items() if (value := m.value(result.objective)) is not None}
    if not values:
        return "There is no recommendation yet: nothing was measured before the interruption."
    best = (min if result.objective == "latency" else max)(values, key=lambda n: values[n])
    known = f"{_value(result, best)}, {_count(len(result.sizes[best].timings_seconds))}"
    return (
        f"Interrupted; best so far: batch size {best} ({known}). A rerun continues from its timings if they are cached."
    )


def _rank(result: BatchSizeResult, n: int, fastest: int | None = None) -> str:
    """Return a phrase on how batch size n compares with batch size `fastest` (None: the result's) by the objective."""
    fastest = fastest or result.fastest_batch_size
    if not result.predicted and sum(m.is_measured for m in result.sizes.values()) == 1:
        return "the only size that ran within the limits"
    best, cut = f"the {_BEST[result.objective]}{_within_limits(result)}", _within_budget(result)
    if n == fastest:
        return best if result.predicted else f"{best}{cut or ' of the measured sizes'}"
    return f"the {_END[result.objective]} size within {_tolerance(result)} of {best} ({fastest}){cut}"


def _within_limits(result: BatchSizeResult) -> str:
    """Return a phrase that restricts the best size to the limits, if a size over them is better; else empty text."""
    best = result.sizes[result.fastest_batch_size or 0].value(result.objective)
    over = (m.value(result.objective) for m in result.sizes.values() if m.status == "over_limit")
    is_better = result.objective != "latency" and any(value and best and value[0] > best[0] for value in over)
    return " within the limits" if is_better else ""


def _within_budget(result: BatchSizeResult) -> str:
    """Return a phrase with the number of measured batch sizes if the budget had no time for others; else empty text."""
    is_cut = any(m.status == "not_run" for m in result.sizes.values())
    return f" of the {_count_timed(result)} sizes that were measured within the budget" if is_cut else ""


def _doubt(result: TuningResult, chosen: Measurement) -> str:
    """Return in parentheses why the recommended size's value is uncertain, such as few timings; empty if certain."""
    timings = len(chosen.timings_seconds)
    width = None if result.decided_by == "loader" else chosen.half_width  # it is the error of the step
    words = [
        f"± {format_tenths(width)}{' assumed' if timings == 1 else ''}" if width is not None else "",
        _count(timings) if timings < MIN_ROUNDS else "",
        "a guess: raise budget" if (width or 0.0) > _GUESS_SHARE else "",
        "on a busy machine" if result.disturbed else "",
    ]
    text = ", ".join(filter(None, words))
    return f" ({text})" if text else ""


def _equal(result: BatchSizeResult) -> list[int]:
    return sorted({result.fastest_batch_size or 0, *result.ties})


def _fastest(result: TuningResult) -> list[str]:
    n, fastest, equal = result.batch_size or 0, result.fastest_batch_size or 0, _equal(result)
    if _is_loop(result):
        rates = result.loop_rates
        fastest = max(rates, key=lambda m: (rates[m], m))
        best, share = format_objective(rates[fastest], "throughput"), format_percent(rates[n] / rates[fastest])
        return [f"The best loop reaches {best} at {fastest}; that of {n} reaches {share} of it."] * (n != fastest)
    if n == fastest:
        return []
    best = f"The best{_within_limits(result)} is {_value(result, fastest)} at {fastest}"
    sentences = [f"{best}; {n} reaches {_share(result, n)} of it."]
    if n not in equal and len(equal) > 1:
        sentences.append(f"Sizes {_span(equal, result)} are {_EQUAL[result.objective]} within the noise.")
    return sentences


def _noisy_ties(result: TuningResult) -> list[str]:
    words = []
    for n in result.noisy_ties:
        width = result.sizes[n].half_width
        words.append(f"{n} ({_share(result, n)} of it{'' if width is None else f', ± {format_tenths(width)}'})")
    return [f"Too noisy to compare with {result.fastest_batch_size}: {join_words(words)}."] if words else []


def _floor(result: TuningResult) -> list[str]:
    timed = {n: m.latency_seconds for n, m in result.sizes.items() if m.latency_seconds is not None}
    lowest = min(timed.values(), default=0.0)
    flat = list(itertools.takewhile(lambda n: timed[n] <= (1 + _FLOOR_SHARE) * lowest, timed))
    widths = (result.sizes[n].half_width or 0.0 for n in flat)
    if not flat or flat[-1] < 2 * flat[0] or max(widths) > _FLOOR_SHARE:
        return []
    same = f"Up to {flat[-1]} samples, a batch takes about the same time ({format_seconds(lowest)})"
    return [f"{same}: smaller batches leave the device idle."]


def _at_chosen(chosen: Measurement) -> list[str]:
    shares = (
        ("of the SMs' warp slots are used (occupancy)", chosen.occupancy),
        ("of SM time is used (fill)", chosen.fill),
    )
    words = [f"{format_percent(share)} {text}" for text, share in shares if share is not None]
    n, clock = chosen.batch_size, chosen.sm_clock_mhz
    return _that_hold(
        (words, f"At {n}, counted for cubatch kernels, {' and '.join(words)}."),
        (clock is not None, f"At {n} the SMs ran at {clock or 0:.0f} MHz."),
    )


def _noisy(result: TuningResult) -> list[str]:
    fastest = result.sizes[result.fastest_batch_size or 0]
    width = fastest.half_width or 0.0
    if width <= NOISY_SHARE:
        return []
    if len(fastest.timings_seconds) == 1:
        text = f"The fastest size has one timing (± {format_tenths(width)}), so other sizes may be as good"
        return [f"{text}. Measure again with a larger budget."]
    more = " or with a larger budget" if result.decided_by == "budget" else ""
    text = f"Timings vary widely (± {format_tenths(width)} at the fastest size), so other sizes may be as good"
    return [f"{text}. Measure again on a quiet machine{more}."]


def _conditions(result: TuningResult, posterior: Posterior, throttled_only: Sequence[int]) -> list[str]:
    """Return sentences on the conditions of the timings: throttling, L2 cache, accumulation, missing reference step."""
    throttled, is_cpu = sum(m.throttled for m in result.measurements), result.device.get("kind") == "cpu"
    only = f", except those of {join_words(list(map(str, throttled_only)))}" if throttled_only else ""
    are = f"{_count(throttled)} at a throttled clock {'is' if throttled == 1 else 'are'} not counted"
    step = f"A step is {result.accumulate} batches of this size and one optimizer step"
    alone = is_cpu and posterior.noise.reference is None and _count_timed(result) > 1
    return _that_hold(
        (throttled, f"{are}{only}."),
        (result.l2 == "cold" and not is_cpu, "The L2 cache is cold: steps rotate over several sets of buffers."),
        (result.l2 == "warm" and not is_cpu, "The L2 cache is warm: steps ran back to back, as they do in use."),
        (result.accumulate > 1, f"{step}; latencies are of such steps."),
        (alone, f"{_UNPAIRED} Measure again on a quiet machine, or with a larger budget."),
    )


def _largest(result: BatchSizeResult) -> list[str]:
    """
    Return a list with a sentence on the largest batch sizes that fit and that ran.

    It is empty without a memory plan, and where the sentence on the limiting factor has them.
    """
    largest, ran = result.largest_batch_size, getattr(result, "largest_measured", None)
    if largest is None or result.decided_by == "memory":
        return []
    failed = ran_out_of_memory(result)
    if failed is not None:
        name = "it" if failed == largest else str(failed)
        text = f"By the memory plan {largest} fits, but {name} ran out of memory"
    else:
        text = f"The largest batch size that fits is {largest} by the memory plan"
    return [f"{text}; the largest that ran is {ran}." if ran else f"{text}."]


def ran_out_of_memory(result: BatchSizeResult) -> int | None:
    """Return the smallest size above every timed one that fits by the plan but ran out of memory; None if none did."""
    largest = result.largest_batch_size or 0
    ran = max((n for n, m in result.sizes.items() if m.latency_seconds is not None), default=0)
    failed = (n for n, m in result.sizes.items() if m.status == "out_of_memory")
    return next((n for n in failed if ran < n <= largest), None)


# --- which limit decided, measured or predicted ----------------------------------------------------------------


def _limit(result: BatchSizeResult, decision: Decision, outcomes: Outcomes = _NONE) -> list[str]:
    """Return sentences on the limit that kept the recommended size from being larger; none if the list has one size."""
    limit = decision.limit
    if limit in ("peak", "plateau"):
        timed = [m for m in result.sizes.values() if m.latency_seconds is not None]
        return [_curve(result, decision)] if len(timed) > 1 else []
    if limit == "budget":
        return _untried(result, outcomes)
    if limit == "max_batch_size":
        given, top = result.limits.get("max_batch_size"), max(decision.reach, decision.top)
        what = "max_batch_size" if given and is_near(top, given) else "The data set, multiple_of or divides"
        return [f"{what} is the limit: sizes above {top} were not allowed and may be faster."]
    if limit == "batch_sizes":
        return [_listed(result, decision)] if len(result.sizes) > 1 else []
    return [{"memory": _memory, "latency_limit": _latency}.get(limit or "", _unknown)(result, decision)]


def _curve(result: BatchSizeResult, decision: Decision) -> str:
    n, top, reach = result.batch_size or 0, decision.top, decision.reach
    word = "predicted" if result.predicted else "measured"
    span = f"({word} up to {top}{f', estimated up to {reach}' if reach > top else ''})"
    last = max((m for m in result.tied_with if m > n), default=n)
    if decision.limit == "peak" or result.objective == "latency":
        if last == top and reach == top:
            within = "the model's error" if result.predicted else "the noise"
            return f"Larger sizes, up to {top}, are as fast within {within}."
        return f"{f'Sizes above {last}' if last > n else 'Larger sizes'} {_WORSE[result.objective]} {span}."
    width = 0.0 if result.predicted else result.sizes[result.fastest_batch_size or n].half_width or 0.0
    doubt = f", as far as a noise of ± {format_tenths(width)} shows" if width > NOISY_SHARE else ""
    return f"Larger sizes gain at most {_tolerance(result)} {span}{doubt}."


def _memory(result: BatchSizeResult, decision: Decision) -> str:
    failed = None if decision.edge is None else result.sizes.get(decision.edge[0])
    fits = max(result.largest_batch_size or 0, decision.top)
    if failed is not None and failed.status == "out_of_memory":
        plan = f", though {fits} fits by the memory plan" if fits >= failed.batch_size else ""
        return f"Memory is the limit: {decision.top} ran, {failed.batch_size} ran out of memory{plan}."
    return f"Memory is the limit: nothing larger than {fits} fits. With more memory a larger size may be faster."


def _latency(result: BatchSizeResult, decision: Decision) -> str:
    slow = None if decision.edge is None else result.sizes.get(decision.edge[0])
    limit = result.limits.get("latency_seconds") or 0.0
    if slow is None or slow.latency_seconds is None or result.predicted:
        return f"The latency limit excludes larger sizes: the next one takes longer than {format_seconds(limit)}."
    return f"The latency limit excludes larger sizes: {decision.top} keeps it; {breaks_latency_limit(slow, limit)}."


def _listed(result: BatchSizeResult, decision: Decision) -> str:
    n, top = result.batch_size or 0, decision.top
    refused = next((m.batch_size for m in result.sizes.values() if m.batch_size > top and m.status in _REFUSED), None)
    if refused is not None:
        return f"batch_sizes is the limit: it has nothing between {top} and {refused}, which exceeds a limit."
    return f"batch_sizes is the limit: it has nothing above {max(n, decision.reach)}; a larger size may be faster."


def _untried(result: BatchSizeResult, outcomes: Outcomes) -> list[str]:
    """Return sentences on how long a trial of the next larger batch size would have taken, if that is known."""
    untried = [n for n, m in result.sizes.items() if n > (result.batch_size or 0) and m.status == "not_run"]
    sentences = []
    known = (n for n in untried if n in outcomes and "needed_seconds" in outcomes[n].facts)
    if (first := next(known, None)) is not None:
        need, left = (outcomes[first].facts[name] for name in ("needed_seconds", "left_seconds"))
        words = f"to take about {format_seconds(need)}; {format_seconds(left)} were left"
        sentences.append(f"A trial of {first} was expected {words}.")
        if need <= left:  # see `SearchState.affordable`
            sentences.append("The search spends only part of the remaining time on a step of such uncertain length.")
    return sentences


def _unknown(result: BatchSizeResult, decision: Decision) -> str:
    """Return a sentence for a result without a known limit: by an interruption, a failure, or missing batch sizes."""
    n, top = result.batch_size or 0, decision.top
    beyond = [m for m in result.sizes.values() if m.batch_size > top]
    if any(m.status == "interrupted" for m in result.sizes.values() if m.batch_size > n):
        return f"The interruption is the limit: sizes above {n} were not measured to their end."
    if decision.edge is not None and decision.edge[1] == FAILURE:
        failed = result.sizes[decision.edge[0]]
        return f"Larger sizes are unknown: {top} ran, {failed.batch_size} {_FAILED.get(failed.status, 'failed')}."
    refused = next((m for m in beyond if m.status in _REFUSED), None)
    gap = "nothing larger gave a timing"
    if refused is not None:
        how = "does not fit" if result.predicted else "failed" if refused.latency_seconds is None else "too slow"
        gap = (
            f"nothing between {top} and {refused.batch_size} ({how}) was {'predicted' if result.predicted else 'timed'}"
        )
    return f"The limiting factor is unknown: {gap}."


# --- predictions ----------------------------------------------------------------------------------------------


def predicted(forecast: Forecast, sharpened: Sharpened) -> tuple[str, ...]:
    """Return sentences for a user: the predicted recommendation, then its reasons."""
    n, top = forecast.batch_size, max(n for n in forecast.seconds if not forecast.why_not(n))
    over = next(((m, "latency_limit") for m in forecast.sizes if m > top), None)
    ends = (forecast.sizes[n].value(forecast.objective) or (0.0, 0.0, 0.0))[1:]
    low, high = (format_value(end, forecast.objective) for end in ends)
    value = f"{_value(forecast, n)} (90 % interval {low} to {high})"
    is_alone = len(forecast.sizes) == 1 and forecast.decided_by == "batch_sizes"
    alone = "the only size requested" if is_alone else "the only size within the limits"
    rank = _rank(forecast, n) if len(forecast.seconds) > 1 else alone
    groups = alike(forecast.passes)
    return (
        f"Predicted, not measured: use batch size {n}: {value}, {rank}.",
        *_predicted_ties(forecast),
        *_limit(forecast, Decision(forecast.decided_by, top, top, over)),
        *_longest_passes(forecast, groups),
        *_wave(forecast, groups),
        *_anchors(forecast, sharpened),
        *_largest(forecast),
    )


def forecast_notes(
    device: Device, model: Sequence[ModelNote], memory: Sequence[str], known: Sequence[Anchor],
    *, experimental: Sequence[str] = (),
) -> tuple[str, ...]:  # fmt: skip
    """
    Return sentences on the limits of a forecast: of experimental kernels, the time model, an unknown GPU and memory.

    Anchors of cubatch kernels (`known`) are listed in the note on the times of these kernels.
    """
    timed = ", ".join(anchor.origin for anchor in known if anchor.work.library == "cubatch")
    measured = f"Times of cubatch kernels are clocks counted in the compiled code, corrected by measurements: {timed}."
    notes = (
        measured
        if timed and note.code in _COUNTED
        else _MODEL_NOTES[note.code].format(value=note.value, device=device, share=_percent(MOVED_SHARE))
        for note in model
    )
    untried = [_UNTRIED.format(join_words(experimental))] if experimental else []
    return (*untried, *notes, *_unknown_architecture(device), *memory)


def _unknown_architecture(device: Device) -> Iterator[str]:
    version = device.compute_capability
    if version is not None and version not in architectures.known():
        like = architectures.like(version)
        name, of = ("{}.{}".format(*each) for each in (version, like.compute_capability))
        yield f"Compute capability {name} is unknown; its SMs are assumed to be those of {of}, {like.name}."


def _predicted_ties(forecast: Forecast) -> Iterator[str]:
    """Yield sentences on sizes that tie with the fastest, and on why a smaller (latency: larger) is not recommended."""
    if not forecast.tied_with:
        return
    n, is_latency = forecast.batch_size, forecast.objective == "latency"
    sizes = join_words(_shorten(list(map(str, forecast.tied_with))))
    they_are = "it is" if len(forecast.tied_with) == 1 else "they are"
    ends = (end(forecast.tied_with, key=forecast.shares.__getitem__) for end in (min, max))
    shares = " to ".join(dict.fromkeys(_share(forecast, m) for m in ends))
    yield (
        f"Within the model's error, {sizes} may be as fast as {forecast.fastest_batch_size}: {they_are} predicted at "
        f"{shares} of that speed."
    )
    better = [m for m in forecast.tied_with if (m > n if is_latency else m < n)]
    if better:
        m = better[-1] if is_latency else better[0]
        needed = 1 / (1 + forecast.tolerance) if is_latency else 1 - forecast.tolerance
        short = f"it is predicted at {_share(forecast, m)} of that speed, less than {_percent(needed)}"
        yield f"{m} is not recommended because {short}: measure it to be sure."


def _longest_passes(forecast: Forecast, groups: Sequence[Sequence[PassShare]]) -> Iterator[str]:
    words = [
        f"{_pass_name(group[0])}{f' and {len(group) - 1} like it' if len(group) > 1 else ''} "
        f"({format_percent(sum(share.share for share in group))}{f', {group[0].bound}' if group[0].bound else ''})"
        for group in groups[:_MAX_PASSES]
    ]
    yield f"Longest by prediction at batch {forecast.batch_size}: {', '.join(words)}."
    if all(share.bound for share in forecast.passes):
        compute = format_percent(sum(share.share for share in forecast.passes if share.bound == "compute"))
        yield f"{compute} of the predicted time is bound by arithmetic, the rest by memory."


def _wave(forecast: Forecast, groups: Sequence[Sequence[PassShare]]) -> Iterator[str]:
    """Yield a sentence on the slowest matrix product: its blocks, those of the busiest SM and the filled share."""
    share = next((group[0] for group in groups if group[0].blocks), None)
    if share is None or share.blocks is None:
        return
    num_sms = forecast.device.num_sms or 1
    busiest = busiest_sm_blocks(share.blocks, num_sms)
    name, filled = _pass_name(share), format_percent(fill(share.blocks, num_sms))
    blocks = f"{share.blocks} blocks: {busiest} on the busiest of {num_sms} SMs"
    text = f"{name} is predicted to run as {share.algorithm} in {blocks}"
    yield f"{text}, {filled} filled."


def _anchors(forecast: Forecast, sharpened: Sharpened) -> Iterator[str]:
    if forecast.anchors:
        ratios = [f"{ratio:.2f} ({name})" for name, ratio in zip(forecast.anchors, sharpened.ratios, strict=True)]
        yield f"Measurements correct this prediction; measured over predicted time: {', '.join(ratios)}."
        yield (
            f"On {forecast.device}, arithmetic takes {sharpened.compute:.2f} times and memory {sharpened.memory:.2f} "
            "times as long as by its data sheet."
        )


def _pass_name(share: PassShare) -> str:
    return share.layer if share.pass_ == Pass.FPROP.value else f"{share.layer} {share.pass_}"


def _that_hold(*rows: tuple[object, str]) -> list[str]:
    """Return the sentences of the rows (condition, sentence) whose condition is true."""
    return [text for condition, text in rows if condition]


# --- words ----------------------------------------------------------------------------------------------------


def _value(result: BatchSizeResult, n: int) -> str:
    value = result.sizes[n].value(result.objective)
    text = "" if value is None else format_objective(value[0], result.objective)
    return f"{text} per batch" if result.objective == "latency" else text


def _share(result: BatchSizeResult, n: int) -> str:
    return format_percent(result.shares[n])


def _tolerance(result: BatchSizeResult) -> str:
    return _percent(result.tolerance or 0.0)


def _percent(share: float) -> str:
    return f"{float(f'{100 * share:.2g}'):g} %"


def _count(timings: int) -> str:
    return format_counted(timings, "timing")


def _first_reason(group: Sequence[Measurement], limit: float | None) -> str:
    first = group[0]
    whose = f"{first.batch_size}: " if len(group) > 1 else ""
    why = textwrap.shorten(visible(first.stop_reason), _MAX_REASON, placeholder=" …")
    if first.status == "over_limit" and first.exceeds(limit):
        why = f"{format_seconds(first.latency_seconds or 0.0)}, {_count(len(first.timings_seconds))}"
    return f" ({whose}{why})" if why else ""


def _names(measurements: Sequence[Measurement]) -> str:
    return join_words(_shorten([str(m.batch_size) for m in measurements]))


def _shorten(words: list[str]) -> list[str]:
    rest = len(words) - _MAX_SIZES
    return words if rest <= 1 else [*words[:_MAX_SIZES], f"{rest} more"]


def _span(sizes: Sequence[int], result: BatchSizeResult) -> str:
    """Return batch sizes as a range if no other measured size lies between them, else as a list."""
    inside = [n for n, m in result.sizes.items() if m.is_measured and sizes[0] <= n <= sizes[-1]]
    if len(sizes) > 2 and len(inside) == len(sizes):  # noqa: PLR2004 - of two, both are named
        return f"from {sizes[0]} to {sizes[-1]}"
    return join_words(_shorten(list(map(str, sizes))))
