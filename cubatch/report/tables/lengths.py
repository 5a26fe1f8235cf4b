"""Tables of a result for several extents of an axis, and of ways to form batches of samples of unequal length."""

from __future__ import annotations

from cubatch.report.grid import Grid
from cubatch.report.tables.common import ended_by, half_width, written
from cubatch.tuning.extents_result import ExtentsResult
from cubatch.tuning.length_plan import Batching, LengthPlan
from cubatch.tuning.results import BUSY_MACHINE
from cubatch.units import format_count, format_counted, format_percent, visible


def by_extent(result: ExtentsResult) -> Grid:
    """Return the table of a result for several extents of an axis, such as lengths: a row per extent."""
    axis, budget = visible(result.axis), result.token_budget
    columns = {
        axis: lambda item: format_count(item[0]),
        "batch size": lambda item: written(format_count, item[1].batch_size),
        "largest": lambda item: written(format_count, item[1].largest_batch_size),
        "samples/s": lambda item: written(format_count, item[1].samples_per_second),
        "±": lambda item: half_width(item[1]),
        "tokens/s": lambda item: written(format_count, result.tokens_per_second.get(item[0])),
        "tokens per batch": lambda item: written(lambda n: format_count(n * item[0]), item[1].batch_size),
        "search ended by": lambda item: ended_by(item[1]),
    }
    if budget is not None:
        first = f"Batches of {format_count(budget)} tokens are within the tolerance of the best at every extent."
    elif result.failed or None in result.batch_sizes.values():
        first = "There is no token budget, because not every extent has a recommended batch size."
    else:
        first = "No measured number of tokens per batch is within the tolerance of the best at every extent. "
        first += result.budget_remedy
    notes = [first]
    if any(tuned.largest_batch_size is not None for tuned in result.results.values()):  # else there is no such column
        notes.append("“largest” is the largest batch that fits, if the sizes that ran took enough memory to tell.")
    notes += [f"{format_count(extent)}: {error}" for extent, error in result.failed.items()]
    notes += [
        f"{format_count(extent)}: {tuned.reasons[0]}"
        for extent, tuned in result.results.items()
        if not tuned.recommended and tuned.reasons
    ]
    notes += [BUSY_MACHINE] if result.on_busy_machine else []
    return Grid.of(result.results.items(), columns, title=f"{_subject(result)}: batch size by {axis}", notes=notes)


def _subject(result: ExtentsResult) -> str:
    tuned = next(iter(result.results.values()))
    return ", ".join(filter(None, (tuned.subject, tuned.mode, str(tuned.device_facts.get("name") or ""))))


def ways(plan: LengthPlan) -> Grid:
    """Return the table of ways to form batches from samples of unequal length, the fastest first."""
    columns = {
        "batches": lambda way: way.name,
        "batch size": _sizes,
        "padding": lambda way: format_percent(way.padding_share),
        "real tokens/s": lambda way: format_count(way.tokens_per_second),
        "of the best": lambda way: format_percent(way.tokens_per_second / plan.best.tokens_per_second),
    }
    title = f"{format_counted(plan.num_samples, 'sample')} of unequal length ({visible(plan.axis)})"
    notes = ["“grouped”, “sorted” and “token budget” join samples of similar length.", *plan.reasons]
    return Grid.of(plan.ways, columns, title=title, marked=[0], notes=notes)


def _sizes(way: Batching) -> str:
    if way.token_budget is not None:
        return f"{format_count(way.token_budget)} tokens"
    if len(way.batch_sizes) == 1:
        return format_count(next(iter(way.batch_sizes.values())))
    return ", ".join(f"{format_count(n)} up to {format_count(edge)}" for edge, n in way.batch_sizes.items())
