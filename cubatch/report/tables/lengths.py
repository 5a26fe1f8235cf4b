"""Tables of a result for several extents of an axis, and of ways to form batches of samples of unequal length."""

from __future__ import annotations

from cubatch.report.grid import Grid
from cubatch.report.tables.common import written
from cubatch.tuning.extents_result import ExtentsResult
from cubatch.tuning.length_plan import Batching, LengthPlan
from cubatch.units import format_count, format_percent, visible


def by_extent(result: ExtentsResult) -> Grid:
    """Return the table with one line per extent."""
    axis, budget, rows = visible(result.axis), result.token_budget, []
    for extent, tuned in result.results.items():
        n, rate = tuned.batch_size, tuned.samples_per_second
        rows.append(
            [
                format_count(extent),
                written(format_count, n),
                written(format_count, tuned.largest_batch_size),
                written(format_count, rate),
                written(format_count, result.tokens_per_second.get(extent)),
                written(format_count, None if n is None else n * extent),
            ]
        )
    if budget is not None:
        first = f"Batches of {format_count(budget)} tokens are within the tolerance of the best at every {axis}."
    elif result.failed or None in result.batch_sizes.values():
        first = f"There is no token budget, because not every {axis} has a recommended batch size."
    else:
        first = f"No number of tokens per batch is within the tolerance of the best at every {axis}."
    notes = [first, "“largest” is the largest batch that fits, by the memory plan."]
    notes += [f"{format_count(extent)}: {error}" for extent, error in result.failed.items()]
    notes += [
        f"{format_count(extent)}: {tuned.reasons[0]}"
        for extent, tuned in result.results.items()
        if not tuned.recommended and tuned.reasons
    ]
    columns = [axis, "batch size", "largest", "samples/s", "tokens/s", "tokens per batch"]
    return Grid(title=f"{_subject(result)}: batch size by {axis}", columns=columns, rows=rows, notes=notes)


def _subject(result: ExtentsResult) -> str:
    tuned = next(iter(result.results.values()))
    return ", ".join(filter(None, (tuned.subject, tuned.mode, str(tuned.device_facts.get("name") or ""))))


def ways(plan: LengthPlan) -> Grid:
    """Return the table of ways to form batches, the fastest first."""
    best = plan.best.tokens_per_second
    rows = [
        [way.name, _sizes(way), format_percent(way.padding_share), format_count(way.tokens_per_second),
         format_percent(way.tokens_per_second / best)]
        for way in plan.ways
    ]  # fmt: skip
    return Grid(
        title=f"{format_count(plan.num_samples)} samples of unequal length ({visible(plan.axis)})",
        columns=["batches", "batch size", "padding", "real tokens/s", "of the best"],
        rows=rows,
        marked=[0],
        notes=["“sorted” and “token budget” join samples of similar length."],
    )


def _sizes(way: Batching) -> str:
    if way.token_budget is not None:
        return f"{format_count(way.token_budget)} tokens"
    if len(way.batch_sizes) == 1:
        return format_count(next(iter(way.batch_sizes.values())))
    return ", ".join(f"{format_count(n)} up to {format_count(edge)}" for edge, n in way.batch_sizes.items())
