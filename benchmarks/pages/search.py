"""The comparison of searches as Markdown: one row a finder, and one of ours for each budget."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.tables import table

_ALL = "all classes"


def search(result: dict[str, Any]) -> str:
    """Regret and seconds of our search and of the rivals' rules on fake devices."""
    tolerance = f"{100 * result['tolerance']:.0f} %"
    rows = []
    for row in result["summary"]:
        if row["kind"] != _ALL:
            continue
        name = row["finder"] if row["budget"] is None else f"**{row['finder']}, {row['budget']:g} s**"
        unusable = f"{row['unusable']} of {row['devices']}" if row["unusable"] else ""
        rows.append([name, _percent(row["regret"]["mean"]), _percent(row["regret"]["p95"]), _seconds(row), unusable])
    kinds = len({row["kind"] for row in result["summary"] if row["kind"] != _ALL and "networks" not in row["kind"]})
    caption = (
        f"{result['date']}, commit {result['commit']}: {result['devices']} fake devices of {kinds} classes, seed "
        f"{result['seed']}: share of the throughput lost beyond a tolerance of {tolerance}, against the best of all "
        "integers, and virtual seconds spent. No usable answer counts as 100 %. Finders that know no latency are "
        "spared the devices where it counts."
    )
    head = ["finder", "regret, mean", "95th percentile", "seconds, mean", "no usable answer"]
    return f"{caption}\n\n{table(head, rows)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(row: dict[str, Any]) -> str:
    return f"{row['seconds']['mean']:.1f}"
