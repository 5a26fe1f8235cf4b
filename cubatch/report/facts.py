"""
What can be read off a tuning result or a prediction, in the JSON form of schema 1.

A result from another machine or year reads alike: a fact that it does not have is None, or empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cubatch.units import visible

NOISY_SHARE = 0.05  # half an interval beyond this share of its median is wide
TIED_SHARE = 0.9  # a tie below this share of the best says more of its noise than of its speed
TIMED = ("ok", "dropped")  # the statuses of sizes that were looked at and are within every limit


def is_predicted(result: Mapping[str, Any]) -> bool:
    """Say whether the result is a prediction: nothing in it was measured."""
    return bool(result.get("predicted"))


def measurements_of(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Give the sizes that a result tells of, in its order."""
    return result.get("measurements") or ()


def is_recommended(result: Mapping[str, Any]) -> bool:
    """
    Say whether the answer was compared with anything: another size, or a limit met right above it.

    A single size that was asked for is the answer; a single one that happened to be measured is not.

    Example:
        >>> sizes = [{"batch_size": 1, "latency_seconds": 0.5}, {"batch_size": 2, "status": "not_run"}]
        >>> is_recommended({"batch_size": 1, "decided_by": "budget", "measurements": sizes})
        False
    """
    measurements = measurements_of(result)
    timed = [m for m in measurements if m.get("latency_seconds") is not None]
    is_compared = len(measurements) == 1 or len(timed) > 1 or result.get("decided_by") in ("memory", "latency_limit")
    return bool(result.get("batch_size")) and (is_compared or is_predicted(result))


def is_above(seconds: float | None, latency_limit: float | None) -> bool:
    """Say whether a size that is over a limit is over that of latency; else it is memory's, also of one that ran."""
    return seconds is not None and latency_limit is not None and seconds > latency_limit


def subject(result: Mapping[str, Any]) -> str:
    """
    Name what was tuned: the network's name, else the kind of layer, else "a callable".

    Example:
        >>> subject({"spec": {"name": "resnet18"}}), subject({"spec": {"type": "conv2d", "k": 8}}), subject({})
        ('resnet18', 'conv2d', 'a callable')
    """
    spec = result.get("spec") or {}
    return visible(str(spec.get("name") or spec.get("type") or "a callable"), keep="")


def setting(result: Mapping[str, Any]) -> str:
    """Say in one line how and where: device, mode, dtype, library, date."""
    device = result.get("device") or {}
    library = result.get("library")
    parts = [
        device.get("name"),
        result.get("mode"),
        result.get("dtype"),
        f"library {library}" if library else None,
        "activations computed again" if result.get("recompute") else None,
        str(result.get("created") or "")[:10] or None,
    ]
    return visible(", ".join(str(part) for part in parts if part), keep="")


def value_of(measurement: Mapping[str, Any], objective: str) -> tuple[float, float, float] | None:
    """
    Give (value, low, high) of what the objective looks at, or None where it was not measured.

    Throughput is in samples per second, latency in seconds, energy in samples per joule.
    """
    if objective == "latency":
        value, interval = measurement.get("latency_seconds"), measurement.get("latency_interval")
    elif objective == "energy":
        joules = measurement.get("joules_per_sample")
        value, interval = (1 / joules if joules else None), None
    else:
        value, interval = measurement.get("samples_per_second"), measurement.get("throughput_interval")
    if value is None or not math.isfinite(value):
        return None
    low, high = interval or (value, value)
    return float(value), float(low), float(high)


def share_of_best(result: Mapping[str, Any]) -> dict[int, float]:
    """Give what part of the best (1) each size reaches whose value can be compared and that is within the limits."""
    objective = result.get("objective") or "throughput"
    rows = {int(m["batch_size"]): m for m in measurements_of(result) if m.get("status") != "over_limit"}
    values = {n: v[0] for n, m in rows.items() if (v := value_of(m, objective)) and v[0] > 0}
    best = _best(result, values)
    if not best:
        return {}
    return {n: best / value if objective == "latency" else value / best for n, value in values.items()}


def is_only_noise(share: float | None, interval: Sequence[float] | None) -> bool:
    """
    Say whether a size ties with the fastest for its noise alone: far worse by its median, and hardly known.

    Args:
        share: What part of the best it reaches; None where it is no tie.
        interval: Where its throughput lies; None where there were too few timings to tell.

    Example:
        >>> is_only_noise(0.65, (50.0, 150.0)), is_only_noise(0.65, (99.0, 101.0)), is_only_noise(0.95, None)
        (True, False, False)
    """
    if share is None or share >= TIED_SHARE:
        return False
    return interval is None or interval[1] - interval[0] > NOISY_SHARE * (interval[0] + interval[1])


def seconds_of(measurement: Mapping[str, Any], result: Mapping[str, Any]) -> float | None:
    """Give the time of a step: as measured, or in a prediction as predicted."""
    seconds = measurement.get("latency_seconds")
    return measurement.get("predicted_seconds") if seconds is None and is_predicted(result) else seconds


def rate_of(measurement: Mapping[str, Any], result: Mapping[str, Any]) -> float | None:
    """Give the samples per second; where only the time is known, by it."""
    rate, seconds = measurement.get("samples_per_second"), seconds_of(measurement, result)
    return measurement["batch_size"] / seconds if rate is None and seconds else rate


def half_width(measurement: Mapping[str, Any]) -> float | None:
    """Give half the width of the throughput's interval as a share of its median."""
    interval, rate = measurement.get("throughput_interval"), measurement.get("samples_per_second")
    return (interval[1] - interval[0]) / (2 * rate) if interval and rate else None


def ties_of(result: Mapping[str, Any]) -> list[int]:
    """Give the ties that are more than noise."""
    shares, noisy = share_of_best(result), set()
    for m in measurements_of(result):
        if is_only_noise(shares.get(int(m["batch_size"])), m.get("throughput_interval")):
            noisy.add(int(m["batch_size"]))
    return [n for n in result.get("tied_with") or () if n not in noisy or is_predicted(result)]


def is_measured(measurement: Mapping[str, Any]) -> bool:
    """Say whether there is a time of a size that is within every limit."""
    return measurement.get("status") in TIMED and measurement.get("latency_seconds") is not None


def measured(result: Mapping[str, Any]) -> list[int]:
    """Give the sizes that were measured and are within every limit."""
    return [int(m["batch_size"]) for m in measurements_of(result) if is_measured(m)]


def ran_out_of_memory(result: Mapping[str, Any]) -> int | None:
    """Name the smallest size above the largest that ran that fits by the plan, and ran out of memory."""
    largest, ran = result.get("largest_batch_size") or 0, result.get("largest_measured") or 0
    failed = (m["batch_size"] for m in measurements_of(result) if m.get("status") == "out_of_memory")
    return min((size for size in failed if ran < size <= largest), default=None)


def _best(result: Mapping[str, Any], values: Mapping[int, float]) -> float | None:
    if not values:
        return None
    fastest = int(result.get("fastest_batch_size") or 0)
    if fastest in values:
        return values[fastest]
    return min(values.values()) if result.get("objective") == "latency" else max(values.values())
