"""`small-batch-floor`: up to which batch does a step take no longer than one of a single sample?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.errors import NothingMeasured
from cubatch.studies.asked import Asked, shared
from cubatch.units import format_percent, format_seconds

TITLE = "Below which batch is nothing gained?"
DEFAULT_MODEL = "mnist-cnn"
MODES = ("inference",)
SWEEPS, QUICK_SWEEPS = 7, 3
FREE = 0.1
_MOST, _QUICK_MOST = 1024, 64
_USUAL_SECONDS, _QUICK_SECONDS = 300.0, 20.0

QUESTION = (
    "A machine of many cores has too little to do in a step of a few samples: calls, launches and waiting take their "
    "time whatever the batch. Up to some size a step takes as long as one of a single sample, so that a smaller "
    "batch saves nothing. Which size is that, and from which on does a larger batch gain nothing any more?"
)


def study(asked: Asked) -> dict[str, Any]:
    """
    Measure powers of two, and find the floor.

    Raises:
        NothingMeasured: If a step of a single sample could not be measured.
        CubatchError: Whatever `autotune` raises.
    """
    limit = asked.largest(_QUICK_MOST if asked.quick else _MOST)
    sizes = [2**k for k in range(limit.bit_length())]
    sweeps = QUICK_SWEEPS if asked.quick else SWEEPS
    result = asked.swept(sizes, sweeps, budget=asked.seconds(_USUAL_SECONDS, _QUICK_SECONDS))
    seconds = {m.batch_size: m.latency_seconds for m in result.measurements if m.latency_seconds is not None}
    found = floor_of(seconds)
    return {
        **shared(result),
        "title": TITLE,
        "question": [QUESTION],
        "method": _method(sweeps),
        "answer": _answer(found, seconds),
        "points": _points(found, seconds),
        "tolerance": result.tolerance,
        "sweeps": sweeps,
        **found,
        "result": result.to_mapping(),
    }


def floor_of(seconds: Mapping[int, float]) -> dict[str, int | None]:
    """
    Find the three sizes at which something ends.

    Args:
        seconds: Of a step, by batch size.

    Returns:
        dict: "floor", the largest size up to which no step takes over a tenth longer than one of the smallest size,
        None where that takes so much longer than a step of a larger one;
        "half", the smallest with half of the best samples per second (Hockney's n1/2: Hockney and Jesshope, Parallel
        Computers, 1981); "enough", the smallest within 5 % of the best.

    Raises:
        NothingMeasured: If there is no time of a single sample.

    Example:
        >>> floor_of({n: 1.0 + n / 100 for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)})
        {'floor': 8, 'half': 128, 'enough': 2048}
    """
    if 1 not in seconds:
        raise NothingMeasured("no step of a single sample was measured", "Raise budget.")
    sizes, rates = sorted(seconds), {n: n / taken for n, taken in seconds.items()}
    best = max(rates.values())
    slow = [n for n in sizes if seconds[n] > (1 + FREE) * seconds[1]]
    is_told = seconds[1] <= (1 + FREE) * min(seconds.values())
    return {
        "floor": max(n for n in sizes if n < min(slow, default=sizes[-1] + 1)) if is_told else None,
        "half": min(n for n in sizes if rates[n] >= best / 2),
        "enough": min(n for n in sizes if rates[n] >= 0.95 * best),
    }


def _answer(found: Mapping[str, int | None], seconds: Mapping[int, float]) -> str:
    if found["floor"] is None:
        least = min(seconds, key=lambda n: (seconds[n], n))
        took = f"{format_seconds(seconds[1])} and {format_seconds(seconds[least])}"
        return (
            f"That was not found: a step of a single sample took longer than one of {least}, {took}. Another algorithm "
            "may be behind it, or something that was busy meanwhile: on a quiet machine it can be told."
        )
    if found["floor"] == 1 and 2 * found["floor"] not in seconds:
        return "Not known: the next larger size was not measured. --budget or --max-batch-size may allow it."
    if found["floor"] == 1:
        return "There is no such batch: already two samples take clearly longer than one."
    return f"Below batch {found['floor']}: a step of a single sample takes as long, within {format_percent(FREE)}."


def _points(found: Mapping[str, int | None], seconds: Mapping[int, float]) -> Sequence[str]:
    lines = [
        f"A step of a single sample takes {format_seconds(seconds[1])}.",
        f"Half of the best samples per second come from batch {found['half']} on (Hockney's n1/2).",
        f"From batch {found['enough']} on at most 5 % more is to be gained, of the sizes that were measured.",
    ]
    if found["enough"] == max(seconds):
        lines.append("That is the largest one measured, so that still larger ones may gain more: --max-batch-size.")
    return lines


def _method(sweeps: int) -> list[str]:
    return [
        (
            f"Powers of two are each visited once in up to {sweeps} sweeps, in shuffled orders, so that heat and drift "
            "meet all sizes alike; of each the median of its timings counts."
        ),
        "Sizes between powers of two are not looked at: the floor lies somewhere up to twice as high.",
    ]
