"""Which batch sizes of a result are worth trying as a hyperparameter, and what each costs in throughput."""

from __future__ import annotations

import math
from collections.abc import Iterable

from cubatch.errors import InvalidArgument
from cubatch.tuning.results import Measurement

_TIMED = ("ok", "dropped")  # ran, within every limit


def choices(measurements: Iterable[Measurement], answer: int | None, within: float) -> dict[int, float]:
    """
    Pick one size an octave, of those that cost little: what `TuningResult.choices` gives.

    An octave is what lies nearest to one power of two.  Of its sizes the answer is taken, else the power of two, else
    the fastest: neighbours such as 61 and 64 train alike, and a trial of each would be wasted.

    Raises:
        InvalidArgument: If `within` is no share below 1.
    """
    if isinstance(within, bool) or not isinstance(within, int | float) or not 0 <= within < 1:
        raise InvalidArgument("within", within, "a share of the best throughput, at least 0 and below 1, such as 0.05")
    rates = {m.batch_size: m.samples_per_second for m in measurements if m.status in _TIMED and m.samples_per_second}
    best = max(rates.values(), default=0.0)
    octaves: dict[int, list[int]] = {}
    for size, rate in rates.items():
        if rate >= (1 - within) * best:
            octaves.setdefault(round(math.log2(size)), []).append(size)
    taken = [
        max(sizes, key=lambda size: (size == answer, size == 2**octave, rates[size]))
        for octave, sizes in octaves.items()
    ]
    return {size: 1 - rates[size] / best for size in sorted(taken)}
