"""The answer of a tuning result in words, which claim no more than was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.report.facts import (
    NOISY_SHARE,
    half_width,
    is_measured,
    is_predicted,
    is_recommended,
    measured,
    measurements_of,
    ran_out_of_memory,
    rate_of,
    seconds_of,
    ties_of,
    value_of,
)
from cubatch.report.tables.common import joined
from cubatch.units import format_count, format_objective, format_percent, format_seconds

_MAX_LISTED = 12  # batch sizes in a line
_MIN_TIMINGS = 5  # fewer give no interval
_WHY = {
    "peak": "larger batches are slower",
    "plateau": "larger batches gain no more than that",
    "memory": "no much larger batch fits in memory, though with more of it one might be better",
    "latency_limit": "larger batches take longer than the latency limit allows",
    "batch_sizes": "only the sizes asked for were looked at",
    "budget": "the budget did not hold a visit to every size, so a larger one may find better",
}
_BUSY = "The machine was busy with other work meanwhile: on a quiet one another size may be the best."
_UNSURE_SHARE = 0.5
_UNSURE = "Timings of one size differ so much (± {}) that this is a guess: a quiet machine or a larger budget tells."
_ALIKE = {"latency": "take about equally long", "energy": "take about equally little energy"}


def answer(result: Mapping[str, Any]) -> str:
    """
    Say the answer, and why, in two or three sentences that claim no more than was measured.

    Args:
        result: A tuning result in the JSON form of schema 1.

    Returns:
        The sentences; a prediction says that it is one; without an answer, or with nothing to compare it
        with, or where others were busy meanwhile or timings differ by more than half, they say so.
    """
    said = _said(result)
    chosen = next((m for m in measurements_of(result) if m["batch_size"] == result.get("batch_size")), None)
    if chosen is None or len(measurements_of(result)) == 1 or is_predicted(result):
        return said
    width = half_width(chosen) or 0.0
    unsure = _UNSURE.format(format_percent(width)) if width > _UNSURE_SHARE and is_recommended(result) else ""
    return " ".join(filter(None, [said, _BUSY if result.get("disturbed") else unsure]))


def _said(result: Mapping[str, Any]) -> str:
    """Say the answer as if the machine had been quiet."""
    objective = result.get("objective") or "throughput"
    by_size = {int(m["batch_size"]): m for m in measurements_of(result)}
    chosen = by_size.get(result.get("batch_size") or 0)
    if chosen is None:
        return _so_far(result, by_size)
    size, device = int(chosen["batch_size"]), (result.get("device") or {}).get("name")
    facts = [
        f"{format_count(rate)} samples/s{_plus_minus(chosen, result)}" if (rate := rate_of(chosen, result)) else "",
        f"{format_seconds(seconds)} per batch" if (seconds := seconds_of(chosen, result)) is not None else "",
        format_objective(v[0], objective) if objective == "energy" and (v := value_of(chosen, objective)) else "",
    ]
    known, where = ", ".join(f for f in facts if f), f" on {device}" if device else ""
    if not is_recommended(result):
        untried = any(m.get("status") == "not_run" for m in by_size.values())
        budget = result.get("budget_seconds") if untried else None
        within = f" in {budget:g} s" if budget else ""
        is_alone = sum(m.get("latency_seconds") is not None for m in by_size.values()) == 1
        only = (
            f"Only batch size {size} could be measured" if is_alone else f"Nothing could be compared with batch {size}"
        )
        first = f"{only}{within}: no recommendation. It gives {known}{where}"
        return f"{first}, and nothing tells whether another size gives more."
    lead = "Predicted, not measured: use" if is_predicted(result) else "Use"
    first = f"{lead} batch size {size}{where}: {known}."
    if len(by_size) == 1 and result.get("decided_by") == "batch_sizes":
        return f"{first} No other size was asked for."
    why = _why(result, size)
    return f"{first} {_standing(result, by_size, size)}{f', and {why}' if why else ''}."


def _plus_minus(chosen: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Write half the 90 % interval of the rate as a share of it; nothing of a prediction, which has its own."""
    width = half_width(chosen)
    return "" if width is None or is_predicted(result) else f" (± {format_percent(width)})"


def points(result: Mapping[str, Any]) -> list[str]:
    """Gather what stands beneath the answer: the reasons of the result, and how far memory would reach."""
    points = [str(reason) for reason in result.get("reasons") or ()]
    if (largest := result.get("largest_batch_size")) is not None:
        measured = None if is_predicted(result) else result.get("largest_measured")
        ran = f"; the largest that ran is {measured}" if measured else ""
        failed = ran_out_of_memory(result)
        points.append(
            f"The largest batch size that fits, by the plan, is {largest}{ran}."
            if failed is None
            else f"By the plan {largest} fits, but {'it' if failed == largest else failed} ran out of memory{ran}."
        )
    return points


def _so_far(result: Mapping[str, Any], by_size: Mapping[int, Mapping[str, Any]]) -> str:
    """Name the best of what was measured before an interruption; there is no answer yet."""
    objective = result.get("objective") or "throughput"
    values = {n: v[0] for n, m in by_size.items() if m.get("latency_seconds") and (v := value_of(m, objective))}
    if not values:
        return "There is no answer yet: too little was measured."
    best = (min if objective == "latency" else max)(values, key=lambda n: values[n])
    timings = len(by_size[best].get("timings_seconds") or ())
    known = f"{format_objective(values[best], objective)}, {_count(timings)}"
    return f"Interrupted; best so far: {best} ({known}). There is no answer yet: run it again to go on."


