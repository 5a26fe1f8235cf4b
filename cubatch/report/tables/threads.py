"""The table of a result for several numbers of threads."""

from __future__ import annotations

from cubatch.report.grid import Grid
from cubatch.report.tables.common import ended_by, half_width, written
from cubatch.tuning.threads_result import ThreadsResult
from cubatch.units import format_count, format_seconds


def by_threads(result: ThreadsResult) -> Grid:
    """Return the table of a result for several numbers of threads per instance, a row per number."""
    rates, singles = result.samples_per_second, result.single_samples_per_second
    columns = {
        "threads": lambda item: format_count(item[0]),
        "instances": lambda item: format_count(result.instances[item[0]]),
        "batch size": lambda item: written(format_count, item[1].batch_size),
        "time": lambda item: written(
            format_seconds, item[1].sizes[item[1].batch_size].latency_seconds if item[1].batch_size else None
        ),
        "samples/s of all": lambda item: written(format_count, rates.get(item[0])),
        "±": lambda item: half_width(item[1]),
        "without batches": lambda item: written(format_count, singles.get(item[0])),
        "search ended by": lambda item: ended_by(item[1]),
    }
    tuned = next(iter(result.results.values()))
    title = f"{tuned.subject}, {tuned.mode}, {tuned.device_facts.get('name') or ''}: instances bound to CPUs"
    notes = [*result.reasons, *(f"{threads} threads: {error}" for threads, error in result.failed.items())]
    marked = [place for place, threads in enumerate(result.results) if threads == result.threads]
    return Grid.of(result.results.items(), columns, title=title, marked=marked, notes=notes)
