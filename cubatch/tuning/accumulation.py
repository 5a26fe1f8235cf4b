"""How a batch that an optimiser step is to see is best cut into steps whose gradients are added up."""

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
    """
    A batch, cut.

    Attributes:
        batch_size: Samples that go through together.
        steps: How many of them make the whole.
        seconds: Of one of them.
        is_measured: Whether that was measured.
        is_below: Whether it is smaller than all sizes that were, and its time in proportion; else it lies between them.
    """

    batch_size: int
    steps: int
    seconds: float
    is_measured: bool
    is_below: bool

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
    Cut a batch into as many steps as take the least time together.

    Of the sizes that divide it, up to the largest whose time can be compared, the one is taken whose steps should take
    the least time: as measured, also of sizes that were dropped, and between measured sizes along straight lines.  Only
    where all of them are below what was measured, it is the largest, and its time in proportion.

    Args:
        result: Of tuning a training step.
        target: The whole batch.
        fitting: The sizes that fit, beside the sum of the gradients; None: whatever was measured.

    Raises:
        InvalidArgument: If the result is of inference, or no size that divides the batch ran and fits.
    """
    if result.mode == "inference":
        raise InvalidArgument("result", "of inference", "of training", "Tune with mode='training'.")
    seconds = {m.batch_size: m.latency_seconds for m in result.comparable if m.latency_seconds}
    if not seconds:
        raise InvalidArgument("result", "without a size that ran", "of a finished run", "Tune again.")
    known = sorted(seconds)
    sizes = [size for size in divisors(target) if size <= known[-1] and (fitting is None or size in fitting)]
    if not sizes:
        wanted = f"one that batches of at most {known[-1]} make, the largest that was measured, and that fit"
        raise InvalidArgument("target_batch_size", target, wanted)
    if sizes[-1] < known[0]:  # nobody knows what steps of these take: the fewest have the least beside the samples
        size = sizes[-1]
        return Cut(size, target // size, seconds[known[0]] * size / known[0], is_measured=False, is_below=True)
    sizes = [size for size in sizes if size >= known[0]]
    expected = np.interp(sizes, known, [seconds[size] for size in known])
    size, took = min(zip(sizes, expected, strict=True), key=lambda pair: (target // pair[0]) * pair[1])
    return Cut(size, target // size, float(took), is_measured=size in seconds, is_below=False)