def _standing(result: Mapping[str, Any], by_size: Mapping[int, Mapping[str, Any]], size: int) -> str:
    """Say how the answer stands to the others: about equal to which, or how near to the best, and on how much."""
    objective, fastest = result.get("objective") or "throughput", int(result.get("fastest_batch_size") or size)
    tolerance = f"{100 * float(result.get('tolerance') or 0):g} %"
    extreme = "largest" if objective == "latency" else "smallest"
    timings = min(len(by_size[n].get("timings_seconds") or ()) for n in (size, fastest) if n in by_size)
    doubt = "" if is_predicted(result) or timings >= _MIN_TIMINGS else f", on {_count(timings)}"
    equal = sorted({fastest, *ties_of(result)})
    if len(equal) > 1 and not is_predicted(result):
        best = "lowest" if objective == "latency" else "best"
        alike = f"{_span(equal, by_size)} {_ALIKE.get(objective, 'are about equally fast')} here"
        return f"{alike}, within the noise; {size} is the {extreme} within {tolerance} of the {best}{doubt}"
    best = {"latency": "the lowest latency", "energy": "the best samples per joule"}.get(objective, "the fastest")
    if size == fastest:
        return _leading(result, by_size, size, best, doubt)
    text = f"It is the {extreme} size within {tolerance} of {best}, which is that of batch {fastest}"
    return text.replace("the fastest, which is that of batch", "the fastest, batch") + doubt


def _leading(
    result: Mapping[str, Any], by_size: Mapping[int, Mapping[str, Any]], size: int, best: str, doubt: str
) -> str:
    """Say what is known of an answer that is itself the best, as far as others were measured and noise allows."""
    is_latency = result.get("objective") == "latency"
    others = [n for n in by_size if (n > size if is_latency else n < size)]
    noisy = [str(n) for n in sorted(set(result.get("tied_with") or ()) - set(ties_of(result)))]
    is_best = f"has {best}" if result.get("objective") in _ALIKE else "is the fastest size"
    if len(measured(result)) == 1 and not is_predicted(result):
        is_beyond = any(m.get("status") == "over_limit" and m.get("latency_seconds") for m in by_size.values())
        return f"It is the only size {'within the limits' if is_beyond else 'that could be measured'}{doubt}"
    if noisy:
        are = "is" if len(noisy) == 1 else "are"
        return f"It {is_best} by expectation, from which {joined(noisy)} {are} too noisy to tell{doubt}"
    if doubt:
        return f"It measured {best.removeprefix('the ')}{doubt}"
    if not others:
        return f"It {is_best}"
    is_open = result.get("decided_by") in ("budget", None)
    beyond, tolerance = "larger" if is_latency else "smaller", f"{100 * float(result.get('tolerance') or 0):g} %"
    return f"It {is_best}{' measured' if is_open else ''}, no {beyond} size comes within {tolerance} of it"


def _why(result: Mapping[str, Any], size: int) -> str | None:
    """Say what kept the answer from being larger, as far as ties and noise allow it."""
    decided_by, objective = str(result.get("decided_by") or ""), result.get("objective") or "throughput"
    ties, is_latency = set(result.get("tied_with") or ()), objective == "latency"
    if is_latency and decided_by in ("peak", "plateau"):
        decided_by = "peak"
    if decided_by == "peak" and any(n > size for n in ties) and not is_predicted(result):
        last = max(measured(result))
        slower = "takes longer" if is_latency else "is slower"
        return None if last in ties else f"the largest measured, {last}, {slower}"
    if is_latency and decided_by == "peak":
        return "larger batches take longer"
    noise = half_width(next((m for m in measurements_of(result) if m["batch_size"] == size), {}))
    if decided_by == "plateau" and noise is not None and noise > NOISY_SHARE and not is_predicted(result):
        return f"larger batches gain no more than that, as far as a noise of ± {format_percent(noise)} lets it be seen"
    if decided_by == "max_batch_size":
        return _at_most(result, size)
    return _WHY.get(decided_by)


def _at_most(result: Mapping[str, Any], size: int) -> str:
    """Say how far max_batch_size let sizes be looked at, and which of those were judged without a reading."""
    top = max([size, *measured(result)])
    allowed = (result.get("limits") or {}).get("max_batch_size")
    if allowed is None or allowed <= top or is_predicted(result):
        return "max_batch_size allows no larger one" if size == top else f"max_batch_size allows none above {top}"
    return f"what lies above {top}, up to the {allowed} that max_batch_size allows, was judged by smaller sizes"


def _span(sizes: Sequence[int], by_size: Mapping[int, Mapping[str, Any]]) -> str:
    """Name sizes by their ends, where nothing that was measured between them is missing; else one by one."""
    inside = [n for n, m in by_size.items() if is_measured(m) and sizes[0] <= n <= sizes[-1]]
    if len(sizes) > 2 and len(inside) == len(sizes):  # noqa: PLR2004 - of two, both are named
        return f"{sizes[0]} to {sizes[-1]}"
    shown = [str(n) for n in sizes[:_MAX_LISTED]] + ([f"{len(sizes) - _MAX_LISTED} more"] * (len(sizes) > _MAX_LISTED))
    return joined(shown)


def _count(timings: int) -> str:
    return f"{timings} timing{'' if timings == 1 else 's'}"
