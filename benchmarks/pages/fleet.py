"""Fleets in virtual time as Markdown: how long they take to answer, and what is used up first."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.tables import table
from cubatch.units import format_bytes, format_seconds


def fleet(result: dict[str, Any]) -> str:
    """A row a fleet, and what ends first."""
    rows = [
        [
            f"{row['workers']:,}",
            str(row["kinds"]),
            "for ever" if row["life_seconds"] is None else format_seconds(row["life_seconds"]),
            f"{row['answers']} of {row['kinds']}",
            f"{row['first_answer_seconds']:.1f} s",
            f"{row['seconds']:.1f} s",
            f"{row['described']:,}",
            f"{row['messages']:,}",
            format_bytes(row["message_bytes"]),
            str(row["timings"]),
            format_bytes(row["store_bytes"]),
            f"{100 * row['scheduler_busy']:.1f} %",
            f"{100 * row['client_busy']:.1f} %",
        ]
        for row in result["rows"]
    ]
    measured = [row["workers"] for row in result["measured"]]
    caption = (
        f"{result['date']}, commit {result['commit']}, `{result['network']}`, {result['mode']}, a budget of "
        f"{result['budget']:.0f} s; in virtual time, where the slowest kind takes {result['measuring_seconds']:.1f} s "
        f"to measure. What Dask takes (distributed {result['distributed']}) was measured on {result['device']}, "
        f"{result['threads']} threads, with {measured[0]} to {measured[-1]} workers, and is a straight line beyond."
    )
    head = [
        "workers", "kinds", "a worker stays", "answers", "first", "all", "asked what they have", "messages", "of",
        "timings kept", "store", "scheduler busy", "caller busy",
    ]  # fmt: skip
    ends = [
        f"{row['what']}, {'not by workers' if row['workers'] is None else format(row['workers'], ',') + ' workers'}"
        for row in result["limits"]
    ]
    return f"{caption}\n\n{table(head, rows)}\n\nUsed up, the first first: {'; '.join(ends)}."
