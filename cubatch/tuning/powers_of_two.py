"""What a result says of powers of two: whether they beat the sizes beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cubatch.report.facts import TIMED
from cubatch.search.posterior import Posterior
from cubatch.tuning.results import Measurement
from cubatch.units import format_percent

NEIGHBOUR_SHARE = 1 / 8  # how near a size must be to a power of two to be compared with it
MAX_COMPARISONS = 3


def sentences(answer: Measurement, measurements: Sequence[Measurement], posterior: Posterior) -> list[str]:
    """Set powers of two against the nearest other size that was measured, those near the answer first."""
    timed = [m for m in measurements if m.status in TIMED and m.latency_seconds is not None]
    costs = {m.batch_size: (m.latency_seconds or 0.0) / m.batch_size for m in timed}
    powers = sorted(
        (n for n in costs if n & (n - 1) == 0), key=lambda n: abs(math.log(n / answer.batch_size))
    )  # nearest first
    found = []
    for power in powers:
        others = [n for n in costs if n & (n - 1) and abs(n - power) <= NEIGHBOUR_SHARE * power]
        if not others:
            continue
        other = min(others, key=lambda n: (abs(n - power), n))
        found.append(_compare(power, other, posterior.ratio_interval(power, other)))
    return [f"Powers of two against their neighbours: {'; '.join(found[:MAX_COMPARISONS])}."] if found else []


def _compare(power: int, other: int, interval: tuple[float, float]) -> str:
    low, high = interval
    if low <= 0 <= high:
        return f"{power} and {other} are tied"
    word, ends = ("faster", (-high, -low)) if high < 0 else ("slower", (low, high))
    least, most = (format_percent(math.expm1(end)) for end in ends)
    return f"{power} is {least if least == most else f'{least} to {most}'} {word} per sample than {other}"
