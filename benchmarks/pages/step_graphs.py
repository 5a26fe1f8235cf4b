"""Steps as graphs and as launches one by one, overlapping and not: what each way took."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.pages.tables import table

_WAYS = ("launches", "launches, overlapping", "graph", "graph, overlapping")


def step_graphs(*results: dict[str, Any]) -> str:
    """A table of all modes: milliseconds of a step, and the ratio of graphs whose launches overlap to those without."""
    rows = []
    for result in results:
        for row in result["rows"]:
            took = {way: statistics.median(seconds) for way, seconds in row["timings_seconds"].items()}
            rows.append([
                result["mode"], str(row["batch_size"]), str(row["launch"]["launches"]),
                *(f"{1e3 * took[way]:.3f}" for way in _WAYS),
                f"{took['graph, overlapping'] / took['graph']:.3f}",
            ])  # fmt: skip
    first = results[0]
    readings = len(first["rows"][0]["timings_seconds"]["graph"])
    caption = (
        f"{first['device']['name']}, {first['date']}, commit {first['commit']}: {first['model']} in {first['dtype']}, "
        f"milliseconds of a step, medians of {readings} readings."
    )
    header = ["mode", "batch", "launches", "one by one", "overlapping", "a graph", "overlapping", "overlapping / not"]
    return f"{caption}\n\n{table(header, rows)}"
