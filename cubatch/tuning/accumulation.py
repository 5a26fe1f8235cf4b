"""Gradient accumulation: the batch size at which a given effective batch takes the least time."""

from __future__ import annotations

from collections.abc import Collection

import attrs
import numpy as np

from cubatch.errors import InvalidArgument
from cubatch.tuning.results import TuningResult
from cubatch.units import format_seconds
from cubatch.workload import divisors


@attrs.frozen
class Cut:
    """An effective batch (the samples of an optimizer step), divided into equal steps."""

    batch_size: int  # samples of one step
    steps: int  # steps per optimizer step
    seconds: float  # time of one step
    is_measured: bool  # whether the time was measured, not interpolated
    is_below: bool  # whether the batch size is below all measured sizes: the time is then proportional to it

    def __str__(self) -> str:
        whole, took = self.batch_size * self.steps, f"{self.steps} x {format_seconds(self.seconds)}"
        if self.is_below:
            return (
                f"Of the sizes that divide {whole} and fit, all below what was measured, {self.batch_size} is the "
                f"largest: {took} in proportion."
            )
        how = "measured" if self.is_measured else "between sizes that were measured"
        return f"Of the sizes that divide {whole}, {self.batch_size} takes the least time for all of it: {took}, {how}."


def cut(result: TuningResult, target: int, *, fitting: Collection[int] | None = None) -> Cut:
    """
    Return the division of an effective batch into the steps that take the least time in total.

    Considered are the divisors of the batch up to the largest timed size. Times are those measured, also of dropped
    sizes, and interpolated linearly between measured sizes. If all divisors are below the measured sizes, the largest
    is taken.

    Args:
        result: The result of tuning a training step.
        target: Samples of the effective batch.
        fitting: Sizes that fit together with the accumulated gradients; None: all sizes up to the largest timed one.

    Raises:
        InvalidArgument: If the result is of inference, or has no timed size or no fastest size. Also if no divisor of
            `target` fits and is at most the largest timed size.
    """
    if result.mode == "inference":
        raise InvalidArgument("result", "of inference", "of training", "Tune with mode='training'.")
    seconds = {m.batch_size: m.latency_seconds / result.accumulate for m in result.comparable if m.latency_seconds}
    if not seconds:
        raise InvalidArgument("result", "without a size that ran", "of a finished run", "Tune again.")
    if result.fastest_batch_size is None:  # interrupted, or the inputs did not grow
        allowed = "of a run that can compare batch sizes"
        raise InvalidArgument("result", "without a recommendation", allowed, "".join(result.reasons[:1]))
    known = sorted(seconds)
    sizes = [size for size in divisors(target) if size <= known[-1] and (fitting is None or size in fitting)]
    if not sizes:
        wanted = f"a multiple of a size that fits and is at most {known[-1]}, the largest that was measured"
        raise InvalidArgument("target_batch_size", target, wanted)
    if sizes[-1] < known[0]:  # unknown times: the fewest steps have the least overhead
        size = sizes[-1]
        return Cut(size, target // size, seconds[known[0]] * size / known[0], is_measured=False, is_below=True)
    sizes = [size for size in sizes if size >= known[0]]
    expected = np.interp(sizes, known, [seconds[size] for size in known])
    size, took = min(zip(sizes, expected, strict=True), key=lambda pair: (target // pair[0]) * pair[1])
    return Cut(size, target // size, float(took), is_measured=size in seconds, is_below=False)
