"""
The sentences beneath a result: why this size, what the fastest was, which limit decided, what else to know.

Only wording: what is said was decided in `answer`.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Collection, Mapping, Sequence

import attrs

from cubatch.measure.goal import Goal
from cubatch.measure.stopping import MIN_ROUNDS
from cubatch.report import facts
from cubatch.report.facts import NOISY_SHARE, TIMED, is_above, is_only_noise
from cubatch.search.posterior import Posterior
from cubatch.tuning import powers_of_two
from cubatch.tuning.decision import FAILURE, Decision
from cubatch.tuning.results import Measurement
from cubatch.units import format_objective, format_percent, format_seconds

FLOOR_SHARE = 0.1  # latencies this near to that of the smallest size count as the same
MAX_SIZES = 6  # named in a sentence
MAX_REASON = 160  # characters of a foreign message in a sentence; the measurement keeps all of it

_QUALITY = {"throughput": "throughput", "latency": "latency", "energy": "samples per joule"}


def value_of(measurement: Measurement, objective: str) -> float | None:
    """Give what the objective looks at: samples per second, seconds, or samples per joule; None if not measured."""
    value = facts.value_of(attrs.asdict(measurement, recurse=False), objective)
    return None if value is None else value[0]


def sentences(
    answer: Measurement,
    fastest: Measurement,
    measurements: Sequence[Measurement],
    *,
    goal: Goal,
    tied_with: Collection[int],
    decision: Decision,
    posterior: Posterior,
    throttled_only: Sequence[int] = (),
    l2: str | None = None,
    could_gain: Mapping[int, float] | None = None,
    needed: Mapping[int, tuple[float, float]] | None = None,
) -> list[str]:
    """
    Say in words why the answer is the answer.

    Args:
        answer: One of the measurements.
        fastest: One of the measurements, which may be the same.
        measurements: All of them, ascending.
        goal: What was asked for.
        tied_with: Sizes that cannot be told from the fastest.
        decision: What ended the sizes above the answer.
        posterior: What the timings say of each size, and of differences of sizes.
        throttled_only: Sizes that have none but throttled timings.
        l2: "cold", "warm" or None.
        could_gain: Share of the best that a size which was not tried might gain, where that is known.
        needed: Seconds that a visit to a size that was not tried would have taken, and seconds that were left.
    """
    timed = [m for m in measurements if m.status in TIMED and m.latency_seconds is not None]
    if len(timed) == 1 and len(measurements) > 1:
        why = [f"Only {answer.batch_size} was measured, so there is nothing to compare it with."]
    else:
        why = [*_why(answer, fastest, timed, goal), *_ties(fastest, measurements, goal, tied_with)]
    return [
        *why,
        _limit(answer, fastest, measurements, goal, decision, tied_with, needed or {}),
        *_floor(measurements),
        *_fullness(answer),
        *powers_of_two.sentences(answer, measurements, posterior),
        *_noisy(fastest, decision.limit),
        *_throttled(measurements, throttled_only),
        *_cold_or_warm(l2),
        *_absent(measurements, goal, could_gain or {}),
    ]


def count_statuses(measurements: Sequence[Measurement], goal: Goal) -> str:
    """Say which candidates ended in which way, those over a limit by which one, each way with its first reason."""
    ways: dict[str, list[Measurement]] = {}
    for m in measurements:
        if m.status == "over_limit":
            is_slow = is_above(m.latency_seconds, goal.latency_limit)
            way = "above the latency limit" if is_slow else "over the memory limit"
        else:
            way = m.status.replace("_", " ")
        if m.status not in TIMED:
            ways.setdefault(way, []).append(m)
    return "; ".join(f"{way}: {_sizes(those)}{_first_reason(those, goal)}" for way, those in ways.items())


def breaks_latency_limit(measurement: Measurement, goal: Goal) -> str:
    """Say how long a size takes that is above the latency limit."""
    count = len(measurement.timings_seconds)
    seconds, limit = format_seconds(measurement.latency_seconds or 0.0), format_seconds(goal.latency_limit or 0.0)
    known = _count(count)
    return f"{measurement.batch_size} already takes {seconds} ({known}), above the latency limit of {limit}"


def _first_reason(those: Sequence[Measurement], goal: Goal) -> str:
    first = those[0]
    if first.status == "over_limit" and is_above(first.latency_seconds, goal.latency_limit):
        return f" ({breaks_latency_limit(first, goal)})"
    whose = f"{first.batch_size}: " if len(those) > 1 else ""
    why = textwrap.shorten(first.stop_reason, MAX_REASON, placeholder=" …")
    return f" ({whose}{why})" if why else ""


def _why(answer: Measurement, fastest: Measurement, timed: Sequence[Measurement], goal: Goal) -> list[str]:
    objective, tolerance = goal.objective, _tolerance(goal)
    value, best = value_of(answer, objective) or 0.0, value_of(fastest, objective) or 0.0
    quality, best_word = _QUALITY[objective], "lowest" if objective == "latency" else "best"
    end = "largest" if objective == "latency" else "smallest"
    timings = min(len(answer.timings_seconds), len(fastest.timings_seconds))
    doubt = f", on {_count(timings)}" if timings < MIN_ROUNDS else ""
    if answer.batch_size == fastest.batch_size:
        beyond, n = "larger" if objective == "latency" else "smaller", answer.batch_size
        others = [m for m in timed if (m.batch_size > n if objective == "latency" else m.batch_size < n)]
        text = f"{answer.batch_size} has the {best_word} {quality}, {format_objective(best, objective)}"
        if doubt or not others:
            return [f"{text}{doubt}."]
        return [f"{text}, and no {beyond} size is within {tolerance} of it."]
    share = best / value if objective == "latency" else value / best
    chosen = f"{answer.batch_size} is the {end} batch size whose {quality} is within {tolerance} of the {best_word}"
    return [
        f"{chosen}: {format_objective(value, objective)}, {format_percent(share)} of it{doubt}.",
        f"The {best_word} is {format_objective(best, objective)} at {fastest.batch_size}.",
    ]


def _ties(
    fastest: Measurement, measurements: Sequence[Measurement], goal: Goal, tied_with: Collection[int]
) -> list[str]:
    """Name the sizes that cannot be told from the fastest, apart from those that are merely too noisy."""
    best = value_of(fastest, goal.objective) or 0.0
    shares = {}
    for m in measurements:
        if m.batch_size in tied_with and (value := value_of(m, goal.objective)):
            shares[m.batch_size] = best / value if goal.objective == "latency" else value / best
    noisy = [m for m in measurements if is_only_noise(shares.get(m.batch_size), m.throughput_interval)]
    ties = join([str(n) for n in tied_with if n not in {m.batch_size for m in noisy}])
    told = [f"{m.batch_size} ({format_percent(shares[m.batch_size])} of it{_known_to(m)})" for m in noisy]
    return [
        *([f"The noise does not tell {ties} from {fastest.batch_size}."] if ties else []),
        *([f"Too noisy to compare with {fastest.batch_size}: {join(told)}."] if told else []),
    ]


def _known_to(measurement: Measurement) -> str:
    spread = _spread(measurement)
    return "" if spread is None else f", ± {format_percent(spread)}"


def _count(timings: int) -> str:
    return f"{timings} timing{'' if timings == 1 else 's'}"


def _limit(
    answer: Measurement,
    fastest: Measurement,
    measurements: Sequence[Measurement],
    goal: Goal,
    decision: Decision,
    tied_with: Collection[int],
    needed: Mapping[int, tuple[float, float]],
) -> str:
    n = answer.batch_size
    larger = [m for m in measurements if m.batch_size > n]
    top, reach, edge = decision.top, decision.reach, decision.edge
    beyond = [m for m in larger if m.batch_size > top]
    failed = [m for m in beyond if m.status in {"error", "timeout"}]
    refused = [m for m in beyond if m.status in {"out_of_memory", "over_limit"}]
    if decision.limit is None:
        if any(m.status == "interrupted" for m in larger):
            return f"The interruption decided: larger sizes than {n} were not measured to their end."
        if edge is not None and edge[1] == FAILURE:
            return f"No limit decided but a failure: {_at_edge(top, edge[0], measurements, goal)}."
        if refused:
            how = "did not" if refused[0].latency_seconds is None else "takes longer than the limit"
            gap = f"no size between {top}, which ran, and {refused[0].batch_size}, which {how}, gave a timing"
            return f"Nothing tells what decided: {gap}."
        return f"Nothing larger than {top} gave a timing ({count_statuses(failed, goal)})."
    ruled_out = f" and by these readings up to {reach}" if reach > top else ""
    span = f"measured up to {top}{ruled_out}" if top > n else f"judged up to {reach} by the readings of smaller ones"
    last_tie = max(tied_with, default=n)
    if goal.objective == "latency":
        flat = f", as far as the noise tells: {last_tie} is tied" if last_tie > n else ""
        peak = f"Larger batches take longer than {n}{flat}."
        plateau = f"The latency stays flat up to {n} and rises beyond{flat}."
    else:
        where = f"Beyond {last_tie}, the largest tie," if last_tie > n else "Beyond it"
        falls = f"{where} the {_QUALITY[goal.objective]} falls"
        peak = f"{falls} again (measured up to {top}): the optimum lies inside."
        if n == min(m.batch_size for m in measurements):
            peak = f"{falls} (measured up to {top}), and nothing is smaller than {n}"
            peak += "." if n == 1 else " in what was looked at."
        spread = _spread(fastest) or 0.0
        doubt = f", as far as timings that spread by ± {format_percent(spread)} tell" if spread > NOISY_SHARE else ""
        plateau = f"Larger batches, {span}, gain no more than {_tolerance(goal)}: a plateau{doubt}."
    more = "with more memory a larger batch might be better"
    listed = f"The list of batch sizes decided: nothing larger than {max(n, reach)} is in it"
    if refused:
        listed = f"The list of batch sizes decided: it holds nothing between {top} and {refused[0].batch_size}"
    return {
        "peak": peak,
        "plateau": plateau,
        "memory": f"Memory decided: {_memory_edge(top, edge, measurements, goal)}; {more}.",
        "latency_limit": f"The latency limit decided: {_latency_edge(top, edge, measurements, goal)}.",
        "max_batch_size": f"max_batch_size decided: nothing larger than {reach} was allowed, which might be better.",
        "batch_sizes": f"{listed}, which might be better.",
        "budget": f"The budget decided: {_untried(larger, needed)}, and might be better.",
    }[decision.limit]


def _untried(larger: Sequence[Measurement], needed: Mapping[int, tuple[float, float]]) -> str:
    """Say how many sizes were not tried, and what a visit to the smallest would have taken; or what held one up."""
    untried = [m.batch_size for m in larger if m.status == "not_run"]
    count = "1 larger size was" if len(untried) == 1 else f"{len(untried)} larger sizes were"
    first = next((n for n in untried if n in needed), None)
    if first is None:
        return f"{count} not tried, since it held no visit to them"
    need, left = needed[first]
    held = f"{format_seconds(left)} were left"
    if need <= left:
        held += ", too little for a guess that far from what was read"
    return f"{count} not tried, since a visit to {first} would take about {format_seconds(need)} and {held}"


def _memory_edge(top: int, edge: tuple[int, str] | None, measurements: Sequence[Measurement], goal: Goal) -> str:
    found = next((m for m in measurements if edge is not None and m.batch_size == edge[0]), None)
    if found is None or found.status != "out_of_memory":  # planned, not met
        return f"nothing larger than {top} fits"
    return _at_edge(top, found.batch_size, measurements, goal)


def _latency_edge(top: int, edge: tuple[int, str] | None, measurements: Sequence[Measurement], goal: Goal) -> str:
    found = next((m for m in measurements if edge is not None and m.batch_size == edge[0]), None)
    if found is None or found.latency_seconds is None:
        return f"the next larger size takes longer than {format_seconds(goal.latency_limit or 0.0)}"
    return f"the largest tried that keeps it is {top}; {breaks_latency_limit(found, goal)}"


def _at_edge(top: int, n: int, measurements: Sequence[Measurement], goal: Goal) -> str:
    """Say which is the largest that ran, and how the next larger one failed."""
    found = next(m for m in measurements if m.batch_size == n)
    how = {"out_of_memory": "runs out of memory", "timeout": "hangs"}.get(found.status, "fails")
    why = "" if found.status == "out_of_memory" else _first_reason([found], goal)
    return f"the largest that ran is {top}; {n} {how}{why}"


def _floor(measurements: Sequence[Measurement]) -> list[str]:
    """Name the size below which a batch costs the same time."""
    timed = {m.batch_size: m.latency_seconds for m in measurements if m.latency_seconds is not None}
    if not timed:
        return []
    lowest = min(timed.values())
    flat = list(itertools.takewhile(lambda n: timed[n] <= (1 + FLOOR_SHARE) * lowest, sorted(timed)))
    top = max(flat, default=0)
    if top < 2 * min(timed):
        return []
    return [
        (
            f"Up to {top} samples a batch costs about the same time ({format_seconds(lowest)}): "
            "less leaves the device idle."
        )
    ]


def _fullness(answer: Measurement) -> list[str]:
    """Say how full a GPU is at the answer, and how fast it ran, as far as it is known: of a CPU nothing is."""
    counted = [
        text.format(format_percent(share))
        for text, share in (
            ("fill {} of the warps that the SMs can hold (occupancy)", answer.occupancy),
            ("keep {} of the SMs at work until the busiest is done (fill)", answer.fill),
        )
        if share is not None
    ]
    told = [f"our kernels, by count, {' and '.join(counted)}, on average by time"] if counted else []
    told += [] if answer.sm_clock_mhz is None else [f"the SMs ran at {answer.sm_clock_mhz:.0f} MHz"]
    return [f"At {answer.batch_size} {'; '.join(told)}."] if told else []


def _spread(measurement: Measurement) -> float | None:
    """Give half the width of the throughput's interval as a share of its median."""
    interval, rate = measurement.throughput_interval, measurement.samples_per_second
    return (interval[1] - interval[0]) / (2 * rate) if interval and rate else None


