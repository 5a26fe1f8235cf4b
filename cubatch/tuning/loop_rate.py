"""The recommendation for a training loop whose data loader may be slower than its step."""

from __future__ import annotations

import attrs

from cubatch.frameworks.loader_rate import LoaderRate
from cubatch.tuning import explain
from cubatch.tuning.results import TuningResult


def with_loader(result: TuningResult, loader: LoaderRate) -> TuningResult:
    """
    Return the result of a loop around a data loader and the measured steps.

    By throughput, the recommendation becomes the smallest measured size whose loop is within the tolerance of the best.
    Where the loader is the bottleneck, larger batches gain nothing.

    Args:
        result: Of the steps alone.
        loader: The rate of the loader.
    """
    result = attrs.evolve(result, loader=loader)
    chosen = result.batch_size
    if chosen is None or result.objective != "throughput":
        return result
    rates = {
        m.batch_size: loader.loop_rate(m.samples_per_second)
        for m in result.comparable  # a size that was dropped for its step alone may be as good in the loop
        if m.samples_per_second
    }
    least = (1 - (result.tolerance or 0.0)) * max(rates.values())
    size = min(n for n, rate in rates.items() if rate >= least)
    if size >= chosen or rates.get(result.current_batch_size or 0, 0.0) >= least:
        size = chosen
    first = explain.loop_headline(result, size) if size != chosen else result.reasons[0]
    limit = "loader" if size != chosen else result.decided_by
    reasons = [first, *explain.loader(result, size), *result.reasons[1:]]
    measurements = [attrs.evolve(m, status="ok") if m.batch_size == size else m for m in result.measurements]
    return attrs.evolve(result, batch_size=size, decided_by=limit, reasons=reasons, measurements=measurements)
