"""
The sentences beneath a result: why this size, what the fastest was, which limit decided, what else to know.

Only wording: what is said was decided in `choose`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from cubatch.curve import format_objective
from cubatch.results import Goal, Measurement
from cubatch.stopping import MIN_ROUNDS, paired_interval
from cubatch.units import format_percent, format_seconds

NOISY_SHARE = 0.05
FLOOR_SHARE = 0.1  # latencies this near to that of the smallest size count as the same
NEIGHBOUR_SHARE = 1 / 8  # how near a size must be to a power of two to be compared with it
MAX_COMPARISONS = 3
MAX_SIZES = 6  # named in a sentence

_QUALITY = {"throughput": "throughput", "latency": "latency", "energy": "samples per joule"}
_TIMED = ("ok", "dropped")


def value_of(measurement: Measurement, objective: str) -> float | None:
    """Give what the objective looks at: samples per second, seconds, or samples per joule; None if not measured."""
    if objective == "latency":
        return measurement.latency_seconds
    if objective == "energy":
        return 1 / measurement.joules_per_sample if measurement.joules_per_sample else None
    return measurement.samples_per_second


def sentences(
    answer: Measurement,
    fastest: Measurement,
    measurements: Sequence[Measurement],
    *,
    goal: Goal,
    tied_with: Sequence[int],
    decided_by: str | None,
    rounds: Mapping[int, Mapping[int, float]],
    throttled_only: Sequence[int] = (),
    l2: str | None = None,
) -> list[str]:
    """
    Say in words why the answer is the answer.

    Args:
        answer: One of the measurements.
        fastest: One of the measurements, which may be the same.
        measurements: All of them, ascending.
        goal: What was asked for.
        tied_with: Sizes that paired rounds cannot tell from the fastest.
        decided_by: One of results.DECIDED_BY; None where an interruption left that open.
        rounds: Seconds by batch size and round, of the timings that count.
        throttled_only: Sizes that have none but throttled timings.
        l2: "cold", "warm" or None.
    """
    return [
        *_why(answer, fastest, goal, tied_with),
        _limit(answer, measurements, goal, decided_by),
        *_floor(measurements),
        *_powers_of_two(answer, measurements, rounds),
        *_noisy(fastest),
        *_few(measurements),
        *_throttled(measurements, throttled_only),
        *_cold_or_warm(l2),
        *_absent(measurements),
    ]


def count_statuses(measurements: Sequence[Measurement]) -> str:
    """Say how many candidates ended in which way, with the first one's reason."""
    parts = []
    for status in dict.fromkeys(m.status for m in measurements if m.status not in _TIMED):
        those = [m for m in measurements if m.status == status]
        sizes = _sizes(those)
        parts.append(
            f"{status.replace('_', ' ')}: {sizes}" + (f" ({those[0].stop_reason})" if those[0].stop_reason else "")
        )
    return "; ".join(parts)


def _why(answer: Measurement, fastest: Measurement, goal: Goal, tied_with: Sequence[int]) -> list[str]:
    objective, tolerance = goal.objective, _tolerance(goal)
    value, best = value_of(answer, objective) or 0.0, value_of(fastest, objective) or 0.0
    quality, best_word = _QUALITY[objective], "lowest" if objective == "latency" else "best"
    end = "largest" if objective == "latency" else "smallest"
    ties = f"paired rounds cannot tell {_join([str(n) for n in tied_with])} from it" if tied_with else ""
    if answer.batch_size == fastest.batch_size:
        beyond = "larger" if objective == "latency" else "smaller"
        text = f"{answer.batch_size} has the {best_word} {quality}, {format_objective(best, objective)}"
        text += f", and no {beyond} size is within {tolerance} of it."
        return [text, *([ties[0].upper() + ties[1:] + "."] if ties else [])]
    share = best / value if objective == "latency" else value / best
    chosen = f"{answer.batch_size} is the {end} batch size whose {quality} is within {tolerance} of the {best_word}"
    return [
        f"{chosen}: {format_objective(value, objective)}, {format_percent(share)} of it.",
        f"The {best_word} is {format_objective(best, objective)} at {fastest.batch_size}"
        + (f"; {ties}." if ties else "."),
    ]


def _limit(answer: Measurement, measurements: Sequence[Measurement], goal: Goal, decided_by: str | None) -> str:
    if decided_by is None:
        return f"The interruption decided: larger sizes than {answer.batch_size} were not measured to their end."
    top = max((m.batch_size for m in measurements if m.status in _TIMED), default=answer.batch_size)
    n, limit = answer.batch_size, format_seconds(goal.latency_limit or 0.0)
    failed = [m for m in measurements if m.batch_size > top and m.status in {"error", "timeout"}]
    if failed and decided_by in {"memory", "max_batch_size", "batch_sizes"}:
        return f"Nothing larger than {top} gave a timing ({count_statuses(failed)})."
    if goal.objective == "latency":
        peak, plateau = f"Larger batches take longer than {n}.", f"The latency stays flat up to {n} and rises beyond."
    else:
        peak = f"Beyond it the {_QUALITY[goal.objective]} falls again (measured up to {top}): the optimum lies inside."
        plateau = f"Larger batches, measured up to {top}, gain no more than {_tolerance(goal)}: a plateau."
    return {
        "peak": peak,
        "plateau": plateau,
        "memory": f"Memory decided: nothing larger than {top} fits; with more memory a larger batch might be better.",
        "latency_limit": f"The latency limit decided: the next larger size takes longer than {limit}.",
        "max_batch_size": f"max_batch_size decided: nothing larger than {top} was allowed, though it might be better.",
        "batch_sizes": f"The list of batch sizes decided: nothing larger than {top} is in it, which might be better.",
        "budget": f"The budget decided: it did not hold the sizes beyond {top}, which might be better.",
    }[decided_by]


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


