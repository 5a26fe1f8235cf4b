"""The recommendation for a loop whose data loader may be slower than its step."""

from __future__ import annotations

import attrs

from cubatch.tuning.results import TuningResult


def in_loop(result: TuningResult) -> TuningResult:
    """
    Return a result of steps as that of the loop around its data loader; the same without one.

    By throughput, the recommendation is the user's current size, else the smallest measured one, whose loop is within
    the tolerance of the best. `decided_by` is "loader" where larger batches have faster steps but no faster loop.
    """
    chosen, rates = result.batch_size, result.loop_rates
    if result.loader is None or chosen is None or result.objective != "throughput" or chosen not in rates:
        return result
    share = 1 - (result.tolerance or 0.0)
    within = [n for n, rate in rates.items() if rate >= share * max(rates.values())]
    current = result.current_batch_size
    size = current if current is not None and current in within else min(within)
    steps = {n: result.sizes[n].samples_per_second or 0.0 for n in within}
    is_limit = any(n > size and share * step > steps[size] for n, step in steps.items())
    measurements = [
        attrs.evolve(m, status="ok", stop_reason="nothing is faster in the loop with the data loader")
        if m.batch_size == size and m.status != "ok"
        else m
        for m in result.measurements
    ]
    limit = "loader" if is_limit else result.decided_by
    return attrs.evolve(result, batch_size=size, decided_by=limit, measurements=measurements)
