"""PyTorch modules: what was said of their steps' memory, beside what they took."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.tables import table
from cubatch.units import format_bytes

WITHIN = 0.1


def memory(result: dict[str, Any]) -> str:
    """The largest size of each module that was thought to fit: said, taken, and the most that any size took."""
    rows = []
    for row in result["rows"]:
        last = next(size for size in row["sizes"] if size["batch_size"] == row["batch_size"])
        rows.append(
            [
                f"`{row['module']}`",
                row["mode"],
                str(row["batch_size"]),
                format_bytes(last["said"]),
                format_bytes(last["took"]),
                f"{100 * row['error']:+.1f} %",
                f"{100 * row['walked_error']:+.1f} %",
                f"{100 * row['most']:.0f} %",
            ]
        )
    near = sum(abs(row["error"]) <= WITHIN for row in result["rows"])
    over = sum(row["most"] > 1 for row in result["rows"])
    caption = (
        f"{result['device']}, {result['threads']} threads, {result['date']}, commit {result['commit']}, inputs of "
        f"{'x'.join(map(str, result['image']))}; {near} of {len(rows)} within {100 * WITHIN:.0f} %, {over} with a size "
        "that took more than the limit."
    )
    head = ["module", "mode", "largest batch", "said", "took", "error", "of the walk alone", "most of the limit"]
    return f"{caption}\n\n{table(head, rows)}"
