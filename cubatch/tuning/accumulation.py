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
        is_measured: Whether that was measured; else it lies between sizes that were.
    """

    batch_size: int
    steps: int
    seconds: float
    is_measured: bool

    def __str__(self) -> str:
        how = "measured" if self.is_measured else "between sizes that were measured"
        whole = self.batch_size * self.steps
        return (
            f"Of the sizes that divide {whole}, {self.batch_size} takes the least time for all of it: {self.steps} x "
            f"{format_seconds(self.seconds)}, {how}."
        )


def cut(result: TuningResult, target: int, *, fitting: Collection[int] | None = None) -> Cut:
    """
    Cut a batch into as many steps as take the least time together.

    Of the sizes that divide it, up to the largest whose time can be compared, the one is taken whose steps should take
    the least time: as measured, also of sizes that were dropped, and between measured sizes along straight lines.

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
    expected = np.interp(sizes, known, [seconds[size] for size in known])
    size, took = min(zip(sizes, expected, strict=True), key=lambda pair: (target // pair[0]) * pair[1])
    return Cut(size, target // size, float(took), size in seconds)
