"""Fake hosts that change their speed, and what each rule of the search is worth: tables of benchmarks/README.md."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.tables import table


def hosts(result: dict[str, Any]) -> str:
    """Return a row for each spread of slow/fast ratios and finder."""
    rows = [
        [
            f"{row['spread']:.0%}", row["finder"], f"{row['regret']:.2%}", f"{row['spread_median']:.2g}",
            f"{row['spread_90']:.2g}", f"{row['seconds']:.1f}", f"{row['seconds_90']:.1f}",
        ]
        for row in result["summary"]
    ]  # fmt: skip
    heads = ["ratios vary by", "finder", "mean regret", "max/min, median", "90th percentile", "seconds, mean", "90th"]
    caption = (
        f"{result['date']}, commit {result['commit']}: {result['hosts']} hosts of family {result['family']}, "
        f"{result['seeds']} searches of each, {result['budget']:g} s, ratios {result['ratios']}."
    )
    return f"{caption}\n\n{table(heads, rows)}"


def ablation(result: dict[str, Any]) -> str:
    """Return a row for each rule that was left out."""
    names = ("regret_60", "regret_10", "seconds_60", "regret_host", "seconds_host")
    rows = [
        [
            row["without"] or "none",
            *(f"{row[name]:.2%}" if name.startswith("regret") else f"{row[name]:.1f}" for name in names),
        ]
        for row in result["rows"]
    ]
    heads = ["rule left out", "regret, 60 s", "regret, 10 s", "seconds of 60", "regret, hosts", "seconds, hosts"]
    caption = (
        f"{result['date']}, commit {result['commit']}: {result['devices']} fake devices and {result['hosts']} fake "
        f"hosts, seed {result['seed']}."
    )
    return f"{caption}\n\n{table(heads, rows)}"
