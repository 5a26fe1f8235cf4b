"""Batch sizes at several lengths or resolutions as Markdown, compared with a sweep."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.tables import origin, page, percent, table
from cubatch.units import format_count


def extents(result: dict[str, Any]) -> str:
    """Return a row for each extent of each workload."""
    rows = [
        [
            row["workload"],
            f"{row['axis']} {each['extent']}",
            str(each["recommended"] or ""),
            percent(each["loss"] if each["recommended"] else None),
            percent(each["reported"] / each["rate"] - 1 if each["reported"] else None, sign="+"),
            format_count(each["rate"] * each["extent"]),
            f"{each['seconds']:.1f}",
        ]
        for row in result["rows"]
        for each in row["extents"]
    ]
    head = ["model", "extent", "recommended", "loss", "error of the rate", "tokens/s", "seconds"]
    return page(f"{origin(result)}. Goals: a loss of at most 3 %, an error of at most 10 %", table(head, rows))