def _noisy(fastest: Measurement, decided_by: str | None) -> list[str]:
    """Warn of a machine on which the best size is not known well enough to compare others with it."""
    spread = _spread(fastest)
    if spread is None or spread <= NOISY_SHARE:
        return []
    text = f"The timings spread widely (± {format_percent(spread)} at the fastest size), as on a machine busy with"
    more = ", or with a larger budget" if decided_by == "budget" else ""
    return [f"{text} something else: other sizes may be as good. Measure again on a quiet one{more}."]


def _throttled(measurements: Sequence[Measurement], throttled_only: Sequence[int]) -> list[str]:
    count = sum(m.throttled for m in measurements)
    if not count:
        return []
    text = f"{count} timings were taken under a throttled clock and do not count"
    only = join([str(n) for n in throttled_only])
    return [f"{text}, except those of {only}, where there are no others." if only else f"{text}."]


def _cold_or_warm(l2: str | None) -> list[str]:
    return {
        "cold": ["The L2 cache is cold: steps rotate over several sets of buffers."],
        "warm": ["Steps ran back to back: what fits the L2 cache was already in it, as when the network is in use."],
    }.get(l2 or "", [])


def _absent(measurements: Sequence[Measurement], goal: Goal, could_gain: Mapping[int, float]) -> list[str]:
    untried = [m for m in measurements if m.status == "not_run"]
    text = count_statuses([m for m in measurements if m.status != "not_run"], goal)
    gain = max((could_gain[m.batch_size] for m in untried if m.batch_size in could_gain), default=None)
    gained = "" if gain is None or gain > 1 else f", with up to {float(f'{100 * gain:.2g}'):g} % to gain"
    return [
        *([f"Not tried, for lack of time{gained}: {_sizes(untried)}. A larger budget tries them."] if untried else []),
        *([f"No answer could come from: {text}."] if text else []),
    ]


def _tolerance(goal: Goal) -> str:
    return f"{100 * goal.tolerance:g} %"


def _sizes(measurements: Sequence[Measurement]) -> str:
    shown = [str(m.batch_size) for m in measurements[:MAX_SIZES]]
    rest = len(measurements) - len(shown)
    return join([*shown, f"{rest} more"] if rest else shown)


def join(words: Sequence[str]) -> str:
    """
    Write a list as people do.

    Example:
        >>> join(["1", "2", "3"]), join(["1"])
        ('1, 2 and 3', '1')
    """
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)
