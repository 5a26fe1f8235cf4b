"""What a step moved before neighbours did more for each other, and moves now: counted and predicted, not measured."""

from __future__ import annotations

from typing import Any

from cubatch.units import format_seconds


def fusion(result: dict[str, Any]) -> str:
    """A line for each mode."""
    lines = []
    for mode in ("inference", "training"):
        before, now = result["before"][mode], result["now"][mode]
        lines.append(
            f"`{result['network']}`, {mode}, batch {result['batch_size']}, {result['dtype']}: "
            f"{before['operations']} to {now['operations']} operations, "
            f"{before['launches']} to {now['launches']} launches, "
            f"{before['bytes'] / 1e9:.1f} to {now['bytes'] / 1e9:.1f} GB moved; predicted for an H100, not measured: "
            f"{format_seconds(before['predicted_seconds'])} to {format_seconds(now['predicted_seconds'])}."
        )
    commits = f"Counted from the schedule, commit {result['before']['commit']} to {result['commit']}, {result['date']}."
    return "\n\n".join(["\n".join(f"- {line}" for line in lines), commits])
