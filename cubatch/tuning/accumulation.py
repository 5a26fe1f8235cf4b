"""Gradient accumulation: the batch size at which a given effective batch takes the least time."""

from __future__ import annotations

from collections.abc import Collection

import attrs
import numpy as np

from cubatch.checks import check_kind
from cubatch.errors import InvalidArgument
from cubatch.measure.records import TIMED
from cubatch.tuning.results import TuningResult
from cubatch.units import format_counted, format_percent, format_seconds, join_words
from cubatch.workload import divisors

MUCH_LESS = 0.9  # of the best throughput: another target is worth a thought


@attrs.frozen
class Cut:
    """An effective batch (the samples of an optimizer step), divided into equal steps."""

    batch_size: int  # samples of one step
    steps: int  # steps per optimizer step
    seconds: float  # time of one step
    is_measured: bool  # whether the time was measured, not interpolated
    is_below: bool  # whether the batch size is below all measured sizes: the time is then proportional to it
    largest: int  # the largest measured size; larger divisors were not compared

    def __str__(self) -> str:
        whole, took = self.batch_size * self.steps, f"{self.steps} x {format_seconds(self.seconds)}"
        if self.is_below:
            return (
                f"Of the sizes that divide {whole} and fit, all below what was measured, {self.batch_size} is the "
                f"largest: {took} in proportion."
            )
        how = "measured" if self.is_measured else "between sizes that were measured"
        return (
            f"Of the sizes that divide {whole}, up to the largest measured, {self.largest}, {self.batch_size} takes "
            f"the least time for all of it: {took}, {how}."
        )


def cut(result: TuningResult, target: int, *, fitting: Collection[int] | None = None) -> Cut:
    """
    Return the division of an effective batch into the steps that take the least time in total.

    Considered are the divisors of the batch up to the largest timed size. Times are those measured, also of dropped
    sizes, and interpolated linearly between measured sizes. If all divisors are below the measured sizes, the largest
    is taken. `fitting` are sizes that fit together with the accumulated gradients; None: all up to the largest timed
    one.

    Raises:
        InvalidArgument: If the result is of inference, or has no timed size or no fastest size. Also if no divisor of
            `target` fits and is at most the largest timed size.
    """
    check_kind("result", result, TuningResult, "a TuningResult, as of autotune_module(..., mode='training')")
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
        took = seconds[known[0]] * size / known[0]
        return Cut(size, target // size, took, is_measured=False, is_below=True, largest=known[-1])
    sizes = [size for size in sizes if size >= known[0]]
    expected = np.interp(sizes, known, [seconds[size] for size in known])
    size, least = min(zip(sizes, expected, strict=True), key=lambda pair: (target // pair[0]) * pair[1])
    return Cut(size, target // size, float(least), is_measured=size in seconds, is_below=False, largest=known[-1])


def concern(result: TuningResult, division: Cut, *, num_devices: int = 1) -> str:
    """
    Return a warning if `result` has no recommendation, or its division is much slower than the best size; else "".

    It names better targets.
    """
    target = division.batch_size * division.steps * num_devices
    if not result.recommended:
        reasons = "".join(result.reasons[:1])
        return (
            f"target_batch_size={target} is cut into steps of {division.batch_size} without a recommendation. {reasons}"
        )
    rate, fastest = max((m.samples_per_second or 0.0, m.batch_size) for m in result.comparable)
    share = division.batch_size / division.seconds / rate
    if not division.is_below and share >= MUCH_LESS:
        return ""
    unit = fastest * num_devices
    near = sorted({max(1, target // unit) * unit, -(-target // unit) * unit})
    less = f"at {format_percent(share)} of the throughput of batch size {fastest}, which does not divide it"
    if division.is_below:
        less = "fewer than were measured"
    failed = {m.batch_size for m in result.measurements if m.status not in (*TIMED, "not_run")}
    most = min({size - 1 for size in failed if size > division.largest} | {result.largest_batch_size or target})
    larger = [str(n) for n in divisors(target // num_devices) if division.largest < n <= most]
    more = (
        f" Larger divisors were not measured: {join_words(larger)}. Raise budget or max_batch_size." if larger else ""
    )
    return (
        f"target_batch_size={target} is best cut into steps of {format_counted(division.batch_size, 'sample')}, "
        f"{less}; {' and '.join(map(str, near))} can be cut into steps of {fastest}.{more}"
    )
