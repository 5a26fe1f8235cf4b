"""Time of steps as CUDA graphs and as single launches, overlapping and not: a table."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.pages.tables import origin, page, table

_WAYS = ("launches", "launches, overlapping", "graph", "graph, overlapping")


def step_graphs(*results: dict[str, Any]) -> str:
    """Return milliseconds of a step for all modes, and the ratio of graphs with overlapping launches to others."""
    rows = []
    for result in results:
        for row in result["rows"]:
            medians = {way: statistics.median(seconds) for way, seconds in row["timings_seconds"].items()}
            rows.append([
                result["mode"], str(row["batch_size"]), str(row["launch"]["launches"]),
                *(f"{1e3 * medians[way]:.3f}" for way in _WAYS),
                f"{medians['graph, overlapping'] / medians['graph']:.3f}",
            ])  # fmt: skip
    first = results[0]
    timings = len(first["rows"][0]["timings_seconds"]["graph"])
    caption = (
        f"{origin(first)}: {first['model']} in {first['dtype']}, milliseconds of a step, medians of {timings} timings"
    )
    head = [
        "mode", "batch", "launches", "single launches", "overlapping", "graph", "graph, overlapping",
        "overlapping / not",
    ]  # fmt: skip
    return page(caption, table(head, rows))