def _powers_of_two(
    answer: Measurement, measurements: Sequence[Measurement], rounds: Mapping[int, Mapping[int, float]]
) -> list[str]:
    """Set powers of two against the nearest other size that was measured, those near the answer first."""
    sizes = [m.batch_size for m in measurements if m.status in _TIMED and m.batch_size in rounds]
    powers = sorted(
        (n for n in sizes if n & (n - 1) == 0), key=lambda n: abs(math.log(n / answer.batch_size))
    )  # nearest first
    found = []
    for power in powers:
        others = [n for n in sizes if n & (n - 1) and abs(n - power) <= NEIGHBOUR_SHARE * power]
        if not others:
            continue
        other = min(others, key=lambda n: (abs(n - power), n))
        interval = paired_interval(_per_sample(rounds[power], power), _per_sample(rounds[other], other))
        if interval is not None:
            found.append(_compare(power, other, interval))
    return [f"Powers of two against their neighbours: {'; '.join(found[:MAX_COMPARISONS])}."] if found else []


def _per_sample(seconds: Mapping[int, float], batch_size: int) -> dict[int, float]:
    return {number: value / batch_size for number, value in seconds.items()}


def _compare(power: int, other: int, interval: tuple[float, float]) -> str:
    low, high = interval
    if low <= 0 <= high:
        return f"{power} and {other} are tied"
    word, ends = ("faster", (-high, -low)) if high < 0 else ("slower", (low, high))
    least, most = (format_percent(math.expm1(end)) for end in ends)
    return f"{power} is {least if least == most else f'{least} to {most}'} {word} per sample than {other}"


def _noisy(fastest: Measurement) -> list[str]:
    """Warn of a machine on which the best size is not known well enough to compare others with it."""
    if fastest.throughput_interval is None or not fastest.samples_per_second:
        return []
    low, high = fastest.throughput_interval
    spread = (high - low) / (2 * fastest.samples_per_second)
    if spread <= NOISY_SHARE:
        return []
    text = f"The timings spread widely (± {format_percent(spread)} at the fastest size), as on a machine busy with"
    return [
        f"{text} something else: other sizes may be as good. Measure again on a quiet one, or with a larger budget."
    ]


def _few(measurements: Sequence[Measurement]) -> list[str]:
    """Warn of sizes that may be the answer and whose medians rest on too little."""
    few = [m for m in measurements if m.status == "ok" and len(m.timings_seconds) < MIN_ROUNDS]
    text = f"fewer than {MIN_ROUNDS} timings, too few for an interval; a larger budget makes them certain"
    return [f"Sizes with {text}: {_sizes(few)}."] if few else []


def _throttled(measurements: Sequence[Measurement], throttled_only: Sequence[int]) -> list[str]:
    count = sum(m.throttled for m in measurements)
    if not count:
        return []
    text = f"{count} timings were taken under a throttled clock and do not count"
    only = _join([str(n) for n in throttled_only])
    return [f"{text}, except those of {only}, where there are no others." if only else f"{text}."]


def _cold_or_warm(l2: str | None) -> list[str]:
    return {
        "cold": ["The L2 cache is cold: steps rotate over several sets of buffers."],
        "warm": ["Steps ran back to back: what fits the L2 cache was already in it, as when the network is in use."],
    }.get(l2 or "", [])


def _absent(measurements: Sequence[Measurement]) -> list[str]:
    untried = [m for m in measurements if m.status == "not_run"]
    text = count_statuses([m for m in measurements if m.status != "not_run"])
    return [
        *([f"Not tried, for lack of time: {_sizes(untried)}. A larger budget tries them."] if untried else []),
        *([f"No answer could come from: {text}."] if text else []),
    ]


def _tolerance(goal: Goal) -> str:
    return f"{100 * goal.tolerance:g} %"


def _sizes(measurements: Sequence[Measurement]) -> str:
    shown = [str(m.batch_size) for m in measurements[:MAX_SIZES]]
    rest = len(measurements) - len(shown)
    return _join([*shown, f"{rest} more"] if rest else shown)


def _join(words: Sequence[str]) -> str:
    """
    Write a list as people do.

    Example:
        >>> _join(["1", "2", "3"]), _join(["1"])
        ('1, 2 and 3', '1')
    """
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)
